"""What ``--dataset`` names, as lines: a file of lines, or the rows of a Parquet file or of a dataset of the hub.

A row becomes the line of JSON that it would be in a file. So it is hashed, compared and numbered like any line, and two
tables with the same rows are the same data, however they are stored.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import orjson

from spile.data.lines import StreamFile
from spile.data.make.sources import Parquet, RowRange, RowSource, SourceRow, is_hub_name, open_source
from spile.errors import DataError, SpecError
from spile.objects.opening import is_remote
from spile.spec.run import EMBEDDED, DataSpec

__all__ = ["open_input"]

_BLOCK = 1 << 20
"""Bytes of lines that are hashed at a time."""


def open_input(spec: DataSpec) -> StreamFile:
    """The lines of a stream's data, wherever they come from."""
    if spec.dataset_dir is not None or not _is_table(spec.dataset):
        if spec.split is not None or spec.config_name is not None:
            flag = "--split" if spec.split is not None else "--config-name"
            raise SpecError(flag, expected="a dataset of the hub, or a folder of one", found=spec.location)
        return StreamFile(spec.location)
    part = RowRange.parse(spec.split)
    source = open_source(
        spec.dataset, column=spec.prompt.column, split=part.split, config_name=spec.config_name, keep=spec.keep
    )
    if isinstance(source, Parquet) and part.split not in (None, "train"):
        raise SpecError("--split", expected="train, all that one file is", found=spec.split)
    named = spec.dataset if spec.split is None else f"{spec.dataset}:{spec.split}"
    return StreamFile(named, partial(_json_lines, source, part, spec.dataset))


def _is_table(dataset: str) -> bool:
    """Whether the dataset is no file of lines: Parquet, a folder of it, or a name that is none of this machine's."""
    if dataset == EMBEDDED:
        return False
    if is_remote(dataset) or dataset.startswith("file://"):
        return is_remote(dataset) and dataset.endswith(".parquet")
    path = Path(dataset).expanduser()
    if path.is_dir():
        return next(path.rglob("*.parquet"), None) is not None
    if path.exists():
        return path.suffix == ".parquet"
    # What would lie in a folder that is here was meant as a file.
    return is_hub_name(dataset) and (path.parent == Path() or not path.parent.is_dir())


def _json_lines(source: RowSource, part: RowRange, location: str) -> Iterator[bytes]:
    block = bytearray()
    for row in source.rows(part.start, part.stop):
        block += _line(row, location)
        if len(block) >= _BLOCK:
            yield bytes(block)
            block.clear()
    if block:
        yield bytes(block)


def _line(row: SourceRow, location: str) -> bytes:
    try:
        return orjson.dumps(row.data, option=orjson.OPT_APPEND_NEWLINE)
    except TypeError as error:
        wrong = {name: type(value).__name__ for name, value in row.data.items() if not _is_json(value)}
        said = ", ".join(f"{name} ({kind})" for name, kind in wrong.items())
        raise DataError(f"{location} {row.place}", expected="columns that JSON can hold", found=said) from error


def _is_json(value: object) -> bool:
    try:
        orjson.dumps(value)
    except TypeError:
        return False
    return True
