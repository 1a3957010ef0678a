"""Split a source into streams of equal size, describe them in ``streams.json``, and put them where workers read them.

The streams that spile makes for a run get the rows in turn, so that readers know the place of each row in the input
(:meth:`spile.spec.identity.StreamIdentity.place`). ``spile data streams`` shuffles the rows.

The same input and seed give the same bytes. Memory grows by 24 bytes per row with an id, to find ids that
occur twice; the rows themselves are not kept.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from spile.data.arc.prompts import shuffled
from spile.data.convert import DuplicateFinder, Progress, RowSelection, RowTally, check_result, usable_rows, workspace
from spile.data.lines import changed_data
from spile.data.manifest import (
    MANIFEST,
    StreamEntry,
    StreamsManifest,
    list_streams,
    read_manifest,
    sha256_of,
    upload,
)
from spile.data.samples import lines_needed
from spile.data.sources import RowRange, default_keep
from spile.data.tables import RowSource
from spile.errors import DataError, SpecError
from spile.objects import is_remote, open_folder
from spile.spec.amounts import counted
from spile.spec.run import DataSpec, LimitShare, PromptSpec, stream_file, stream_file_number

MAX_STREAMS = 10_000
_BUFFERS = 16 << 20


@dataclass(frozen=True)
class Streams:
    """The result of a split."""

    manifest: StreamsManifest
    written: tuple[str, ...]
    tally: RowTally


class _Writer:
    """The count, hash and file of one stream. The file is open only while a full buffer is written."""

    def __init__(self, path: Path | None, buffer: int) -> None:
        self._path, self._limit, self._buffer = path, buffer, bytearray()
        self._digest = hashlib.sha256()
        self.samples = self.bytes = 0
        if path is not None:
            path.touch()

    def line(self, line: bytes) -> None:
        self._buffer += line
        self._buffer += b"\n"
        self.samples += 1
        if len(self._buffer) >= self._limit:
            self.flush()

    def flush(self, *, last: bool = False) -> None:
        self._digest.update(self._buffer)
        self.bytes += len(self._buffer)
        if self._path is not None:
            with self._path.open("ab", buffering=0) as file:
                file.write(self._buffer)
                if last:
                    os.fsync(file.fileno())
        self._buffer.clear()

    def entry(self, number: int) -> StreamEntry:
        self.flush(last=True)
        return StreamEntry(stream_file(number), self.samples, self.bytes, self._digest.hexdigest())


def make_streams(
    dataset: str,
    output_dir: Path,
    num_streams: int,
    *,
    selection: RowSelection | None = None,
    seed: int | None = 0,
    only: Collection[int] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Streams:
    """Split a dataset into ``stream_000.jsonl``, …, listed in ``streams.json``.

    Of N consecutive rows each of N streams gets one: in an order that depends on ``seed`` or, if it is None, in turn.
    ``only`` writes some streams again, byte for byte as ``streams.json`` lists them. The files are renamed when all are
    complete, ``streams.json`` last.
    """
    selection = selection or RowSelection()
    source = selection.open(dataset, selection.keep or default_keep(dataset))
    chosen = _check_numbers(num_streams, only)
    if only is not None and overwrite:
        raise SpecError("--overwrite", expected="no --streams: it makes all streams again", found="--streams")
    with workspace(output_dir) as work:
        manifest, tally = _write(source, work, num_streams, chosen, selection, seed, progress)
        if tally.samples < num_streams:
            found = str(num_streams)
            raise SpecError("--num-streams", expected=f"at most {tally.samples}, one per sample", found=found)
        if not overwrite:
            _refuse_other_streams(output_dir, manifest)
        _publish(work, output_dir, manifest, overwrite)
    return Streams(manifest, tuple(stream_file(number) for number in sorted(chosen)), tally)


def _check_numbers(num_streams: int, only: Collection[int] | None) -> set[int]:
    if not 1 <= num_streams <= MAX_STREAMS:
        raise SpecError("--num-streams", expected=f"1 to {MAX_STREAMS}", found=str(num_streams))
    chosen = set(range(num_streams) if only is None else only)
    beyond = [number for number in chosen if not 0 <= number < num_streams]
    if beyond or not chosen:
        raise SpecError("--streams", expected=f"streams 0 to {num_streams - 1}", found=str(max(beyond, default="none")))
    return chosen


def _write(
    source: RowSource,
    work: Path,
    num_streams: int,
    chosen: set[int],
    selection: RowSelection,
    seed: int | None,
    progress: Progress | None,
) -> tuple[StreamsManifest, RowTally]:
    """Count and hash all streams, and write the chosen ones."""
    buffer = max(1 << 14, min(1 << 20, _BUFFERS // num_streams))
    writers = [_Writer(work / stream_file(n) if n in chosen else None, buffer) for n in range(num_streams)]
    tally, names, order = RowTally(), DuplicateFinder(), list(range(num_streams))
    items = usable_rows(source, selection, tally, keep_rejected=True, progress=progress)
    for place, item in enumerate(items):
        if seed is not None and place % num_streams == 0:
            order = shuffled(num_streams, "streams", seed, place // num_streams)
        writers[order[place % num_streams]].line(item.line())
        if item.own_id:
            names.add(item.task_id, item.row)
    check_result(tally, names, source, selection)
    manifest = StreamsManifest(
        source={**source.origin, **selection.record()},
        seed=seed,
        samples=tally.samples,
        streams=tuple(writer.entry(number) for number, writer in enumerate(writers)),
        rejected=dict(sorted(tally.rejected.items())),
    )
    return manifest, tally


def _refuse_other_streams(folder: Path, manifest: StreamsManifest) -> None:
    """Refuse to replace streams of another split. Streams without a ``streams.json`` may be of an interrupted one."""
    existing = read_manifest(open_folder(str(folder)))
    if existing is not None:
        refuse_other_split(existing, manifest, str(folder / MANIFEST))
        return
    listed = {entry.name: entry.sha256 for entry in manifest.streams}
    for path in sorted(folder.iterdir()):
        if stream_file_number(path.name) is not None and sha256_of(path) != listed.get(path.name):
            raise DataError(
                f"{folder} holds streams of another split",
                expected=f"the {len(listed)} streams of this one",
                found=f"a different {path.name}",
                fix="use another --output-dir, or --overwrite",
            )


def refuse_other_split(existing: StreamsManifest, manifest: StreamsManifest, file: str) -> None:
    """Raise an error unless the streams that ``file`` lists are the same as the new ones."""
    if existing.streams == manifest.streams:
        return
    fix = "use another --output-dir, or --overwrite to replace them all"
    if len(existing.streams) != len(manifest.streams) or existing.seed != manifest.seed:
        raise DataError(
            f"{file} lists other streams",
            expected=f"{len(existing.streams)} streams{_seed_text(existing)}",
            found=f"{len(manifest.streams)}{_seed_text(manifest)}",
            fix=fix,
        )
    old, new = next((a, b) for a, b in zip(existing.streams, manifest.streams, strict=True) if a != b)
    raise DataError(
        f"{file} lists a different {old.name}: the source or the selection has changed",
        expected=f"{old.samples} samples, sha256 {old.sha256}",
        found=f"{new.samples} samples, {new.sha256}",
        fix=fix,
    )


def _seed_text(manifest: StreamsManifest) -> str:
    return " with the rows in turn" if manifest.seed is None else f" of seed {manifest.seed}"


def _publish(work: Path, folder: Path, manifest: StreamsManifest, overwrite: bool) -> None:
    """Move the new streams to the folder, and then ``streams.json``, unless it is there already."""
    for path in sorted(work.iterdir()):
        path.replace(folder / path.name)
    if overwrite:
        listed = {entry.name for entry in manifest.streams}
        for file in folder.iterdir():
            if stream_file_number(file.name) is not None and file.name not in listed:
                file.unlink()
    if overwrite or not (folder / MANIFEST).is_file():
        open_folder(str(folder)).put(MANIFEST, manifest.to_json())


_NAME = 16
"""The number of digits of a split's digest in the name of its folder."""


