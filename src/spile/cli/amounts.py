"""Amounts for people, as :mod:`spile.plan.amounts` writes them."""

from __future__ import annotations

from spile.plan.amounts import amount, duration, size

__all__ = ["amount", "duration", "size"]
