"""The supervisor: run every stream of a dataset on an engine, and decide what to do when a worker ends.

The policy, :meth:`RestartPolicy.decide`, is a pure function: exit code and history in, decision out. Every place that
restarts workers uses it: :class:`Supervisor` for the engines that this command schedules (local and Ray), and the
agent on each machine of a fleet, which keeps :attr:`Decision.history` for the next call.

The supervisor is the loop around it for many streams: it starts the longest stream first, keeps ``engine.workers``
streams running, moves streams away from silent and slow machines, and stops the workers when the user asks for it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Protocol

from spile.data.manifest import list_streams
from spile.errors import DataError, ExitCode
from spile.objects import open_folder
from spile.objects.preflight import preflight
from spile.store.heartbeat import Liveness
from spile.store.layout import access_check_name
from spile.store.quarantine import RESUMABLE, Supervision, is_kill
from spile.store.snapshot import State, StreamView

# -- the policy -------------------------------------------------------------------------------------------------------

_LONGEST_DOUBLING, _LONGEST_AFTER_KILL = 5, 2
_FENCE_RETRIES = 30
"""Restarts while another worker owns the stream."""
_LOSS_RETRIES = 5
"""Restarts after losses in a row without a commit between them. A loss after a commit is always retried."""


_LOSSES: dict[int | None, str] = {None: "its machine was lost", ExitCode.HOST_LOST: "another host of its pod was lost"}


class RestartAction(Enum):
    """What to do with a stream after its worker has ended."""

    DONE = "done"
    """The stream is complete."""
    RESTART = "restart"
    """Start a worker again after :attr:`Decision.pause` seconds. It continues where the ledger ends."""
    REFUSED = "refused"
    """The command or the data is wrong (exit code 2). Another attempt would fail in the same way."""
    GIVE_UP = "give up"
    """The limits of the policy are used up."""


@dataclass(frozen=True)
class AttemptHistory:
    """What has happened to a stream so far. Start with ``AttemptHistory()`` and keep :attr:`Decision.history`."""

    errors: int = 0
    """Attempts that ended with an error, since the last long attempt."""
    fences: int = 0
    """Attempts that found the stream owned by another worker, since the last long attempt."""
    losses: int = 0
    """Attempts in a row whose machine was lost, or that were stopped, before anything was committed."""
    kills: int = 0
    """Attempts whose worker was killed by a signal, since the last long attempt or the last commit."""


@dataclass(frozen=True)
class Decision:
    """The policy's answer."""

    action: RestartAction
    reason: str
    """Why, as a clause for a log line: ``exit code 137``, ``another worker owns it``."""
    history: AttemptHistory
    """The history to pass to the next call."""
    pause: float = 0.0
    """Seconds to wait before a restart."""


