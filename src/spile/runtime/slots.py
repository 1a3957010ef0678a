"""How many answers at once: the cache's memory is planned before it is asked for."""

from __future__ import annotations

from dataclasses import dataclass

import jax

from spile.errors import SpecError
from spile.planning.amounts import size
from spile.runtime.sizing import host_memory

__all__ = ["SlotPlan", "plan_slots"]


@dataclass(frozen=True)
class SlotPlan:
    """How many answers at once, and in which pieces. No answer depends on it beyond rounding."""

    slots: int
    """Answers per data-parallel group."""
    capacity: int
    """Tokens of prompt and answer that a slot has room for."""
    chunk: int
    """Prompt tokens that one row of the reading program takes: of a prompt's last row half is padding."""
    rows: int
    """Such pieces that it reads at once."""
    stride: int
    """Tokens of an answer per call."""


_SLOTS = {"cpu": 16, "gpu": 256, "tpu": 128}
_CHUNK = {"cpu": 128, "gpu": 256, "tpu": 256}
_READ_TOKENS = {"cpu": 512, "gpu": 8192, "tpu": 4096}
_STRIDE = {"cpu": 8, "gpu": 16, "tpu": 16}
_ALIGNED = 64
"""Tokens of capacity come in so many: fused kernels want whole blocks."""
_CACHE_PART = 0.6
"""Of what the weights leave of a device's memory, the part that the cache may take; the rest is for a call's work."""


def plan_slots(
    longest: int, max_new: int, token_bytes: int, weight_bytes: int, memory: int | None, asked: int | None
) -> SlotPlan:
    """As many answers at a time as asked for, or as are good for this device and its memory holds.

    ``token_bytes``: what one token's keys and values take on a device. ``memory`` is a device's; None: half the host's.
    """
    platform = jax.default_backend()
    chunk = min(_CHUNK[platform], -(-longest // 16) * 16)
    capacity = -(-(longest + max_new) // _ALIGNED) * _ALIGNED
    room = (host_memory() // 2 if memory is None else memory) - weight_bytes
    fitting = int(room * _CACHE_PART) // (token_bytes * capacity)
    wanted = asked or min(_SLOTS[platform], max(fitting, 1))
    if wanted > fitting:
        fix = f"use --batch-size {fitting}" if fitting else "use a smaller --max-seq-length or --max-new-tokens"
        raise SpecError(
            f"a cache for {wanted} answers of {capacity:,} tokens takes {size(wanted * token_bytes * capacity)}",
            expected=f"at most {size(max(0, int(room * _CACHE_PART)))} beside {size(weight_bytes)} of weights",
            found=f"--batch-size {wanted}" if asked else "not room for one",
            fix=fix,
        )
    rows = max(1, min(wanted, _READ_TOKENS[platform] // chunk))
    return SlotPlan(wanted, capacity, chunk, rows, min(_STRIDE[platform], max_new))
