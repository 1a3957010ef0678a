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
_CUT = 24
"""What a column whose cells may be cut short should have at the least."""


@dataclass(frozen=True)
class Fitting:
    """The table that ``build`` makes without some columns: as few of ``spare`` as the width allows, the first first."""

    build: Callable[[Collection[str]], Table]
    spare: Sequence[str]
    cut: Collection[str] = ()
    """Columns whose cells may be cut short, so that fewer are left out."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        for count in range(len(self.spare) + 1):
            table = self.build(self.spare[:count])
            if self._width(table, console, options) <= options.max_width:
                break
        yield table

    def _width(self, table: Table, console: Console, options: ConsoleOptions) -> int:
        """What it takes for every cell to be whole that is not to be cut short."""
        cut = [column for column in table.columns if column.header in self.cut]
        for column in cut:
            column.max_width = _CUT
        width = Measurement.get(console, options.update_width(_ANY), table).maximum
        for column in cut:
            column.max_width = None
        return width
