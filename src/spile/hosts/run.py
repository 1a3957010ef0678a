"""Run a command on many hosts over ssh, and explain failures of ssh."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import json
import os
import re
import shlex
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from spile.errors import Failure, Interrupted, SpileError, UserError, untrusted
from spile.hosts import guard
from spile.hosts.hosts import Access, Host


class SshFailure(NamedTuple):
    """An error of ssh: the pattern of its message, the class of our error, our message and the fix."""

    words: str
    kind: type[SpileError]
    problem: str
    fix: str


TABLE: tuple[SshFailure, ...] = (
    SshFailure(r"Could not resolve hostname", UserError, "no such host", "check the address"),
    SshFailure(
        r"REMOTE HOST IDENTIFICATION HAS CHANGED|Host key verification failed|No .* host key is known",
        UserError,
        "the host's key is not the one known",
        "if the machine was really replaced, remove the old key with ssh-keygen -R",
    ),
    SshFailure(
        r"Load key .*|Identity file .* not accessible", UserError, "the ssh key cannot be used", "check --ssh-key"
    ),
    SshFailure(
        r"Permission denied|Too many authentication failures",
        UserError,
        "the host refused the login",
        "check --user and --ssh-key; a TPU VM takes the keys in its ssh-keys metadata",
    ),
    SshFailure(
        r"Connection refused", Failure, "nothing listens there", "check that sshd is running on the host, and the port"
    ),
    SshFailure(
        r"timed out|No route to host|Network is unreachable",
        Failure,
        "the host cannot be reached",
        "open tcp:22 in the firewall, or use --internal-ip from inside the network",
    ),
    SshFailure(
        r"not responding|Broken pipe|closed by|[Cc]onnection reset", Failure, "the connection was lost", "run it again"
    ),
    SshFailure(
        r"Bad configuration option|command-line.*(error|Bad|unsupported)",
        UserError,
        "ssh refuses an option",
        "check --ssh-option",
    ),
    SshFailure(
        r"(tar|mkdir): (command )?(not found|No such file)",
        UserError,
        "neither rsync nor tar on the host",
        "install rsync there",
    ),
    SshFailure(
        r"python3?: (command )?not found|python3?: No such file|python3: not found",
        UserError,
        "no python3 on the host",
        "install Python 3.8 or newer there",
    ),
)


def explain(host: Host, code: int | None, words: str) -> SpileError:
    """Return the error for an ssh that failed before the guard reported."""
    for row in TABLE:
        if re.search(row.words, words):
            return row.kind(f"{host.label}: {row.problem}", found=_last(words), fix=row.fix)
    if code == 127:
        return UserError(f"{host.label}: no python3 on the host", fix="install Python 3.8 or newer there")
    return Failure(f"{host.label}: ssh failed", found=_last(words) or f"exit code {code}")


def combine_errors(errors: Sequence[SpileError], total: int) -> SpileError:
    """Return the errors of several hosts as one: the first error and the number of hosts."""
    first = next((error for error in errors if isinstance(error, UserError)), errors[0])
    if len(errors) == 1:
        return first
    return type(first)(
        f"{len(errors)} of {total} hosts failed; {first.problem}",
        expected=first.expected,
        found=first.found,
        fix=first.fix,
    )


def _last(words: str) -> str:
    lines = [line.strip() for line in words.splitlines() if line.strip() and not set(line.strip()) <= {"@"}]
    return lines[-1] if lines else ""


HEARTBEAT = b".\n"


@dataclass(frozen=True)
class SessionTimes:
    """How long each side waits for the other, in seconds."""

    heartbeat: float = 1.0
    silence: float = 10.0
    """The guard ends its command after this time without a heartbeat."""
    grace: float = 3.0
    """The time between the request to end a command and the kill."""


@dataclass(frozen=True)
class Job:
    """The command to run on a host."""

    command: str
    """A command line for the host's bash."""
    folder: str = "~"
    env: dict[str, str] = field(default_factory=dict)
    keep: bool = False
    """Whether processes that a successful command leaves behind keep running."""

    def line(self) -> bytes:
        argv = ["bash", "-lc", self.command]
        return json.dumps({"argv": argv, "folder": self.folder, "env": self.env, "keep": self.keep}).encode() + b"\n"


