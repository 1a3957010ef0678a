"""The watch: every process keeps a beat and looks at the others', and ends with one line when one of them has ended.

A thread that waits in a collective for a dead host cannot be asked to stop, so the watch ends the whole process.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import NoReturn, TypeVar

from spile.errors import PodError, SpileError
from spile.spec.sample import Sample, Skip
from spile.store.ledger import ShardRecord
from spile.store.shard import ShardBuilder
from spile.store.stream import StreamStore
from spile.worker.pipeline import Control, Verdict
from spile.worker.pod.barriers import Coordination, Service, start_service
from spile.worker.pod.identity import Identity
from spile.worker.pod.rollcall import RollConnections, answer_roll_call, hold_roll_call

__all__ = [
    "BARRIERS",
    "Beats",
    "End",
    "Pod",
    "PodControl",
    "PodSink",
    "PodTimes",
    "PodWatch",
    "end_process",
    "join",
]


_NEXT = "this process ends too, and the same command on all hosts resumes"


@dataclass(frozen=True)
class End:
    """Why to stop, and with which exit code."""

    line: str
    code: int = 1


@dataclass
class Beats:
    """The others' beats as they were last seen: pure but for the clock it is handed."""

    identity: Identity
    timeout: float
    seen: dict[int, tuple[str, float]] = field(default_factory=dict)

    def look(self, alive: Mapping[str, str], ended: Mapping[str, str], now: float) -> End | None:
        """Take what the directory says. A reason to end, or None."""
        for number, text in sorted(ended.items()):
            if int(number) != self.identity.process:
                said = json.loads(text)
                return End(f"{self.identity.host(int(number))} ended: {said['line']}", int(said["code"]))
        for process in range(self.identity.count):
            beat = alive.get(str(process), "")
            before = self.seen.get(process)
            if before is None or before[0] != beat:
                self.seen[process] = (beat, now)
            elif now - before[1] > self.timeout and process != self.identity.process:
                report = beat.partition("\t")[2] or "nothing"
                return End(
                    f"{self.identity.host(process)} died or was cut off: no sign of life for {self.timeout:g} s; "
                    f"it last reported: {report}; {_NEXT}"
                )
        return None


def end_process(end: End) -> None:
    """One line, then out: nothing else in this process can be trusted to come back."""
    sys.stdout.flush()
    os.write(2, f"spile: {end.line}\n".encode())
    os._exit(end.code)


class PodWatch:
    """The thread."""

    def __init__(
        self,
        coordination: Coordination,
        *,
        timeout: float,
        every: float | None = None,
        end: Callable[[End], None] = end_process,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._coordination, self._timeout = coordination, timeout
        self._every = every if every is not None else min(1.0, timeout / 4)
        self._end, self._clock = end, clock
        self._report = "joined"
        self._over = threading.Event()
        self._news = threading.Event()
        self._answered = clock()
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for name, work in (("spile-beat", self._beat), ("spile-watch", self._guard))
        ]
        for thread in self._threads:
            thread.start()

    def report(self, text: str) -> None:
        """What this process does now; the others repeat it should it die."""
        self._report = " ".join(text.split())
        self._news.set()

    def stop(self) -> None:
        """Look no more: the others may go."""
        self._over.set()
        self._news.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _beat(self) -> None:
        identity = self._coordination.identity
        beats = Beats(identity, self._timeout)
        number = 0
        while not self._over.is_set():
            number += 1
            try:
                self._coordination.put(f"alive/{identity.process}", f"{number}\t{self._report}")
                alive, ended = self._coordination.entries("alive"), self._coordination.entries("ended")
            except Exception as error:  # noqa: BLE001 - whatever it is, the service does not answer
                if not self._over.is_set():
                    self._lost(str(error))
                return
            self._answered = self._clock()
            end = beats.look(alive, ended, self._answered)
            if end is not None and not self._over.is_set():
                self._end(end)
                return
            self._news.wait(self._every)
            self._news.clear()

    def _guard(self) -> None:
        """A host that vanished without a word leaves our call waiting: notice that from another thread."""
        while not self._over.wait(self._every):
            if self._clock() - self._answered > self._timeout:
                self._lost(f"no answer for {self._timeout:g} s")
                return

    def _lost(self, why: str) -> None:
        identity = self._coordination.identity
        short = " ".join(why.split())[:120]
        self._end(End(f"{identity.host(0)} died or was cut off: its coordination service is gone ({short}); {_NEXT}"))


_AHEAD = 4
"""Batches that process 0 may decide on before the slowest host has asked."""
_KEPT = 64
"""Verdicts that stay in the directory; no host is ever that far behind."""