@dataclass(frozen=True)
class StreamsPlan:
    """The streams of a fleet, and where workers will read them."""

    url: str
    manifest: StreamsManifest | None
    """None if no manifest describes the streams, so that only their names can be checked."""
    local: Path | None = None
    """The local folder that has to be uploaded first; None if the streams are already in place."""

    @property
    def split(self) -> str | None:
        """The digest against which workers check their stream."""
        return None if self.manifest is None else self.manifest.digest()

    @property
    def count(self) -> int:
        return len(self.manifest.streams) if self.manifest is not None else _count(str(self.local or self.url))

    def check(self, workers: int) -> None:
        """Raise if there are more workers than streams, because some would have nothing to do."""
        if self.count < workers:
            raise DataError(
                f"{self.local or self.url} has too few streams",
                expected=f"{workers}, at least one per worker",
                found=f"{self.count}, up to {stream_file(self.count - 1)}" if self.count else f"no {stream_file(0)}",
                fix="deploy fewer workers, or split the dataset again with --num-streams and another --gcs-prefix",
            )

    def check_limit(self, data: DataSpec) -> None:
        """Raise if an earlier deployment prepared fewer rows than the limits of the run need."""
        lines = _rows_needed(data, self.count)
        if lines is None or self.manifest is None:
            return
        prepared = self.manifest.source.get("max_samples")
        if isinstance(prepared, int) and prepared <= self.manifest.samples and prepared < lines:
            raise DataError(
                f"{self.url} has fewer samples than {data.limits} needs",
                expected=f"{lines:,} rows in {counted(self.count, 'stream')}",
                found=f"{prepared:,}",
                fix="leave out --skip-dataset to prepare more, or give a smaller limit",
            )

    def put(self, log: Callable[[str], None]) -> None:
        """Upload the streams to where workers read them, skipping files that are already there."""
        if self.local is None:
            return
        sent = upload(self.local, open_folder(self.url))
        verb = "uploaded" if is_remote(self.url) else "written"
        log(f"{counted(len(sent.uploaded), 'file')} {verb} to {sent.url}, {len(sent.skipped)} already there")


