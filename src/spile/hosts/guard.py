"""The guard: runs one command on a host and leaves no process behind, even if a part of the chain is killed.

It is sent inline (``python3 -uc …``), so the host needs only Python 3.8. It consists of two processes, both child
subreapers: the inner one starts the command in a new session and relays its output; the outer one only waits. If one of
them is killed, the other ends all processes of the command.

    stdin     one message per line: {job} start · "." heartbeat · "s" stop · "k" kill · end of input: stop
    stdout    the output and errors of the command
    stderr    one event per line, after a record separator: ready · ended · exit, with the code · refused
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import subprocess
import time
from typing import Any

MARK = "\x1espile "
MAX_PENDING = 1 << 18
GIVE_UP_SECONDS = 15.0
SUBREAPER = 36
SIGNALS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
NO_OUTPUT: Any = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


def send_event(event: str, **fields: object) -> None:
    """Write one event to stderr."""
    text = MARK + json.dumps(dict(fields, event=event)) + "\n"
    try:
        os.write(2, text.encode())
    except OSError:
        return  # The connection is closed; the processes still have to be ended.


def descendants() -> list[int]:
    """Return all living processes below this one, including orphans, because this process is their subreaper."""
    children: dict[int, list[int]] = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            with open("/proc/" + name + "/stat", "rb") as file:
                state, parent = file.read().rpartition(b")")[2].split()[:2]
        except OSError:
            continue  # The process has ended meanwhile.
        if state not in (b"Z", b"X"):
            children.setdefault(int(parent), []).append(int(name))
    found: list[int] = []
    front = [os.getpid()]
    while front:
        below = children.get(front.pop(), [])
        found += below
        front += below
    return found


def signal_all(pids: list[int], number: int) -> None:
    """Send a signal to processes; use sudo for those of other users (``sudo …``)."""
    foreign = []
    for pid in pids:
        try:
            os.kill(pid, number)
        except ProcessLookupError:
            continue
        except PermissionError:
            foreign.append(str(pid))
    if foreign:
        try:
            subprocess.call(["sudo", "-n", "kill", "-" + str(int(number)), *foreign], **NO_OUTPUT)  # noqa: S603, S607
        except OSError:
            return  # Without sudo they are reported as left.


class ProcessTree:
    """The command and all processes that it started."""

    def __init__(self, child: int) -> None:
        self.child = child
        self.code: int | None = None
        self.asked: set[int] = set()
        self.left: list[int] = []

    def reap(self) -> None:
        """Collect the processes that have ended, including adopted orphans."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.child:
                self.code = 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)

    def end(self, ask_until: float) -> bool:
        """Send SIGTERM to the processes, or SIGKILL after ``ask_until``. Return True when none is left."""
        self.reap()
        self.left = descendants()
        late = time.monotonic() >= ask_until
        signal_all([p for p in self.left if late or p not in self.asked], signal.SIGKILL if late else signal.SIGTERM)
        self.asked.update(self.left)
        return not self.left


