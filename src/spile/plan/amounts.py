"""Amounts for people: bytes, seconds and rates in three digits."""

from __future__ import annotations

__all__ = ["amount", "counted", "duration", "size"]


def amount(value: float) -> str:
    """``1.23 M``, ``456 k``, ``78``."""
    for limit, unit in ((1e9, " G"), (1e6, " M"), (1e4, " k")):
        if value >= limit:
            scaled = value / (1e3 if unit == " k" else limit)
            return f"{scaled:.3g}{unit}" if scaled < 1000 else f"{scaled:,.0f}{unit}"
    return f"{value:,.0f}"


def size(count: float) -> str:
    """Bytes in powers of ten, as disks and buckets are sold: ``1.05 GB``."""
    for limit, unit in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= limit:
            return f"{count / limit:.3g} {unit}"
    return f"{count:.0f} bytes"


def duration(seconds: float) -> str:
    """``12 s``, ``3 min 20 s``, ``5 h 12 min``, ``3 d 4 h``."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for large, small, names in ((86400, 3600, ("d", "h")), (3600, 60, ("h", "min")), (60, 1, ("min", "s"))):
        if whole >= large:
            rest = whole % large // small
            return f"{whole // large} {names[0]}" + (f" {rest} {names[1]}" if rest else "")
    return f"{whole} s"


def counted(count: int, noun: str) -> str:
    """``1 shard``, ``2 shards``, ``1,048 shards``."""
    return f"{count:,} {noun}{'s' * (count != 1)}"
