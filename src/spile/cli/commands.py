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
    "dev": "For development: stand-ins for what is not at hand.",
    "tpu": "A fleet's machines: create, delete, status, list, recreate-preempted.",
    "data": "Make datasets: convert, split into streams, upload.",
}

COMMANDS: tuple[Command, ...] = (
    Command("extract", "spile.cli.extract:extract", "Run a model over a dataset and store its activations."),
    Command("verify", "spile.cli.verify:verify", "Prove a dataset complete: every sample once, every checksum."),
    Command("dev fake-cloud", "spile.cli.dev:fake_cloud", "Serve a local stand-in for the Cloud TPU API."),
)
