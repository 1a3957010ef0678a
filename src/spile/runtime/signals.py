"""Signals that end a worker well: the first one commits what is done, a second one ends at once.

Before a row has been computed there is nothing to commit, so the first ends at once too: while a model is downloaded,
loaded or compiled, or the other hosts of a pod are waited for. Python runs a handler only between two steps of the
main thread, which may be inside a library for minutes; a thread that sees the signal at once ends the process then.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from spile.errors import Interrupted
from spile.runtime.interrupts import handled
from spile.runtime.progress import Progress

__all__ = ["end_soon", "handling_signals", "interrupting", "last_words"]

_PATIENCE = 3.0
"""Seconds from the signal that ends at once to the end of the process, whatever its threads wait for."""
_NOTICE = 0.5
"""Seconds that the main thread has to handle a signal by itself, and the other hosts of a pod to take last words."""
_KINDS = (signal.SIGINT, signal.SIGTERM)


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


class _SignalReceiver:
    """The two ways by which a signal is noticed: its handler, and a byte in a pipe."""

    def __init__(self, stop: threading.Event, progress: Progress) -> None:
        self._stop, self._progress = stop, progress
        self._handled = self._arrived = 0

    def _at_once(self, number: int) -> bool:
        now = self._progress.snapshot()
        return number > 1 or (not now.samples and now.phase.early)

    def handle(self, number: int, _frame: FrameType | None) -> None:
        """In the main thread, when it comes to it."""
        self._handled += 1
        name = signal.Signals(number).name
        if self._at_once(self._handled):
            end_soon()
            if self._handled == 1:
                self._progress.log(f"{name}: nothing is computed yet, so this ends at once")
            raise KeyboardInterrupt
        self._stop.set()
        self._progress.log(f"{name}: finishing the batches in flight and committing them (again: end at once)")

    def woken(self, over: threading.Event) -> None:
        """In a thread, at once."""
        self._arrived += 1
        if not over.wait(_NOTICE) and self._handled < self._arrived and self._at_once(self._arrived):
            end_soon()


@contextmanager
def _woken(call: Callable[[threading.Event], None]) -> Iterator[None]:
    """Call for each signal from a thread, even while the main thread is inside a library."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    over = threading.Event()

    def listen() -> None:
        while (byte := os.read(reader, 1)) and not over.is_set():
            if byte[0] in _KINDS:
                call(over)

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
