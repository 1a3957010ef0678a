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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import orjson

from spile.data.arc.grids import task_problem
from spile.data.manifest import ANSWERS, CHALLENGES
from spile.data.rows import PAIRS, TOKENS, arc_task_id, rejected_line, row_id
from spile.data.sources import RowRange, open_source
from spile.data.tables import RowSource, SourceRow
from spile.errors import DataError, SpecError
from spile.objects.local import write_errors
from spile.spec.options import check_number
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


Kind = Literal["arc", "chat", "text", "tokens"]
_SHOWN, _EVERY = 5, 256


@dataclass(frozen=True)
class RowSelection:
    """Which rows of a source are used, and how. They are flags of ``spile data``."""

    column: str = PAIRS
    """The field with a list of [input, output] pairs (the last is the test), or with the text."""
    start_index: int = 0
    """The first row, from 0."""
    end_index: int | None = None
    """The row to stop before."""
    max_samples: int | None = None
    """The largest number of samples."""
    max_train_examples: int | None = None
    """Keep at most this many training pairs of each task."""
    keep: tuple[str, ...] = ()
    """Additional fields of a row to keep in its line."""
    bad_rows: BadRows = "error"
    """Whether a row that cannot be used is an error, or is counted and skipped."""
    split: str | None = None
    """The hub dataset's split, or a folder's subfolder. [default: train]"""
    config_name: str | None = None
    """The hub dataset's configuration."""
    dataset_revision: str | None = None
    """The branch, tag or commit of the hub dataset. [default: the newest commit]"""

    def __post_init__(self) -> None:
        check_number("--start-index", self.start_index, 0)
        check_number("--end-index", self.end_index, 1)
        check_number("--max-samples", self.max_samples, 1)
        check_number("--max-train-examples", self.max_train_examples, 1)
        if self.end_index is not None and self.end_index <= self.start_index:
            raise SpecError(
                "--end-index", expected=f"more than --start-index {self.start_index}", found=str(self.end_index)
            )

    def open(self, dataset: str, keep: tuple[str, ...] = ()) -> RowSource:
        """Open a dataset by name. ``keep``: columns of a table that are read in addition to those of the samples."""
        return open_source(
            dataset,
            column=self.column,
            split=self.split,
            config_name=self.config_name,
            keep=keep,
            revision=self.dataset_revision,
        )

    def record(self) -> dict[str, object]:
        """Return the selection as ``streams.json`` records it; the origin of the source has the rest."""
        left_out = ("bad_rows", "split", "config_name", "dataset_revision", *(() if self.keep else ("keep",)))
        return {name: value for name, value in vars(self).items() if name not in left_out}


@dataclass
class RowTally:
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


Progress = Callable[[RowTally], None]


@dataclass(frozen=True, slots=True)
class UsableRow:
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
        return orjson.dumps(self.data) if self.raw is None else self.raw


class _Unusable(Exception):
    """A row cannot be used; the text is the reason."""


class DuplicateFinder:
    """Detects duplicate names with 24 bytes per name; they are compared at the end."""

    def __init__(self) -> None:
        self._digests, self._rows = bytearray(), array("Q")

    def add(self, name: str, row: int) -> None:
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


def usable_rows(
    source: RowSource,
    selection: RowSelection,
    tally: RowTally,
    *,
    arc_only: bool = False,
    keep_rejected: bool = False,
    progress: Progress | None = None,
) -> Iterator[UsableRow]:
    """Yield the usable rows. All must be of the first row's kind: tasks, chats or texts.

    ``keep_rejected``: also yield a line for each rejected row, so that a run over it records the row as skipped.
    ``progress`` is called with the tally every few hundred rows, and at the end.
    """
    kind: Kind | None = "arc" if arc_only else None
    for row in RowRange(None, selection.start_index, selection.end_index).rows(source):
        if selection.max_samples is not None and tally.samples >= selection.max_samples:
            break
        tally.rows += 1
        if progress is not None and tally.rows % _EVERY == 0:
            progress(tally)
        try:
            if row.problem is not None or not isinstance(row.data, dict):
                raise _Unusable(row.problem or "a row that is not an object")
            kind = kind or _kind(row.data, selection.column)
            item = _task(row, selection) if kind == "arc" else _plain(row, kind, selection.column)
            tally.samples += 1
        except (_Unusable, DataError) as error:  # The id of a row may be no id.
            tally.reject(row, str(error), source, selection.bad_rows)
            if not keep_rejected:
                continue
            name = Path(str(source.origin["dataset"])).name
            item = UsableRow(_default_id(row.number), {}, rejected_line(f"{name} {row.place}: {error}"), row.number)
        yield item
    if progress is not None:
        progress(tally)


def _default_id(number: int) -> str:
    """Return the name of a row without an id, as in a run that reads the source itself."""
    return f"line-{number}"


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


def _plain(row: SourceRow, kind: Kind | None, column: str) -> UsableRow:
    """Return a chat, a text or token ids unchanged, with a name."""
    if kind is None:
        raise _Unusable(f"no {column!r}, train, messages, text or {TOKENS}")
    if kind == "chat" and (not isinstance(row.data.get("messages"), list) or not row.data["messages"]):
        raise _Unusable("no messages")
    if kind == "tokens" and not isinstance(row.data.get(TOKENS), list):
        raise _Unusable(f"no {TOKENS}")
    if kind == "text" and not isinstance(row.data.get(column, row.data.get("text")), str):
        raise _Unusable("no text")
    name = row_id(row.data)
    if name is not None:
        return UsableRow(name, row.data, row.raw, row.number)
    return UsableRow(_default_id(row.number), {"task_id": _default_id(row.number), **row.data}, None, row.number)


