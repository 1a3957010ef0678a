"""A pod: the processes of many hosts that act as one worker.

The worker sees a :class:`WorkerGroup`, which is one process or a :class:`Pod`. The processes of a pod meet in a roll
call, connect to one coordination service, agree on decisions and commit together. Each process sends a heartbeat and
watches those of the others. A thread that waits in a collective for a dead host cannot be interrupted, so
the watch ends the whole process with one line.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import NoReturn, TypeVar, cast

from spile.compute.producer import Control, Decision
from spile.errors import ExitCode, PodError, SpecError, SpileError
from spile.run.pipeline import Sink
from spile.run.pod.coordination import Coordination, Service
from spile.run.pod.identity import Identity
from spile.run.pod.rollcall import Log, answer_roll_call, hold_roll_call
from spile.spec.run import RunSpec
from spile.spec.sample import Sample, Skip
from spile.store.ledger import ShardRecord
from spile.store.shard import ShardBuilder
from spile.store.writer import StreamWriter

T = TypeVar("T")


class WorkerGroup:
    """The processes that are one worker. This class is a worker of one process; :class:`Pod` is one of several."""

    first = True
    """Whether this process writes what is written once: it alone commits."""
    name = ""
    """The name of this process, ``worker 3 of 16``; empty for a single process."""

    def begin_run(self) -> WorkerGroup:
        """Return the group for the next run. Every process makes the same runs in the same order."""
        return self

    def agree(self, name: str, value: T | None = None) -> T:  # noqa: ARG002
        """Return the value of the first process, as JSON preserves it, on every process; ignore all other values."""
        agreed: T = json.loads(json.dumps(value))
        return agreed

    def barrier(self, name: str) -> None:
        """Wait for all processes; :class:`PodError` names the missing ones."""

    def control(self, local: Control) -> Control:
        """Return a control that gives every process the same decisions."""
        return local

    def sink(self, stream: StreamWriter, after_commit: Callable[[], None]) -> Sink:
        """Return where this process stores its rows."""
        return Sink(stream, after_commit)

    def notify_end(self, error: BaseException) -> None:
        """Tell the other processes why this one ends, so that they end with the same line and code."""


def check_same_command(hosts: WorkerGroup, spec: RunSpec) -> None:
    """Refuse a command that differs from the one of process 0, and name what differs."""
    # The rows are compared by their hash.
    without_rows = replace(spec, data=replace(spec.data, rows=None))
    own_command = json.loads(json.dumps(asdict(without_rows)))
    first_command: dict[str, object] = hosts.agree("command", own_command)
    differing = sorted(name for name in own_command if own_command[name] != first_command.get(name))
    if differing:
        name = differing[0]
        raise SpecError(
            f"{hosts.name} was started with a different command than worker 0: {', '.join(differing)}",
            expected=first_command.get(name),
            found=own_command[name],
            fix="run the same command on every host",
        )


# -- heartbeats -------------------------------------------------------------------------------------------------------

_RESUME = "this process ends too, and the same command on all hosts resumes"


def end_process(line: str, code: int = ExitCode.FAILED) -> None:
    """Print one line and exit at once: other threads of this process may never return."""
    sys.stdout.flush()
    os.write(2, f"spile: {line}\n".encode())
    os._exit(code)


class PodWatch:
    """Two threads: one sends heartbeats and reads those of the others, one notices if the service hangs."""

    def __init__(self, coordination: Coordination, identity: Identity, timeout: float) -> None:
        self._coordination, self._identity, self._timeout = coordination, identity, timeout
        self._interval = min(1.0, timeout / 4)
        self._report = "joined"
        self._heartbeats: dict[int, tuple[str, float]] = {}
        """The latest heartbeat of each process, and when it was first seen."""
        self._stopped, self._wake = threading.Event(), threading.Event()
        self._last_answer = time.monotonic()
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for name, work in (("spile-heartbeat", self._send_heartbeats), ("spile-watch", self._watch_service))
        ]
        for thread in self._threads:
            thread.start()

    def report(self, text: str) -> None:
        """Set what this process does now; the others print it if this process dies."""
        self._report = " ".join(text.split())
        self._wake.set()

    def reports(self) -> dict[int, str]:
        """Return what each process reported last."""
        alive = self._coordination.entries("alive")
        return {process: _reported(alive.get(str(process), "")) for process in range(self._identity.count)}

    def stop(self) -> None:
        """Stop watching: the other processes may leave."""
        self._stopped.set()
        self._wake.set()
        for thread in self._threads:
            thread.join()

    def _send_heartbeats(self) -> None:
        number = 0
        while not self._stopped.is_set():
            number += 1
            try:
                self._coordination.put(f"alive/{self._identity.process}", f"{number}\t{self._report}")
                alive, ended = self._coordination.entries("alive"), self._coordination.entries("ended")
            except Exception as error:  # noqa: BLE001 - any error means that the service does not answer
                self._end_without_service(" ".join(str(error).split())[:120])
                return
            self._last_answer = time.monotonic()
            self._check_others(alive, ended)
            self._wake.wait(self._interval)
            self._wake.clear()

    def _check_others(self, alive: Mapping[str, str], ended: Mapping[str, str]) -> None:
        """End this process if another one reported its end or sends no heartbeats."""
        for process in range(self._identity.count):
            host, me = self._identity.host(process), process == self._identity.process
            if str(process) in ended and not me:
                end = json.loads(ended[str(process)])
                self._end(f"{host} ended: {end['line']}", int(end["code"]))
            beat = alive.get(str(process), "")
            last, since = self._heartbeats.get(process, (None, 0.0))
            if last != beat:
                self._heartbeats[process] = beat, self._last_answer
            elif self._last_answer - since > self._timeout and not me:
                lost = f"{host} died or was cut off: no sign of life for {self._timeout:g} s"
                self._end(f"{lost}; it last reported: {_reported(beat)}; {_RESUME}", ExitCode.HOST_LOST)

    def _watch_service(self) -> None:
        """Notice from another thread that a call to the service hangs because its host is gone."""
        while not self._stopped.wait(self._interval):
            if time.monotonic() - self._last_answer > self._timeout:
                self._end_without_service(f"no answer for {self._timeout:g} s")

    def _end_without_service(self, why: str) -> None:
        lost = f"{self._identity.host(0)} died or was cut off: its coordination service is gone ({why})"
        self._end(f"{lost}; {_RESUME}", ExitCode.HOST_LOST)

    def _end(self, line: str, code: int) -> None:
        if not self._stopped.is_set():
            end_process(line, code)


def _reported(heartbeat: str) -> str:
    return heartbeat.partition("\t")[2] or "nothing"


# -- decisions and commits --------------------------------------------------------------------------------------------

_MOST_AHEAD = 4
"""Steps that process 0 may be ahead of the slowest host."""
_DECISIONS_KEPT = 64
"""Decisions that stay in the directory; no host is ever that far behind."""


class PodControl(Control):
    """A control that gives every host the same decisions: process 0 decides, the others ask."""

    def __init__(self, pod: Pod, local: Control) -> None:
        self._pod, self._local = pod, local
        self._number = 0
        self._asked: dict[int, list[str]] = {}
        """The step that each other host asked about last, and ``stop`` if it got a signal."""

    def decide(self) -> Decision:
        """Return the decision about the next step. Every host calls this once before each step."""
        self._number += 1
        local = self._local.decide()
        return self._decide_for_all(local) if self._pod.identity.first else self._ask_for_decision(local)

    def stopping(self) -> bool:
        """Return whether a signal arrived here or, as far as is known, on another host."""
        if self._local.stopping():
            return True
        if self._pod.identity.first:
            self._asked = self._read_asked()
            return self._stop_requested()
        return self._pod.coordination.entries("decision").get(f"{self._number + 1}") == "stop"

    def committed(self) -> None:
        self._local.committed()

    def _decide_for_all(self, local: Decision) -> Decision:
        if late := self._pod.wait_while(self._behind, self._pod.times.barrier):
            raise self._pod.late_error(late, f"come to batch {self._number - _MOST_AHEAD}")
        decision: Decision = "stop" if self._stop_requested() else local
        self._pod.coordination.put(f"decision/{self._number}", decision)
        if self._number > _DECISIONS_KEPT:
            self._pod.coordination.delete(f"decision/{self._number - _DECISIONS_KEPT}")
        return decision

    def _behind(self) -> list[int]:
        """Return the hosts that are too far behind this one."""
        self._asked = self._read_asked()
        least = self._number - _MOST_AHEAD
        return [each for each in range(1, self._pod.identity.count) if int(self._asked.get(each, ["0"])[0]) < least]

    def _read_asked(self) -> dict[int, list[str]]:
        return {int(process): text.split() for process, text in self._pod.coordination.entries("asked").items()}

    def _stop_requested(self) -> bool:
        return any("stop" in words for words in self._asked.values())

    def _ask_for_decision(self, local: Decision) -> Decision:
        request = " stop" if local == "stop" else ""
        self._pod.coordination.put(f"asked/{self._pod.identity.process}", f"{self._number}{request}")
        return cast(Decision, self._pod.wait_for(f"decision/{self._number}", 0, f"decide about batch {self._number}"))


class PodSink(Sink):
    """The sink of a pod: each host stores its own rows, and all commit together."""

    def __init__(self, pod: Pod, stream: StreamWriter, after_commit: Callable[[], None] = lambda: None) -> None:
        super().__init__(stream, after_commit)
        self._pod = pod
        self._number = 0

    def begin(self, samples: Sequence[Sample]) -> ShardBuilder:
        return self._stream.begin(samples, host=self._pod.identity.process)

    def commit(self, record: ShardRecord | None, skipped: Sequence[Skip] = (), end: int | None = None) -> None:
        """Commit a shard, with what this host stored of it. Every host makes this call for the same shards."""
        self._number += 1
        directory, me = self._pod.coordination, self._pod.identity.process
        self._pod.report(f"committing shard {self._number} of this run")
        directory.put(f"record/{self._number}/{me}", json.dumps(None if record is None else record.to_json()))
        if self._pod.first:
            stored = [
                json.loads(self._pod.wait_for(f"record/{self._number}/{process}", process, self._action("finish")))
                for process in range(self._pod.identity.count)
            ]
            records = [ShardRecord.from_json(fields) for fields in stored if fields is not None]
            if records or skipped or end is not None:
                self._stream.commit(records, skipped, end=end)
            directory.put(f"committed/{self._number}", "")
            directory.delete(f"record/{self._number}/")
        else:
            self._pod.wait_for(f"committed/{self._number}", 0, self._action("commit"))
            self._stream.record_commit([] if record is None else [record], skipped, end)
        self._after()
        self._pod.report(f"computing; {self._number} shards committed in this run")

    def _action(self, verb: str) -> str:
        return f"{verb} shard {self._number} of this run"


BARRIERS = ("pre_jax_init", "model_loaded", "extraction_start", "final_checkpoint", "complete")
"""The barriers of a run, in order; the first is the roll call."""

_SERVICE_LINGER = 5.0
"""Seconds that the service outlives worker 0, in addition to the time that the others need to notice."""


@dataclass(frozen=True)
class PodTimes:
    """Timeouts in seconds."""

    roll_call: float = 300.0
    barrier: float = 1800.0
    """Long, because loading a large model from a bucket takes time; heartbeats reveal a dead host much earlier."""
    heartbeat: float = 20.0

    @classmethod
    def of(cls, barrier_timeout: float | None, heartbeat: float | None) -> PodTimes:
        """Return the defaults, changed as the flags say."""
        times = cls() if barrier_timeout is None else cls(barrier_timeout, barrier_timeout)
        return times if heartbeat is None else replace(times, heartbeat=heartbeat)


class Pod(WorkerGroup):
    """One process of a pod."""

    def __init__(
        self, identity: Identity, coordination: Coordination, watch: PodWatch, service: Service | None, times: PodTimes
    ) -> None:
        self.identity, self.coordination, self.times = identity, coordination, times
        self.first, self.name = identity.first, f"worker {identity.process} of {identity.count}"
        self._watch, self._service = watch, service
        self._runs = 0

    def begin_run(self) -> Pod:
        self._runs += 1
        return Pod(self.identity, self.coordination.scoped(f"run-{self._runs}"), self._watch, None, self.times)

    def control(self, local: Control) -> Control:
        return PodControl(self, local)

    def sink(self, stream: StreamWriter, after_commit: Callable[[], None]) -> Sink:
        return PodSink(self, stream, after_commit)

    def report(self, text: str) -> None:
        """Set what this process does now; the others print it if this process dies or is late."""
        self._watch.report(text)

    def barrier(self, name: str) -> None:
        self.report(f"waiting at barrier '{name}'")
        self.coordination.put(f"at/{name}/{self.identity.process}", "")
        if missing := self.wait_while(lambda: self._absent(f"at/{name}"), self.times.barrier):
            reports = self._watch.reports()
            named = "; ".join(f"{self.identity.host(each)}, last reported: {reports[each]}" for each in missing)
            others = sorted({reports[each] for each in range(self.identity.count) if each not in missing})
            raise PodError(
                f"{len(missing)} of {self.identity.count} workers did not come to the barrier '{name}' "
                f"within {self.times.barrier:g} s: {named} (the others: {', '.join(others)})",
                fix="see those hosts' logs, then run the same command again",
            )
        self.report(f"past barrier '{name}'")

    def wait_while(self, late: Callable[[], list[int]], timeout: float) -> list[int]:
        """Wait until no process is late; return those that still are after ``timeout`` seconds."""
        until, pause = time.monotonic() + timeout, 0.001
        while (processes := late()) and time.monotonic() < until:
            time.sleep(pause)
            pause = min(2 * pause, 0.1)
        return processes

    def _absent(self, folder: str) -> list[int]:
        """Return the processes that have not put a value under their number into a folder."""
        present = self.coordination.entries(folder)
        return [process for process in range(self.identity.count) if str(process) not in present]

    def agree(self, name: str, value: T | None = None) -> T:
        if self.first:
            self.coordination.put(f"agreed/{name}", json.dumps(value))
        agreed: T = json.loads(self.wait_for(f"agreed/{name}", 0, f"send '{name}'"))
        return agreed

    def wait_for(self, key: str, process: int, action: str) -> str:
        """Wait for a value that a process sets; ``action`` tells what the process failed to do if it is late."""
        value = self.coordination.get(key, self.times.barrier)
        if value is None:
            raise self.late_error([process], action)
        return value

    def late_error(self, processes: Sequence[int], action: str) -> PodError:
        return PodError(
            f"{', '.join(map(self.identity.host, processes))} did not {action} within {self.times.barrier:g} s",
            fix="see the logs of these hosts, then run the same command again",
        )

    def notify_end(self, error: BaseException) -> None:
        line, code = _message_and_code(error)
        self.coordination.put(f"ended/{self.identity.process}", json.dumps({"line": line, "code": code}))

    def fail(self, error: BaseException) -> NoReturn:
        """Notify the other processes and end this one with its line; never returns.

        When a process dies, collectives fail on the others at once. Then wait: the watch knows which process died.
        """
        if not isinstance(error, PodError) and _is_device_error(error):
            time.sleep(self.times.heartbeat + _SERVICE_LINGER / 2)
        try:
            self.notify_end(error)
        except Exception as lost:  # noqa: BLE001 - the service died with a host; our own line is printed below
            sys.stderr.write(f"spile: could not notify the other workers: {' '.join(str(lost).split())[:200]}\n")
        if not isinstance(error, SpileError | KeyboardInterrupt):
            traceback.print_exception(error)
        end_process(*_message_and_code(error))
        raise error  # not reached

    def leave(self) -> None:
        """Disconnect, after all reached the barrier ``complete``. The service of worker 0 ends last."""
        self._watch.stop()
        self.coordination.put(f"left/{self.identity.process}", "")
        if self._service is not None:
            self.wait_while(lambda: self._absent("left"), self.times.heartbeat)
        self.coordination.close()
        if self._service is not None:
            self._service.stop()


def _message_and_code(error: BaseException) -> tuple[str, int]:
    if isinstance(error, SpileError):
        return str(error), error.exit_code
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", ExitCode.INTERRUPTED
    return " ".join(f"{type(error).__name__}: {error}".split())[:2000], ExitCode.FAILED


def _is_device_error(error: BaseException | None) -> bool:
    """Return whether an error was caused by JAX's runtime, as when a collective lost a process."""
    import jax

    while error is not None and not isinstance(error, jax.errors.JaxRuntimeError):
        error = error.__cause__
    return error is not None


