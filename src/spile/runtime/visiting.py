"""What the visits to a stream have in common, and where they differ."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from spile.plan.ranges import Ranges
from spile.runtime.notes import Notes
from spile.runtime.parts import Parts
from spile.runtime.pod.group import WorkerGroup
from spile.runtime.progress import Progress
from spile.store.stream import StreamStore

__all__ = ["OnDevices", "VisitKind"]


class OnDevices(Protocol):
    """A model on its devices, whatever it does there."""

    def describe(self) -> str:
        """For people."""

    def close(self) -> None:
        """It is not needed any more."""


class VisitKind(NamedTuple):
    """What one kind of visit to a stream does where others do something else."""

    make: Callable[[Parts, Progress, Ranges], Any]
    """Puts the model on the devices, for what is left but for what is done: an :class:`OnDevices`."""
    work: Callable[[Parts, StreamStore, Ranges, Any, Notes, threading.Event, WorkerGroup], bool]
    """Works off what is left; False: told to stop."""
    finish: Callable[[Parts, StreamStore], None]
    """What is written beside the ledger when nothing is left."""
