"""One host's session: an ssh that runs the guard, heartbeats into it, output and events out of it."""

from __future__ import annotations

import asyncio
import inspect
import json
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from spile.errors import SpileError, UserError
from spile.fleet.ssh.failures import explain
from spile.fleet.ssh.hosts import Access, Host
from spile.fleet.ssh.remote import guard

__all__ = ["Ended", "Job", "Session", "SessionTimes", "remote_program"]

HEARTBEAT = b".\n"


@dataclass(frozen=True)
class SessionTimes:
    """How long each side waits for the other."""

    heartbeat: float = 1.0
    silence: float = 10.0
    """The guard ends its command after so many seconds without a heartbeat."""
    grace: float = 3.0
    """Between asking a command to end and killing it."""


@dataclass(frozen=True)
class Job:
    """What to run on a host."""

    command: str
    """A line for the host's bash."""
    folder: str = "~"
    env: dict[str, str] = field(default_factory=dict)
    keep: bool = False
    """What a command that succeeded leaves running shall go on: it was started to stay."""

    def line(self) -> bytes:
        """The guard's word to go."""
        argv = ["bash", "-lc", self.command]
        return json.dumps({"argv": argv, "folder": self.folder, "env": self.env, "keep": self.keep}).encode() + b"\n"


@dataclass(frozen=True)
class Ended:
    """How a session ended."""

    code: int
    cause: str
    """``ended`` by itself, ``stopped`` by us, or what went wrong."""
    seconds: float
    left: tuple[int, ...] = ()
    """Processes that could not be ended (another user's, with no sudo)."""

    @property
    def stopped(self) -> bool:
        """We ended it; its code says nothing."""
        return self.cause == "stopped"


def remote_program(module: object, call: str) -> str:
    """A module's text and a call, as a command for the host's shell."""
    return f"python3 -uc {shlex.quote(inspect.getsource(module) + chr(10) + call)}"  # type: ignore[arg-type]


class Session:
    """From the connection to the last byte of output."""

    def __init__(self, host: Host, access: Access, pace: SessionTimes, output: Callable[[bytes], None]) -> None:
        self.host = host
        self.failed = asyncio.Event()
        """The command has failed; what it left may still be ending."""
        self._access, self._pace, self._output = access, pace, output
        self._ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._events: dict[str, dict[str, Any]] = {}
        self._words = ""
        self._began = time.monotonic()
        self._process: asyncio.subprocess.Process | None = None
        self._end: asyncio.Task[None] | None = None

    async def open(self) -> None:
        """Connect, and wait until the guard is there."""
        remote = remote_program(guard, f"main({self._pace.silence!r}, {self._pace.grace!r})")
        self._process = await asyncio.create_subprocess_exec(
            *self._access.command(self.host, remote),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,  # the terminal's Ctrl+C is for us, not for ssh
        )
        self._end = asyncio.create_task(self._follow(self._process))
        await asyncio.wait({self._ready, self._end}, return_when=asyncio.FIRST_COMPLETED)
        if not self._ready.done():
            await self._end
            raise self._trouble()

    def go(self, job: Job) -> None:
        """Start the command."""
        self._began = time.monotonic()
        self._write(job.line())

    def stop(self, *, now: bool = False) -> None:
        """Ask the guard to end the command: gently, or at once."""
        self._write(b"k\n" if now else b"s\n")

    async def ended(self) -> Ended:
        """Wait for the end."""
        assert self._end is not None  # noqa: S101  (it was opened)
        await asyncio.shield(self._end)
        seconds = time.monotonic() - self._began
        event = self._events.get("exit")
        if event is not None:
            return Ended(
                int(event["code"]), str(event["cause"]), float(event["seconds"]) or seconds, tuple(event["left"])
            )
        refused = self._events.get("refused")
        if refused is not None:
            return Ended(126, f"the host refused: {refused['reason']}", seconds)
        return Ended(255, self._trouble().problem.removeprefix(f"{self.host.label}: "), seconds)

    def abandon(self) -> None:
        """End the ssh itself; the guard ends the rest when its input ends."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def _abandon_unless_over(self, readers: list[asyncio.Task[None]]) -> None:
        """If we cannot read on (a full disk, a closed terminal), nobody shall write on."""
        if any(task.cancelled() or not task.done() or task.exception() is not None for task in readers):
            self.abandon()

    async def close(self) -> None:
        """Leave nothing of it running here."""
        self.abandon()
        if self._end is not None:
            await asyncio.wait({self._end})
            if not self._end.cancelled():
                self._end.exception()  # whoever waited for the end has been told already

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
        event = json.loads(line.removeprefix(guard.MARK))
        self._events[event["event"]] = event
        if event["event"] == "ended" and event["code"] != 0:
            self.failed.set()
        if event["event"] == "ready" and not self._ready.done():
            self._ready.set_result(None)
