"""Any source of ARC tasks to ARC JSONL, or to the challenge pair of JSON files."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Literal

import orjson

from spile.data.make.items import Item, ItemTally, RowSelection, Unique, usable
from spile.data.make.sources import RowSource, open_source
from spile.data.make.whole_files import replacing
from spile.errors import DataError

__all__ = ["ANSWERS", "CHALLENGES", "Converted", "Format", "convert", "convert_source"]

Format = Literal["arc-jsonl", "arc-json"]
CHALLENGES, ANSWERS = "arc_format_train.json", "test_outputs_train.json"

Progress = Callable[[ItemTally], None]
_EVERY = 256


@dataclass(frozen=True)
class Converted:
    """What came of it."""

    files: tuple[Path, ...]
    tally: ItemTally


def convert(
    dataset: str,
    output: Path,
    *,
    selection: RowSelection | None = None,
    split: str | None = None,
    config_name: str | None = None,
    format: Format = "arc-jsonl",  # noqa: A002  the flag's name
    test_outputs: bool = False,
    progress: Progress | None = None,
) -> Converted:
    """Write a dataset's tasks to ``output``: a JSONL file, or with ``arc-json`` a folder for the challenge pair.

    ``test_outputs`` keeps the held-back outputs in the JSONL. Nothing is there until all is, and nothing at all if a
    task id stands twice or no row can be used.
    """
    selection = selection or RowSelection()
    source = open_source(dataset, column=selection.column, split=split, config_name=config_name)
    return convert_source(source, output, selection, format=format, test_outputs=test_outputs, progress=progress)


def convert_source(
    source: RowSource,
    output: Path,
    selection: RowSelection,
    *,
    format: Format = "arc-jsonl",  # noqa: A002
    test_outputs: bool = False,
    progress: Progress | None = None,
) -> Converted:
    """:func:`convert`, from a source that is open already."""
    files = (output,) if format == "arc-jsonl" else (output / CHALLENGES, output / ANSWERS)
    tally, names = ItemTally(), Unique()
    written: set[str] = set()
    with replacing(*files) as handles:
        write = _JsonlWriter(handles[0], test_outputs) if format == "arc-jsonl" else _PairWriter(*handles)
        for item in usable(source, selection, tally, arc_only=True):
            if item.own_id:
                names.add(item.task_id, item.row)
            elif format == "arc-json" and item.task_id in written:  # in an object by ids equal tasks are one
                tally.samples -= 1
                tally.rejected["the same task as an earlier row"] += 1
                continue
            else:
                written.add(item.task_id)
            write.item(item)
            if progress is not None and tally.rows % _EVERY == 0:
                progress(tally)
        write.end()
        check_names(names, source, selection)
        check_some(tally, source)
    if progress is not None:
        progress(tally)
    return Converted(files, tally)


def check_names(names: Unique, source: RowSource, selection: RowSelection) -> None:
    """Refuse a task id that stands twice, and say where."""
    repeat = names.first_repeat()
    if repeat is not None:
        one = replace(selection, start_index=repeat[0], end_index=repeat[0] + 1, max_samples=None)
        name = next((item.task_id for item in usable(source, one, ItemTally())), "")
        raise DataError(
            f"task id {name!r} stands twice in {source.origin['dataset']}",
            expected="each id once",
            found=f"rows {repeat[0]} and {repeat[1]}, counted from 0",
            fix="rename one, or choose rows with --start-index and --end-index",
        )


def check_some(tally: ItemTally, source: RowSource) -> None:
    """Refuse a source of which nothing could be used."""
    if tally.samples == 0:
        why = "; ".join(f"{count} × {reason}" for reason, count in tally.rejected.most_common(3))
        raise DataError(
            f"nothing in {source.origin['dataset']} can be used",
            expected="at least one task",
            found=why or "no rows",
            fix="check --column, --split, --start-index and --end-index",
        )


class _JsonlWriter:
    def __init__(self, file: IO[bytes], test_outputs: bool) -> None:
        self._file, self._test_outputs = file, test_outputs

    def item(self, item: Item) -> None:
        data = item.content()
        test = data["test"] if self._test_outputs else [{"input": pair["input"]} for pair in data["test"]]
        line = {"task_id": item.task_id, "train": data["train"], "test": test}
        self._file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))

    def end(self) -> None:
        """A JSONL file has no end."""


class _PairWriter:
    """Two JSON objects by task id, a task at a time."""

    def __init__(self, challenges: IO[bytes], answers: IO[bytes]) -> None:
        self._files, self._between = (challenges, answers), b"{\n"

    def item(self, item: Item) -> None:
        data = item.content()
        task = {"train": data["train"], "test": [{"input": pair["input"]} for pair in data["test"]]}
        known = [pair["output"] for pair in data["test"] if pair.get("output") is not None]
        for file, value in zip(self._files, (task, known), strict=True):
            file.write(self._between + orjson.dumps(item.task_id) + b": " + orjson.dumps(value))
        self._between = b",\n"

    def end(self) -> None:
        for file in self._files:
            file.write(b"\n}\n" if self._between != b"{\n" else b"{}\n")
