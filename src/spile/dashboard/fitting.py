"""A table that leaves columns out where there is no room for all, instead of cutting every cell short."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.table import Table

__all__ = ["Fitting"]

_ANY = 10_000
"""Wider than any table."""


@dataclass(frozen=True)
class Fitting:
    """The table that ``build`` makes without some columns: as few of ``spare`` as the width allows, the first first."""

    build: Callable[[Collection[str]], Table]
    spare: Sequence[str]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        for count in range(len(self.spare) + 1):
            table = self.build(self.spare[:count])
            if Measurement.get(console, options.update_width(_ANY), table).maximum <= options.max_width:
                break
        yield table
