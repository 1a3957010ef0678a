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
import threading
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from spile.errors import Failure, Interrupted, SpileError, UserError, untrusted
from spile.hosts import guard
from spile.hosts.hosts import Access, Host

_T = TypeVar("_T")

_NO_PYTHON = "install Python 3.8 or newer there"
_SSH_FAILURES: tuple[tuple[str, type[SpileError], str, str], ...] = (
    (r"Could not resolve hostname", UserError, "no such host", "check the address"),
    (
        r"No .* host key is known",
        UserError,
        "your ssh configuration refuses a host whose key is not known",
        "log in once with ssh to check and store the key, or add --ssh-option StrictHostKeyChecking=accept-new",
    ),
    (
        r"REMOTE HOST IDENTIFICATION HAS CHANGED|Host key verification failed",
        UserError,
        "the host's key is not the one known",
        "if the machine was really replaced, remove the old key with ssh-keygen -R",
    ),
    (r"Load key .*|Identity file .* not accessible", UserError, "the ssh key cannot be used", "check --ssh-key"),
    (
        r"4033: 'not authorized'",
        UserError,
        "IAP refuses the tunnel",
        "ask for the role roles/iap.tunnelResourceAccessor",
    ),
    (
        r"4003: 'failed to connect to backend'",
        Failure,
        "IAP cannot reach the host",
        "open tcp:22 in the firewall for 35.235.240.0/20",
    ),
    (
        r"Permission denied|Too many authentication failures",
        UserError,
        "the host refused the login",
        "check --user and --ssh-key; a TPU VM takes the keys in its ssh-keys metadata, or with OS Login those of your "
        "account: gcloud compute os-login ssh-keys add --key-file ~/.ssh/google_compute_engine.pub, then --user with "
        "the user name of: gcloud compute os-login describe-profile (role roles/compute.osAdminLogin)",
    ),
    (r"Connection refused", Failure, "nothing listens there", "check that sshd is running on the host, and the port"),
    (
        r"timed out|No route to host|Network is unreachable",
        Failure,
        "the host cannot be reached",
        "open tcp:22 in the firewall, or use --internal-ip from inside the network",
    ),
    (r"not responding|Broken pipe|closed by|[Cc]onnection reset", Failure, "the connection was lost", "run it again"),
    (
        r"Bad configuration option|command-line.*(error|Bad|unsupported)",
        UserError,
        "ssh refuses an option",
        "check --ssh-option",
    ),
    (
        r"(tar|mkdir): (command )?(not found|No such file)",
        UserError,
        "neither rsync nor tar on the host",
        "install rsync there",
    ),
    (r"python3?: (command )?(not found|No such file)", UserError, "no python3 on the host", _NO_PYTHON),
)
"""Errors of ssh: the pattern of its message, the class of our error, our message and the fix."""


def ssh_error(host: Host, code: int | None, message: str) -> SpileError:
    """Return the error for an ssh that failed before the guard reported."""
    for pattern, kind, problem, fix in _SSH_FAILURES:
        if re.search(pattern, message):
            return kind(f"{host.label}: {problem}", found=_last_line(message), fix=fix)
    if code == 127:
        return UserError(f"{host.label}: no python3 on the host", fix=_NO_PYTHON)
    return Failure(f"{host.label}: ssh failed", found=_last_line(message) or f"exit code {code}")


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


def raise_errors(results: Sequence[object], total: int) -> None:
    """Raise the errors among the results of several hosts as one. An error that is not ours is raised as it is."""
    errors: list[SpileError] = []
    for result in results:
        if isinstance(result, SpileError):
            errors.append(result)
        elif isinstance(result, BaseException):
            raise result
    if errors:
        raise combine_errors(errors, total)


def _last_line(message: str) -> str:
    lines = [line.strip() for line in message.splitlines() if line.strip() and not set(line.strip()) <= {"@"}]
    return lines[-1] if lines else ""


_HEARTBEAT = 1.0
"""Seconds between two heartbeats to the guard."""
_SILENCE = 10.0
"""The guard ends its command after this many seconds without a heartbeat."""
_KILL_WAIT = 8.0
"""Seconds after the kill of a command in which its guard must report the end."""


