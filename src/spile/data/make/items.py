"""Rows of a source as samples: what can be used, under a name that is unique, and a tally of what cannot."""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import orjson

from spile.data.arc.grids import task_problem
from spile.data.make.sources import RowSource, SourceRow
from spile.data.rows import TOKENS, arc_task_id, row_id
from spile.errors import SpecError

__all__ = ["IdRule", "Item", "ItemTally", "RowSelection", "Unique", "usable"]

Kind = Literal["arc", "chat", "text", "tokens"]
IdRule = Literal["content", "number"]
"""What a task without an id is named after: its content, as in an extraction; or, in older splits, its number."""
_SHOWN = 5


@dataclass(frozen=True)
class RowSelection:
    """Which rows of a source, and how they are taken."""

    column: str = "examples"
    """The field that holds a list of pairs, or the text."""
    start_index: int = 0
    end_index: int | None = None
    """Rows from ``start_index`` up to, not including, ``end_index``."""
    max_samples: int | None = None
    """At most so many that can be used."""
    max_train_examples: int | None = None
    """A task's first so many train pairs."""
    ids: IdRule = "content"
    keep: tuple[str, ...] = ()
    """Fields that a row's line keeps, whatever else it is made of."""

    def __post_init__(self) -> None:
        for flag, value, least in (
            ("--start-index", self.start_index, 0),
            ("--end-index", self.end_index, 1),
            ("--max-samples", self.max_samples, 1),
            ("--max-train-examples", self.max_train_examples, 1),
        ):
            if value is not None and value < least:
                raise SpecError(flag, expected=f"{least} or more", found=str(value))
        if self.end_index is not None and self.end_index <= self.start_index:
            raise SpecError(
                "--end-index", expected=f"more than --start-index {self.start_index}", found=str(self.end_index)
            )

    def record(self) -> dict[str, object]:
        """As ``streams.json`` says it; older ones, whose tasks were named by their number, have no ``ids``."""
        absent = {"ids": "number", "keep": ()}
        return {name: value for name, value in vars(self).items() if name not in absent or absent[name] != value}


@dataclass
class ItemTally:
    """What was read, what could be used, and why the rest could not."""

    rows: int = 0
    samples: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    shown: list[str] = field(default_factory=list)
    """The first few rows that could not be used: where, and why."""

    def reject(self, row: SourceRow, reason: str) -> None:
        """Count a row that cannot be used."""
        self.rejected[reason] += 1
        if len(self.shown) < _SHOWN:
            self.shown.append(f"{row.place}: {reason}")


@dataclass(frozen=True, slots=True)
class Item:
    """A row that can be used, in the form that streams hold."""

    task_id: str
    data: dict[str, Any] | None
    """What it holds; None where the line was not parsed."""
    raw: bytes | None
    """Its line, where that is already what a stream would hold."""
    row: int
    own_id: bool = True
    """Whether the row brought its id. Of two equal rows that did not, both are the same task."""

    def line(self) -> bytes:
        """The line of a stream, without its newline."""
        return orjson.dumps(self.data) if self.raw is None else self.raw

    def content(self) -> dict[str, Any]:
        """What it holds."""
        return dict(orjson.loads(self.raw or b"{}")) if self.data is None else self.data


class Unique:
    """Notices a name used twice: 24 bytes per name, whatever its length, compared when all are known."""

    def __init__(self) -> None:
        self._digests, self._rows = bytearray(), array("Q")

    def add(self, name: str, row: int) -> None:
        """Remember that this row has this name."""
        self._digests += hashlib.blake2b(name.encode(), digest_size=16).digest()
        self._rows.append(row)

    def first_repeat(self) -> tuple[int, int] | None:
        """The numbers of two rows with one name, those that come first; None if all names differ."""
        halves = np.frombuffer(bytes(self._digests), dtype=np.uint64).reshape(-1, 2)
        order = np.lexsort((halves[:, 1], halves[:, 0]))  # stable: equal names stay in the order they came in
        ranked = halves[order]
        same = np.flatnonzero((ranked[1:] == ranked[:-1]).all(axis=1))
        if not len(same):
            return None
        place = min(same, key=lambda at: order[at + 1])
        return self._rows[int(order[place])], self._rows[int(order[place + 1])]


def usable(source: RowSource, selection: RowSelection, tally: ItemTally, *, arc_only: bool = False) -> Iterator[Item]:
    """The rows that can be used. All are of the first one's kind: tasks, chats or texts."""
    kind: Kind | None = "arc" if arc_only else None
    for row in source.rows(selection.start_index, selection.end_index):
        if selection.max_samples is not None and tally.samples >= selection.max_samples:
            return
        tally.rows += 1
        if row.proven is not None and kind in (None, "arc") and selection.max_train_examples is None:
            kind = "arc"
            tally.samples += 1
            yield Item(row.proven, None, row.raw, row.number)
            continue
        row = _parsed(row)
        if row.problem is not None or not isinstance(row.data, dict):
            tally.reject(row, row.problem or "a row that is no object")
            continue
        kind = kind or _kind(row.data, selection.column)
        item = _task(row, selection) if kind == "arc" else _plain(row, kind, selection.column)
        if isinstance(item, str):
            tally.reject(row, item)
            continue
        tally.samples += 1
        yield item


def _parsed(row: SourceRow) -> SourceRow:
    """A row that was proven but must be looked into after all."""
    if row.proven is None or row.raw is None:
        return row
    return SourceRow(row.number, orjson.loads(row.raw), row.place, row.raw)


def _numbered(number: int) -> str:
    """A row's name where it brings none: its place in the source, which another selection does not change."""
    return f"task_{number:08d}"


def _kind(data: dict[str, Any], column: str) -> Kind | None:
    """What a row is, by its fields; None if it is nothing we know, and the next may tell."""
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
    """A chat or a text: carried over as it is, with a name."""
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
    """A task: a row that is one already, or a column of pairs whose last one is the test."""
    data, kept = row.data, {name: row.data[name] for name in selection.keep if name in row.data}
    booleans = row.raw is None or b"true" in row.raw or b"false" in row.raw
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
    problem = task_problem(data, booleans=booleans)
    if problem is not None:
        return problem
    own = row_id(data)
    name = own or (arc_task_id(data) if selection.ids == "content" else _numbered(row.number))
    most = selection.max_train_examples
    if raw is None or (most is not None and len(data["train"]) > most):
        raw, data = None, {"task_id": name, "train": data["train"][:most], "test": data["test"], **kept}
    return Item(name, data, raw, row.number, own is not None or selection.ids == "number")


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
