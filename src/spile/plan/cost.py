"""What a run will take: tokens, bytes, shards, hours, dollars, storage. Arithmetic over measured or assumed rates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from spile.errors import SpecError
from spile.plan.machines import Machine, Price

__all__ = ["START_SECONDS", "Estimate", "Lengths", "Limit", "Rates", "Volume", "estimate", "refuse_over_budget"]

_HOUR = 3600.0
_ID_BYTES = 4
"""Of a token's id, or its position."""
START_SECONDS = 600.0
"""From asking for a machine to its first shard: it boots, installs, loads the model and compiles. Paid for as well."""


@dataclass(frozen=True)
class Lengths:
    """Samples whose tokens were counted, and how many samples there are in all."""

    counted: Sequence[int]
    samples: int

    def __post_init__(self) -> None:
        if self.samples < 0 or (self.samples and not self.counted):
            raise SpecError("samples to count", expected="at least 1", found=len(self.counted))

    @property
    def whole(self) -> bool:
        """Whether every sample was counted: then nothing is estimated."""
        return len(self.counted) >= self.samples

    @property
    def mean(self) -> float:
        """Tokens per sample."""
        return sum(self.counted) / len(self.counted) if self.counted else 0.0

    @property
    def tokens(self) -> int:
        """In all."""
        return sum(self.counted) if self.whole else round(self.mean * self.samples)

    @property
    def error(self) -> float:
        """The standard error of the total, relative to it."""
        count = len(self.counted)
        if self.whole or count < 2 or not self.mean:
            return 0.0
        variance = sum((length - self.mean) ** 2 for length in self.counted) / (count - 1)
        unseen = 1 - count / self.samples
        return math.sqrt(variance / count * unseen) / self.mean


@dataclass(frozen=True)
class Volume:
    """What is stored."""

    samples: int
    tokens: int
    bytes_per_token: int
    shard_bytes: float
    rows: int | None = None
    """Tokens whose rows are stored; None: all. Then all token ids are stored beside them."""

    @property
    def bytes(self) -> int:
        """In all."""
        if self.rows is None:
            return self.tokens * self.bytes_per_token
        return self.rows * (self.bytes_per_token + _ID_BYTES) + self.tokens * _ID_BYTES

    @property
    def shards(self) -> int:
        """Files, at least."""
        return math.ceil(self.bytes / self.shard_bytes)


@dataclass(frozen=True)
class Rates:
    """What a machine is taken to reach. Assumptions, each of them said with the result."""

    efficiency: float = 0.4
    """Of the chips' peak FLOP/s."""
    sink_bytes: float = 0.5e9
    """Bytes per second and host that the store takes."""
    padding: float = 1.07
    """Computed tokens a real one."""
    start_seconds: float = 0.0
    """Paid for before the first token: boot, installation, loading, compilation."""
    tokens_per_second: float | None = None
    """Measured (``spile bench``), the whole machine; replaces the chips' peak and the efficiency."""

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
class Limit:
    """One thing that bounds the run, and how long it would take were it the only one."""

    name: str
    hours: float


@dataclass(frozen=True)
class Estimate:
    """A run on so many machines of one type."""

    volume: Volume
    machine: Machine
    workers: int
    limits: tuple[Limit, ...]
    storage_month: float
    """Dollars."""
    start_hours: float = 0.0
    """Of every machine, before its first token."""

    @property
    def slowest(self) -> Limit:
        """What bounds it."""
        return max(self.limits, key=lambda limit: limit.hours)

    @property
    def hours(self) -> float:
        """From the request for machines to the last shard, with all workers side by side."""
        return self.start_hours + self.slowest.hours

    @property
    def machine_hours(self) -> float:
        """What is paid for."""
        return self.hours * self.workers

    @property
    def dollars(self) -> Price:
        """The machines; storage comes on top, each month."""
        return self.machine.price.times(self.machine_hours)

    @property
    def tokens_per_second(self) -> float:
        """All workers together."""
        return self.volume.tokens / (self.slowest.hours * _HOUR) if self.slowest.hours else 0.0

    def record(self) -> dict[str, Any]:
        """For ``--json``."""
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
            "limits": [asdict(limit) for limit in self.limits],
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
    """The run's two limits, compute and sink, and what follows from the slower."""
    rates = rates or Rates()
    if workers < 1:
        raise SpecError("--workers", expected="at least 1", found=workers)
    if rates.tokens_per_second is not None:
        compute = volume.tokens / rates.tokens_per_second
    else:
        peak = machine.chips * machine.tflops * 1e12 * rates.efficiency
        compute = volume.tokens * rates.padding * flops_per_token / peak
    sink = volume.bytes / (machine.hosts * rates.sink_bytes)
    limits = tuple(Limit(name, seconds / workers / _HOUR) for name, seconds in (("model", compute), ("sink", sink)))
    storage = volume.bytes / 1e9 * storage_gb_month
    return Estimate(volume, machine, workers, limits, storage, rates.start_seconds / _HOUR)


def refuse_over_budget(found: Estimate, budget: float, *, preemptible: bool) -> None:
    """``--budget``: a run that would cost more is an error that says how much more, and what would fit."""
    cost = found.dollars.preemptible if preemptible else found.dollars.on_demand
    if cost <= budget:
        return
    kind = "preemptible" if preemptible else "on demand"
    start = found.start_hours * found.workers * (cost / found.machine_hours)
    samples = math.floor(found.volume.samples * max(0.0, budget - start) / max(cost - start, 1e-9))
    cheaper = "" if preemptible or found.dollars.preemptible > budget else "--preemptible would fit; or "
    fewer = f"--max-samples {samples} would fit" if samples else "not one sample would fit"
    raise SpecError(
        f"over budget on {found.workers} × {found.machine.name} {kind}",
        expected=f"at most ${budget:,.2f}",
        found=f"${cost:,.2f}",
        fix=cheaper + fewer,
    )
