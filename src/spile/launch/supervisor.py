"""What an engine is: something that runs one worker per stream, somewhere, and says how each ended."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from spile.errors import Failure, Fenced, Interrupted, UserError
from spile.store.snapshot import SILENCE, State, StreamView

__all__ = [
    "ClusterCheck",
    "Engine",
    "EngineOutcome",
    "Scheduler",
    "SchedulerPolicy",
    "StreamTask",
    "WorkerEnd",
    "slow_stream",
]


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


_STOPPED = (Interrupted.exit_code, 143)
_SAME_MISTAKE = 2
"""Streams that are refused, with none done, before the command itself is taken for the mistake."""


@dataclass(frozen=True)
class SchedulerPolicy:
    """How patient the scheduler is. Times are in seconds."""

    tries: int = 3
    """Attempts more after a worker's own errors."""
    pause: float = 5.0
    """Before the first of them; doubled each time."""
    long_attempt: float = 900.0
    """An attempt that lasted so long got somewhere: its errors do not add up with those before."""
    look: float = 5.0
    """Between looks at the dataset."""
    worth_moving: float = 120.0
    """A slow worker's stream is moved only if it would take so much longer."""


@dataclass
class _Stream:
    task: StreamTask
    state: str = "waiting"
    """``waiting``, ``running``, ``done`` or ``failed``."""
    errors: int = 0
    attempts: int = 0
    began: float = 0.0
    not_before: float = 0.0
    moving: bool = False
    avoid: set[str] = field(default_factory=set)
    problem: str = ""
    refused: bool = False


@dataclass(frozen=True)
class EngineOutcome:
    """How the whole run ended."""

    done: int
    failed: Mapping[int, str]
    """Streams that were given up, and why."""
    refused: bool
    """They were all mistakes of the command or the data."""
    interrupted: bool
    attempts: int

    @property
    def exit_code(self) -> int:
        """One for all."""
        if self.failed:
            return UserError.exit_code if self.refused else Failure.exit_code
        return Interrupted.exit_code if self.interrupted else 0


