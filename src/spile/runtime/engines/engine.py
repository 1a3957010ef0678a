"""What an engine is: something that runs one worker per stream, somewhere, and says how each ended."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

__all__ = ["ClusterCheck", "Engine", "StreamTask", "WorkerEnd"]


@dataclass(frozen=True)
class StreamTask:
    """One stream's work: the words of ``spile extract`` that do it, wherever it runs."""

    stream: int
    words: tuple[str, ...]
    size: int = 0
    """Bytes of the stream's file: the longest is started first."""
    env: Mapping[str, str] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    """Variables of the one who started it that are not the worker's: the words say it all."""

    @property
    def alone(self) -> tuple[str, ...]:
        """The words for a worker that is one process, whatever its machine is part of."""
        return (*self.words, "--num-processes", "1")


@dataclass(frozen=True)
class WorkerEnd:
    """How one worker ended."""

    stream: int
    code: int | None
    """Its exit code; None: its machine was lost, and nobody knows how far it came but the ledger."""
    where: str = ""
    """The machine."""
    said: str = ""
    """Its last lines."""

    @property
    def last_line(self) -> str:
        """What it said last: of an error, the error."""
        return self.said.strip().rpartition("\n")[2]


@dataclass(frozen=True)
class ClusterCheck:
    """What every machine is asked before the run starts."""

    output: str
    """The dataset's home, which it must be able to write."""
    token: str
    """An object there that only a machine with the same home can see."""
    inputs: tuple[str, ...] = ()
    """Folders and files that it must be able to read."""


class Engine(Protocol):
    """Runs workers. All calls come from one thread."""

    name: str
    workers: int
    """How many at once."""
    room: int
    """For how many there is room now; more wait for machines that join."""
    elsewhere: bool
    """Whether another worker may be on another machine, so that moving a slow one's stream can help."""

    def check(self, asked: ClusterCheck) -> None:
        """Tell what would fail, on every machine, before anything starts."""
        ...

    def start(self, task: StreamTask, avoid: Collection[str] = ()) -> None:
        """Start a worker; it may wait for a machine. ``avoid``: machines where this stream did badly."""
        ...

    def wait(self, seconds: float) -> Sequence[WorkerEnd]:
        """Those that ended; returns early when one does."""
        ...

    def stop(self, stream: int) -> None:
        """Ask a worker to commit and end."""
        ...

    def abandon(self, stream: int) -> None:
        """Ask so, and hear of it no more: the ledger keeps what it still does harmless."""
        ...

    def kill(self) -> None:
        """End all workers at once."""
        ...

    def close(self) -> None:
        """Leave nothing running."""
        ...