def existing_streams(url: str) -> StreamsPlan:
    return StreamsPlan(url.rstrip("/"), read_manifest(open_folder(url)))


def local_streams(folder: Path, below: str) -> StreamsPlan:
    """Return the plan for a local folder of streams; its folder below ``below`` is named after its content."""
    if not folder.is_dir():
        raise DataError(f"no such folder: {folder}", fix="make streams first: spile data streams")
    manifest = read_manifest(open_folder(str(folder)))
    name = manifest.digest() if manifest is not None else _digest(folder)
    return StreamsPlan(place_of(below, name), manifest, folder)


def place_of(below: str, digest: str) -> str:
    """Return the folder for streams with this digest. Other content gets another folder, so nothing is replaced."""
    return f"{below}/{digest[:_NAME]}"


@contextmanager
def split_streams(
    dataset: str,
    below: str,
    count: int,
    *,
    data: DataSpec,
    log: Callable[[str], None],
    limited: bool = False,
) -> Iterator[StreamsPlan]:
    """Split a dataset into streams in a temporary local folder, which exists inside the ``with`` block.

    ``data`` selects the rows. ``limited``: prepare no more rows than the limits of the run need.
    """
    lines = _rows_needed(data, count) if limited else None
    selection = replace(_selection(data), max_samples=lines)
    with tempfile.TemporaryDirectory(prefix="spile-streams-") as folder:
        made = make_streams(dataset, Path(folder), count, selection=selection, seed=None)
        bound = "" if lines is None else f", as {data.limits} needs no more"
        log(f"{made.tally.samples:,} samples of {dataset} in {counted(count, 'stream')}{bound}")
        yield local_streams(Path(folder), below)


def _rows_needed(data: DataSpec, streams: int) -> int | None:
    """Return the number of rows that the limits of the samples need; None if all. Each stream gets at least one."""
    run = lines_needed(replace(data, max_samples_per_stream=None), data.prompt)
    each = lines_needed(replace(data, max_samples=None), data.prompt)
    found = min((lines for lines in (run, None if each is None else each * streams) if lines is not None), default=None)
    return None if found is None else max(found, streams)


def of_stream(data: DataSpec) -> DataSpec:
    """Return the data of one stream of a run with its part of the limits of the run.

    Raises:
        DataError: The number of samples in the streams before this one is not known.
    """
    if data.max_samples is None and data.max_tokens is None and data.max_bytes is None:
        return data
    turn = 1 if data.prompt.pack else data.prompt.predictions_per_task
    if data.of_streams is not None:
        return with_share(data, data.of_streams, turn=turn)
    if data.dataset_dir is None:
        return data
    folder = open_folder(data.dataset_dir)
    manifest = read_manifest(folder)
    count = len(list_streams(folder)) if manifest is None else len(manifest.streams)
    if manifest is not None and manifest.seed is None:
        return with_share(data, count, turn=turn)
    if data.max_samples is None or count == 1:
        return with_share(data, count, before=0)
    if manifest is None or data.prompt.pack:
        raise DataError(
            f"--max-samples with {counted(count, 'stream')} of {folder.url}",
            expected="the number of samples of each stream, in streams.json",
            found="no streams.json" if manifest is None else "--pack, which makes other samples of them",
            fix="limit each stream instead: --max-samples-per-stream",
        )
    return with_share(data, count, before=turn * sum(entry.samples for entry in manifest.streams[: data.worker_id]))


