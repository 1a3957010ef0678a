"""Convert rows of any source to ARC JSONL or to the challenge's pair of JSON files.

Also holds what conversion and splitting share: the selection of usable rows, and files that are written atomically.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import orjson

from spile.data.arc.grids import task_problem
from spile.data.rows import PAIRS, TOKENS, arc_task_id, rejected_line, row_id
from spile.data.sources import open_source
from spile.data.tables import RowSource, SourceRow
from spile.errors import DataError, SpecError
from spile.objects.local import write_errors
from spile.spec.options import at_least
from spile.spec.run import BadRows


@contextmanager
def workspace(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder inside ``folder``, on the same disk; remove it afterwards."""
    fresh = not folder.exists()
    with write_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".making-", dir=folder))
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)
            if fresh and not any(folder.iterdir()):
                folder.rmdir()


@contextmanager
def replacing(*files: Path) -> Iterator[Sequence[IO[bytes]]]:
    """Yield temporary files to write instead of ``paths``, which must be in one folder.

    The files are renamed, in order, when the block ends without an error. Otherwise nothing changes.
    """
    with workspace(files[0].parent) as work, write_errors(files[0]):
        made = [work / file.name for file in files]
        with ExitStack() as stack:
            handles = [stack.enter_context(path.open("wb", buffering=1 << 20)) for path in made]
            yield handles
            for handle in handles:
                handle.flush()
                os.fsync(handle.fileno())
        for path, file in zip(made, files, strict=True):
            path.replace(file)


Kind = Literal["arc", "chat", "text", "tokens"]
_SHOWN = 5


@dataclass(frozen=True)
class RowSelection:
    """Which rows of a source are used, and how."""

    column: str = PAIRS
    """The field with a list of pairs, or with the text."""
    start_index: int = 0
    end_index: int | None = None
    """Use rows from ``start_index`` up to, but not including, ``end_index``."""
    max_samples: int | None = None
    """The maximum number of usable rows."""
    max_train_examples: int | None = None
    """The maximum number of train pairs of a task."""
    keep: tuple[str, ...] = ()
    """Additional fields of a row to keep in its line."""
    bad_rows: BadRows = "error"
    """Whether a row that cannot be used is an error, or is counted and skipped."""

    def __post_init__(self) -> None:
        at_least("--start-index", self.start_index, 0)
        at_least("--end-index", self.end_index, 1)
        at_least("--max-samples", self.max_samples, 1)
        at_least("--max-train-examples", self.max_train_examples, 1)
        if self.end_index is not None and self.end_index <= self.start_index:
            raise SpecError(
                "--end-index", expected=f"more than --start-index {self.start_index}", found=str(self.end_index)
            )

    def record(self) -> dict[str, object]:
        """Return the selection as ``streams.json`` records it."""
        return {name: value for name, value in vars(self).items() if name != "bad_rows" and (name != "keep" or value)}


@dataclass
class ItemTally:
    """Counts of the rows read, used and rejected, by reason."""

    rows: int = 0
    samples: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    shown: list[str] = field(default_factory=list)
    """The place and reason of the first rejected rows."""

    def reject(self, row: SourceRow, reason: str, source: RowSource, bad_rows: BadRows) -> None:
        """Count a rejected row, or raise an error that names it."""
        if bad_rows == "error":
            raise DataError(
                f"{source.origin['dataset']} {row.place}",
                expected="a usable row",
                found=reason,
                fix="correct it, or add --bad-rows skip",
            )
        self.rejected[reason] += 1
        if len(self.shown) < _SHOWN:
            self.shown.append(f"{row.place}: {reason}")


@dataclass(frozen=True, slots=True)
class Item:
    """A usable row, in the form in which streams store it."""

    task_id: str
    data: dict[str, Any]
    """The content of the row; empty for a rejected one."""
    raw: bytes | None
    """The original line, if a stream stores it unchanged."""
    row: int
    own_id: bool = True
    """Whether the row has an id of its own. Equal rows without an id are the same task."""

    def line(self) -> bytes:
        """Return the line to store, without a newline."""
        return orjson.dumps(self.data) if self.raw is None else self.raw


