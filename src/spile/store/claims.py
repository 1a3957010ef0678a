"""Claims: which worker works on which stream, so that there can be more streams than workers.

A claim is advisory. It saves work; it does not guarantee anything. The guarantee that no sample is stored twice is the
ledger: a worker that lost its claim without noticing is fenced at its next commit.

``claims/0005/000003.json`` is the third claim on stream 5. It is created only if absent, so one of several candidates
wins. The owner overwrites it at a fixed interval, which changes its modification time and ETag. A candidate that lists
the same version for ``expiry`` seconds of its own monotonic clock may create ``000004.json``; no clocks are compared.
``claims/0005/000003.released`` says that the owner gave the claim up, and ``000003.done-1a2b3c4d`` that it finished the
stream for the limits of a run that have this hash. The highest number of a stream counts, and it is never deleted, so
that a number is never used twice.

A candidate needs one listing of all claims, and no request for each stream: a run may have ten thousand streams and a
thousand workers.

Only creating an object if it is absent and overwriting it are needed, which every disk and bucket can do. A conditional
replacement (by ETag or generation) would give the same guarantee with one more operation in each backend.
"""

from __future__ import annotations

import json
import random
import secrets
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

from spile.errors import SpileError
from spile.objects.folder import Folder, NotFound, read_ahead
from spile.store.layout import CLAIMS, claim_key, parse_claim

CLAIM_SECONDS = 90.0
"""Default time without a renewal after which another worker may take a stream over."""
_RENEWALS = 4
"""Renewals within that time."""
_CHOICES = 4
"""Candidates choose at random among this many of the best streams, or a quarter, so that they rarely collide."""
_READERS = 32


class _Version(NamedTuple):
    """The newest claim on a stream, as a listing shows it."""

    number: int
    state: str
    """``json``, ``released`` or ``done-`` and a hash."""
    mark: tuple[float, int, str | None]

    @property
    def released(self) -> bool:
        return self.state != "json"


class _Sighting(NamedTuple):
    version: _Version
    since: float
    """When this version was first seen, on this worker's monotonic clock."""
    renewed: bool
    """Whether the version changed while this worker watched: the owner is alive."""


class ClaimOwner(NamedTuple):
    """The last claim on a stream."""

    worker: str
    active: bool
    """Whether the worker has not released it."""