@dataclass(frozen=True)
class Job:
    """The command to run on a host."""

    command: str
    """A command line for the host's bash."""
    folder: str = "~"
    env: Mapping[str, str] = field(default_factory=dict)
    keep: bool = False
    """Whether processes that a successful command leaves behind keep running."""
    grace: float = 3.0
    """Seconds between the request to end the command and the kill."""

    def line(self) -> bytes:
        argv = ["bash", "-lc", self.command]
        job = {"argv": argv, "folder": self.folder, "env": {**self.env}, "keep": self.keep, "grace": self.grace}
        return json.dumps(job).encode() + b"\n"


@dataclass(frozen=True)
class HostOutcome:
    """The result of a command on one host."""

    host: Host
    code: int
    cause: str
    """``ended`` if it ended by itself, ``stopped`` if it was stopped from here, else what went wrong."""
    seconds: float
    left: tuple[str, ...] = ()
    """Processes that could not be ended because another user owns them and there is no sudo."""

    @property
    def stopped(self) -> bool:
        """Whether it was stopped from here, so that its exit code means nothing."""
        return self.cause == "stopped"


def kill(process: asyncio.subprocess.Process) -> None:
    """Kill a process of this machine unless it has ended."""
    if process.returncode is None:
        # Process.kill() would first poll: if the process has just ended, asyncio then warns of an unknown child.
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def run_interruptible(main: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine in an event loop. Ctrl+C cancels it and, when it has ended, raises KeyboardInterrupt."""
    if threading.current_thread() is not threading.main_thread():
        return asyncio.run(main)
    before = signal.getsignal(signal.SIGINT)

    async def guarded() -> _T:
        task = asyncio.ensure_future(main)
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, task.cancel)
        return await task

    try:
        return asyncio.run(guarded())
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        signal.signal(signal.SIGINT, before)


class Session:
    """One ssh session, from the connection to the last byte of output."""

    end: asyncio.Task[HostOutcome] | None = None
    """The end of the session. Exists when it was opened."""

    def __init__(self, host: Host, access: Access, output: Callable[[Host, bytes], None]) -> None:
        self.host = host
        self._access, self._output = access, output
        self._ready = asyncio.Event()
        self._on_failure: Callable[[], None] = lambda: None
        self._outcome: HostOutcome | None = None
        self._refused: str | None = None
        self._stderr = ""
        self._began = time.monotonic()
        self._process: asyncio.subprocess.Process | None = None

    async def open(self) -> None:
        """Connect and wait until the guard is ready."""
        program = f"{inspect.getsource(guard)}\nmain({_SILENCE!r})"
        self._process = await asyncio.create_subprocess_exec(
            *self._access.command(self.host, f"python3 -uc {shlex.quote(program)}"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # Ctrl+C in the terminal must not reach ssh.
        )
        self.end = asyncio.create_task(self._read_to_end(self._process))
        await _wait_for_either(self.end, self._ready)
        if not self._ready.is_set():
            raise self._session_error()

    def start(self, job: Job, on_failure: Callable[[], None]) -> None:
        """Start the command. ``on_failure`` is called when it fails; processes that it started may still be ending."""
        self._began, self._on_failure = time.monotonic(), on_failure
        self._write(job.line())

    def stop(self, *, now: bool = False) -> None:
        """Ask the guard to end the command: with time to finish, or at once."""
        self._write(b"k\n" if now else b"s\n")

    def abandon(self) -> None:
        """Kill the ssh process; the guard ends the command when its input ends."""
        if self._process is not None:
            kill(self._process)

    async def close(self) -> None:
        """Kill the ssh process and wait for its end."""
        self.abandon()
        if self.end is not None:
            await asyncio.gather(self.end, return_exceptions=True)

    def _session_error(self) -> SpileError:
        """Return the error of a session that ended without a report of the guard."""
        if self._refused is not None:
            return UserError(f"{self.host.label}: the host refused", found=self._refused)
        code = self._process.returncode if self._process is not None else None
        if code == 255 and not self._stderr.strip():
            return ssh_error(self.host, code, "connection closed by the host")
        return ssh_error(self.host, code, self._stderr)

    def _write(self, data: bytes) -> None:
        process = self._process
        if process is not None and process.stdin is not None and not process.stdin.is_closing():
            process.stdin.write(data)

    async def _read_to_end(self, process: asyncio.subprocess.Process) -> HostOutcome:
        """Read the output and the events to their end, and send heartbeats meanwhile."""
        beat = asyncio.create_task(self._send_heartbeats())
        try:
            async with asyncio.TaskGroup() as readers:
                readers.create_task(self._read_output(process))
                readers.create_task(self._read_events(process))
        except BaseExceptionGroup as errors:  # The output cannot be stored, for example because the disk is full.
            self.abandon()
            raise errors.exceptions[0] from None
        finally:
            beat.cancel()
            await process.wait()
        outcome = self._outcome or self._outcome_without_report()
        if outcome.code != 0:
            self._on_failure()
        return outcome

    def _outcome_without_report(self) -> HostOutcome:
        seconds = time.monotonic() - self._began
        if self._refused is not None:
            return HostOutcome(self.host, 126, f"the host refused: {self._refused}", seconds)
        problem = self._session_error().problem.removeprefix(f"{self.host.label}: ")
        return HostOutcome(self.host, 255, problem, seconds)

    async def _send_heartbeats(self) -> None:
        while True:
            await asyncio.sleep(_HEARTBEAT)
            self._write(b".\n")

    async def _read_output(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None  # noqa: S101
        while data := await process.stdout.read(1 << 16):
            self._output(self.host, data)

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
            self._stderr = (self._stderr + line + "\n")[-8192:]
            return
        with untrusted(Failure, f"{self.host.label} sent an event that cannot be read"):
            event = json.loads(line.removeprefix(guard.MARK))
            match event["event"]:
                case "ready":
                    self._ready.set()
                case "refused":
                    self._refused = str(event["reason"])
                case "ended" if int(event["code"]) != 0:
                    self._on_failure()
                case "exit":
                    seconds, left = time.monotonic() - self._began, tuple(map(str, event["left"]))
                    self._outcome = HostOutcome(self.host, int(event["code"]), str(event["cause"]), seconds, left)


_MEGASCALE_PORT = 8080


def environment_of(host: Host, hosts: Sequence[Host]) -> dict[str, str]:
    """Return the variables with the host's number in its slice and, if there are several slices, the slice's number."""
    slices = len({other.slice for other in hosts})
    variables = {"TPU_WORKER_ID": str(host.worker), "PYTHONUNBUFFERED": "1"}
    if slices > 1:
        first = next(other for other in hosts if other.slice == 0 and other.worker == 0)
        variables |= {
            "MEGASCALE_COORDINATOR_ADDRESS": f"{first.internal or first.address}:{_MEGASCALE_PORT}",
            "MEGASCALE_NUM_SLICES": str(slices),
            "MEGASCALE_SLICE_ID": str(host.slice),
        }
    return variables


def jobs_for(hosts: Sequence[Host], job: Job) -> dict[Host, Job]:
    """Return the job for each host, with the variables of :func:`environment_of`."""
    return {host: replace(job, env={**environment_of(host, hosts), **job.env}) for host in hosts}


def worst_exit_code(outcomes: Sequence[HostOutcome]) -> int:
    """Return the highest exit code of the commands that ended by themselves; 130 if all were stopped by Ctrl+C."""
    own = [outcome.code for outcome in outcomes if not outcome.stopped]
    if any(own) or (own and len(own) == len(outcomes)):
        return max(own)
    return Interrupted.exit_code


class StopRequest:
    """The request to stop the commands of all hosts, made by the user or by the failure of one host."""

    def __init__(self) -> None:
        self.made, self.repeated = asyncio.Event(), asyncio.Event()

    def interrupt(self) -> None:
        """Stop the commands; if they are being stopped already, kill them."""
        (self.repeated if self.made.is_set() else self.made).set()


async def run_everywhere(
    jobs: Mapping[Host, Job],
    *,
    access: Access,
    output: Callable[[Host, bytes], None],
    stop: StopRequest | None = None,
) -> list[HostOutcome]:
    """Connect to all hosts, then run the job of each. The first failure, or ``stop``, ends all of them."""
    stop = stop or StopRequest()
    access.check(list(jobs))
    sessions = [Session(host, access, output) for host in jobs]
    try:
        await _connect(sessions, stop)
        for session in sessions:
            session.start(jobs[session.host], stop.made.set)
        return await _wait_for_all(sessions, stop, max(job.grace for job in jobs.values()) + _KILL_WAIT)
    finally:
        await asyncio.gather(*(session.close() for session in sessions))


async def _connect(sessions: Sequence[Session], stop: StopRequest) -> None:
    """Open all sessions. No command starts until every guard is ready."""
    opening = asyncio.gather(*(session.open() for session in sessions), return_exceptions=True)
    await _wait_for_either(opening, stop.made)
    if not opening.done():
        for session in sessions:
            session.abandon()
        await opening
        raise Interrupted("interrupted before anything ran")
    raise_errors(opening.result(), len(sessions))


async def _wait_for_all(sessions: Sequence[Session], stop: StopRequest, seconds: float) -> list[HostOutcome]:
    """Wait for all sessions. When a stop is requested, stop the others and give them ``seconds``."""
    ends = asyncio.gather(*(session.end for session in sessions if session.end is not None))
    await _wait_for_either(ends, stop.made)
    for session in sessions:
        session.stop()
    try:
        async with asyncio.timeout(seconds):
            await _wait_for_either(ends, stop.repeated)
            for session in sessions:
                session.stop(now=True)
            await asyncio.shield(ends)
    except TimeoutError:  # A connection is dead and ssh did not notice; the guard ends the command on the host.
        for session in sessions:
            session.abandon()
    return await ends


async def _wait_for_either(future: asyncio.Future[Any], event: asyncio.Event) -> None:
    """Wait until the future is done or the event is set. Raises the exception of the future."""
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({future, waiting}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
    if future.done():
        future.result()


def run(jobs: Mapping[Host, Job], *, access: Access, output: Callable[[Host, bytes], None]) -> list[HostOutcome]:
    """Run ``run_everywhere`` in an event loop. Ctrl+C, SIGTERM and SIGHUP stop all hosts; a second one kills them."""

    async def main() -> list[HostOutcome]:
        stop = StopRequest()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asyncio.get_running_loop().add_signal_handler(number, stop.interrupt)
        return await run_everywhere(jobs, access=access, output=output, stop=stop)

    return asyncio.run(main())


_MAX_PARALLEL = 32
_KEPT_BYTES = 8192


@dataclass(frozen=True)
class Launched:
    """The result of a script on one host."""

    host: Host
    error: SpileError | None
    output: str
    """The last output of the script."""


def launch(hosts: Sequence[Host], script: Callable[[Host], str], *, access: Access) -> list[Launched]:
    """Run each host's script in bash; what a successful script started keeps running. Failures do not raise."""

    async def main() -> list[Launched]:
        slots = asyncio.Semaphore(_MAX_PARALLEL)

        async def one(host: Host, job: Job) -> Launched:
            async with slots:
                return await _launch_one(host, replace(job, command=script(host)), access)

        jobs = jobs_for(hosts, Job("", keep=True))
        return list(await asyncio.gather(*(one(host, job) for host, job in jobs.items())))

    return run_interruptible(main())


async def _launch_one(host: Host, job: Job, access: Access) -> Launched:
    printed = bytearray()

    def keep(_: Host, data: bytes) -> None:
        printed.extend(data)
        del printed[:-_KEPT_BYTES]

    error: SpileError | None = None
    try:
        (outcome,) = await run_everywhere({host: job}, access=access, output=keep)
        if outcome.code != 0:
            last = printed.decode("utf-8", "replace").strip().rpartition("\n")[2]
            how = f"exit code {outcome.code}" if outcome.cause == "ended" else outcome.cause
            error = Failure(f"{host.label}: the launch failed", found=f"{how}, after: {last}" if last else how)
    except SpileError as caught:
        error = caught
    return Launched(host, error, printed.decode("utf-8", "replace"))