class Unique:
    """Detects duplicate names with 24 bytes per name; they are compared at the end."""

    def __init__(self) -> None:
        self._digests, self._rows = bytearray(), array("Q")

    def add(self, name: str, row: int) -> None:
        """Record the name of a row."""
        self._digests += hashlib.blake2b(name.encode(), digest_size=16).digest()
        self._rows.append(row)

    def first_repeat(self) -> tuple[int, int] | None:
        """Return the numbers of the first two rows with the same name, or None if all names differ."""
        halves = np.frombuffer(bytes(self._digests), dtype=np.uint64).reshape(-1, 2)
        order = np.lexsort((halves[:, 1], halves[:, 0]))  # stable, so that equal names keep their order
        ranked = halves[order]
        same = np.flatnonzero((ranked[1:] == ranked[:-1]).all(axis=1))
        if not len(same):
            return None
        place = min(same, key=lambda at: order[at + 1])
        return self._rows[int(order[place])], self._rows[int(order[place + 1])]


def usable(
    source: RowSource,
    selection: RowSelection,
    tally: ItemTally,
    *,
    arc_only: bool = False,
    keep_rejected: bool = False,
) -> Iterator[Item]:
    """Yield the usable rows. All must be of the first row's kind: tasks, chats or texts.

    ``keep_rejected``: also yield a line for each rejected row, so that a run over it records the row as skipped.
    """
    kind: Kind | None = "arc" if arc_only else None
    for row in source.rows(selection.start_index, selection.end_index):
        if selection.max_samples is not None and tally.samples >= selection.max_samples:
            return
        tally.rows += 1
        item: Item | str
        if row.problem is not None or not isinstance(row.data, dict):
            item = row.problem or "a row that is not an object"
        else:
            kind = kind or _kind(row.data, selection.column)
            item = _task(row, selection) if kind == "arc" else _plain(row, kind, selection.column)
        if isinstance(item, str):
            tally.reject(row, item, source, selection.bad_rows)
            if not keep_rejected:
                continue
            name = Path(str(source.origin["dataset"])).name
            item = Item(_numbered(row.number), {}, rejected_line(f"{name} {row.place}: {item}"), row.number)
        else:
            tally.samples += 1
        yield item


def _numbered(number: int) -> str:
    """Return the name of a row without an id: its row number, which does not depend on the selection."""
    return f"task_{number:08d}"


def _kind(data: dict[str, Any], column: str) -> Kind | None:
    """Return the kind of a row by its fields, or None if it is not recognised."""
    value = data.get(column)
    if (
        isinstance(value, list)
        or (isinstance(value, str) and value.lstrip().startswith(("[[[", "[{")))
        or "train" in data
    ):
        return "arc"
    if "messages" in data:
        return "chat"
    if TOKENS in data and not isinstance(data.get("text"), str):
        return "tokens"
    return "text" if isinstance(value, str) or isinstance(data.get("text"), str) else None


def _plain(row: SourceRow, kind: Kind | None, column: str) -> Item | str:
    """Return a chat or a text unchanged, with a name."""
    if kind is None:
        return f"no {column!r}, train, messages, text or {TOKENS}"
    named = {"chat": "messages", "tokens": TOKENS}.get(kind)
    value = row.data.get(named) if named else row.data.get(column, row.data.get("text"))
    if kind == "chat" and (not isinstance(value, list) or not value):
        return "no messages"
    if kind == "tokens" and not isinstance(value, list):
        return f"no {TOKENS}"
    if kind == "text" and not isinstance(value, str):
        return "no text"
    name = row_id(row.data)
    if name is not None:
        return Item(name, row.data, row.raw, row.number)
    return Item(_numbered(row.number), {"task_id": _numbered(row.number), **row.data}, None, row.number)


def _task(row: SourceRow, selection: RowSelection) -> Item | str:
    """Return an ARC task: the row itself, or a column of pairs of which the last is the test."""
    data, kept = row.data, {name: row.data[name] for name in selection.keep if name in row.data}
    if selection.column in data and "train" not in data:
        made = _from_pairs(data[selection.column])
        if isinstance(made, str):
            return made
        own = row_id(data)
        data, raw = {**({} if own is None else {"task_id": own}), **made}, None
    elif "train" in data:
        raw = row.raw if isinstance(data.get("task_id"), str) else None
    else:
        return f"no column {selection.column!r}"
    problem = task_problem(data)
    if problem is not None:
        return problem
    own = row_id(data)
    name = own or arc_task_id(data)
    most = selection.max_train_examples
    if raw is None or (most is not None and len(data["train"]) > most):
        raw, data = None, {"task_id": name, "train": data["train"][:most], "test": data["test"], **kept}
    return Item(name, data, raw, row.number, own is not None)


