"""Reading a large object from front to back, with the next chunks already on their way."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from spile.objects.folder import Folder

__all__ = ["read_chunks"]

_AHEAD = 3


def read_chunks(folder: Folder, key: str, chunk: int = 8 << 20) -> Iterator[bytes]:
    """The object's bytes in order, in pieces of ``chunk`` (the last is shorter); at most four are held at once."""
    size = folder.info(key).size
    pool = ThreadPoolExecutor(_AHEAD, thread_name_prefix="read-ahead")
    try:
        waiting: deque[Future[bytes | memoryview]] = deque()
        for start in range(0, size, chunk):
            waiting.append(pool.submit(folder.get_range, key, start, min(chunk, size - start)))
            if len(waiting) > _AHEAD:
                yield bytes(waiting.popleft().result())
        while waiting:
            yield bytes(waiting.popleft().result())
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
