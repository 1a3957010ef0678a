"""Groups of pieces read in parallel, checked, and put at their rows' places in memory."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from itertools import chain, pairwise
from typing import Any

import numpy as np
import numpy.typing as npt

from spile.objects.staging import StagedFiles, Staging
from spile.planning.shuffle import Places, RowPieces
from spile.reading.opening import OpeningGroup, ShardOpener
from spile.reading.read_pool import ReadPool
from spile.reading.ring import Group, RowRing
from spile.reading.rows import RowBatch, context_of
from spile.reading.selection import Selection
from spile.reading.source import TapSource
from spile.store.blocks import read_blocks
from spile.store.shard_reader import ShardReader
from spile.store.statistics import widened

__all__ = ["GroupLoader", "LoadingGroup"]

_RUN = 4 << 20
"""Bytes that one task reads, about. Fewer cost more turns of the interpreter, more leave the processor's cache."""

_Run = tuple[npt.NDArray[np.bool_] | None, RowBatch | None]
"""Which of its rows are wanted (None: all), and what is known of them."""


@dataclass(frozen=True)
class LoadingGroup:
    """A group on its way."""

    places: Places
    tasks: list[Future[_Run]]

    def result(self) -> Group:
        """Wait for all pieces; a failure is raised."""
        # From the last on: who waits for each in turn is woken by each, and takes the lock that readers need.
        runs = [task.result() for task in reversed(self.tasks)][::-1]
        wanted = [each for each, _ in runs if each is not None]
        known = [each for _, each in runs if each is not None]
        return Group(self.places, np.concatenate(wanted) if wanted else None, RowBatch.join(known) if known else None)


class GroupLoader:
    """Reads groups into a ring."""

    def __init__(
        self,
        source: TapSource,
        selection: Selection,
        pool: ReadPool,
        opener: ShardOpener,
        *,
        context: bool,
        past_cache: bool,
    ) -> None:
        self._source, self._selection, self._pool, self._opener = source, selection, pool, opener
        self._context, self._files = context, StagedFiles(past_cache=past_cache)
        self._own = threading.local()

    def begin(
        self, ring: RowRing, pieces: RowPieces, places: Places, first: int, following: Iterable[RowPieces]
    ) -> LoadingGroup:
        """Start to read a group whose rows have these places; rows before the place ``first`` have been given out.

        ``following``: the groups after it.
        """
        blocks = pieces.split(self._source.block_rows)
        ends = np.cumsum(blocks.lengths)
        at = ring.rows_at(places, first)  # of all at once: threads would wait for the interpreter after each step
        tasks = []
        opening = self._opening(blocks, following)
        for run in self._runs(blocks, ends):
            mine = at[ends[run.start] - int(blocks.lengths[run.start]) : ends[run.stop - 1]]
            tasks.append(self._pool.submit(partial(self._read, ring, blocks[run], mine, opening)))
        return LoadingGroup(places, tasks)

    def _opening(self, blocks: RowPieces, following: Iterable[RowPieces]) -> OpeningGroup:
        """Shards of a local disk are opened by who reads them: millions of pieces need not be looked at for it."""
        if self._source.local:
            return OpeningGroup(self._opener, self._source.shards, (), ())
        then = chain.from_iterable(group.shards.tolist() for group in following)
        return OpeningGroup(self._opener, self._source.shards, blocks.shards.tolist(), then)

    def _runs(self, blocks: RowPieces, ends: Places) -> list[slice]:
        """Neighbours of one shard together, as far as one task should go: small ones cost little each."""
        part = (ends - 1) * self._source.width // _RUN
        borders = 1 + np.flatnonzero((np.diff(blocks.shards) != 0) | (np.diff(part) != 0))
        edges = [0, *borders.tolist(), len(blocks)]
        return [slice(begin, end) for begin, end in pairwise(edges) if begin < end]

    def _read(self, ring: RowRing, blocks: RowPieces, at: Places, opening: OpeningGroup) -> _Run:
        """One run, every tap of it. In a thread of the pool."""
        number = int(blocks.shards[0])
        opening.reached(number)
        stream, shard = self._source.shards[number]
        wanted, known = None, None
        if self._selection.by_tail:
            wanted = np.concatenate([self._selection.mask(stream, shard, *each) for _, *each in blocks.joined()])
        if wanted is None or wanted.any():
            norms = self._put(ring, shard, blocks, at)
            if norms is not None:
                near = self._selection.of_norm(norms)
                wanted = near if wanted is None else wanted & near
        if self._context:
            known = RowBatch.join([context_of(stream, shard, *each) for _, *each in blocks.joined()])
        return wanted, known

    def _put(self, ring: RowRing, shard: ShardReader, blocks: RowPieces, at: Places) -> npt.NDArray[np.float32] | None:
        """Read blocks and put their rows where they belong; the norms of the first tap's, where they are asked for."""
        if not hasattr(self._own, "staging"):
            self._own.staging = Staging(self._files)
        norms = []
        for tap in self._source.taps:
            done = 0
            for rows in _parts(shard, tap, blocks, self._own.staging):
                count = rows.size // rows.shape[-1]
                if self._selection.by_norm and tap == self._source.taps[0]:
                    norms.append(_norms(rows.reshape(count, -1)))
                ring.put(tap, at[done : done + count].reshape(rows.shape[:-1]), rows)
                done += count
        return np.concatenate(norms) if norms else None


def _parts(shard: ShardReader, tap: str, blocks: RowPieces, staging: Staging) -> Iterator[npt.NDArray[Any]]:
    """The rows of blocks: all at once where they are alike, else one by one."""
    rows = int(blocks.lengths[0])
    together = read_blocks(shard, tap, blocks.starts, rows, staging) if (blocks.lengths == rows).all() else None
    if together is not None:
        yield together
        return
    for _, start, stop in blocks:
        yield shard.rows(tap, start, stop, staging)


def _norms(rows: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    wide = widened(rows, np.float32)
    return np.asarray(np.sqrt(np.einsum("ij,ij->i", wide, wide)))
