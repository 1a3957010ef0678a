"""A run as a cluster's job: what Kubernetes and Slurm are told alike."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from spile.errors import SpecError

__all__ = ["ClusterJob"]

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]*[a-z0-9])?")
_LONGEST = 48
"""A label has 63 characters, and a pod's name adds the stream's and the host's number."""


@dataclass(frozen=True)
class ClusterJob:
    """One worker per stream, each one process or a slice of many hosts."""

    name: str
    words: tuple[str, ...]
    """``spile extract`` and its flags, without those that say which stream and which host."""
    streams: tuple[int, ...]
    root: str
    """The dataset's home."""
    workers: int | None = None
    """Streams worked on at once; None: all."""
    hosts: int = 1
    env: Mapping[str, str] = field(default_factory=dict)
    grace: int = 120
    """Seconds from the request to end until the kill: a worker commits its shard in them."""
    tries: int = 6
    """Attempts more after a worker's own errors."""
    cpus: int | None = None
    memory_gb: int | None = None

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or len(self.name) > _LONGEST:
            expected = f"small letters, digits and dashes, {_LONGEST} at most"
            raise SpecError("--name", expected=expected, found=repr(self.name))
        if not self.streams:
            raise SpecError("no streams", expected="--num-streams N, or a --dataset-dir that holds some")
        for flag, value, least in (
            ("--num-workers", self.workers, 1),
            ("--hosts-per-worker", self.hosts, 1),
            ("--cpus", self.cpus, 1),
            ("--memory-gb", self.memory_gb, 1),
            ("--retries", self.tries, 0),
        ):
            if value is not None and value < least:
                raise SpecError(flag, expected=f"{least} or more", found=str(value))
        if not 10 <= self.grace <= 3600:
            raise SpecError("--grace", expected="from 10 to 3,600 seconds", found=str(self.grace))

    @property
    def at_once(self) -> int:
        """Streams worked on at once."""
        return min(self.workers or len(self.streams), len(self.streams))

    @property
    def indexed(self) -> bool:
        """Whether the streams are 0, 1, 2, … as a job's own indexes are."""
        return self.streams == tuple(range(len(self.streams)))
