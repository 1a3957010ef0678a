"""Read-ahead: results of calls, or items of an iterator, computed in threads before they are asked for."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import repeat
from typing import Any, TypeVar

T = TypeVar("T")


def read_ahead(calls: Iterable[Callable[[], T]], depth: int, *, threads: int | None = None) -> Iterator[T]:
    """Yield the result of each call, in order, while the next calls run in threads.

    ``calls`` is consumed lazily, in the thread of the caller. The first exception of a call is raised when its result
    is due. Closing the generator cancels the calls that have not started and waits for the ones that have.

    Args:
        calls: Functions without arguments.
        depth: How many calls run, or hold a result, while the caller uses an earlier result.
        threads: How many calls run at the same time; ``depth`` unless given.
    """
    ending = sys.is_finalizing  # a generator may be closed after the globals of its module are gone
    pool = ThreadPoolExecutor(threads or depth, thread_name_prefix="spile-ahead")
    waiting: deque[Future[T]] = deque()
    try:
        for call in calls:
            if len(waiting) < depth:
                waiting.append(pool.submit(call))
                continue
            result = waiting.popleft().result()
            waiting.append(pool.submit(call))
            yield result
            del result  # otherwise the previous result stays in memory while the next one is awaited
        while waiting:
            yield waiting.popleft().result()
    finally:
        if not ending():  # at that point the interpreter has already joined the threads
            pool.shutdown(wait=True, cancel_futures=True)


def iterate_ahead(items: Iterator[T], depth: int) -> Iterator[T]:
    """Yield the items of an iterator, which runs in a thread up to ``depth`` items ahead of the caller.

    An exception of the iterator is raised in its place. Closing the generator closes the iterator.
    """
    end: Any = object()
    try:
        for item in read_ahead(repeat(partial(next, items, end)), depth, threads=1):
            if item is end:
                return
            yield item
    finally:
        close = getattr(items, "close", None)
        if close is not None:
            close()
