"""Trying again: exponential backoff with full jitter, capped, counted, and over after a bounded time."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from spile.objects.cloud.failures import RequestFailure
from spile.objects.environment import positive_number
from spile.objects.stats import Stats

__all__ = ["Retry", "while_out"]

_log = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass(frozen=True)
class Retry:
    """How long and how often."""

    first: float = 0.2
    """The first wait is at most so many seconds; each next one at most twice as many."""
    cap: float = 15.0
    total: float = 180.0
    """No new attempt after so many seconds."""
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic

    @classmethod
    def from_environment(cls) -> Retry:
        """``SPILE_RETRY_SECONDS`` bounds the whole."""
        total = positive_number("SPILE_RETRY_SECONDS", cls.total)
        return cls(first=min(cls.first, total / 10), total=total)

    def call(self, attempt: Callable[[], Result], stats: Stats) -> Result:
        """The attempt's result, or the last trouble."""
        began = self.clock()
        tries = 0
        while True:
            try:
                stats.add(requests=1)
                return attempt()
            except RequestFailure as trouble:
                # Full jitter: many workers that failed together do not come back together.
                wait = random.uniform(0, min(self.cap, self.first * 2**tries))
                trouble.exhausted |= self.clock() - began + wait > self.total
                if not trouble.transient or trouble.exhausted:
                    raise
                tries += 1
                stats.add(retries=1, waited=wait)
                self.sleep(wait)


def while_out(name: str, attempt: Callable[[], Result], retry: Retry) -> Result:
    """What the hub gives, tried again as a bucket is while it is out (503, 429, no network), said aloud once."""
    told = False

    def one() -> Result:
        nonlocal told
        try:
            return attempt()
        except RequestFailure as outage:
            if outage.transient and not told:
                told = True
                _log.warning("the hub does not give %s (%s); trying for %.0f s", name, outage.cause, retry.total)
            raise

    return retry.call(one, Stats())