def _task(row: SourceRow, selection: RowSelection) -> UsableRow:
    """Return an ARC task: the row itself, or a column of pairs of which the last is the test."""
    data, kept = row.data, {name: row.data[name] for name in selection.keep if name in row.data}
    if "train" in data:
        raw = row.raw if isinstance(data.get("task_id"), str) else None
    elif selection.column in data:
        own = row_id(data)
        data, raw = {**({} if own is None else {"task_id": own}), **_from_pairs(data[selection.column])}, None
    else:
        raise _Unusable(f"no column {selection.column!r}")
    problem = task_problem(data)
    if problem is not None:
        raise _Unusable(problem)
    own = row_id(data)
    name = own or arc_task_id(data)
    most = selection.max_train_examples
    if raw is None or (most is not None and len(data["train"]) > most):
        raw, data = None, {"task_id": name, "train": data["train"][:most], "test": data["test"], **kept}
    return UsableRow(name, data, raw, row.number, own is not None)


def _from_pairs(pairs: Any) -> dict[str, Any]:
    if isinstance(pairs, str):
        try:
            pairs = orjson.loads(pairs)
        except orjson.JSONDecodeError as error:
            raise _Unusable("pairs that are not JSON") from error
    if not isinstance(pairs, list):
        raise _Unusable("pairs that are not a list")
    if len(pairs) < 2:
        raise _Unusable("fewer than two pairs")
    made = []
    for pair in pairs:
        sides = [pair.get("input"), pair.get("output")] if isinstance(pair, dict) else pair
        if not isinstance(sides, list) or len(sides) != 2:
            raise _Unusable(f"a pair of {len(sides)}" if isinstance(sides, list) else "a pair that is not a list")
        made.append({"input": sides[0], "output": sides[1]})
    return {"train": made[:-1], "test": made[-1:]}


def check_result(tally: RowTally, names: DuplicateFinder, source: RowSource, selection: RowSelection) -> None:
    """Raise an error if no row of the source is usable, or if a task id occurs twice."""
    if tally.samples == 0:
        why = "; ".join(f"{count} × {reason}" for reason, count in tally.rejected.most_common(3))
        raise DataError(
            f"{source.origin['dataset']} has no usable rows",
            expected="at least one task",
            found=why or "no rows",
            fix="check --column, --split, --start-index and --end-index",
        )
    repeat = names.first_repeat()
    if repeat is not None:
        one = replace(selection, start_index=repeat[0], end_index=repeat[0] + 1, max_samples=None)
        name = next((item.task_id for item in usable_rows(source, one, RowTally())), "")
        raise DataError(
            f"task id {name!r} occurs twice in {source.origin['dataset']}",
            expected="each id once",
            found=f"rows {repeat[0]} and {repeat[1]}, counted from 0",
            fix="rename one, or choose rows with --start-index and --end-index",
        )


Format = Literal["arc-jsonl", "arc-json"]


@dataclass(frozen=True)
class Converted:
    """The result of a conversion."""

    files: tuple[Path, ...]
    tally: RowTally


def convert(
    dataset: str,
    output: Path,
    *,
    selection: RowSelection | None = None,
    format: Format = "arc-jsonl",  # noqa: A002  the flag's name
    test_outputs: bool = False,
    progress: Progress | None = None,
) -> Converted:
    """Write the tasks of a dataset to ``output``: a JSONL file, or with ``arc-json`` a folder for the challenge pair.

    ``test_outputs`` keeps the test outputs in the JSONL. The output appears only when it is complete, and not at all
    if a task id occurs twice or no row is usable.
    """
    selection = selection or RowSelection()
    source = selection.open(dataset)
    pair = format == "arc-json"
    files = (output / CHALLENGES, output / ANSWERS) if pair else (output,)
    before, between, after = (b"{\n", b",\n", b"\n}\n") if pair else (b"", b"", b"")
    tally, names, unnamed = RowTally(), DuplicateFinder(), set[str]()
    with workspace(files[0].parent) as work, ExitStack() as stack:
        handles = [stack.enter_context((work / file.name).open("wb", buffering=1 << 20)) for file in files]
        for item in usable_rows(source, selection, tally, arc_only=True, progress=progress):
            if item.own_id:
                names.add(item.task_id, item.row)
            elif pair:  # equal tasks are one entry of an object
                if item.task_id in unnamed:
                    tally.samples -= 1
                    tally.rejected["the same task as an earlier row"] += 1
                    continue
                unnamed.add(item.task_id)
            for handle, entry in zip(handles, _pair_entries(item) if pair else _line(item, test_outputs), strict=True):
                handle.write(before + entry)
            before = between
        check_result(tally, names, source, selection)
        for handle, file in zip(handles, files, strict=True):
            handle.write(after)
            handle.flush()
            os.fsync(handle.fileno())
            Path(handle.name).replace(file)
    return Converted(files, tally)


def _line(item: UsableRow, test_outputs: bool) -> tuple[bytes]:
    test = item.data["test"] if test_outputs else _inputs(item)
    line = {"task_id": item.task_id, "train": item.data["train"], "test": test}
    return (orjson.dumps(line, option=orjson.OPT_APPEND_NEWLINE),)


def _pair_entries(item: UsableRow) -> tuple[bytes, bytes]:
    """Return the entries of a task in the two JSON objects of the challenge, whose keys are task ids."""
    name, challenge = orjson.dumps(item.task_id), {"train": item.data["train"], "test": _inputs(item)}
    outputs = [pair["output"] for pair in item.data["test"] if pair.get("output") is not None]
    return name + b": " + orjson.dumps(challenge), name + b": " + orjson.dumps(outputs)


def _inputs(item: UsableRow) -> list[dict[str, Any]]:
    return [{"input": pair["input"]} for pair in item.data["test"]]