def with_share(data: DataSpec, streams: int, *, turn: int | None = None, before: int = 0) -> DataSpec:
    """Return the data with the stream's part of the limits of a run over ``streams`` streams.

    The limits count the first samples of the data: in the order of the input if the streams have its rows in turn,
    otherwise stream by stream.

    Args:
        data: The data of a stream.
        streams: The number of streams of the run.
        turn: The number of samples that a row makes, if the streams have the rows of the input in turn.
        before: The number of samples in the streams before this one, if they do not.
    """
    own = data.max_samples
    if turn is not None:
        own = in_turn(own, data.worker_id, streams, turn)
    elif own is not None:
        own = max(0, own - before)
    return replace(data, share=LimitShare(own, streams))


def in_turn(limit: int | None, number: int, streams: int, turn: int) -> int | None:
    """Return how many of the first ``limit`` samples a stream has, if streams have rows of ``turn`` samples in turn."""
    if limit is None:
        return None
    rows, rest = divmod(limit, turn)
    return max(0, -(-(rows - number) // streams)) * turn + (rest if rows % streams == number else 0)


def _selection(data: DataSpec) -> RowSelection:
    part = RowRange.parse(data.split)
    column = RowSelection.column if data.prompt.column == PromptSpec.column else data.prompt.column
    return RowSelection(
        column,
        part.start,
        part.stop,
        keep=data.keep,
        bad_rows=data.bad_rows,
        split=part.split,
        config_name=data.config_name,
        dataset_revision=data.dataset_revision,
    )


def refuse_other_rows(manifest: StreamsManifest, data: DataSpec, place: str) -> None:
    """Raise if existing streams contain other rows than requested: flags such as --split would have no effect."""
    part, source = RowRange.parse(data.split), manifest.source
    asked = {"split": part.split or "train", "config_name": data.config_name}
    facts = {name: (source[name], value) for name, value in asked.items() if name in source}
    facts["rows"] = _rows(source.get("start_index"), source.get("end_index")), _rows(part.start, part.stop)
    for name, (made, wanted) in facts.items():
        if made != wanted:
            raise DataError(
                f"{place} holds streams of another selection: {name}",
                expected=str(made),
                found=str(wanted),
                fix="give --split and --config-name as before, or another --output",
            )


def refuse_changed_source(manifest: StreamsManifest, dataset: str, data: DataSpec) -> None:
    """Raise if a dataset no longer has the rows of which streams were made. A commit of the hub cannot change."""
    source = manifest.source
    if "revision" in source:
        return
    named = source.get("keep")
    keep = tuple(map(str, named)) if isinstance(named, list) else ()
    selection = replace(_selection(data), column=str(source["column"]), keep=keep)
    opened = selection.open(dataset, keep or default_keep(dataset))
    now, _ = _write(opened, Path(), len(manifest.streams), set(), selection, manifest.seed, None)
    if now.streams != manifest.streams:
        raise changed_data(dataset)


def _rows(start: object, stop: object) -> str:
    return f"{start or 0} to {'the last' if stop is None else stop}"


def prepare_streams(dataset: str, url: str, count: int, *, data: DataSpec, log: Callable[[str], None]) -> None:
    """Split a dataset and upload its streams to exactly this URL, skipping files that are already there."""
    with split_streams(dataset, url, count, data=data, log=log) as made:
        replace(made, url=url).put(log)


def _count(url: str) -> int:
    """Return the number of streams, counted from 0 without a gap, if no ``streams.json`` says it."""
    numbers = list_streams(open_folder(url))
    return next(number for number in range(len(numbers) + 1) if number not in numbers)


def _digest(folder: Path) -> str:
    listed = "".join(f"{path.name} {sha256_of(path)}\n" for path in sorted(folder.glob("*.jsonl")))
    return hashlib.sha256(listed.encode()).hexdigest()