@dataclass(frozen=True)
class RestartPolicy:
    """How often a worker is restarted. Times are in seconds."""

    retries: int = 3
    """Restarts after errors."""
    kill_factor: int = 4
    """A worker that is killed by a signal is restarted this many times as often: a sample may be the cause, and each
    attempt leaves fewer that it can be (:mod:`spile.store.quarantine`)."""
    pause: float = 5.0
    """Wait before the first restart after an error. It doubles with each further error, five times at most."""
    long_attempt: float = 900.0
    """An attempt of this length made progress: earlier errors no longer count."""

    def decide(self, history: AttemptHistory, code: int | None, *, seconds: float, committed: bool = False) -> Decision:
        """Decide what happens after a worker has ended.

        Args:
            history: The stream's history, from the previous decision.
            code: The worker's exit code, 128 + n for signal n; None if its machine was lost.
            seconds: How long the attempt lasted.
            committed: Whether the stream gained a commit during the attempt. A long attempt counts as if it had.

        Returns:
            The decision. For a restart it contains the pause and the new history.
        """
        if seconds >= self.long_attempt:
            history = AttemptHistory()
        if code == 0:
            return Decision(RestartAction.DONE, "done", history)
        if code == ExitCode.REFUSED:
            return Decision(RestartAction.REFUSED, f"exit code {code}", history)
        if code is None or code in RESUMABLE:
            lost = 0 if committed or seconds >= self.long_attempt else history.losses + 1
            history = replace(history, losses=lost)
            reason = _LOSSES.get(code, "it was stopped")
            if lost > _LOSS_RETRIES:
                return Decision(
                    RestartAction.GIVE_UP, f"{reason} {lost} times in a row and nothing was committed", history
                )
            return Decision(RestartAction.RESTART, reason, history)
        history = replace(history, losses=0)
        if code == ExitCode.FENCED:
            history = replace(history, fences=history.fences + 1)
            action = RestartAction.RESTART if history.fences <= _FENCE_RETRIES else RestartAction.GIVE_UP
            return Decision(action, "another worker owns it", history, self.pause)
        longest = _LONGEST_DOUBLING
        if is_kill(code):
            history = replace(history, kills=(0 if committed else history.kills) + 1)
            exhausted, longest = history.kills > self.retries * self.kill_factor, _LONGEST_AFTER_KILL
        else:
            history = replace(history, errors=history.errors + 1)
            exhausted = history.errors > self.retries
        pause = self.pause * 2.0 ** min(history.errors + history.kills - 1, longest)
        action = RestartAction.GIVE_UP if exhausted else RestartAction.RESTART
        return Decision(action, f"exit code {code}", history, pause)


# -- engines ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class StreamTask:
    """The work of one stream: the arguments of ``spile`` that do it, on any machine."""

    stream: int
    words: tuple[str, ...]
    size: int = 0
    """Bytes of the stream's file. The longest stream is started first."""
    env: Mapping[str, str] = field(default_factory=dict)
    name: str = ""
    """What messages call it. [default: stream N]"""

    @property
    def label(self) -> str:
        return self.name or f"stream {self.stream}"

    @property
    def single_process_words(self) -> tuple[str, ...]:
        """The arguments for a worker of one process, even on a machine that is part of a slice."""
        return (*self.words, "--num-processes", "1") if self.words[0] == "worker" else self.words


@dataclass(frozen=True)
class WorkerEnd:
    """How one worker ended."""

    stream: int
    code: int | None
    """Its exit code; None if its machine was lost, so that only the ledger shows its progress."""
    where: str = ""
    """The machine."""
    last_lines: str = ""
    """Its last lines of output."""
    cause: str = ""
    """The engine's explanation if it lost the worker."""

    @property
    def last_line(self) -> str:
        """The last line of output, which is the error if there was one."""
        return self.last_lines.strip().rpartition("\n")[2]


@dataclass(frozen=True)
class ClusterCheck:
    """The checks that every machine runs before the run starts."""

    output: str = ""
    """The output folder, which the machine must be able to write; empty if nothing is written."""
    token: str = ""
    """An object in the output folder that only a machine with the same folder can see."""
    inputs: tuple[str, ...] = ()
    """Folders and files that the machine must be able to read."""


class Engine(Protocol):
    """Runs workers. All calls come from one thread. See docs/guides/add-an-engine.md."""

    name: str
    workers: int
    """The number of workers that run at once."""
    room: int
    """The number of workers that fit now. The others wait for machines that join later."""
    elsewhere: bool
    """Whether a restarted worker may run on a different machine, so that moving a stream can help."""

    def check(self, asked: ClusterCheck) -> None:
        """Raise an error that names everything that would fail on any machine, before anything starts."""
        ...

    def start(self, task: StreamTask, avoid: Collection[str] = ()) -> None:
        """Start a worker, now or when a machine is free; not on a machine in ``avoid`` if another one fits."""
        ...

    def wait(self, seconds: float) -> Sequence[WorkerEnd]:
        """Wait until a worker ends, at most ``seconds``, and return those that have ended."""
        ...

    def stop(self, stream: int) -> None:
        """Ask a worker to commit and end."""
        ...

    def abandon(self, stream: int) -> None:
        """Ask a worker to end and report nothing more about it. Fencing keeps a late worker harmless."""
        ...

    def kill(self) -> None:
        """End all workers at once."""
        ...

    def close(self) -> None:
        """Release everything; leave nothing running."""
        ...


