"""One bucket: its connections, its memory, its counters, which all folders in it share."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from spile.objects.cloud.ranges import FastRanges
from spile.objects.cloud.rest import GoogleDialect, RestClient, S3Dialect
from spile.objects.cloud.upload import Buffers, Uploader
from spile.objects.retry import Retry
from spile.objects.stats import Stats

__all__ = ["READERS", "Bucket"]

READERS = 48
"""Small objects that are read side by side, however many folders of the bucket are being read."""

Result = TypeVar("Result")


class Bucket:
    """What all folders of one bucket share: the connections, the memory, the counters."""

    def __init__(self, scheme: str, name: str, retry: Retry | None = None) -> None:
        self.name = name
        self.url = f"{scheme}://{name}"
        self.stats = Stats()
        self.retry = retry if retry is not None else Retry.from_environment()
        dialect = GoogleDialect() if scheme == "gs" else S3Dialect(name)
        self.rest = RestClient(dialect, name)
        self.ranges = FastRanges(dialect, name, self.stats)
        self.buffers = Buffers()
        self.readers = ThreadPoolExecutor(READERS, thread_name_prefix="get")
        self.uploader = Uploader(self.rest, self.again)

    def again(self, attempt: Callable[[], Result]) -> Result:
        """Until it succeeds or is hopeless; :class:`RequestFailure` then."""
        return self.retry.call(attempt, self.stats)
