"""Bounded queues between the threads of a worker, and one way for all of them to end when one fails."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

__all__ = ["Crew", "Pipe", "Stopped"]

T = TypeVar("T")

_LOOK_UP = 0.1
"""Seconds between looks at whether the crew was told to stop."""


class Stopped(Exception):  # control flow between our own threads; never leaves them
    """Another thread of the crew failed: drop what you hold and end."""


class Crew:
    """Threads that fail together: the first error ends all of them and is raised by :meth:`join`."""

    def __init__(self) -> None:
        self._failed = threading.Event()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._threads: list[threading.Thread] = []

    @property
    def failed(self) -> bool:
        """Whether to end."""
        return self._failed.is_set()

    def fail(self, error: BaseException) -> None:
        """End everybody; the first error is the one that counts."""
        with self._lock:
            if self._error is None and not isinstance(error, Stopped):
                self._error = error
        self._failed.set()

    def start(self, name: str, work: Callable[[], None]) -> None:
        """Run a stage in a thread of its own."""

        def guarded() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - kept, and raised again by join
                self.fail(error)

        thread = threading.Thread(target=guarded, name=f"spile-{name}", daemon=True)
        self._threads.append(thread)
        thread.start()

    def join(self) -> None:
        """Wait for all to end, then raise what ended them early, if anything."""
        for thread in self._threads:
            while thread.is_alive():  # a bare join would hold back Ctrl+C
                thread.join(_LOOK_UP)
        if self._error is not None:
            raise self._error


class Pipe(Generic[T]):
    """A queue of bounded length that ends for good when its crew fails."""

    def __init__(self, crew: Crew, most: int) -> None:
        self._crew = crew
        self._queue: queue.Queue[T | None] = queue.Queue(most)

    def put(self, item: T | None) -> None:
        """Wait for room. None closes the pipe."""
        while not self._crew.failed:
            try:
                self._queue.put(item, timeout=_LOOK_UP)
            except queue.Full:
                continue
            return
        raise Stopped

    def close(self) -> None:
        """Nothing more comes."""
        self.put(None)

    def __iter__(self) -> Iterator[T]:
        while not self._crew.failed:
            try:
                item = self._queue.get(timeout=_LOOK_UP)
            except queue.Empty:
                continue
            if item is None:
                return
            yield item
        raise Stopped
