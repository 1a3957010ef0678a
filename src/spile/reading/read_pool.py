"""Threads that read. Unlike an executor's they are not waited for, nor heard of, when the program ends."""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

__all__ = ["ReadPool"]

T = TypeVar("T")
_Tasks = queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None]


class ReadPool:
    """A few daemon threads, begun with the first task, and their queue. What waits when it is closed is cancelled."""

    def __init__(self, threads: int) -> None:
        self._tasks: _Tasks = queue.SimpleQueue()
        self._wanted = threads
        # Called when the program ends, too: later, when generators are closed, even modules may be gone.
        self._end = weakref.finalize(self, _close, self._tasks, threads)
        self._lock = threading.Lock()

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Do this when a thread is free."""
        future: Future[T] = Future()
        with self._lock:  # nothing comes into the queue after its threads were told to end
            if self._end.alive:
                self._begin()
                self._tasks.put((future, task))
                return future
        future.cancel()
        return future

    def _begin(self) -> None:
        for number in range(self._wanted):
            threading.Thread(target=_work, args=(self._tasks,), name=f"spile-read-{number}", daemon=True).start()
        self._wanted = 0

    def close(self) -> None:
        """Cancel what waits and let the threads end by themselves."""
        with self._lock:
            self._end()


def _close(tasks: _Tasks, threads: int) -> None:
    with suppress(queue.Empty):
        while True:
            item = tasks.get_nowait()
            if item is not None:
                item[0].cancel()
    for _ in range(threads):
        tasks.put(None)


def _work(tasks: _Tasks) -> None:
    while (item := tasks.get()) is not None:
        future, task = item
        if not future.set_running_or_notify_cancel():
            continue
        try:
            future.set_result(task())
        except BaseException as error:  # noqa: BLE001  raised again by whoever asks for the result
            future.set_exception(error)
