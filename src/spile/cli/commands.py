"""Every command: its name, its function as an import path, and its line in ``spile --help``.

The functions are named, not imported, so that ``spile --help`` costs nothing but this table.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["COMMANDS", "GROUPS", "Command"]


class Command(NamedTuple):
    """A row of the table."""

    name: str
    """Words separated by a blank: ``data convert`` is ``convert`` in the group ``data``."""
    function: str
    help: str


GROUPS: dict[str, str] = {
    "data": "Make datasets: convert, split into streams, upload.",
}

COMMANDS: tuple[Command, ...] = (
    Command("extract", "spile.cli.extract:extract", "Run a model over a dataset and store its activations."),
    Command("verify", "spile.cli.verify:verify", "Prove a dataset complete: every sample once, every checksum."),
)
