"""Claims: which worker works on which stream, so that there can be more streams than workers.

A claim is advisory. It saves work; it does not guarantee anything. The guarantee that no sample is stored twice is the
ledger: a worker that lost its claim without noticing is fenced at its next commit.

``claims/0005/000003.json`` is the third claim on stream 5. It is created only if absent, so one of several candidates
wins. The owner overwrites it at a fixed interval, which changes its modification time and ETag. A candidate that lists
the same version for ``expiry`` seconds of its own monotonic clock may create ``000004.json``; no clocks are compared.
``claims/0005/000003.released`` says that the owner gave the claim up. The highest number of a stream counts, and it is
never deleted, so that a number is never used twice.

Only creating an object if it is absent and overwriting it are needed, which every disk and bucket can do. A conditional
replacement (by ETag or generation) would give the same guarantee with one more operation in each backend.
"""

from __future__ import annotations

import json
import random
import re
import secrets
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from spile.errors import SpileError
from spile.objects.folder import Folder, NotFound

CLAIMS = "claims/"
CLAIM_SECONDS = 90.0
"""Default time without a renewal after which another worker may take a stream over."""
_RENEWALS = 4
"""Renewals within that time."""
_KEY = re.compile(r"claims/(\d{4,9})/(\d{6,9})\.(json|released)", re.ASCII)
_CHOICES = 4
"""Candidates choose at random among this many of the best streams, so that they rarely collide."""


@dataclass(frozen=True)
class _Version:
    """The newest claim on a stream, as a listing shows it."""

    number: int
    released: bool
    mark: tuple[float, int, str | None]


@dataclass(frozen=True)
class _Sighting:
    version: _Version
    since: float
    """When this version was first seen, on this worker's monotonic clock."""
    renewed: bool = False
    """Whether the version changed while this worker watched: the owner is alive."""


class Holding(NamedTuple):
    """The last claim on a stream: the name of its worker, and whether it is still active."""

    worker: str
    active: bool
    """Whether the claim was not released."""


class ClaimBook:
    """The claims on the streams of one dataset, as one worker sees them.

    Args:
        root: The dataset's folder.
        worker: This worker's name. A worker that restarts under the same name takes its own claims back at once, so
            two workers that run at the same time must have different names.
        expiry: Seconds without a renewal after which a claim may be taken over.
        clock: A monotonic clock.

    """

    def __init__(
        self,
        root: Folder,
        worker: str,
        *,
        expiry: float = CLAIM_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        chance: random.Random | None = None,
    ) -> None:
        self.worker, self.expiry = worker, expiry
        self._root, self._clock, self._chance = root, clock, chance or random.Random()
        self._seen: dict[int, _Sighting] = {}
        self._reader = ClaimReader(root)

    def take(self, streams: Iterable[int]) -> Claim | None:
        """Claim one of these streams, preferring those that this worker held before a restart, then the first ones.

        Returns:
            The claim, or None if every stream is claimed by another worker at the moment.

        """
        self._look()
        free = [stream for stream in streams if self._is_free(stream)]
        own = [stream for stream in free if self._is_own(stream)]
        others = [stream for stream in free if stream not in own]
        best = others[:_CHOICES]
        self._chance.shuffle(best)
        for stream in (*own, *best, *others[_CHOICES:]):
            number = self._seen[stream].version.number + 1 if stream in self._seen else 1
            claim = Claim(self._root, stream, number, self.worker, self.expiry)
            if claim.create():
                return claim
        return None

    def all_busy(self, streams: Iterable[int]) -> bool:
        """Return whether the owners of all these streams renewed their claims while this worker watched."""
        return all(stream in self._seen and self._seen[stream].renewed for stream in streams)

    def _look(self) -> None:
        now = self._clock()
        for stream, version in _newest(self._root).items():
            before = self._seen.get(stream)
            if before is None or before.version != version:
                alive = before is not None and before.version.number == version.number and not version.released
                self._seen[stream] = _Sighting(version, now, renewed=alive)

    def _is_free(self, stream: int) -> bool:
        seen = self._seen.get(stream)
        if seen is None or seen.version.released or self._clock() - seen.since >= self.expiry:
            return True
        return self._is_own(stream)

    def _is_own(self, stream: int) -> bool:
        """Return whether an earlier process of this worker holds the stream: one that ended without releasing it."""
        seen = self._seen.get(stream)
        if seen is None or seen.renewed or seen.version.released:
            return False
        return self._reader.owner(stream, seen.version.number) == self.worker


