"""Signals: the first Ctrl+C or SIGTERM commits what is done and stops, the second ends at once.

Python raises KeyboardInterrupt between any two steps of the main thread, so also where exceptions are ignored (JAX has
a callback of the garbage collector) or converted to another error (the import of an extension module). This module
sends an ignored interrupt again, and reports a converted one as an interrupt.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from _thread import start_new_thread
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from spile.errors import Interrupted, SpileError

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

    from spile.worker.progress import Progress

INTERRUPTED = "spile: interrupted"
_RESEND_AFTER = 0.01
"""Seconds after which a lost signal is sent again; by then the callback that lost it has probably returned."""

Handler = Callable[[int, FrameType | None], None]


@contextmanager
def handled(handler: Handler, *kinds: signal.Signals) -> Iterator[None]:
    """Handle these signals with ``handler`` inside the context. A KeyboardInterrupt that it raises is never lost."""
    raised = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal raised
        try:
            handler(number, frame)
        except KeyboardInterrupt:
            raised = True
            raise

    before = {kind: signal.signal(kind, handle) for kind in kinds}
    hook, sys.unraisablehook = sys.unraisablehook, lambda lost: _resend(lost) or hook(lost)
    try:
        yield
    except SpileError:
        raise
    except Exception as error:
        if raised:
            raise KeyboardInterrupt from error
        raise
    finally:
        sys.unraisablehook = hook
        for kind, old in before.items():
            signal.signal(kind, old)


def _resend(lost: UnraisableHookArgs) -> bool:
    """Send SIGINT again if Python is about to ignore a KeyboardInterrupt; return whether it was one."""
    if lost.exc_type is not KeyboardInterrupt:
        return False

    def send() -> None:
        time.sleep(_RESEND_AFTER)
        os.kill(os.getpid(), signal.SIGINT)

    start_new_thread(send, ())  # not threading.Thread: its locks may be held by the interrupted code
    return True


@contextmanager
def interruptible() -> Iterator[None]:
    """Raise KeyboardInterrupt on Ctrl+C inside the context; exit at once while JAX is being imported.

    The import of JAX has many bare ``except:`` clauses, and no command has started any work by then.
    """

    def handle(_number: int, frame: FrameType | None) -> None:
        if _loads_jax(frame):
            os.write(2, f"{INTERRUPTED}\n".encode())
            os._exit(Interrupted.exit_code)
        raise KeyboardInterrupt

    with handled(handle, signal.SIGINT):
        yield


def _loads_jax(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "jax":
            return True
        frame = frame.f_back
    return False


def exit_handler(code: int) -> Handler:
    """Return a handler that exits at once with ``code``, for when only the interpreter is left to shut down."""

    def handle(_number: int, _frame: FrameType | None) -> None:
        os._exit(code)

    return handle


_EXIT_AFTER = 3.0
"""Seconds from the second signal to the end of the process, even if its threads hang."""
_NOTICE = 0.5
"""Seconds that the main thread has to handle a signal, and that each call before an exit may take."""
_KINDS = (signal.SIGINT, signal.SIGTERM)
_SAME_REQUEST = 0.5
"""A SIGTERM within this many seconds of another is the same request: Slurm sends two when it preempts a job."""


_exit_calls: list[Callable[[], None]] = []


def end_soon(code: int = Interrupted.exit_code) -> None:
    """End the process in a few seconds unless it ends by itself. What its threads leave is what a kill leaves."""
    timer = threading.Timer(_EXIT_AFTER, _end, [code])
    timer.daemon = True
    timer.start()


def _end(code: int) -> None:
    for call in _exit_calls:
        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(_NOTICE)  # do not wait for a host that does not answer
    os._exit(code)


@contextmanager
def before_exit(call: Callable[[], None]) -> Iterator[None]:
    """Make this call before :func:`end_soon` ends the process, while the context is open."""
    _exit_calls.append(call)
    try:
        yield
    finally:
        _exit_calls.remove(call)


@contextmanager
def handling_signals(stop: threading.Event, progress: Progress) -> Iterator[None]:
    """Set ``stop`` on the first signal; raise KeyboardInterrupt on the second, or if nothing was computed yet."""
    receiver = _SignalReceiver(stop, progress)
    with handled(receiver.handle, *_KINDS), _call_on_signal(receiver.notice):
        yield


@contextmanager
def interrupting() -> Iterator[None]:
    """Treat SIGTERM as Ctrl+C inside the context: nothing is to be committed yet."""

    def handle(_number: int, _frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    with handled(handle, *_KINDS):
        yield


class _Repeats:
    """Recognizes a SIGTERM that repeats the previous one."""

    def __init__(self) -> None:
        self._last = float("-inf")

    def includes(self, number: int) -> bool:
        now, last = time.monotonic(), self._last
        if number != signal.SIGTERM:
            return False
        self._last = now
        return now - last < _SAME_REQUEST


class _SignalReceiver:
    """Notices a signal in two ways: by its handler, and by a byte in a pipe while the main thread is busy."""

    def __init__(self, stop: threading.Event, progress: Progress) -> None:
        self._stop, self._progress = stop, progress
        self._handled = self._arrived = 0
        self._repeats = {"handled": _Repeats(), "arrived": _Repeats()}

    def _ends_at_once(self, number: int) -> bool:
        now = self._progress.snapshot()
        return number > 1 or (not now.samples and now.phase.early)

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal in the main thread."""
        if self._repeats["handled"].includes(number):
            return
        self._handled += 1
        name = signal.Signals(number).name
        if self._ends_at_once(self._handled):
            end_soon()
            if self._handled == 1:
                self._progress.log(f"{name}: nothing is computed yet, so this ends at once")
            raise KeyboardInterrupt
        self._stop.set()
        self._progress.log(f"{name}: finishing the batches in flight and committing them (again: end at once)")

    def notice(self, number: int, over: threading.Event) -> None:
        """Notice a signal in another thread. The wait is in a third one, so that the next signal is read at once."""
        if self._repeats["arrived"].includes(number):
            return
        self._arrived += 1
        threading.Thread(target=self._check_handled, args=(self._arrived, over), daemon=True).start()

    def _check_handled(self, arrived: int, over: threading.Event) -> None:
        """End the process if the main thread does not handle this signal soon."""
        if not over.wait(_NOTICE) and self._handled < arrived and self._ends_at_once(arrived):
            end_soon()


@contextmanager
def _call_on_signal(call: Callable[[int, threading.Event], None]) -> Iterator[None]:
    """Make this call from a thread for each signal, even while the main thread is inside a library."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    over = threading.Event()

    def listen() -> None:
        while (byte := os.read(reader, 1)) and not over.is_set():
            if byte[0] in _KINDS:
                call(byte[0], over)

    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    thread = threading.Thread(target=listen, name="spile-signals", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(before)
        over.set()
        os.close(writer)
        thread.join()
        os.close(reader)