@contextlib.contextmanager
def join(identity: Identity, times: PodTimes | None = None, log: Log = lambda _: None) -> Iterator[WorkerGroup]:
    """Join the pod, and leave it at the end. An error inside the context ends the whole pod with its line.

    No device may be used before. A single process joins nothing.
    """
    if identity.count == 1:
        yield WorkerGroup()
        return
    pod = _join(identity, times or PodTimes(), log)
    try:
        yield pod
    except BaseException as error:  # noqa: BLE001 - ends this process
        pod.fail(error)
    pod.leave()


def _join(identity: Identity, times: PodTimes, log: Log) -> Pod:
    service: Service | None = None
    waiting = f"⏳ Waiting at '{BARRIERS[0]}' barrier..."

    def ready(line: str) -> None:
        log(f"✓ {line}")
        log(waiting)

    def serve() -> str:
        nonlocal service
        service = Service(identity.coordinator, identity.count, times.heartbeat + _SERVICE_LINGER)
        return service.address

    log(f"📋 Worker ID: {identity.process}")
    log(f"   Is barrier server: {identity.first}")
    log("")
    if identity.first:
        log(f"🚀 Starting barrier server on port {identity.port}...")
        roll = hold_roll_call(identity, serve, timeout=times.roll_call, ready=ready)
    else:
        log(waiting)
        roll = answer_roll_call(identity, timeout=times.roll_call)
    log("✓ Synchronized! Starting JAX init...")
    with roll.guarded(end_process, times.roll_call):
        # Longer than our own timeout: JAX would abort all processes without naming the missing one.
        coordination = Coordination.connect(roll.service, roll.identity, timeout=2 * times.roll_call + 60)
    watch = PodWatch(coordination, roll.identity, times.heartbeat)
    return Pod(roll.identity, coordination, watch, service, times)


def log_devices(hosts: WorkerGroup, log: Log) -> None:
    import jax

    local, count = jax.local_devices(), jax.device_count()
    ids = ", ".join(str(device.id) for device in local)
    log(f"✓ {hosts.name or 'This process'} sees {len(local)} of {count} devices: {local[0].device_kind}, ids {ids}")