def _from_pairs(pairs: Any) -> dict[str, Any] | str:
    if isinstance(pairs, str):
        try:
            pairs = orjson.loads(pairs)
        except orjson.JSONDecodeError:
            return "pairs that are no JSON"
    if not isinstance(pairs, list):
        return "pairs that are no list"
    if len(pairs) < 2:
        return "fewer than two pairs"
    made = []
    for pair in pairs:
        sides = [pair.get("input"), pair.get("output")] if isinstance(pair, dict) else pair
        if not isinstance(sides, list) or len(sides) != 2:
            return f"a pair of {len(sides)}" if isinstance(sides, list) else "a pair that is no list"
        made.append({"input": sides[0], "output": sides[1]})
    return {"train": made[:-1], "test": made[-1:]}


Format = Literal["arc-jsonl", "arc-json"]
CHALLENGES, ANSWERS = "arc_format_train.json", "test_outputs_train.json"

Progress = Callable[[ItemTally], None]
_EVERY = 256


@dataclass(frozen=True)
class Converted:
    """The result of a conversion."""

    files: tuple[Path, ...]
    tally: ItemTally


def convert(
    dataset: str | RowSource,
    output: Path,
    *,
    selection: RowSelection | None = None,
    split: str | None = None,
    config_name: str | None = None,
    revision: str | None = None,
    format: Format = "arc-jsonl",  # noqa: A002  the flag's name
    test_outputs: bool = False,
    progress: Progress | None = None,
) -> Converted:
    """Write the tasks of a dataset, given by name or as an open source, to ``output``.

    The output is a JSONL file, or with ``arc-json`` a folder for the challenge pair.

    ``test_outputs`` keeps the test outputs in the JSONL. The output appears only when it is complete, and not at all
    if a task id occurs twice or no row is usable.
    """
    selection = selection or RowSelection()
    source: RowSource = (
        open_source(dataset, column=selection.column, split=split, config_name=config_name, revision=revision)
        if isinstance(dataset, str)
        else dataset
    )
    files = (output,) if format == "arc-jsonl" else (output / CHALLENGES, output / ANSWERS)
    tally, names = ItemTally(), Unique()
    written: set[str] = set()
    with replacing(*files) as handles:
        write = _JsonlWriter(handles[0], test_outputs) if format == "arc-jsonl" else _PairWriter(*handles)
        for item in usable(source, selection, tally, arc_only=True):
            if item.own_id:
                names.add(item.task_id, item.row)
            elif format == "arc-json" and item.task_id in written:  # equal tasks are one entry of an object
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
    """Raise an error that names both rows if a task id occurs twice."""
    repeat = names.first_repeat()
    if repeat is not None:
        one = replace(selection, start_index=repeat[0], end_index=repeat[0] + 1, max_samples=None)
        name = next((item.task_id for item in usable(source, one, ItemTally())), "")
        raise DataError(
            f"task id {name!r} occurs twice in {source.origin['dataset']}",
            expected="each id once",
            found=f"rows {repeat[0]} and {repeat[1]}, counted from 0",
            fix="rename one, or choose rows with --start-index and --end-index",
        )


def check_some(tally: ItemTally, source: RowSource) -> None:
    """Raise an error if no row of the source is usable."""
    if tally.samples == 0:
        why = "; ".join(f"{count} × {reason}" for reason, count in tally.rejected.most_common(3))
        raise DataError(
            f"{source.origin['dataset']} has no usable rows",
            expected="at least one task",
            found=why or "no rows",
            fix="check --column, --split, --start-index and --end-index",
        )


class _JsonlWriter:
    def __init__(self, file: IO[bytes], test_outputs: bool) -> None:
        self._file, self._test_outputs = file, test_outputs

    def item(self, item: Item) -> None:
        data = item.data
        test = data["test"] if self._test_outputs else [{"input": pair["input"]} for pair in data["test"]]
        line = {"task_id": item.task_id, "train": data["train"], "test": test}
        self._file.write(orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE))

    def end(self) -> None:
        """Write nothing: a JSONL file has no footer."""


class _PairWriter:
    """Writes two JSON objects keyed by task id, one task at a time."""

    def __init__(self, challenges: IO[bytes], answers: IO[bytes]) -> None:
        self._files, self._between = (challenges, answers), b"{\n"

    def item(self, item: Item) -> None:
        data = item.data
        task = {"train": data["train"], "test": [{"input": pair["input"]} for pair in data["test"]]}
        known = [pair["output"] for pair in data["test"] if pair.get("output") is not None]
        for file, value in zip(self._files, (task, known), strict=True):
            file.write(self._between + orjson.dumps(item.task_id) + b": " + orjson.dumps(value))
        self._between = b",\n"

    def end(self) -> None:
        for file in self._files:
            file.write(b"\n}\n" if self._between != b"{\n" else b"{}\n")
