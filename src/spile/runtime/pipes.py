"""Bounded queues between the threads of a worker, and one way for all of them to end when one fails."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

__all__ = ["Crew", "Pipe", "Stopped"]

T = TypeVar("T")

_LOOK_UP = 0.1
"""Seconds between looks at whether the crew was told to stop."""
_PATIENCE = 2.0
"""Seconds that an interrupted crew is waited for."""


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
        """End everybody; the first error is the one that counts, but for an interrupt, which is the user's word."""
        with self._lock:
            if isinstance(error, KeyboardInterrupt) or (self._error is None and not isinstance(error, Stopped)):
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
        """Wait for all to end, then raise what ended them early, if anything.

        Who is interrupted does not wait long for a thread that waits itself, for a device or a network that hangs.
        """
        try:
            while not self._interrupted and not self.ended:
                time.sleep(_LOOK_UP / 10)  # a bare join would hold back Ctrl+C
        except KeyboardInterrupt as error:
            self.fail(error)
        patience = time.monotonic() + _PATIENCE
        while not self.ended and time.monotonic() < patience:
            time.sleep(_LOOK_UP / 10)
        if self._error is not None:
            raise self._error

    @property
    def ended(self) -> bool:
        """Whether no thread is at work any more."""
        return not any(thread.is_alive() for thread in self._threads)

    @property
    def _interrupted(self) -> bool:
        return isinstance(self._error, KeyboardInterrupt)


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
