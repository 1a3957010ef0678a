"""Threads that fail together, and bounded queues between them."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


POLL = 0.1
"""Seconds between checks whether another thread failed."""


_INTERRUPT_WAIT = 2.0
"""Seconds that an interrupted run waits for its threads."""


class ThreadsEnded(Exception):  # control flow between our own threads; never leaves them
    """Another thread of the group failed: drop everything and return."""


class ThreadGroup:
    """Threads that fail together: the first error ends all of them and is raised by :meth:`join`."""

    def __init__(self) -> None:
        self._failed = threading.Event()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._threads: list[threading.Thread] = []

    @property
    def failed(self) -> bool:
        """Whether a thread failed and the others should end."""
        return self._failed.is_set()

    def fail(self, error: BaseException) -> None:
        """End all threads. The first error counts, except that a KeyboardInterrupt always counts."""
        with self._lock:
            if isinstance(error, KeyboardInterrupt) or (self._error is None and not isinstance(error, ThreadsEnded)):
                self._error = error
        self._failed.set()

    def start(self, name: str, work: Callable[[], None]) -> None:
        """Run ``work`` in a thread of the group."""

        def guarded() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - stored, and raised again by join
                self.fail(error)

        thread = threading.Thread(target=guarded, name=f"spile-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def join(self) -> None:
        """Wait for all threads, then raise the error that ended them, if any.

        After an interrupt the wait is short: a thread may be waiting for a device or a network that hangs.
        """
        try:
            while not isinstance(self._error, KeyboardInterrupt) and not self.ended:
                time.sleep(POLL / 10)  # Thread.join would delay Ctrl+C
        except KeyboardInterrupt as error:
            self.fail(error)
        deadline = time.monotonic() + _INTERRUPT_WAIT
        while not self.ended and time.monotonic() < deadline:
            time.sleep(POLL / 10)
        if self._error is not None:
            raise self._error

    @property
    def ended(self) -> bool:
        """Whether no thread is running."""
        return not any(thread.is_alive() for thread in self._threads)


class Channel(Generic[T]):
    """A bounded queue between threads of a group. Both ends raise :class:`ThreadsEnded` once the group failed."""

    def __init__(self, threads: ThreadGroup, length: int) -> None:
        self._threads = threads
        self._queue: queue.Queue[T | None] = queue.Queue(length)

    def put(self, item: T | None) -> None:
        """Wait for room and add an item. None closes the channel for one reader."""
        while not self._threads.failed:
            try:
                self._queue.put(item, timeout=POLL)
            except queue.Full:
                continue
            return
        raise ThreadsEnded

    @property
    def ready(self) -> bool:
        """Whether an item is waiting."""
        return not self._queue.empty()

    def __iter__(self) -> Iterator[T]:
        while not self._threads.failed:
            try:
                item = self._queue.get(timeout=POLL)
            except queue.Empty:
                continue
            if item is None:
                return
            yield item
        raise ThreadsEnded
