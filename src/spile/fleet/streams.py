"""A fleet's streams in its bucket: under a name of their content, so that no deployment replaces another's."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from spile.data.convert import RowSelection
from spile.data.sources import RowRange
from spile.data.split import MANIFEST, STREAM, StreamsManifest, make_streams, stream_name
from spile.data.upload import read_manifest, upload
from spile.errors import DataError
from spile.objects import open_folder
from spile.spec.amounts import counted
from spile.spec.run import DataSpec, PromptSpec

__all__ = [
    "StreamsPlan",
    "existing_streams",
    "local_streams",
    "place_of",
    "prepare_streams",
    "refuse_other_rows",
    "split_streams",
]

_NAME = 16
"""Digits of a split's digest in its folder's name."""


@dataclass(frozen=True)
class StreamsPlan:
    """Streams, and where workers will read them."""

    url: str
    manifest: StreamsManifest | None
    """None: nothing describes them, and only their names can be checked."""
    local: Path | None = None
    """What has to be put there first; None: it is there."""

    @property
    def split(self) -> str | None:
        """What workers check their stream against."""
        return None if self.manifest is None else self.manifest.digest()

    def check(self, workers: int) -> None:
        """Each worker its stream, each stream its worker: one that nobody works on would never be done."""
        found = len(self.manifest.streams) if self.manifest is not None else _count(self.url, self.local, workers)
        if found != workers:
            raise DataError(
                f"the streams of {self.local or self.url} are not the workers'",
                expected=f"{workers}, one per worker",
                found=f"{found}, up to {stream_name(found - 1)}" if found else f"no {stream_name(0)}",
                fix="leave --skip-dataset out to split the dataset anew, or take as many workers",
            )

    def put(self, log: Callable[[str], None]) -> None:
        """Put them where workers read them, skipping what is there already."""
        if self.local is None:
            return
        sent = upload(self.local, open_folder(self.url))
        log(f"{len(sent.uploaded)} files uploaded to {sent.url}, {len(sent.skipped)} there already")


def existing_streams(url: str) -> StreamsPlan:
    """Streams that are in a bucket already."""
    return StreamsPlan(url.rstrip("/"), read_manifest(open_folder(url)))


def local_streams(folder: Path, below: str) -> StreamsPlan:
    """A folder of streams on this computer, which goes to the bucket below ``below``, under a name of its content."""
    if not folder.is_dir():
        raise DataError(f"no such folder: {folder}", fix="make streams first: spile data streams")
    file = folder / MANIFEST
    manifest = StreamsManifest.from_json(file.read_bytes(), str(file)) if file.is_file() else None
    name = manifest.digest() if manifest is not None else _digest(folder)
    return StreamsPlan(place_of(below, name), manifest, folder)


def place_of(below: str, digest: str) -> str:
    """Where streams of this content lie: another content lies elsewhere, so that nothing is ever replaced."""
    return f"{below}/{digest[:_NAME]}"


@contextmanager
def split_streams(
    dataset: str,
    below: str,
    count: int,
    *,
    data: DataSpec,
    log: Callable[[str], None],
    begun: str | None = None,
) -> Iterator[StreamsPlan]:
    """Split a dataset into one stream per worker, here; they can be put in the bucket as long as this lasts.

    ``data`` says what is taken of it and in which order.
    ``begun``: where the streams of the deployment before are; the same split is made as it was made then.
    """
    there = read_manifest(open_folder(begun)) if begun is not None else None
    with tempfile.TemporaryDirectory(prefix="spile-streams-") as folder:
        made = make_streams(
            dataset,
            Path(folder),
            count,
            selection=_selection(data),
            split=RowRange.parse(data.split).split,
            config_name=data.config_name,
            seed=data.seed,
            begun=there,
        )
        log(f"{made.tally.samples:,} samples of {dataset} in {counted(count, 'stream')}")
        yield local_streams(Path(folder), below)


def _selection(data: DataSpec) -> RowSelection:
    part = RowRange.parse(data.split)
    column = RowSelection.column if data.prompt.column == PromptSpec.column else data.prompt.column
    return RowSelection(column, part.start, part.stop, keep=data.keep)


def refuse_other_rows(manifest: StreamsManifest, data: DataSpec, place: str) -> None:
    """Streams that were made earlier are of the rows that are asked for now: --split would be without effect."""
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


def _rows(start: object, stop: object) -> str:
    return f"{start or 0} to {'the last' if stop is None else stop}"


def prepare_streams(dataset: str, url: str, count: int, *, data: DataSpec, log: Callable[[str], None]) -> None:
    """Split a dataset and put its streams at this very place, skipping what is there already."""
    with split_streams(dataset, url, count, data=data, log=log, begun=url) as made:
        replace(made, url=url).put(log)


def _count(url: str, local: Path | None, workers: int) -> int:
    """How many streams there are, from 0 up, where no ``streams.json`` says it."""
    listed = [path.name for path in local.iterdir()] if local is not None else [i.key for i in open_folder(url).list()]
    numbers = {int(found[1]) for name in listed if (found := STREAM.fullmatch(name))}
    return next((number for number in range(max(numbers, default=0) + 2) if number not in numbers), workers)


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.jsonl")):
        with path.open("rb") as file:
            digest.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()
