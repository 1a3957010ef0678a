"""Estimate a run: tokens, bytes, shards, hours, dollars, storage. Pure arithmetic over measured or assumed rates."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from spile.errors import SpecError
from spile.planning.machines import Machine, Price

_HOUR = 3600.0
_ID_BYTES = 4
"""Bytes of a token id or a position."""
START_SECONDS = 600.0
"""From the request for a machine to its first batch: boot, installation, loading, compilation. It is paid for too."""


@dataclass(frozen=True)
class Lengths:
    """The lengths of the counted samples, and the number of all samples."""

    counted: Sequence[int]
    samples: int
    head: int | None = None
    """The number of dataset rows that were read, if ``samples`` is an estimate from them."""
    counted_rows: Sequence[int] | None = None
    """The numbers of stored activation rows of the counted samples; None if every token has one."""
    prompts: Sequence[int] = ()
    """The lengths of the counted prompts without a limit; none for packed sequences."""

    @property
    def exact(self) -> bool:
        return len(self.counted) >= self.samples and self.head is None

    @property
    def mean(self) -> float:
        """Tokens per sample."""
        return sum(self.counted) / len(self.counted) if self.counted else 0.0

    @property
    def tokens(self) -> int:
        return self._extrapolate(self.counted)

    @property
    def rows(self) -> int:
        """The number of activation rows that are stored."""
        return self.tokens if self.counted_rows is None else self._extrapolate(self.counted_rows)

    def first(self, samples: int) -> Lengths:
        """Return the lengths of the first samples of the same data."""
        rows = None if self.counted_rows is None else self.counted_rows[:samples]
        return replace(self, samples=samples, counted=self.counted[:samples], counted_rows=rows)

    def _extrapolate(self, counted: Sequence[int]) -> int:
        return sum(counted) if self.exact or not counted else round(sum(counted) / len(counted) * self.samples)

    @property
    def error(self) -> float:
        """The standard error of the number of tokens, relative to it."""
        count = len(self.counted)
        if self.exact or count < 2 or not self.mean:
            return 0.0
        variance = sum((length - self.mean) ** 2 for length in self.counted) / (count - 1)
        unseen = max(0.0, 1 - count / self.samples)
        return math.sqrt(variance / count * unseen) / self.mean


@dataclass(frozen=True)
class Volume:
    """What a run stores."""

    samples: int
    tokens: int
    bytes_per_token: int
    shard_bytes: float
    rows: int | None = None
    """Tokens whose rows are stored; None means all. If only some are, the ids of all tokens are stored too."""

    @property
    def bytes(self) -> int:
        if self.rows is None:
            return self.tokens * self.bytes_per_token
        return self.rows * (self.bytes_per_token + _ID_BYTES) + self.tokens * _ID_BYTES

    @property
    def shards(self) -> int:
        """The least number of shards."""
        return math.ceil(self.bytes / self.shard_bytes)


@dataclass(frozen=True)
class Rates:
    """Assumed rates of a machine. Each assumption is shown with the result."""

    efficiency: float = 0.4
    """Fraction of the peak FLOP/s of the chips."""
    sink_bytes: float = 0.5e9
    """Bytes per second that one host can store."""
    padding: float = 1.07
    """Computed tokens per real token."""
    start_seconds: float = 0.0
    """Seconds before the first batch: boot, installation, loading, compilation."""
    tokens_per_second: float | None = None
    """Measured rate of the whole machine (``python -m bench.limits``); replaces peak and efficiency."""

    def __post_init__(self) -> None:
        for name in ("efficiency", "sink_bytes", "padding", "tokens_per_second"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise SpecError(f"--{name.replace('_', '-')}", expected="more than 0", found=f"{value:g}")
        if not 0 <= self.start_seconds < math.inf:
            raise SpecError("--start-minutes", expected="0 or more", found=f"{self.start_seconds / 60:g}")
        if self.efficiency > 1:
            raise SpecError("--efficiency", expected="at most 1", found=self.efficiency)


@dataclass(frozen=True)
class Estimate:
    """The estimate of a run on several machines of one type."""

    volume: Volume
    machine: Machine
    workers: int
    limits: Mapping[str, float]
    """For each stage, the hours that it would take alone."""
    storage_month: float
    """Dollars."""
    start_hours: float = 0.0
    """Hours of each machine before its first batch."""

    @property
    def slowest(self) -> str:
        return max(self.limits, key=self.limits.__getitem__)

    @property
    def run_hours(self) -> float:
        """From the first batch to the last shard."""
        return self.limits[self.slowest]

    @property
    def hours(self) -> float:
        """From the request for machines to the last shard, with all workers in parallel."""
        return self.start_hours + self.run_hours

    @property
    def machine_hours(self) -> float:
        return self.hours * self.workers

    @property
    def dollars(self) -> Price:
        """The price of the machines, without storage."""
        return self.machine.price.times(self.machine_hours)

    @property
    def tokens_per_second(self) -> float:
        """The rate of all workers together."""
        return self.volume.tokens / (self.run_hours * _HOUR) if self.run_hours else 0.0

    def full_shard_seconds(self) -> float:
        """Return the seconds that one worker needs to fill a shard."""
        seconds = self.run_hours * _HOUR * self.workers
        return seconds * self.volume.shard_bytes / self.volume.bytes if seconds else 0.0

    def shard_bytes(self, commit_every: float | None) -> float:
        """Return the size of most shards: a commit closes a shard that is not full."""
        seconds = self.full_shard_seconds()
        part = 1.0 if commit_every is None or seconds <= commit_every else commit_every / seconds
        return min(self.volume.bytes / self.workers, self.volume.shard_bytes * part)

    def record(self) -> dict[str, Any]:
        """Return the fields for ``--json``."""
        return {
            "machine": self.machine.name,
            "topology": self.machine.topology,
            "chips": self.machine.chips,
            "hosts": self.machine.hosts,
            "workers": self.workers,
            "samples": self.volume.samples,
            "tokens": self.volume.tokens,
            "rows": self.volume.tokens if self.volume.rows is None else self.volume.rows,
            "bytes_per_token": self.volume.bytes_per_token,
            "bytes": self.volume.bytes,
            "shards": self.volume.shards,
            "limits": [{"name": name, "hours": hours} for name, hours in self.limits.items()],
            "start_hours": self.start_hours,
            "hours": self.hours,
            "tokens_per_second": self.tokens_per_second,
            "dollars": asdict(self.dollars),
            "storage_month": self.storage_month,
        }


def estimate(
    volume: Volume,
    machine: Machine,
    *,
    flops_per_token: float,
    rates: Rates | None = None,
    workers: int = 1,
    storage_gb_month: float = 0.0,
) -> Estimate:
    """Estimate a run from its two limits: computing and storing."""
    rates = rates or Rates()
    if workers < 1:
        raise SpecError("--workers", expected="at least 1", found=workers)
    if rates.tokens_per_second is not None:
        compute = volume.tokens / rates.tokens_per_second
    else:
        peak = machine.chips * machine.tflops * 1e12 * rates.efficiency
        compute = volume.tokens * rates.padding * flops_per_token / peak
    sink = volume.bytes / (machine.hosts * rates.sink_bytes)
    limits = {name: seconds / workers / _HOUR for name, seconds in (("model", compute), ("sink", sink))}
    storage = volume.bytes / 1e9 * storage_gb_month
    return Estimate(volume, machine, workers, limits, storage, rates.start_seconds / _HOUR)


def refuse_over_budget(estimated: Estimate, budget: float, *, preemptible: bool) -> None:
    """Refuse a run that costs more than ``--budget``; the error says what would fit."""
    cost = estimated.dollars.preemptible if preemptible else estimated.dollars.on_demand
    if cost <= budget:
        return
    kind = "preemptible" if preemptible else "on demand"
    start = estimated.start_hours * estimated.workers * (cost / estimated.machine_hours)
    samples = math.floor(estimated.volume.samples * max(0.0, budget - start) / max(cost - start, 1e-9))
    cheaper = "" if preemptible or estimated.dollars.preemptible > budget else "--preemptible would fit, or "
    fewer = f"--max-samples {samples} would fit" if samples else "not one sample would fit"
    raise SpecError(
        f"over budget on {estimated.workers} × {estimated.machine.name} {kind}",
        expected=f"at most ${budget:,.2f}",
        found=f"${cost:,.2f}",
        fix=cheaper + fewer,
    )