class Claim:
    """One worker's claim on one stream."""

    def __init__(self, root: Folder, stream: int, number: int, worker: str, expiry: float) -> None:
        self.stream, self.number, self.worker, self.expiry = stream, number, worker, expiry
        self._root, self._token, self._counter = root, secrets.token_hex(8), 0

    def create(self) -> bool:
        """Create the claim; return False if another worker was faster."""
        return self._root.create(_key(self.stream, self.number), self._body())

    def renew(self) -> bool:
        """Renew the claim; return False if another worker has taken the stream over."""
        newest = _newest(self._root, self.stream).get(self.stream)
        if newest is not None and newest.number > self.number:
            return False
        self._counter += 1
        self._root.put(_key(self.stream, self.number), self._body())
        return True

    def release(self) -> None:
        """Give the stream up, so that another worker may take it at once."""
        self._root.create(_key(self.stream, self.number, "released"), self._body())
        for info in self._root.list(f"{CLAIMS}{self.stream:04d}/"):
            found = _KEY.fullmatch(info.key)
            if found and int(found[2]) < self.number:
                self._root.delete(info.key)

    @contextmanager
    def keep_renewed(self, log: Callable[[str], None] = lambda _line: None) -> Iterator[None]:
        """Renew the claim in a thread until the block ends, then release it; problems are passed to ``log``.

        If the claim is lost, the work in the block continues until its next commit, at which the ledger fences it.
        """
        ended = threading.Event()

        def renew() -> None:
            while not ended.wait(self.expiry / _RENEWALS):
                try:
                    if not self.renew():
                        log(f"stream {self.stream}: another worker has taken it over")
                        return
                except SpileError as error:  # The next renewal may succeed.
                    log(f"could not renew the claim on stream {self.stream}: {error}")

        thread = threading.Thread(target=renew, name="claim", daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()
            try:
                self.release()
            except SpileError as error:
                log(f"could not release the claim on stream {self.stream}: {error}")

    def _body(self) -> bytes:
        fields = {"worker": self.worker, "token": self._token, "counter": self._counter}
        return json.dumps(fields).encode() + b"\n"


class ClaimReader:
    """Reads repeatedly which worker holds each stream. The owner of a claim never changes, so it is read once."""

    def __init__(self, root: Folder) -> None:
        self._root = root
        self._owners: dict[tuple[int, int], str] = {}

    def owners(self) -> dict[int, Holding]:
        """Return the last owner of each stream that was ever claimed."""
        newest = _newest(self._root).items()
        return {stream: Holding(self.owner(stream, each.number), active=not each.released) for stream, each in newest}

    def owner(self, stream: int, number: int) -> str:
        """Return the worker of a claim, or an empty string if the claim cannot be read."""
        if (stream, number) not in self._owners:
            self._owners[stream, number] = _read_owner(self._root, _key(stream, number))
        return self._owners[stream, number]


def _newest(root: Folder, stream: int | None = None) -> dict[int, _Version]:
    found: dict[int, _Version] = {}
    for info in root.list(CLAIMS if stream is None else f"{CLAIMS}{stream:04d}/"):
        match = _KEY.fullmatch(info.key)
        if match is None:
            continue
        number, released = int(match[2]), match[3] == "released"
        version = _Version(number, released, (info.updated, info.size, info.etag))
        before = found.get(int(match[1]))
        if before is None or (number, released) > (before.number, before.released):
            found[int(match[1])] = version
    return found


def _read_owner(root: Folder, key: str) -> str:
    try:
        return str(json.loads(root.get(key))["worker"])
    except (NotFound, ValueError, KeyError, TypeError, RecursionError):
        return ""  # Other programs can write to the bucket too, so a claim that cannot be parsed has no owner.


def _key(stream: int, number: int, suffix: str = "json") -> str:
    return f"{CLAIMS}{stream:04d}/{number:06d}.{suffix}"
