"""What the visits to a stream have in common, and where they differ."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from spile.data.stream import SampleReader
from spile.planning.ranges import Ranges
from spile.runtime.flow import Control, Sink
from spile.runtime.parts import Parts
from spile.runtime.pod.group import WorkerGroup
from spile.runtime.progress import Progress
from spile.runtime.status_files import StatusFiles
from spile.runtime.worker import LocalControl
from spile.store.stream import StreamStore

__all__ = ["OnDevices", "Visit", "VisitKind"]


class OnDevices(Protocol):
    """A model on its devices, whatever it does there."""

    def describe(self) -> str:
        """For people."""

    def close(self) -> None:
        """It is not needed any more."""


class Visit(NamedTuple):
    """What the work of one visit is done with."""

    parts: Parts
    stream: StreamStore
    done: Ranges
    """What earlier visits committed, the same on every process of a pod."""
    reader: SampleReader
    """Everything else."""
    status: StatusFiles
    stop: threading.Event
    hosts: WorkerGroup

    def control(self) -> Control:
        """When to commit and when to stop, agreed with the pod's other processes."""
        return self.hosts.control(LocalControl(self.stop, self.parts.spec.commit_every))

    def sink(self) -> Sink:
        """Where finished shards go."""
        return self.hosts.sink(self.stream, self.status.committed)


class VisitKind(NamedTuple):
    """What one kind of visit to a stream does where others do something else."""

    make: Callable[[Parts, Progress, SampleReader], Any]
    """Puts the model on the devices, with a look at the samples that come: an :class:`OnDevices`."""
    work: Callable[[Visit, Any], bool]
    """Works off what is left; False: told to stop."""
    finish: Callable[[Parts, StreamStore], None]
    """What is written beside the ledger when nothing is left."""
