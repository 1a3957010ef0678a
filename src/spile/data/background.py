"""An iterator that works ahead in a thread of its own, by a bounded number of items."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Generic, TypeVar

__all__ = ["ahead"]

T = TypeVar("T")


class _End:
    pass


class _Raised:
    def __init__(self, error: BaseException) -> None:
        self.error = error


class _Worker(Generic[T]):
    def __init__(self, items: Iterator[T], depth: int) -> None:
        self._items = items
        self.queue: queue.Queue[T | _End | _Raised] = queue.Queue(depth)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._work, name="spile-tokens", daemon=True)
        self._thread.start()

    def _put(self, item: T | _End | _Raised) -> bool:
        """False: nobody wants any more."""
        while not self._stop.is_set():
            try:
                self.queue.put(item, timeout=0.1)
            except queue.Full:
                continue
            return True
        return False

    def _work(self) -> None:
        try:
            for item in self._items:
                if not self._put(item):
                    break
            else:
                self._put(_End())
        except BaseException as error:  # noqa: BLE001  handed to the consumer, who raises it
            self._put(_Raised(error))
        finally:
            close = getattr(self._items, "close", None)
            if close is not None:
                close()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def ahead(items: Iterator[T], depth: int) -> Iterator[T]:
    """The same items in the same order, made by a thread up to ``depth`` items before they are asked for.

    An error of the iterator is raised here, in its place. Closing this generator stops the thread and closes
    the iterator.
    """
    worker = _Worker(items, depth)
    try:
        while True:
            item = worker.queue.get()
            if isinstance(item, _End):
                return
            if isinstance(item, _Raised):
                raise item.error
            yield item
    finally:
        worker.stop()