class PodControl:
    """A :class:`~spile.worker.pipeline.Control` that says the same on every host."""

    def __init__(self, pod: Pod, local: Control) -> None:
        self._pod, self._local = pod, local
        self._number = 0

    def verdict(self) -> Verdict:
        """Asked once before each batch, by every host."""
        self._number += 1
        mine = self._local.verdict()
        return self._decide(mine) if self._pod.identity.first else self._ask(mine)

    def stopping(self) -> bool:
        """A signal came here. Process 0, which decides, looks for one on any host; the others for its decision."""
        if self._local.stopping():
            return True
        if self._pod.identity.first:
            return any("stop" in said for said in self._asked().values())
        return self._pod.coordination.entries("verdict").get(f"{self._number + 1}") == "stop"

    def committed(self) -> None:
        """The clock starts again; process 0's is the one that counts."""
        self._local.committed()

    def _decide(self, mine: Verdict) -> Verdict:
        verdict: Verdict = "stop" if self._others_wish_to_stop() else mine
        directory = self._pod.coordination
        directory.put(f"verdict/{self._number}", verdict)
        if self._number > _KEPT:
            directory.delete(f"verdict/{self._number - _KEPT}")
        return verdict

    def _others_wish_to_stop(self) -> bool:
        """What the others said when they last asked, once none of them is too far behind."""
        until = time.monotonic() + self._pod.times.barrier
        pause = 0.001
        while True:
            asked = self._asked()
            behind = [
                process
                for process in range(1, self._pod.identity.count)
                if int(asked.get(process, ["0"])[0]) < self._number - _AHEAD
            ]
            if not behind:
                return any("stop" in said for said in asked.values())
            if time.monotonic() > until:
                raise PodError(
                    f"{', '.join(map(self._pod.identity.host, behind))} fell behind by {_AHEAD} batches "
                    f"for {self._pod.times.barrier:g} s",
                    fix="see those hosts' logs, then run the same command again",
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.05)

    def _asked(self) -> dict[int, list[str]]:
        return {int(process): said.split() for process, said in self._pod.coordination.entries("asked").items()}

    def _ask(self, mine: Verdict) -> Verdict:
        directory = self._pod.coordination
        wish = " stop" if mine == "stop" else ""
        directory.put(f"asked/{self._pod.identity.process}", f"{self._number}{wish}")
        said = directory.get(f"verdict/{self._number}", self._pod.times.barrier)
        if said not in ("go", "commit", "stop"):
            raise PodError(
                f"{self._pod.identity.host(0)} did not say how to go on after batch {self._number - 1} "
                f"within {self._pod.times.barrier:g} s",
                fix="see that host's log, then run the same command again",
            )
        return said  # type: ignore[return-value]


class PodSink:
    """A :class:`~spile.worker.pipeline.Sink` whose commits all hosts make together."""

    def __init__(self, pod: Pod, stream: StreamStore, after_commit: Callable[[], None] = lambda: None) -> None:
        self._pod, self._stream, self._after = pod, stream, after_commit
        self._number = 0

    def begin(self, samples: Sequence[Sample]) -> ShardBuilder:
        """Lay out this host's part of a shard."""
        return self._stream.begin(samples, host=self._pod.identity.process)

    def commit(self, record: ShardRecord | None, skipped: Sequence[Skip], end: int | None) -> None:
        """Called on every host for the same shard, with what this host stored of it, and comes back when it is done."""
        self._number += 1
        directory, me = self._pod.coordination, self._pod.identity.process
        self._pod.report(f"committing shard {self._number} of this visit")
        directory.put(f"record/{self._number}/{me}", json.dumps(None if record is None else record.to_json()))
        if self._pod.identity.first:
            records = [found for process in range(self._pod.identity.count) if (found := self._record(process))]
            if records or skipped or end is not None:
                self._stream.commit(records, skipped, end=end)
            directory.put(f"committed/{self._number}", "")
            directory.delete(f"record/{self._number}/")
        elif directory.get(f"committed/{self._number}", self._pod.times.barrier) is None:
            raise self._late("commit", 0)
        else:
            self._stream.follow([] if record is None else [record], skipped, end)
        self._after()
        self._pod.report(f"computing; {self._number} shards committed in this visit")

    def _record(self, process: int) -> ShardRecord | None:
        said = self._pod.coordination.get(f"record/{self._number}/{process}", self._pod.times.barrier)
        if said is None:
            raise self._late("finish", process)
        fields = json.loads(said)
        return None if fields is None else ShardRecord.from_json(fields)

    def _late(self, verb: str, process: int) -> PodError:
        return PodError(
            f"{self._pod.identity.host(process)} did not {verb} shard {self._number} of this visit "
            f"within {self._pod.times.barrier:g} s",
            fix="see that host's log, then run the same command again",
        )


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
