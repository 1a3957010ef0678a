"""A Ctrl+C that nothing swallows.

Python raises KeyboardInterrupt between any two steps of the main thread, and so also where exceptions are thrown away
(jax has a callback of the garbage collector) or made into another error (the import of an extension module). Here what
was thrown away comes again, and what an interrupt broke is told as the interrupt.
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

__all__ = [
    "INTERRUPTED",
    "end_soon",
    "handled",
    "handling_signals",
    "interruptible",
    "interrupting",
    "last_words",
    "leaving",
]


INTERRUPTED = "spile: interrupted"
_AGAIN = 0.01
"""Seconds after which a signal comes again: the callback that it was lost in is over by then, or it is lost again."""

Handler = Callable[[int, FrameType | None], None]


@contextmanager
def handled(handler: Handler, *kinds: signal.Signals) -> Iterator[None]:
    """While this lasts ``handler`` answers these signals. A KeyboardInterrupt that it raises leaves this as one."""
    raised = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal raised
        try:
            handler(number, frame)
        except KeyboardInterrupt:
            raised = True
            raise

    before = {kind: signal.signal(kind, handle) for kind in kinds}
    hook, sys.unraisablehook = sys.unraisablehook, lambda lost: _again(lost) or hook(lost)
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


def _again(lost: UnraisableHookArgs) -> bool:
    """Send the signal again whose exception Python is about to throw away; whether there was one."""
    if lost.exc_type is not KeyboardInterrupt:
        return False

    def send() -> None:
        time.sleep(_AGAIN)
        os.kill(os.getpid(), signal.SIGINT)

    start_new_thread(send, ())  # not threading's: its locks may be held by the very code that was interrupted
    return True


@contextmanager
def interruptible() -> Iterator[None]:
    """In the program: Ctrl+C is a KeyboardInterrupt, and the end at once while jax is being loaded.

    What jax does then is full of ``except:``, and no command has begun anything.
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


def leaving(code: int) -> Handler:
    """The answer once all is told and only the interpreter is left to end: the process ends with its own exit code."""

    def handle(_number: int, _frame: FrameType | None) -> None:
        os._exit(code)

    return handle


_PATIENCE = 3.0
"""Seconds from the signal that ends at once to the end of the process, whatever its threads wait for."""
_NOTICE = 0.5
"""Seconds that the main thread has to handle a signal by itself, and the other hosts of a pod to take last words."""
_KINDS = (signal.SIGINT, signal.SIGTERM)
_SAME_REQUEST = 0.5
"""A SIGTERM within this many seconds of another is the same request: Slurm sends two when it preempts a job."""


_last_words: list[Callable[[], None]] = []


def end_soon(code: int = Interrupted.exit_code) -> None:
    """End the process unless it has ended by itself soon: what its threads leave is what a kill leaves."""
    timer = threading.Timer(_PATIENCE, _end, [code])
    timer.daemon = True
    timer.start()


def _end(code: int) -> None:
    for word in _last_words:
        thread = threading.Thread(target=word, daemon=True)
        thread.start()
        thread.join(_NOTICE)  # a host that does not answer is not waited for
    os._exit(code)


@contextmanager
def last_words(tell: Callable[[], None]) -> Iterator[None]:
    """While this lasts a process that is ended by its timer says this first."""
    _last_words.append(tell)
    try:
        yield
    finally:
        _last_words.remove(tell)


@contextmanager
def handling_signals(stop: threading.Event, progress: Progress) -> Iterator[None]:
    """While this lasts a signal asks for the end: through ``stop``, or by KeyboardInterrupt where that is at once."""
    receiver = _SignalReceiver(stop, progress)
    with handled(receiver.handle, *_KINDS), _woken(receiver.woken):
        yield


@contextmanager
def interrupting() -> Iterator[None]:
    """While this lasts SIGTERM is a Ctrl+C: there is nothing to commit yet, and the others of a pod are to be told."""

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
    """The two ways by which a signal is noticed: its handler, and a byte in a pipe."""

    def __init__(self, stop: threading.Event, progress: Progress) -> None:
        self._stop, self._progress = stop, progress
        self._handled = self._arrived = 0
        self._repeats = {"handled": _Repeats(), "arrived": _Repeats()}

    def _at_once(self, number: int) -> bool:
        now = self._progress.snapshot()
        return number > 1 or (not now.samples and now.phase.early)

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """In the main thread, when it comes to it."""
        if self._repeats["handled"].includes(number):
            return
        self._handled += 1
        name = signal.Signals(number).name
        if self._at_once(self._handled):
            end_soon()
            if self._handled == 1:
                self._progress.log(f"{name}: nothing is computed yet, so this ends at once")
            raise KeyboardInterrupt
        self._stop.set()
        self._progress.log(f"{name}: finishing the batches in flight and committing them (again: end at once)")

    def woken(self, number: int, over: threading.Event) -> None:
        """In a thread, at once."""
        if self._repeats["arrived"].includes(number):
            return
        self._arrived += 1
        if not over.wait(_NOTICE) and self._handled < self._arrived and self._at_once(self._arrived):
            end_soon()


@contextmanager
def _woken(call: Callable[[int, threading.Event], None]) -> Iterator[None]:
    """Call for each signal from a thread, even while the main thread is inside a library."""
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