@dataclass(frozen=True)
class HostOutcome:
    """The result of a command on one host."""

    host: Host
    code: int
    cause: str
    """``ended`` if it ended by itself, ``stopped`` if it was stopped from here, else what went wrong."""
    seconds: float
    left: tuple[int, ...] = ()
    """Processes that could not be ended because another user owns them and there is no sudo."""

    @property
    def stopped(self) -> bool:
        """Whether it was stopped from here, so that its exit code means nothing."""
        return self.cause == "stopped"


def remote_program(module: object, call: str) -> str:
    """Return a shell command that runs a module's source followed by a call."""
    return f"python3 -uc {shlex.quote(inspect.getsource(module) + chr(10) + call)}"  # type: ignore[arg-type]


def _texts(values: Sequence[object]) -> tuple[str, ...]:
    return tuple(map(str, values))


_EVENT_FIELDS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "exit": {"code": int, "cause": str, "seconds": float, "left": _texts},
    "ended": {"code": int},
    "refused": {"reason": str},
}
"""The fields that are used of each event of :mod:`spile.hosts.guard`, and their types."""


class Session:
    """One ssh session, from the connection to the last byte of output."""

    def __init__(self, host: Host, access: Access, pace: SessionTimes, output: Callable[[bytes], None]) -> None:
        self.host = host
        self.failed = asyncio.Event()
        """Set when the command has failed; processes that it started may still be ending."""
        self._access, self._pace, self._output = access, pace, output
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._events: dict[str, dict[str, Any]] = {}
        self._words = ""
        self._began = time.monotonic()
        self._process: asyncio.subprocess.Process | None = None
        self._end: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Connect and wait until the guard is ready."""
        remote = remote_program(guard, f"main({self._pace.silence!r}, {self._pace.grace!r})")
        self._process = await asyncio.create_subprocess_exec(
            *self._access.command(self.host, remote),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl+C in the terminal must not reach ssh.
        )
        self._end = asyncio.create_task(self._follow(self._process))
        await asyncio.wait({self._ready, self._end}, return_when=asyncio.FIRST_COMPLETED)
        if not self._ready.done():
            await self._end
            raise self._trouble()

    def go(self, job: Job) -> None:
        self._began = time.monotonic()
        self._write(job.line())

    def stop(self, *, now: bool = False) -> None:
        """Ask the guard to end the command: with time to finish, or at once."""
        self._write(b"k\n" if now else b"s\n")

    async def ended(self) -> HostOutcome:
        """Wait for the end of the session."""
        assert self._end is not None  # noqa: S101  (it was opened)
        await asyncio.shield(self._end)
        seconds = time.monotonic() - self._began
        event = self._events.get("exit")
        if event is not None:
            return HostOutcome(self.host, event["code"], event["cause"], event["seconds"] or seconds, event["left"])
        refused = self._events.get("refused")
        if refused is not None:
            return HostOutcome(self.host, 126, f"the host refused: {refused['reason']}", seconds)
        problem = self._trouble().problem.removeprefix(f"{self.host.label}: ")
        return HostOutcome(self.host, 255, problem, seconds)

    def abandon(self) -> None:
        """Kill the ssh process; the guard ends the command when its input ends."""
        if self._process is not None and self._process.returncode is None:
            # Process.kill() would first poll: if ssh has just ended, asyncio then warns of an unknown child process.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._process.pid, signal.SIGKILL)

    def _abandon_unless_over(self, readers: list[asyncio.Task[None]]) -> None:
        """Kill ssh if its output can no longer be read, for example because the disk is full."""
        if any(task.cancelled() or not task.done() or task.exception() is not None for task in readers):
            self.abandon()

    async def close(self) -> None:
        """Kill the ssh process and wait for its end."""
        self.abandon()
        if self._end is not None:
            await asyncio.wait({self._end})
            if not self._end.cancelled():
                self._end.exception()  # Mark the exception as retrieved: ended() has already raised it.

    def _trouble(self) -> SpileError:
        refused = self._events.get("refused")
        if refused is not None:
            return UserError(f"{self.host.label}: the host refused", found=refused["reason"])
        code = self._process.returncode if self._process is not None else None
        if code == 255 and not self._words.strip():
            return explain(self.host, code, "connection closed by the host")
        return explain(self.host, code, self._words)

    def _write(self, data: bytes) -> None:
        process = self._process
        if process is not None and process.stdin is not None and not process.stdin.is_closing():
            process.stdin.write(data)

    async def _follow(self, process: asyncio.subprocess.Process) -> None:
        beat = asyncio.create_task(self._beat())
        readers = [asyncio.create_task(self._read_output(process)), asyncio.create_task(self._read_events(process))]
        try:
            await asyncio.gather(*readers)
        finally:
            self._abandon_unless_over(readers)
            for task in (beat, *readers):
                task.cancel()
            await asyncio.gather(beat, *readers, return_exceptions=True)
            await process.wait()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._pace.heartbeat)
            self._write(HEARTBEAT)

    async def _read_output(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None  # noqa: S101
        while data := await process.stdout.read(1 << 16):
            self._output(data)

    async def _read_events(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None  # noqa: S101
        rest = ""
        while data := await process.stderr.read(1 << 16):
            *lines, rest = (rest + data.decode("utf-8", "replace")).split("\n")
            for line in lines:
                self._read_event(line)
        self._read_event(rest)

    def _read_event(self, line: str) -> None:
        if not line.startswith(guard.MARK):
            self._words = (self._words + line + "\n")[-8192:]
            return
        with untrusted(Failure, f"{self.host.label} sent an event that cannot be read"):
            raw = dict(json.loads(line.removeprefix(guard.MARK)))
            kinds = _EVENT_FIELDS.get(str(raw["event"]), {})
            event = {"event": str(raw["event"]), **{name: kind(raw[name]) for name, kind in kinds.items()}}
        self._events[event["event"]] = event
        if event["event"] == "ended" and event["code"] != 0:
            self.failed.set()
        if event["event"] == "ready" and not self._ready.done():
            self._ready.set_result(None)


MEGASCALE_PORT = 8080
INTERRUPTED = 130
PATIENCE = 8.0


def environment_of(host: Host, hosts: Sequence[Host]) -> dict[str, str]:
    """Return the variables with the host's number in its slice and, if there are several slices, the slice's number."""
    slices = len({other.slice for other in hosts})
    variables = {"TPU_WORKER_ID": str(host.worker), "PYTHONUNBUFFERED": "1"}
    if slices > 1:
        first = next(other for other in hosts if other.slice == 0 and other.worker == 0)
        variables |= {
            "MEGASCALE_COORDINATOR_ADDRESS": f"{first.internal or first.address}:{MEGASCALE_PORT}",
            "MEGASCALE_NUM_SLICES": str(slices),
            "MEGASCALE_SLICE_ID": str(host.slice),
        }
    return variables


def worst(outcomes: Sequence[HostOutcome]) -> int:
    """Return the highest exit code of the commands that ended by themselves; 130 if all were stopped by Ctrl+C."""
    own = [outcome.code for outcome in outcomes if not outcome.stopped]
    if any(own) or (own and len(own) == len(outcomes)):
        return max(own)
    return INTERRUPTED


async def run_everywhere(
    hosts: Sequence[Host],
    job: Job,
    *,
    access: Access,
    output: Callable[[Host, bytes], None],
    pace: SessionTimes | None = None,
    variables: Callable[[Host, Sequence[Host]], dict[str, str]] = environment_of,
    interrupt: asyncio.Event | None = None,
) -> list[HostOutcome]:
    """Connect to all hosts, then run the job on all. Output goes to ``output``; setting ``interrupt`` stops all."""
    pace = pace or SessionTimes()
    access.check(hosts)
    interrupt = interrupt or asyncio.Event()
    sessions = [Session(host, access, pace, lambda data, host=host: output(host, data)) for host in hosts]  # type: ignore[misc]
    ends: list[asyncio.Task[HostOutcome]] = []
    try:
        await _connect(sessions, interrupt)
        for session in sessions:
            env = {**variables(session.host, hosts), **job.env}
            session.go(replace(job, env=env))
        ends = [asyncio.create_task(session.ended()) for session in sessions]
        await _wait_for_all(sessions, ends, pace, interrupt)
        return [task.result() for task in ends]
    finally:
        await asyncio.gather(*(session.close() for session in sessions))
        await asyncio.gather(*ends, return_exceptions=True)


async def _connect(sessions: Sequence[Session], interrupt: asyncio.Event) -> None:
    """Open all sessions. No command starts until every guard is ready."""
    opening = asyncio.gather(*(session.open() for session in sessions), return_exceptions=True)
    asked = asyncio.create_task(interrupt.wait())
    both: tuple[asyncio.Future[Any], ...] = (opening, asked)
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    if not opening.done():
        for session in sessions:
            session.abandon()
        await opening
        raise Interrupted("interrupted before anything ran")
    errors = [result for result in opening.result() if isinstance(result, BaseException)]
    for error in errors:
        if not isinstance(error, SpileError):
            raise error
    if errors:
        raise combine_errors([error for error in errors if isinstance(error, SpileError)], len(sessions))


async def _wait_for_all(
    sessions: Sequence[Session], ends: Sequence[asyncio.Task[HostOutcome]], pace: SessionTimes, interrupt: asyncio.Event
) -> None:
    """Wait for all sessions; at the first failure or interrupt, stop the others."""
    pending: set[asyncio.Task[HostOutcome]] = set(ends)
    alarms = [asyncio.create_task(event.wait()) for event in (interrupt, *(session.failed for session in sessions))]
    try:
        while pending and not any(alarm.done() for alarm in alarms):
            done, _ = await asyncio.wait({*pending, *alarms}, return_when=asyncio.FIRST_COMPLETED)
            pending -= done
            if any(task.result().code != 0 for task in ends if task.done()):
                break
        for session in sessions:
            session.stop()
        interrupt.clear()
        deadline = asyncio.get_running_loop().time() + pace.grace + PATIENCE
        await _wait_for(pending, sessions, interrupt, deadline)
        for session in sessions:
            session.abandon()  # The connection is dead and ssh did not notice; the guard ends the command on the host.
        await asyncio.gather(*pending)
    finally:
        for alarm in alarms:
            alarm.cancel()


async def _wait_for(
    pending: set[asyncio.Task[HostOutcome]], sessions: Sequence[Session], interrupt: asyncio.Event, deadline: float
) -> None:
    """Wait for the stopped hosts to end; a further interrupt kills at once."""
    again = asyncio.create_task(interrupt.wait())
    while pending:
        left = deadline - asyncio.get_running_loop().time()
        waiting = {*pending} if again.done() else {*pending, again}
        done, _ = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            break
        if again in done:
            for session in sessions:
                session.stop(now=True)
        pending -= done
    again.cancel()


def run(
    hosts: Sequence[Host],
    job: Job,
    *,
    access: Access,
    output: Callable[[Host, bytes], None],
    pace: SessionTimes | None = None,
    variables: Callable[[Host, Sequence[Host]], dict[str, str]] = environment_of,
) -> list[HostOutcome]:
    """Run ``run_everywhere`` in an event loop. Ctrl+C, SIGTERM and SIGHUP stop all hosts; a second one kills them."""

    async def main() -> list[HostOutcome]:
        interrupt = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, interrupt.set)
        return await run_everywhere(
            hosts, job, access=access, output=output, pace=pace, variables=variables, interrupt=interrupt
        )

    return asyncio.run(main())


AT_ONCE = 32
KEPT = 8192


@dataclass(frozen=True)
class Launched:
    """The result of a script on one host."""

    host: Host
    error: SpileError | None
    output: str
    """The last output of the script."""


def launch(
    hosts: Sequence[Host],
    script: Callable[[Host], str],
    *,
    access: Access,
    env: Mapping[str, str] | None = None,
) -> list[Launched]:
    """Run each host's script in bash; what a successful script started keeps running. Failures do not raise."""

    async def main() -> list[Launched]:
        room = asyncio.Semaphore(AT_ONCE)

        async def one(host: Host) -> Launched:
            async with room:
                return await _launch_one(host, hosts, Job(script(host), "~", dict(env or {}), keep=True), access)

        return list(await asyncio.gather(*(one(host) for host in hosts)))

    return asyncio.run(main())


async def _launch_one(host: Host, hosts: Sequence[Host], job: Job, access: Access) -> Launched:
    printed = bytearray()

    def keep(_: Host, data: bytes) -> None:
        printed.extend(data)
        del printed[:-KEPT]

    error: SpileError | None = None
    try:
        (outcome,) = await run_everywhere(
            [host], job, access=access, output=keep, variables=lambda one, _: environment_of(one, hosts)
        )
        if outcome.code != 0:
            last = printed.decode("utf-8", "replace").strip().rpartition("\n")[2]
            how = f"exit code {outcome.code}" if outcome.cause == "ended" else outcome.cause
            error = Failure(f"{host.label}: the launch failed", found=f"{how}, after: {last}" if last else how)
    except SpileError as caught:
        error = caught
    return Launched(host, error, printed.decode("utf-8", "replace"))
