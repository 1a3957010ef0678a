"""What a folder's traffic amounted to, for a run's summary."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

__all__ = ["Stats"]


@dataclass
class Stats:
    """Counters that many threads add to. Read them at any time."""

    requests: int = 0
    retries: int = 0
    """Requests that were sent again after a failure that may pass."""
    waited: float = 0.0
    """Seconds slept before retries, summed over threads."""
    bytes_written: int = 0
    bytes_read: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False, compare=False)

    def add(
        self, *, requests: int = 0, retries: int = 0, waited: float = 0.0, bytes_written: int = 0, bytes_read: int = 0
    ) -> None:
        """Count, atomically."""
        with self._lock:
            self.requests += requests
            self.retries += retries
            self.waited += waited
            self.bytes_written += bytes_written
            self.bytes_read += bytes_read