def stream_tasks(dataset_dir: str, words: Callable[[int], tuple[str, ...]]) -> list[StreamTask]:
    """Return one task per ``stream_NNN.jsonl`` in a folder or bucket; ``words`` returns the arguments for a number."""
    sizes = list_streams(open_folder(dataset_dir))
    if not sizes:
        raise DataError(
            f"no stream in {dataset_dir}",
            expected="stream_000.jsonl, stream_001.jsonl, …",
            fix="make them with spile data streams --output-dir DIR, or name one file with --dataset",
        )
    return [StreamTask(number, words(number), size) for number, size in sizes.items()]


@contextmanager
def cluster_check(output: str, inputs: tuple[str, ...]) -> Iterator[ClusterCheck]:
    """Create the checks for :meth:`Engine.check`. The token object exists only inside the ``with`` block."""
    home = open_folder(output)
    preflight(home)
    place = home.local_path
    absent = [] if place is None else [each for each in (place, *place.parents) if not each.exists()]
    token = access_check_name()
    home.put(token, b"spile\n")
    try:
        yield ClusterCheck(output, token, inputs)
    finally:
        home.delete(token)
        for each in absent:  # A run that is refused later leaves no folder.
            each.rmdir()


# -- the supervisor ---------------------------------------------------------------------------------------------------

_SAME_CAUSE = 2
"""If this many streams fail for one cause and no stream makes progress, the whole run is stopped."""
_OBSERVE_EVERY = 5.0
"""Seconds between two observations of the dataset."""
_LEAST_GAIN = 120.0
"""A slow worker's stream is moved only if that saves this many seconds."""


@dataclass
class _Stream:
    task: StreamTask
    state: str = "waiting"
    """``waiting``, ``running``, ``done`` or ``failed``."""
    history: AttemptHistory = field(default_factory=AttemptHistory)
    supervision: Supervision = field(default_factory=Supervision.begin)
    attempts: int = 0
    began: float = 0.0
    not_before: float = 0.0
    moving: bool = False
    avoid: set[str] = field(default_factory=set)
    committed: int = 0
    """Shards in its ledger, as last seen."""
    committed_at_start: int = 0
    """The same when the current attempt started."""
    action: RestartAction | None = None
    """Why it failed."""
    problem: str = ""


@dataclass(frozen=True)
class EngineOutcome:
    """How the whole run ended."""

    done: int
    failed: Mapping[int, str]
    """Streams that were given up, with the reason."""
    refused: bool
    """Whether all of them were mistakes in the command or the data."""
    changed: bool
    """Whether a stream gained a commit, or had more than one attempt, the first of which changed something."""
    interrupted: bool
    attempts: int

    @property
    def exit_code(self) -> ExitCode:
        if self.failed:
            return ExitCode.REFUSED if self.refused and not self.changed else ExitCode.FAILED
        return ExitCode.INTERRUPTED if self.interrupted else ExitCode.DONE


