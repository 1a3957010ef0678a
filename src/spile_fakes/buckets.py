"""The content of the fake GCS, in memory: buckets, objects with generations and checksums, and unfinished uploads."""

from __future__ import annotations

import itertools
import random
import threading
import time
from bisect import bisect_left
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import Literal, get_args
from urllib.parse import unquote

from spile.objects.crc import crc32c, to_base64


def crc32c_base64(*pieces: bytes) -> str:
    """Return the CRC32C in the form that GCS uses."""
    value = 0
    for piece in pieces:
        value = crc32c(piece, value)
    return to_base64(value)


@dataclass(frozen=True)
class Stored:
    """One object."""

    pieces: tuple[bytes, ...]
    """The pieces as they were sent. They are joined at the first read, to keep benchmarks of writes fast."""
    generation: int
    updated: float
    crc32c: str
    content_type: str

    @cached_property
    def data(self) -> bytes:
        """The whole content."""
        return b"".join(self.pieces)

    @property
    def size(self) -> int:
        """The size in bytes."""
        return sum(map(len, self.pieces))

    @property
    def etag(self) -> str:
        """A tag that changes with the content."""
        return f'"{self.generation}"'


@dataclass
class Upload:
    """A multipart upload that is not finished."""

    bucket: str
    key: str
    started: float
    content_type: str
    parts: dict[int, tuple[str, bytes]] = field(default_factory=dict)


@dataclass
class FakeBucket:
    """One bucket: objects by key."""

    location: str = "US-CENTRAL1"
    objects: dict[str, Stored] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    """Permissions that the caller does not have."""
    bindings: list[dict[str, object]] | None = field(default_factory=list)
    """The bindings of the IAM policy; None if the policy may not be read."""
    _sorted: list[str] | None = None

    def keys(self) -> list[str]:
        """Return the sorted keys. The list is cached until a key is added or removed."""
        if self._sorted is None:
            self._sorted = sorted(self.objects)
        return self._sorted

    def page(self, prefix: str, delimiter: str, after: str, limit: int) -> tuple[list[str], list[str], str | None]:
        """Return a page of keys, the folded prefixes, and where the next page begins."""
        keys = self.keys()
        last = after
        found: list[str] = []
        folded: list[str] = []
        for key in itertools.islice(keys, bisect_left(keys, max(prefix, after)), None):
            if not key.startswith(prefix):
                break
            if key <= after:
                continue
            if len(found) + len(folded) == limit:
                return found, folded, last
            rest = key[len(prefix) :]
            if delimiter and delimiter in rest:
                name = prefix + rest.partition(delimiter)[0] + delimiter
                if name not in folded and not after.startswith(name):
                    folded.append(name)
            else:
                found.append(key)
            last = key
        return found, folded, None


