"""Split a source into streams of equal size, and describe them in ``streams.json``.

The same input and seed give the same bytes. Memory does not depend on the size of the source.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

from spile.data.arc.prompts import shuffled
from spile.data.convert import ItemTally, Progress, RowSelection, Unique, check_usable, usable, workspace
from spile.data.manifest import MANIFEST, STREAM, StreamEntry, StreamsManifest, read_manifest, sha256_of, stream_name
from spile.data.sources import default_keep
from spile.data.tables import RowSource
from spile.errors import DataError, SpecError
from spile.objects import open_folder

MOST_STREAMS = 10_000
_BUFFERS = 16 << 20


@dataclass(frozen=True)
class Streams:
    """The result of a split."""

    manifest: StreamsManifest
    written: tuple[str, ...]
    tally: ItemTally


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
        return StreamEntry(stream_name(number), self.samples, self.bytes, self._digest.hexdigest())


def make_streams(
    dataset: str,
    output_dir: Path,
    num_streams: int,
    *,
    selection: RowSelection | None = None,
    seed: int = 0,
    only: Collection[int] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Streams:
    """Split a dataset into ``stream_000.jsonl``, …, listed in ``streams.json``.

    ``only`` writes some streams again, byte for byte as ``streams.json`` lists them. The files are renamed when all are
    complete, ``streams.json`` last.
    """
    selection = selection or RowSelection()
    source = selection.open(dataset, selection.keep or default_keep(dataset))
    chosen = _chosen(num_streams, only)
    if only is not None and overwrite:
        raise SpecError("--overwrite", expected="no --streams: it makes all streams again", found="--streams")
    with workspace(output_dir) as work:
        manifest, tally = _write(source, work, num_streams, chosen, selection, seed, progress)
        if not overwrite:
            _refuse_other_streams(output_dir, manifest)
        _publish(work, output_dir, manifest, overwrite)
    return Streams(manifest, tuple(stream_name(number) for number in sorted(chosen)), tally)


def _chosen(num_streams: int, only: Collection[int] | None) -> set[int]:
    if not 1 <= num_streams <= MOST_STREAMS:
        raise SpecError("--num-streams", expected=f"1 to {MOST_STREAMS}", found=str(num_streams))
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
    seed: int,
    progress: Progress | None,
) -> tuple[StreamsManifest, ItemTally]:
    """Count and hash all streams, and write the chosen ones."""
    buffer = max(1 << 14, min(1 << 20, _BUFFERS // num_streams))
    writers = [_Writer(work / stream_name(n) if n in chosen else None, buffer) for n in range(num_streams)]
    tally, names, order = ItemTally(), Unique(), list[int]()
    items = usable(source, selection, tally, keep_rejected=True, progress=progress)
    for place, item in enumerate(items):
        if place % num_streams == 0:
            order = shuffled(num_streams, "streams", seed, place // num_streams)
        writers[order[place % num_streams]].line(item.line())
        if item.own_id:
            names.add(item.task_id, item.row)
    check_usable(tally, names, source, selection)
    if tally.samples < num_streams:
        raise SpecError("--num-streams", expected=f"at most {tally.samples}, one per sample", found=str(num_streams))
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
    there = read_manifest(open_folder(str(folder)))
    if there is not None:
        refuse_others(there, manifest, str(folder / MANIFEST))
        return
    listed = {entry.name: entry.sha256 for entry in manifest.streams}
    for path in sorted(folder.iterdir()):
        if STREAM.fullmatch(path.name) and sha256_of(path) != listed.get(path.name):
            raise DataError(
                f"{folder} holds streams of another split",
                expected=f"the {len(listed)} streams of this one",
                found=f"a different {path.name}",
                fix="use another --output-dir, or --overwrite",
            )


def refuse_others(there: StreamsManifest, manifest: StreamsManifest, file: str) -> None:
    """Raise an error unless the streams that ``file`` lists are the same as the new ones."""
    if there.streams == manifest.streams:
        return
    fix = "use another --output-dir, or --overwrite to replace them all"
    if len(there.streams) != len(manifest.streams) or there.seed != manifest.seed:
        raise DataError(
            f"{file} lists other streams",
            expected=f"{len(there.streams)} streams of seed {there.seed}",
            found=f"{len(manifest.streams)} of seed {manifest.seed}",
            fix=fix,
        )
    old, new = next((a, b) for a, b in zip(there.streams, manifest.streams, strict=True) if a != b)
    raise DataError(
        f"{file} lists a different {old.name}: the source or the selection has changed",
        expected=f"{old.samples} samples, sha256 {old.sha256}",
        found=f"{new.samples} samples, {new.sha256}",
        fix=fix,
    )


def _publish(work: Path, folder: Path, manifest: StreamsManifest, overwrite: bool) -> None:
    """Move the new streams to the folder, and then ``streams.json``, unless it is there already."""
    for path in sorted(work.iterdir()):
        path.replace(folder / path.name)
    if overwrite:
        listed = {entry.name for entry in manifest.streams}
        for file in folder.iterdir():
            if STREAM.fullmatch(file.name) and file.name not in listed:
                file.unlink()
    if overwrite or not (folder / MANIFEST).is_file():
        open_folder(str(folder)).put(MANIFEST, manifest.to_json())
