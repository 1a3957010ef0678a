"""A Ctrl+C that nothing swallows.

Python raises KeyboardInterrupt between any two steps of the main thread, and so also where exceptions are thrown away
(jax has a callback of the garbage collector) or made into another error (the import of an extension module). Here what
was thrown away comes again, and what an interrupt broke is told as the interrupt.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from _thread import start_new_thread
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TYPE_CHECKING

from spile.errors import Interrupted, SpileError

if TYPE_CHECKING:
    from sys import UnraisableHookArgs

__all__ = ["INTERRUPTED", "handled", "interruptible", "leaving"]

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