class Scheduler:
    """Works off tasks on an engine. ``observe`` shows and returns the dataset's streams as they are now."""

    def __init__(
        self,
        engine: Engine,
        tasks: Iterable[StreamTask],
        *,
        policy: SchedulerPolicy | None = None,
        log: Callable[[str], None] = lambda _line: None,
        observe: Callable[[Scheduler], Mapping[int, StreamView]] = lambda _: {},
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self._policy, self._log, self._observe, self._clock = policy or SchedulerPolicy(), log, observe, clock
        longest_first = sorted(tasks, key=lambda task: (-task.size, task.stream))
        self._streams = {task.stream: _Stream(task) for task in longest_first}
        self._stopping = False

    def count(self, state: str) -> int:
        """Streams in a state."""
        return sum(stream.state == state for stream in self._streams.values())

    def stop(self) -> None:
        """Ask all workers to commit and end; a second call ends them at once."""
        if self._stopping:
            self.engine.kill()
            return
        self._stopping = True
        for stream in self._running():
            self.engine.stop(stream.task.stream)

    def run(self, asked_to_stop: Callable[[], int]) -> EngineOutcome:
        """To the end. ``asked_to_stop``: how many times the user has asked."""
        heard, next_look = 0, 0.0
        while self._unfinished():
            while heard < asked_to_stop():
                heard += 1
                self.stop()
            self._start_some()
            for end in self.engine.wait(0.2):
                self._ended(end)
            if self._clock() >= next_look:
                self._take_over(self._observe(self))
                next_look = self._clock() + self._policy.look
        self._observe(self)
        failed = {number: stream.problem for number, stream in sorted(self._streams.items()) if stream.problem}
        return EngineOutcome(
            done=self.count("done"),
            failed=failed,
            refused=all(stream.refused for stream in self._streams.values() if stream.problem),
            interrupted=self._stopping and self.count("done") < len(self._streams),
            attempts=sum(stream.attempts for stream in self._streams.values()),
        )

    def _running(self) -> list[_Stream]:
        return [stream for stream in self._streams.values() if stream.state == "running"]

    def _unfinished(self) -> bool:
        return bool(self._running()) or (not self._stopping and self.count("waiting") > 0)

    def _start_some(self) -> None:
        if self._stopping:
            return
        room = self.engine.workers - len(self._running())
        ready = [s for s in self._streams.values() if s.state == "waiting" and s.not_before <= self._clock()]
        for stream in ready[: max(0, room)]:
            stream.state, stream.began, stream.moving = "running", self._clock(), False
            stream.attempts += 1
            self.engine.start(stream.task, stream.avoid)

    def _ended(self, end: WorkerEnd) -> None:
        stream = self._streams[end.stream]
        if stream.state != "running":
            return
        stream.state = "waiting"
        where = f" on {end.where}" if end.where else ""
        if end.code == 0:
            stream.state = "done"
        elif end.code is None:
            self._log(f"stream {end.stream}: its machine{where} was lost; it continues on another")
        elif end.code in _STOPPED:
            if stream.moving and end.where:
                stream.avoid.add(end.where)
        elif end.code == UserError.exit_code:
            self._give_up(stream, end, refused=True)
            if self.count("done") == 0 and self.count("failed") >= _SAME_MISTAKE and not self._stopping:
                self._log("a second stream was refused: the command is at fault, so all are stopped")
                self.stop()
        else:
            self._failed(stream, end, where)

    def _failed(self, stream: _Stream, end: WorkerEnd, where: str) -> None:
        policy = self._policy
        if self._clock() - stream.began >= policy.long_attempt:
            stream.errors = 0
        stream.errors += 1
        fenced = end.code == Fenced.exit_code
        if stream.errors > policy.tries * (10 if fenced else 1):
            self._give_up(stream, end, refused=False)
            return
        pause = policy.pause if fenced else policy.pause * 2.0 ** (stream.errors - 1)
        stream.not_before = self._clock() + pause
        if not self._stopping:
            how = "another worker owns it" if fenced else f"its worker{where} ended with {_told(end)}"
            self._log(f"stream {end.stream}: {how}; it continues in {pause:g} s")

    def _give_up(self, stream: _Stream, end: WorkerEnd, *, refused: bool) -> None:
        stream.state, stream.refused = "failed", refused
        stream.problem = _told(end)
        self._log(f"stream {end.stream}: given up: {stream.problem}")

    def _take_over(self, views: Mapping[int, StreamView]) -> None:
        """A lost worker's stream at once; a slow one's when there is somebody free to take it."""
        if self._stopping or not self.engine.elsewhere:
            return
        running = {stream.task.stream: stream for stream in self._running()}
        for number, stream in running.items():
            view = views.get(number)
            age = view.age if view is not None else None
            if age is not None and SILENCE < age < self._clock() - stream.began:
                self._log(f"stream {number}: its worker on {view.host if view else ''} is silent; another takes over")
                self.engine.abandon(number)
                stream.state = "waiting"
                stream.avoid.update(filter(None, [view.host if view else ""]))
        free = self.engine.workers > len(self._running()) and not self.count("waiting")
        movable = [views[n] for n, s in running.items() if n in views and s.state == "running" and not s.avoid]
        slow = slow_stream(movable, views.values(), self._policy.worth_moving) if free else None
        if slow is not None and not running[slow.number].moving:
            self._log(f"stream {slow.number}: its worker on {slow.host} is slow; a free one takes the rest")
            running[slow.number].moving = True
            self.engine.stop(slow.number)


def slow_stream(movable: Iterable[StreamView], views: Iterable[StreamView], worth: float) -> StreamView | None:
    """The running stream that would gain most by another worker: one a third as fast as is usual, far from its end."""
    rates = [view.tokens_per_second for view in views if view.tokens_per_second]
    usual = statistics.median(rates) if rates else 0.0

    def gain(view: StreamView) -> float:
        left, rate = view.seconds_left or 0.0, view.tokens_per_second
        return left - left * rate / usual if rate and rate < usual / 3 else 0.0

    best = max((view for view in movable if view.state is State.WORKING), key=gain, default=None)
    return best if best is not None and gain(best) > worth else None


def _told(end: WorkerEnd) -> str:
    """An exit code and the last line, which is the error's."""
    line = end.last_line.removeprefix("spile: ")
    return f"exit code {end.code}" + (f": {line}" if line else "")
