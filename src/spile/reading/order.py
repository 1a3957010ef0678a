"""What decides which row comes when: the order of a shuffled reader, and where it is in it."""

from __future__ import annotations

import hashlib
import os
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, count
from typing import Any

import numpy as np
import numpy.typing as npt

from spile.errors import UserError
from spile.planning.shuffle import EpochOrder, EpochPlan, RowPieces, ShuffleSpec, plan_epoch
from spile.reading.selection import Selection
from spile.reading.source import TapSource
from spile.spec.amounts import size

__all__ = ["ShuffleOrder", "ShufflePlace"]

_ORDER = 3
"""Of the two-level shuffle: a state of another version's would go on with other rows."""


@dataclass(frozen=True)
class ShufflePlace:
    """After a batch: how many batches of the epoch were given, and how many rows of which window."""

    epoch: int = 0
    batches: int = 0
    window: int = 0
    taken: int = 0


@dataclass(frozen=True)
class ShuffleOrder:
    """What decides which row comes when: two readers with equal orders give equal batches."""

    source: TapSource
    spec: ShuffleSpec
    selection: Selection
    shards: tuple[tuple[str, int], ...]
    """Name and rows of each shard."""

    def plan(self, epoch: int) -> EpochPlan:
        """What is this reader's of an epoch."""
        if not self.shards:
            return EpochPlan((), 1, 0, whole=True)
        rows = [rows for _, rows in self.shards]
        source = self.source
        return plan_epoch(rows, source.widths, self.spec, epoch, source.chunk_rows, local=source.local)

    def comes_back(self, epochs: int | None) -> bool:
        """Whether rows are read again, and may still be in the system's page cache by then."""
        if epochs == 1 or not self.shards or self.plan(0).whole:
            return False
        size = sum(rows for _, rows in self.shards) * self.source.width
        return size <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2

    def describe(self) -> dict[str, Any]:
        """What a state is of; compared when it is given back."""
        named = "\n".join(f"{name} {rows}" for name, rows in self.shards)
        return {
            "taps": list(self.source.taps),
            "shards": hashlib.sha256(named.encode()).hexdigest()[:16],
            "batch_rows": self.spec.batch_rows,
            "seed": self.spec.seed,
            "memory": self.spec.memory,
            "part": [self.spec.part, self.spec.parts],
            "drop_last": self.spec.drop_last,
            "scratch": self.spec.scratch is not None,
            "order": _ORDER,
            "piece": self.spec.piece,
            "selection": self.selection.describe(),
        }

    def place(self, state: Mapping[str, Any]) -> ShufflePlace:
        """Where a state says to go on."""
        wanted = self.describe()
        state = {"order": 1, "piece": None, **state}
        wrong = [name for name, value in wanted.items() if name in state and state[name] != value]
        if wrong == ["order"] and len(self.plan(0).groups) <= 1 and not self.selection.describe():  # it is what it was
            wrong = []
        if wrong:
            raise UserError(
                "a state of another reader",
                expected=", ".join(f"{name} = {state[name]}" for name in wrong),
                found=", ".join(f"{name} = {wanted[name]}" for name in wrong),
                fix="give shuffled() what it was given before, or no state",
            )
        try:
            return ShufflePlace(*(int(state[name]) for name in ("epoch", "batches", "window", "taken")))
        except (KeyError, TypeError, ValueError) as error:
            raise UserError("state", expected="what state() returned", found=repr(state)) from error

    def selected(self, epoch: int) -> list[int]:
        """How many rows of each window are wanted, as the shards' tails tell."""
        order = EpochOrder(self.plan(epoch), self.spec, epoch)
        if not self.selection.by_tail:
            return np.diff(order.starts).tolist()
        found = np.zeros(len(order.plan.groups), np.int64)
        for number, group in enumerate(order.plan.groups):
            places = order.places(number)[self._wanted(group)]
            window = np.searchsorted(order.starts, places, side="right") - 1
            found += np.bincount(window, minlength=len(found))
        return found.tolist()

    def _wanted(self, pieces: RowPieces) -> npt.NDArray[np.bool_]:
        found = []
        for number, start, stop in zip(
            pieces.shards.tolist(), pieces.starts.tolist(), pieces.stops.tolist(), strict=True
        ):
            stream, shard = self.source.shards[number]
            found.append(self.selection.mask(stream, shard, start, stop))
        return np.concatenate(found)

    def steps(self, epoch: int) -> int | None:
        """With ``drop_last``: the full batches that every reader has in this epoch; None: no such bound."""
        if not self.spec.drop_last or self.spec.parts == 1:
            return None
        shares = [replace(self, spec=replace(self.spec, part=part)) for part in range(self.spec.parts)]
        return min(sum(share.selected(epoch)) for share in shares) // self.spec.batch_rows

    def after(self, batches: int, *, endless: bool) -> ShufflePlace:
        """The place after so many batches from the start: no row is read for it."""
        if not batches:
            return ShufflePlace()
        if self.selection.by_norm:
            raise UserError("after", expected="no bound on norms, or a state", found=f"after={batches}")
        most = self.spec.batch_rows
        rows, left = batches * most, batches
        for epoch in count():
            windows = self.selected(epoch)
            total, steps = sum(windows), self.steps(epoch)
            if not total:
                return ShufflePlace(epoch)
            whole = total // most if self.spec.drop_last else -(-total // most)
            given = whole if steps is None else steps
            if (rows < total) if endless else (left < given):
                taken = rows if endless else left * most
                ends = list(accumulate(windows))
                number = bisect_right(ends, taken)
                return ShufflePlace(epoch, left, number, taken - (ends[number] - windows[number]))
            rows -= total
            left = batches - (batches * most - rows) // most if endless else left - given
        raise AssertionError("an endless count ended")

    def quality(self) -> str:
        """How random the order is, in words."""
        plan = self.plan(1)  # of a later epoch: the first one's groups grow from small ones
        share = "" if self.spec.parts == 1 else f" of this reader's share, one of {self.spec.parts}"
        if len(plan.groups) <= 1:
            return f"a full permutation{share}"
        pieces = sum(map(len, plan.groups))
        most = max(map(len, plan.groups)) * plan.spread
        held = size(self.spec.memory * plan.spread // (plan.spread + 1))
        return (
            f"two levels{share}: {pieces:,} pieces in random order, rows drawn from {most:,} of them at a time "
            f"({held}), which change gradually"
        )