class Buckets:
    """All buckets, behind one lock, so that each request is atomic."""

    def __init__(self, base: str = "") -> None:
        self.base = base
        """The server's URL, for links in its replies."""
        self.lock = threading.RLock()
        self.buckets: dict[str, FakeBucket] = {}
        self.uploads: dict[str, Upload] = {}
        self._generations = itertools.count(time.time_ns() // 1000)
        self._ids = itertools.count(1)

    def store(self, bucket: str, key: str, *pieces: bytes, content_type: str = "") -> Stored:
        """Create or replace an object."""
        content_type, checksum = content_type or "application/octet-stream", crc32c_base64(*pieces)
        with self.lock:
            home = self.buckets[bucket]
            stored = Stored(pieces, next(self._generations), time.time(), checksum, content_type)
            if key not in home.objects:
                home._sorted = None
            home.objects[key] = stored
        return stored

    def remove(self, bucket: str, key: str) -> bool:
        """Remove an object; return False if there is none."""
        with self.lock:
            home = self.buckets[bucket]
            home._sorted = None
            return home.objects.pop(key, None) is not None

    def damage(self, bucket: str, key: str, at: int = 0) -> None:
        """Flip a byte of a stored object without changing its checksums."""
        with self.lock:
            stored = self.buckets[bucket].objects[key]
            data = bytearray(stored.data)
            data[at] ^= 0x20
            self.buckets[bucket].objects[key] = replace(stored, pieces=(bytes(data),))

    def begin(self, bucket: str, key: str, content_type: str = "") -> str:
        """Start an upload and return its id."""
        with self.lock:
            name = f"upload-{next(self._ids)}"
            self.uploads[name] = Upload(bucket, key, time.time(), content_type)
            return name


FaultKind = Literal["status", "status_after", "reset", "reset_after", "truncate", "slow", "hang"]


@dataclass
class Fault:
    """A rule that makes requests fail. It matches by method and by a part of the target, ``count`` times."""

    kind: FaultKind
    status: int = 503
    method: str | None = None
    target: str = ""
    """Text that the unquoted path and query must contain."""
    skip: int = 0
    """The number of matching requests that succeed first."""
    count: int = 1
    """The number of matching requests that fail; -1 for all."""
    seconds: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(FaultKind):
            raise ValueError(f"unknown fault {self.kind}, expected one of {', '.join(get_args(FaultKind))}")

    def matches(self, method: str, target: str) -> bool:
        """Return whether this request matches."""
        return self.count != 0 and self.method in (None, method) and self.target in unquote(target)


@dataclass
class Faults:
    """The active rules and how often each was applied."""

    rules: list[Fault] = field(default_factory=list)
    spoiled: dict[str, int] = field(default_factory=dict)
    requests: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, kind: FaultKind, **options: object) -> None:
        self.extend([Fault(kind, **options)])  # type: ignore[arg-type]

    def extend(self, rules: list[Fault]) -> None:
        """Add rules after the existing ones."""
        with self._lock:
            self.rules.extend(rules)

    def clear(self) -> None:
        with self._lock:
            self.rules.clear()

    def strike(self, method: str, target: str) -> Fault | None:
        """Return the fault for this request, if any, and count it."""
        with self._lock:
            self.requests += 1
            for rule in self.rules:
                if rule.matches(method, target):
                    if rule.skip > 0:
                        rule.skip -= 1
                        continue
                    rule.count -= rule.count > 0
                    self.spoiled[rule.kind] = self.spoiled.get(rule.kind, 0) + 1
                    return rule
        return None

    def report(self) -> dict[str, object]:
        """Return the state for the admin endpoint."""
        with self._lock:
            rules = [asdict(rule) for rule in self.rules]
            return {"requests": self.requests, "spoiled": dict(self.spoiled), "rules": rules}


def random_faults(seed: int, count: int, requests: int = 40) -> list[Fault]:
    """Return temporary faults spread over about ``requests`` requests; the same seed gives the same faults."""
    dice = random.Random(seed)
    kinds: list[FaultKind] = ["status", "status_after", "reset", "reset_after", "truncate", "slow"]
    rules = []
    for _ in range(count):
        kind = dice.choice(kinds)
        status = dice.choice([408, 429, 500, 502, 503, 504])
        method = dice.choice([None, None, "PUT", "POST", "GET"])
        rules.append(
            Fault(kind, status, method, skip=dice.randrange(requests), count=dice.choice([1, 1, 2]), seconds=0.02)
        )
    return rules


class Throttle:
    """A limit on the bytes per second of all connections together. There is no limit until one is set."""

    def __init__(self) -> None:
        self.rate: float | None = None
        self._free = 0.0
        self._lock = threading.Lock()

    def take(self, count: int, since: float | None = None) -> float:
        """Wait until ``count`` bytes may pass; return that time.

        ``since`` is when the previous bytes of the same body passed. These bytes were waiting behind them, so a thread
        that wakes up late on a busy machine does not count as an idle connection.
        """
        now = time.monotonic()
        rate = self.rate
        if not rate:
            return now
        with self._lock:
            self._free = end = max(self._free, now if since is None else since) + count / rate
        if end > now:
            time.sleep(end - now)
        return end
