"""Sets of sample numbers as sorted, disjoint, half-open ranges.

Samples of a stream finish in nearly the order of the stream, so the finished samples are a few ranges for any number
of samples, and memory does not grow with the dataset.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from operator import itemgetter

_start = itemgetter(0)
"""The sort key of ranges: sorting by an integer is several times faster than sorting tuples."""


class Ranges:
    """An immutable set of non-negative integers."""

    __slots__ = ("_starts", "_stops")

    def __init__(self, pairs: Iterable[tuple[int, int]] = ()) -> None:
        starts: list[int] = []
        stops: list[int] = []
        last = -math.inf
        for start, stop in sorted(pairs, key=_start):
            if start > last:
                if stop > start:
                    starts.append(start)
                    stops.append(stop)
                    last = stop
            elif stop > last:
                stops[-1] = last = stop
        self._starts, self._stops = tuple(starts), tuple(stops)

    @classmethod
    def of(cls, numbers: Iterable[int]) -> Ranges:
        """Return the set of these numbers."""
        return cls((number, number + 1) for number in numbers)

    @classmethod
    def repeated(cls, pairs: Iterable[tuple[int, int]]) -> Ranges:
        """Return the numbers that are in more than one of these ranges."""
        found: list[tuple[int, int]] = []
        end = -1
        for start, stop in sorted(pairs, key=_start):
            if start < end and start < stop:
                found.append((start, stop if stop < end else end))
            if stop > end and stop > start:
                end = stop
        return cls(found)

    def pairs(self) -> list[tuple[int, int]]:
        """Return the ranges as (start, stop), as a commit stores them."""
        return list(zip(self._starts, self._stops, strict=True))

    def bounds(self) -> tuple[int, ...]:
        """Return the first number and the end of the last range; an empty tuple for an empty set."""
        return (self._starts[0], self._stops[-1]) if self._starts else ()

    def __contains__(self, number: int) -> bool:
        place = bisect_right(self._starts, number) - 1
        return place >= 0 and number < self._stops[place]

    def __iter__(self) -> Iterator[int]:
        for start, stop in self.pairs():
            yield from range(start, stop)

    def __len__(self) -> int:
        return sum(stop - start for start, stop in self.pairs())

    def __or__(self, other: Ranges) -> Ranges:
        return Ranges([*self.pairs(), *other.pairs()])

    def __and__(self, other: Ranges) -> Ranges:
        few, many = sorted((self, other), key=lambda ranges: len(ranges._starts))
        both: list[tuple[int, int]] = []
        for start, stop in few.pairs():  # Skip the ranges of the larger set that do not overlap.
            place = max(0, bisect_right(many._starts, start) - 1)
            while place < len(many._starts) and many._starts[place] < stop:
                both.append((max(start, many._starts[place]), min(stop, many._stops[place])))
                place += 1
        return Ranges(both)

    def __sub__(self, other: Ranges) -> Ranges:
        left: list[tuple[int, int]] = []
        cuts = other.pairs()
        cut = 0
        for start, stop in self.pairs():
            while cut < len(cuts) and cuts[cut][1] <= start:
                cut += 1
            place = cut
            while place < len(cuts) and cuts[place][0] < stop:
                left.append((start, cuts[place][0]))
                start = max(start, cuts[place][1])
                place += 1
            left.append((start, stop))
        return Ranges(left)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ranges) and self.pairs() == other.pairs()

    def __hash__(self) -> int:
        return hash((self._starts, self._stops))

    def __repr__(self) -> str:
        return f"Ranges({self.pairs()})"

    def text(self, most: int = 8) -> str:
        """Return a readable text such as ``0-11, 20, 31-40``, with the number of ranges beyond the first ``most``."""
        shown = [str(a) if b == a + 1 else f"{a}-{b - 1}" for a, b in self.pairs()[:most]]
        more = len(self._starts) - most
        return ", ".join([*shown, f"and {more} more ranges"] if more > 0 else shown)