class Guard:
    """The inner process: one loop over its input, the command's output and the clock."""

    def __init__(self, silence: float, outer: int, kept: int) -> None:
        self.silence, self.outer, self.keep_pipe = silence, outer, kept
        self.grace = 0.0
        self.tree: ProcessTree | None = None
        self.pipe: int | None = None
        self.cause: str | None = None
        self.kill_at = self.give_up = 0.0
        self.unread, self.output = b"", b""
        self.last_message = time.monotonic()
        self.listening, self.connected, self.processes_ended, self.keep = True, True, False, False

    def stop(self, cause: str, grace: float) -> None:
        """End the tree: SIGTERM now, SIGKILL after ``grace``."""
        now = time.monotonic()
        self.kill_at = min(self.kill_at, now + grace) if self.cause else now + grace
        self.give_up = self.kill_at + GIVE_UP_SECONDS
        self.cause = self.cause or cause

    def disconnect(self, cause: str) -> None:
        """End the tree soon, because the connection to the runner is lost."""
        if self.connected:
            self.connected = False
            self.stop(cause, min(self.grace, 2.0))

    def read_messages(self) -> None:
        """Read the runner's messages."""
        try:
            data = os.read(0, 1 << 16)
        except OSError:
            data = b""
        self.last_message = time.monotonic()
        if not data:
            self.listening = False
            self.disconnect("the runner has gone")
        *lines, self.unread = (self.unread + data).split(b"\n")
        for line in lines:
            if line.startswith(b"{") and self.tree is None and self.cause is None:
                self.start(json.loads(line.decode()))
            elif line in (b"s", b"k"):
                self.stop("stopped", self.grace if line == b"s" else 0.0)

    def start(self, job: Any) -> None:
        """Start the command in its own session."""
        self.keep, self.grace = job["keep"], job["grace"]
        try:
            self.child = subprocess.Popen(  # noqa: S603
                job["argv"],
                cwd=os.path.expanduser(job["folder"]),
                env=dict(os.environ, **job["env"]),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            send_event("refused", reason=str(error))
            os._exit(126)
        assert self.child.stdout is not None  # noqa: S101
        self.tree, self.pipe = ProcessTree(self.child.pid), self.child.stdout.fileno()

    def relay(self) -> None:
        """Wait a short time for input or output, and pass on the command's output."""
        readers = [0] if self.listening else []
        if self.pipe is not None and len(self.output) < MAX_PENDING:
            readers.append(self.pipe)
        writers = [1] if self.output and self.connected else []
        ready, room, _ = select.select(readers, writers, [], 0.05 if self.cause else 0.2)
        if 0 in ready:
            self.read_messages()
        if self.pipe is not None and self.pipe in ready:
            data = os.read(self.pipe, 1 << 16)
            self.output = self.output + data if self.connected else b""
            self.pipe = self.pipe if data else None
        if room:
            try:
                self.output = self.output[os.write(1, self.output) :]
            except BlockingIOError:
                return
            except OSError:
                self.disconnect("the runner has gone")

    def watch(self) -> None:
        """Check for the end of the command, a silent runner and a killed outer guard."""
        if self.tree is not None and self.tree.code is None:
            self.tree.reap()
        if self.tree is not None and self.tree.code is not None and self.cause is None:
            send_event("ended", code=self.tree.code)  # The runner need not wait for the remaining processes.
            self.stop("ended", self.grace)
            if self.keep and self.tree.code == 0:
                # The processes of the command keep running; the outer guard is notified too.
                self.processes_ended = True
                self.give_up = time.monotonic() + 1.0
                os.write(self.keep_pipe, b"k")
        if time.monotonic() - self.last_message > self.silence:
            self.disconnect("the link is silent")
        if os.getppid() != self.outer:
            self.disconnect("the outer guard was killed")

    def is_over(self) -> bool:
        """Return whether no process is left and all output has been passed on."""
        if self.cause is None:
            return False
        self.processes_ended = self.processes_ended or self.tree is None or self.tree.end(self.kill_at)
        if self.processes_ended:
            silent = self.pipe is None or (self.keep and time.monotonic() > self.give_up)
            return not self.connected or (silent and not self.output)
        return time.monotonic() > self.give_up

    def run(self) -> int:
        """Guard the command until its end and return its exit code."""
        send_event("ready")
        while not self.is_over():
            self.relay()
            self.watch()
        code = 143 if self.tree is None or self.tree.code is None else self.tree.code
        left = [] if self.tree is None else self.tree.left
        send_event("exit", code=code, cause=self.cause, left=left)
        return code


def become_subreaper() -> None:
    """Make orphans below this process its own children instead of those of init."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(SUBREAPER, 1, 0, 0, 0) != 0:
        send_event("refused", reason="prctl: " + os.strerror(ctypes.get_errno()))
        os._exit(126)


def wait_for(inner: int, kept: int) -> int:
    """Wait in the outer process for the inner one, then end what it left, unless that is to keep running."""
    for number in SIGNALS:
        signal.signal(number, lambda *_: os.kill(inner, signal.SIGTERM))
    pid = status = 0
    while pid != inner:
        pid, status = os.wait()
    tree, give_up = ProcessTree(0), time.monotonic() + GIVE_UP_SECONDS
    while not os.read(kept, 1) and not tree.end(0.0) and time.monotonic() < give_up:
        time.sleep(0.05)
    if not os.WIFSIGNALED(status):
        return os.WEXITSTATUS(status)
    code = 128 + os.WTERMSIG(status)
    send_event("exit", code=code, cause="the guard was killed", left=tree.left)
    return code


def main(silence: float) -> None:
    """Guard one command and exit with its exit code."""
    become_subreaper()
    outer = os.getpid()
    kept, keep = os.pipe()
    inner = os.fork()
    if inner:
        os.close(keep)
        os._exit(wait_for(inner, kept))
    os.setsid()
    become_subreaper()
    os.set_blocking(1, False)
    guard = Guard(silence, outer, keep)
    for number in SIGNALS:
        signal.signal(number, lambda *_: guard.stop("a signal", min(guard.grace, 2.0)))
    os._exit(guard.run())
