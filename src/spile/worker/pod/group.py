"""Who works on a stream: one process alone, or the hosts of a pod together. The worker sees the same face of both."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Protocol, TypeVar

from spile.errors import SpecError
from spile.spec.run import ExtractSpec
from spile.store.stream import StreamStore
from spile.worker.pipeline import Control, Sink
from spile.worker.pod.identity import Identity
from spile.worker.pod.pod import Pod, PodControl, PodSink, PodTimes, join
from spile.worker.worker import StreamSink

__all__ = ["PodProcess", "SingleProcess", "WorkerGroup", "joined_group", "same_command"]

T = TypeVar("T")


class WorkerGroup(Protocol):
    """The processes that are one worker."""

    def visit(self) -> WorkerGroup:
        """Begin one more piece of work together."""

    @property
    def first(self) -> bool:
        """Whether this process writes what is written once: it alone commits."""

    @property
    def name(self) -> str:
        """Which process this is, for people; empty where it is the only one."""

    def agree(self, name: str, value: T | None = None) -> T:
        """The first process's value, which JSON can hold, on every process."""

    def barrier(self, name: str) -> None:
        """Wait for all."""

    def control(self, local: Control) -> Control:
        """Who decides when a shard ends early."""

    def sink(self, stream: StreamStore, after_commit: Callable[[], None]) -> Sink:
        """Where rows go."""


class SingleProcess:
    """One process: agrees with itself and waits for nobody."""

    first = True
    name = ""

    def visit(self) -> WorkerGroup:
        """Itself."""
        return self

    def agree(self, name: str, value: T | None = None) -> T:  # noqa: ARG002 - nobody asks what about
        """What it says itself, through JSON as on a pod."""
        agreed: T = json.loads(json.dumps(value))
        return agreed

    def barrier(self, name: str) -> None:
        """Nobody to wait for."""

    def control(self, local: Control) -> Control:
        """Its own signals and clock."""
        return local

    def sink(self, stream: StreamStore, after_commit: Callable[[], None]) -> Sink:
        """The stream's store."""
        return StreamSink(stream, after_commit)


class PodProcess:
    """A pod's process."""

    def __init__(self, pod: Pod) -> None:
        self.pod = pod
        self._visits = 0

    def visit(self) -> WorkerGroup:
        """All processes make the same visits in the same order."""
        self._visits += 1
        return PodProcess(self.pod.visit(self._visits))

    @property
    def first(self) -> bool:
        """Worker 0."""
        return self.pod.identity.first

    @property
    def name(self) -> str:
        """``worker 3 of 16``."""
        return f"worker {self.pod.identity.process} of {self.pod.identity.count}"

    def agree(self, name: str, value: T | None = None) -> T:
        """Through the coordination service."""
        return self.pod.agree(name, value)

    def barrier(self, name: str) -> None:
        """Through the coordination service."""
        self.pod.barrier(name)

    def control(self, local: Control) -> Control:
        """One answer for all."""
        return PodControl(self.pod, local)

    def sink(self, stream: StreamStore, after_commit: Callable[[], None]) -> Sink:
        """Own rows, common commits."""
        return PodSink(self.pod, stream, after_commit)


@contextlib.contextmanager
def joined_group(
    identity: Identity, times: PodTimes | None = None, log: Callable[[str], None] = lambda _: None
) -> Iterator[WorkerGroup]:
    """One process, or a pod joined for as long as this lasts. An error inside ends the whole pod with its line."""
    if identity.count == 1:
        yield SingleProcess()
        return
    with join(identity, times=times, log=log) as pod:
        yield PodProcess(pod)


def same_command(hosts: WorkerGroup, spec: ExtractSpec) -> None:
    """Every process was given the first one's command, or an error that names what differs."""
    mine = json.loads(json.dumps(dataclasses.asdict(spec)))
    theirs: dict[str, object] = hosts.agree("command", mine)
    differing = sorted(name for name in mine if mine[name] != theirs.get(name))
    if differing:
        name = differing[0]
        raise SpecError(
            f"{hosts.name} was given another command than worker 0: {', '.join(differing)}",
            expected=theirs.get(name),
            found=mine[name],
            fix="run the same command on every host",
        )
