"""The pod: this process joined with the others, as one worker."""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import NoReturn, TypeVar

from spile.errors import PodError, SpileError
from spile.runtime.pod.barriers import Coordination, Service, start_service
from spile.runtime.pod.connections import RollConnections
from spile.runtime.pod.identity import Identity
from spile.runtime.pod.rollcall import answer_roll_call, hold_roll_call
from spile.runtime.pod.watch import End, PodWatch, end_process

__all__ = ["BARRIERS", "Pod", "PodTimes", "join"]

BARRIERS = ("pre_jax_init", "model_loaded", "extraction_start", "final_checkpoint", "complete")
"""In the order in which a run comes to them; the first is the roll call."""

_LINGER = 5.0
"""Seconds that the service outlives worker 0 by, over the time it takes the others to notice."""

T = TypeVar("T")
Line = Callable[[str], None]


@dataclass(frozen=True)
class PodTimes:
    """How long to wait, in seconds."""

    roll_call: float = 300.0
    barrier: float = 1800.0
    """Loading a large model from a bucket takes its time; a dead host is noticed by its beat, long before."""
    heartbeat: float = 20.0

    @classmethod
    def of(cls, barrier_timeout: float | None, heartbeat: float | None) -> PodTimes:
        """The defaults with what a user said on top."""
        times = cls() if barrier_timeout is None else cls(barrier_timeout, barrier_timeout)
        return times if heartbeat is None else replace(times, heartbeat=heartbeat)


class Pod:
    """A process among the others."""

    def __init__(
        self, identity: Identity, coordination: Coordination, watch: PodWatch, service: Service | None, times: PodTimes
    ) -> None:
        self.identity, self.coordination, self.times = identity, coordination, times
        self._watch, self._service = watch, service
        self._left = False

    def visit(self, number: int) -> Pod:
        """The same pod for one more piece of work, with names of its own for what is said in it."""
        return Pod(self.identity, self.coordination.scoped(f"visit-{number}"), self._watch, None, self.times)

    def report(self, text: str) -> None:
        """What this process does now: repeated by the others, should it die or be late."""
        self._watch.report(text)

    def barrier(self, name: str) -> None:
        """Wait for all; :class:`PodError` names everyone who did not come."""
        self.report(f"waiting at barrier '{name}'")
        self.coordination.barrier(name, self.times.barrier)
        self.report(f"past barrier '{name}'")

    def agree(self, name: str, value: T | None = None) -> T:
        """Process 0's value, which JSON can hold, on every process. The others' argument does not count."""
        key = f"agreed/{name}"
        if self.identity.first:
            self.coordination.put(key, json.dumps(value))
        said = self.coordination.get(key, self.times.barrier)
        if said is None:
            raise PodError(f"{self.identity.host(0)} did not say '{name}' within {self.times.barrier:g} s")
        agreed: T = json.loads(said)
        return agreed

    def tell_end(self, error: BaseException) -> None:
        """Tell the others why this process ends, so that they end with the same line and code."""
        line, code = _said(error)
        said = json.dumps({"line": line, "code": code})
        self.coordination.put(f"ended/{self.identity.process}", said)

    def fail(self, error: BaseException) -> NoReturn:
        """End this process with its line, once the others have been told; never returns.

        A collective fails on the survivors the moment a peer dies: then the watch, which knows who, speaks first.
        """
        if not isinstance(error, PodError) and _of_a_device(error):
            time.sleep(self.times.heartbeat + _LINGER / 2)
        try:
            self.tell_end(error)
        except Exception as lost:  # noqa: BLE001 - the service has gone with a host; our own line still counts
            sys.stderr.write(f"spile: the others could not be told: {' '.join(str(lost).split())[:200]}\n")
        if not isinstance(error, SpileError | KeyboardInterrupt):
            traceback.print_exception(error)
        line, code = _said(error)
        end_process(End(line, code))
        raise error  # not reached

    def leave(self) -> None:
        """Go, once all have come to ``complete``. Worker 0's service goes last."""
        if self._left:
            return
        self._left = True
        self._watch.stop()
        self.coordination.put(f"left/{self.identity.process}", "")
        if self._service is not None:
            until = time.monotonic() + self.times.heartbeat
            while len(self.coordination.entries("left")) < self.identity.count and time.monotonic() < until:
                time.sleep(0.02)
        self.coordination.close()
        if self._service is not None:
            self._service.release()

    def __enter__(self) -> Pod:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if error is not None:
            self.fail(error)
        self.leave()


def _said(error: BaseException) -> tuple[str, int]:
    """An error's line and exit code."""
    if isinstance(error, SpileError):
        return str(error), error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", 130
    return " ".join(f"{type(error).__name__}: {error}".split())[:2000], 1


def _of_a_device(error: BaseException | None) -> bool:
    """Whether JAX's runtime is at its root, as when a collective lost a peer."""
    import jax

    while error is not None and not isinstance(error, jax.errors.JaxRuntimeError):
        error = error.__cause__
    return error is not None


def join(identity: Identity, *, times: PodTimes | None = None, log: Line = lambda _: None) -> Pod:
    """Roll call, then one coordination service for all. No device has been touched when this returns."""
    times = times or PodTimes()
    service: list[Service] = []

    def serve() -> str:
        service.append(start_service(identity.coordinator, identity.count, times.heartbeat + _LINGER))
        return service[0].address

    log(f"📋 Worker ID: {identity.process}")
    log(f"   Is barrier server: {identity.first}")
    log("")
    if identity.first:
        log(f"🚀 Starting barrier server on port {identity.port}...")
    roll = _roll_call(identity, serve, times, log)
    identity = replace(identity, hosts=identity.hosts or roll.answer.names)
    log("✓ Synchronized! Starting JAX init...")
    with roll.guarded(lambda line: end_process(End(line)), times.roll_call):
        # JAX's own patience is longer than ours: it would abort everybody, and name nobody.
        coordination = Coordination.connect(roll.answer.service, identity, timeout=2 * times.roll_call + 60)
    watch = PodWatch(coordination, timeout=times.heartbeat)
    return Pod(identity, coordination, watch, service[0] if service else None, times)


def _roll_call(identity: Identity, serve: Callable[[], str], times: PodTimes, log: Line) -> RollConnections:
    def ready(line: str) -> None:
        log(f"✓ {line}")
        log(f"⏳ Waiting at '{BARRIERS[0]}' barrier...")

    if identity.first:
        return hold_roll_call(identity, serve, timeout=times.roll_call, ready=ready)
    log(f"⏳ Waiting at '{BARRIERS[0]}' barrier...")
    return answer_roll_call(identity, timeout=times.roll_call)
