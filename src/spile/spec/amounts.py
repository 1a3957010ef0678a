"""Format bytes, seconds and rates with three digits for display, and parse amounts."""

from __future__ import annotations

import re

from spile.errors import SpecError

_NEARLY = 0.9995
"""A value that rounds up to the next unit is shown in that unit, to avoid ``1e+03 kB``."""


def amount(value: float) -> str:
    """Format a number: ``1.23 M``, ``456 k``, ``78``."""
    for limit, unit, scale in ((1e9 * _NEARLY, "G", 1e9), (1e6 * _NEARLY, "M", 1e6), (1e4, "k", 1e3)):
        if value >= limit:
            return f"{_digits(value / scale)} {unit}"
    return f"{value:,.0f}"


def size(count: float) -> str:
    """Format bytes in decimal units: ``1.05 GB``."""
    for limit, unit in ((1e15, "PB"), (1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if count >= limit * _NEARLY:
            return f"{_digits(count / limit)} {unit}"
    return f"{count:.0f} bytes"


def _digits(value: float) -> str:
    return f"{value:.3g}" if value < 999.5 else f"{value:,.0f}"


def duration(seconds: float) -> str:
    """Format seconds: ``12 s``, ``3 min 20 s``, ``5 h 12 min``, ``3 d 4 h``."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    for large, small, names in ((86400, 3600, ("d", "h")), (3600, 60, ("h", "min")), (60, 1, ("min", "s"))):
        if whole >= large:
            rest = whole % large // small
            return f"{whole // large} {names[0]}" + (f" {rest} {names[1]}" if rest else "")
    return f"{whole} s"


def counted(count: int, noun: str) -> str:
    """Format a count with its noun: ``1 shard``, ``2 shards``, ``1,048 shards``."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


_AMOUNT = re.compile(r"(\d+(?:\.\d+)?) ?([kMGTP]?)(i?)", re.ASCII | re.IGNORECASE)


def parse_amount(flag: str, text: str, unit: str = "") -> int:
    """Parse ``100M``, ``1.5k`` or ``4096``; with ``unit`` B also ``1GB`` and ``1GiB``."""
    found = _AMOUNT.fullmatch(text.strip().replace("_", "").removesuffix(unit or " "))
    if found is None or (found[3] and not (unit and found[2])):
        example = "1GB, 500MB or 4096" if unit else "100M, 500k or 4096"
        raise SpecError(flag, expected=f"an amount such as {example}", found=repr(text))
    step = 1024 if found[3] else 1000
    return int(float(found[1]) * step ** " kmgtp".index(found[2].lower() or " "))