class Supervisor:
    """Runs the tasks on an engine until each is done or given up.

    Args:
        engine: Where workers run.
        tasks: One per stream.
        policy: When a worker is restarted.
        log: Receives one line per event.
        observe: Shows the dataset to the user and returns its streams by number, as they are now.
        finished: Receives the end of each worker that completed its task.
        clock: Seconds from any starting point.
    """

    def __init__(
        self,
        engine: Engine,
        tasks: Iterable[StreamTask],
        *,
        policy: RestartPolicy | None = None,
        log: Callable[[str], None] = lambda _line: None,
        observe: Callable[[Supervisor], Mapping[int, StreamView]] = lambda _: {},
        finished: Callable[[WorkerEnd], None] = lambda _: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self._policy, self._log, self._observe, self._clock = policy or RestartPolicy(), log, observe, clock
        self._finished = finished
        longest_first = sorted(tasks, key=lambda task: (-task.size, task.stream))
        self._streams = {task.stream: _Stream(task) for task in longest_first}
        self._stopping = False

    def count(self, state: str) -> int:
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
        """Run to the end. ``asked_to_stop`` returns how many times the user has asked to stop."""
        stops_handled, next_observation = 0, 0.0
        self._observe_streams()
        committed_before = self._total_committed()
        while self._unfinished():
            while stops_handled < asked_to_stop():
                stops_handled += 1
                self.stop()
            self._start_workers()
            ends = self.engine.wait(0.2)
            # What follows depends on whether a worker that was lost or killed had committed.
            if any(_is_loss(end) or is_kill(end.code) for end in ends):
                self._observe_streams()
            for end in ends:
                self._handle_end(end)
                self._stop_if_hopeless(self._total_committed() > committed_before)
            if self._clock() >= next_observation:
                self._move_streams(self._observe_streams())
                next_observation = self._clock() + _OBSERVE_EVERY
        self._observe_streams()
        failed = {number: stream.problem for number, stream in sorted(self._streams.items()) if stream.problem}
        return EngineOutcome(
            done=self.count("done"),
            failed=failed,
            refused=all(stream.action is RestartAction.REFUSED for stream in self._streams.values() if stream.problem),
            changed=self._total_committed() > committed_before
            or any(stream.attempts > 1 for stream in self._streams.values()),
            interrupted=self._stopping and self.count("done") < len(self._streams),
            attempts=sum(stream.attempts for stream in self._streams.values()),
        )

    def _running(self) -> list[_Stream]:
        return [stream for stream in self._streams.values() if stream.state == "running"]

    def _unfinished(self) -> bool:
        return bool(self._running()) or (not self._stopping and self.count("waiting") > 0)

    def _observe_streams(self) -> Mapping[int, StreamView]:
        views = self._observe(self)
        for number, view in views.items():
            if number in self._streams:
                self._streams[number].committed = view.committed
        return views

    def _total_committed(self) -> int:
        return sum(stream.committed for stream in self._streams.values())

    def _start_workers(self) -> None:
        if self._stopping:
            return
        room = self.engine.workers - len(self._running())
        ready = [s for s in self._streams.values() if s.state == "waiting" and s.not_before <= self._clock()]
        for stream in ready[: max(0, room)]:
            stream.state, stream.began, stream.moving = "running", self._clock(), False
            stream.committed_at_start = stream.committed
            stream.attempts += 1
            env = {**stream.task.env, **stream.supervision.environment()}
            self.engine.start(replace(stream.task, env=env), stream.avoid)

    def _handle_end(self, end: WorkerEnd) -> None:
        stream = self._streams[end.stream]
        if stream.state != "running":
            return
        if self._stopping and _is_loss(end):
            stream.state = "waiting"
            return
        if stream.moving and end.where and end.code in RESUMABLE:
            stream.avoid.add(end.where)
        stream.supervision = stream.supervision.after(end.code)
        decision = self._policy.decide(
            stream.history,
            end.code,
            seconds=self._clock() - stream.began,
            committed=stream.moving or stream.committed > stream.committed_at_start,
        )
        stream.history, stream.not_before = decision.history, self._clock() + decision.pause
        if decision.action is RestartAction.RESTART:
            stream.state = "waiting"
            self._log_restart(stream.task.label, end, decision)
        elif decision.action is RestartAction.DONE:
            stream.state = "done"
            self._finished(end)
        else:
            stream.state, stream.action = "failed", decision.action
            stream.problem = _problem(end, decision)
            self._log(f"{stream.task.label}: given up: {stream.problem}")

    def _log_restart(self, label: str, end: WorkerEnd, decision: Decision) -> None:
        where = f" on {end.where}" if end.where else ""
        if end.code is None:
            cause = f" ({end.cause})" if end.cause else ""
            self._log(f"{label}: its machine{where} was lost{cause}; it continues on another")
        elif end.code not in RESUMABLE and not self._stopping:
            fenced = end.code == ExitCode.FENCED
            how = decision.reason if fenced else f"its worker{where} ended with {_problem(end, decision)}"
            self._log(f"{label}: {how}; it continues in {decision.pause:g} s")

    def _stop_if_hopeless(self, progress: bool) -> None:
        """Stop the run if streams fail for one cause that will make all others fail too."""
        if self._stopping or progress or self.count("done"):
            return
        failed = [stream for stream in self._streams.values() if stream.state == "failed"]
        if sum(stream.action is RestartAction.REFUSED for stream in failed) >= _SAME_CAUSE:
            self._log("a second stream was refused: the command or the data is wrong, so the run is stopped")
            self.stop()
        elif sum(stream.history.losses > 0 for stream in failed) >= _SAME_CAUSE:
            self._log("machines are lost before anything is committed, so the run is stopped")
            self.stop()

    def _move_streams(self, views: Mapping[int, StreamView]) -> None:
        """Move the stream of a silent worker at once, and that of a slow worker if another worker is free."""
        if self._stopping or not self.engine.elsewhere:
            return
        running = {stream.task.stream: stream for stream in self._running()}
        for number, stream in running.items():
            view = views.get(number)
            if view is None or view.age is None:
                continue
            if Liveness(view.interval).silent < view.age < self._clock() - stream.began:
                self._log(f"stream {number}: its worker on {view.host} is silent; another takes over")
                self.engine.abandon(number)
                stream.supervision = stream.supervision.after(None)
                stream.state = "waiting"
                stream.avoid.update(filter(None, [view.host]))
        free = self.engine.workers > len(self._running()) and not self.count("waiting")
        movable = [views[n] for n, s in running.items() if n in views and s.state == "running" and not s.avoid]
        slow = slow_stream(movable, views.values()) if free else None
        if slow is not None and not running[slow.number].moving:
            self._log(f"stream {slow.number}: its worker on {slow.host} is slow; a free one takes the rest")
            running[slow.number].moving = True
            self.engine.stop(slow.number)


def slow_stream(movable: Iterable[StreamView], views: Iterable[StreamView]) -> StreamView | None:
    """Return the stream of ``movable`` that would gain most from another worker, or None.

    Its rate must be below a third of the median of ``views``, and moving it must save over ``_LEAST_GAIN`` seconds.
    """
    rates = [view.tokens_per_second for view in views if view.tokens_per_second]
    usual = statistics.median(rates) if rates else 0.0

    def gain(view: StreamView) -> float:
        left, rate = view.seconds_left or 0.0, view.tokens_per_second
        return left - left * rate / usual if rate and rate < usual / 3 else 0.0

    best = max((view for view in movable if view.state is State.WORKING), key=gain, default=None)
    return best if best is not None and gain(best) > _LEAST_GAIN else None


def _is_loss(end: WorkerEnd) -> bool:
    return end.code is None or end.code in RESUMABLE


def _problem(end: WorkerEnd, decision: Decision) -> str:
    """Return the reason and the worker's last line, which is the error."""
    if _is_loss(end):
        cause = f": {end.cause}" if end.cause else ""
        return f"{decision.reason}{cause}. Let workers commit earlier (--commit-every), or look at the machines' logs"
    line = end.last_line.removeprefix("spile: ")
    return f"exit code {end.code}" + (f": {line}" if line else "")