class ClaimBook:
    """The claims on the streams of one dataset, as one worker sees them.

    Args:
        root: The dataset's folder.
        worker: This worker's name. A worker that restarts under the same name takes its own claims back at once, so
            two workers that run at the same time must have different names.
        expiry: Seconds without a renewal after which a claim may be taken over.
        clock: A monotonic clock.
        goal: A text that is equal for workers with the same limits of the run. A stream that a worker with this goal
            has finished is not offered again.

    """

    def __init__(
        self,
        root: Folder,
        worker: str,
        *,
        expiry: float = CLAIM_SECONDS,
        clock: Callable[[], float] = time.monotonic,
        rng: random.Random | None = None,
        goal: str = "",
    ) -> None:
        self.worker, self.expiry = worker, expiry
        self._root, self._clock, self._rng = root, clock, rng or random.Random()
        self._done = f"done-{zlib.crc32(goal.encode()):08x}"
        self._seen: dict[int, _Sighting] = {}
        self._own: dict[int, int] | None = None
        """The claims, by stream, that an earlier process of this worker left behind."""

    def take(self, streams: Iterable[int]) -> Claim | None:
        """Claim one of these streams, preferring those that this worker held before a restart, then the first ones.

        Returns:
            The claim, or None if every stream is claimed by another worker at the moment.

        """
        self._refresh()
        wanted = [stream for stream in streams if not self.is_done(stream)]
        if self._own is None:
            self._own = self._find_own(wanted)
        own = [stream for stream in wanted if self._is_own(stream, self._own)]
        free = [stream for stream in wanted if self._is_free(stream) and stream not in own]
        free.sort(key=self._seen.__contains__)  # A stream that was never claimed has all of its work left.
        count = max(_CHOICES, sum(stream not in self._seen for stream in free) // 4)
        best = free[:count]
        self._rng.shuffle(best)
        for stream in (*own, *best, *free[count:]):
            number = self._seen[stream].version.number + 1 if stream in self._seen else 1
            claim = Claim(self._root, stream, number, self.worker, self.expiry, self._done)
            if claim.create():
                return claim
        return None

    def is_done(self, stream: int) -> bool:
        """Return whether a worker with the same goal had finished the stream at the last listing."""
        return stream in self._seen and self._seen[stream].version.state == self._done

    def all_busy(self, streams: Iterable[int]) -> bool:
        """Return whether the owners of all these streams renewed their claims while this worker watched."""
        return all(stream in self._seen and self._seen[stream].renewed for stream in streams)

    def _refresh(self) -> None:
        now = self._clock()
        for stream, version in _newest(self._root).items():
            before = self._seen.get(stream)
            if before is None or before.version != version:
                alive = before is not None and before.version.number == version.number and not version.released
                self._seen[stream] = _Sighting(version, now, renewed=alive)

    def _is_free(self, stream: int) -> bool:
        seen = self._seen.get(stream)
        return seen is None or seen.version.released or self._clock() - seen.since >= self.expiry

    def _is_own(self, stream: int, own: Mapping[int, int]) -> bool:
        """Return whether an earlier process of this worker holds the stream: one that ended without releasing it."""
        seen = self._seen.get(stream)
        if seen is None or seen.renewed or seen.version.released:
            return False
        return own.get(stream) == seen.version.number

    def _find_own(self, streams: Iterable[int]) -> dict[int, int]:
        """Read the owners of all active claims once, at the start of this process."""
        seen = {stream: self._seen[stream].version for stream in streams if stream in self._seen}
        active = {stream: version.number for stream, version in seen.items() if not version.released}
        calls = (partial(_read_owner, self._root, *each) for each in active.items())
        owners = zip(active.items(), read_ahead(calls, _READERS), strict=True)
        return {stream: number for (stream, number), owner in owners if owner == self.worker}


class Claim:
    """One worker's claim on one stream."""

    def __init__(self, root: Folder, stream: int, number: int, worker: str, expiry: float, done: str) -> None:
        self.stream, self.number, self.worker, self.expiry = stream, number, worker, expiry
        self._root, self._token, self._counter, self._done = root, secrets.token_hex(8), 0, done
        self.finished = False
        """Whether the stream is finished. :meth:`release` then marks it, so that no worker takes it again."""

    def create(self) -> bool:
        """Create the claim; return False if another worker was faster."""
        return self._root.create(claim_key(self.stream, self.number), self._body())

    def renew(self) -> bool:
        """Renew the claim; return False if another worker has taken the stream over."""
        newest = _newest(self._root, self.stream).get(self.stream)
        if newest is not None and newest.number > self.number:
            return False
        self._counter += 1
        self._root.put(claim_key(self.stream, self.number), self._body())
        return True

    def release(self) -> None:
        """Give the stream up, so that another worker may take it at once, unless it is finished."""
        suffix = self._done if self.finished else "released"
        self._root.create(claim_key(self.stream, self.number, suffix), self._body())
        for key, found in _list(self._root, self.stream):
            if found.number < self.number:
                self._root.delete(key)

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

    def owners(self) -> dict[int, ClaimOwner]:
        """Return the last owner of each stream that was ever claimed; an empty name if the claim cannot be read."""
        holdings = {}
        for stream, newest in _newest(self._root).items():
            claim = stream, newest.number
            if claim not in self._owners:
                self._owners[claim] = _read_owner(self._root, *claim)
            holdings[stream] = ClaimOwner(self._owners[claim], active=not newest.released)
        return holdings


def remove_finished_marks(root: Folder, stream: int) -> None:
    """Remove the marks that a stream is finished, before the stream is cleared."""
    for key, version in _list(root, stream):
        if version.state.startswith("done-"):
            root.delete(key)


def _newest(root: Folder, stream: int | None = None) -> dict[int, _Version]:
    found: dict[int, _Version] = {}
    for key, version in _list(root, stream):
        number = int(key.split("/")[1])
        before = found.get(number)
        if before is None or (version.number, version.released) > (before.number, before.released):
            found[number] = version
    return found


def _list(root: Folder, stream: int | None) -> Iterator[tuple[str, _Version]]:
    """Yield the key of each object that belongs to a claim, and what the listing shows of it."""
    for info in root.list(CLAIMS if stream is None else f"{CLAIMS}{stream:04d}/"):
        if claim := parse_claim(info.key):
            yield info.key, _Version(claim[1], claim[2], (info.updated, info.size, info.etag))


def _read_owner(root: Folder, stream: int, number: int) -> str:
    try:
        return str(json.loads(root.get(claim_key(stream, number)))["worker"])
    except (NotFound, ValueError, KeyError, TypeError, RecursionError):
        return ""  # Other programs can write to the bucket too, so a claim that cannot be parsed has no owner.
