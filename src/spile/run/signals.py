"""Signals: the first Ctrl+C or SIGTERM commits what is done and stops, the second ends at once.

Python raises KeyboardInterrupt between any two steps of the main thread, even in code that ignores exceptions (JAX has
a callback of the garbage collector) or converts them to another error (the import of an extension module). This module
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

    from spile.compute.progress import Progress

INTERRUPTED = "spile: interrupted"
_STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_RESEND_AFTER = 0.01
"""Seconds after which a lost signal is sent again; by then the callback that lost it has probably returned."""

Handler = Callable[[int, FrameType | None], None]


@contextmanager
def handle_signals(handler: Handler, *signals: signal.Signals, once: bool = False) -> Iterator[None]:
    """Handle these signals with ``handler`` inside the context. A KeyboardInterrupt that it raises is never lost.

    ``once``: ignore signals after a KeyboardInterrupt, so that nothing disturbs what cleans up.
    """
    raised = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal raised
        if once and raised:
            return
        try:
            handler(number, frame)
        except KeyboardInterrupt:
            raised = True
            raise

    def resend(ignored: UnraisableHookArgs) -> None:
        nonlocal raised
        if ignored.exc_type is not KeyboardInterrupt:
            hook(ignored)
            return
        raised = False
        start_new_thread(_send_again, ())  # not threading.Thread: its locks may be held by the interrupted code

    before = {each: signal.signal(each, handle) for each in signals}
    hook, sys.unraisablehook = sys.unraisablehook, resend
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
        for each, old in before.items():
            signal.signal(each, old)


def _send_again() -> None:
    time.sleep(_RESEND_AFTER)
    os.kill(os.getpid(), signal.SIGINT)


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

    with handle_signals(handle, signal.SIGINT):
        yield


def _loads_jax(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "jax":
            return True
        frame = frame.f_back
    return False


def exit_handler(code: int) -> Handler:
    """Return a handler that exits at once with ``code``, for times when there is nothing to clean up."""
    return lambda _number, _frame: os._exit(code)


_EXIT_AFTER = 3.0
"""Seconds from the second signal to the end of the process, even if its threads hang."""
_EXIT_CALL = 0.5
"""Seconds that each call before an exit may take."""
_SAME_REQUEST = 0.5
"""Seconds within which a second SIGTERM is the same request: Slurm sends two when it preempts a job."""

_exit_calls: list[Callable[[], None]] = []


def exit_soon(code: int = Interrupted.exit_code) -> None:
    """End the process in a few seconds unless it ends by itself. Unfinished files stay, as after a kill."""
    timer = threading.Timer(_EXIT_AFTER, _exit, [code])
    timer.daemon = True
    timer.start()


def _exit(code: int) -> None:
    for call in _exit_calls:
        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        thread.join(_EXIT_CALL)  # do not wait for a host that does not answer
    os._exit(code)


@contextmanager
def before_exit(call: Callable[[], None]) -> Iterator[None]:
    """Make this call before :func:`exit_soon` ends the process, while the context is open."""
    _exit_calls.append(call)
    try:
        yield
    finally:
        _exit_calls.remove(call)


@contextmanager
def stop_on_signals(stop: threading.Event, progress: Progress) -> Iterator[None]:
    """Set ``stop`` on the first signal; raise KeyboardInterrupt on the second, or if nothing was computed yet.

    A thread decides, because the main thread may be inside a library, which a handler would have to wait for.
    """
    ending = threading.Event()

    def handle(_number: int, _frame: FrameType | None) -> None:
        if ending.is_set():
            raise KeyboardInterrupt

    def decide(requests: int, name: str) -> None:
        now = progress.snapshot()
        if requests > 1 or (not now.samples and now.phase.early):
            exit_soon()
            if requests == 1:
                progress.log(f"{name}: nothing is computed yet, so this ends at once")
            ending.set()
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        else:
            stop.set()
            progress.log(f"{name}: finishing the batches in flight and committing them (again: end at once)")

    def listen() -> None:
        requests, last = 0, float("-inf")
        while number := int.from_bytes(os.read(reader, 1)):
            repeated = number == signal.SIGTERM and time.monotonic() - last < _SAME_REQUEST
            last = time.monotonic() if number == signal.SIGTERM else last
            if number in _STOP_SIGNALS and not repeated and not ending.is_set():
                requests += 1
                decide(requests, signal.Signals(number).name)

    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    thread = threading.Thread(target=listen, name="spile-signals", daemon=True)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)  # gets the number of each signal
    thread.start()
    try:
        with handle_signals(handle, *_STOP_SIGNALS, once=True):  # exit_soon limits the time of the cleanup
            yield
    finally:
        signal.set_wakeup_fd(before)
        os.close(writer)
        thread.join()
        os.close(reader)
