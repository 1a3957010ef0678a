"""How much at once: tokens per batch, shards side by side, batches in memory. No stored number depends on it."""

from __future__ import annotations

import os
from pathlib import Path

import jax

from spile.models.architecture import ModelConfig
from spile.models.tensors import flops_per_token
from spile.objects.opening import is_remote
from spile.spec.run import ExtractSpec
from spile.worker.pipeline import AHEAD
from spile.worker.worker import Sizes

__all__ = ["IN_HAND", "choose_sizes", "host_memory", "in_flight"]

_BATCH_TOKENS = {"cpu": (4096, 4096), "gpu": (4096, 32768), "tpu": (4096, 16384)}
"""Tokens per device and step, at least and at most: enough to keep it busy, and its rows a fraction of a shard."""
_ROWS = {"cpu": (4096, True), "gpu": (1024, False), "tpu": (1024, False)}
"""How short a row may be, and whether a last batch has a shape of its own. A program costs an accelerator's compiler
seconds, more than it takes to compute the padding of one batch, and its attention costs a row's whole length; a CPU's
does not, and a longer row fills better."""
_PROGRAM_FLOPS = 4e11
"""What a CPU takes some seconds for: the padding of a last batch costs more than to compile a program for it."""
_MOST_LANES = 8
IN_HAND = 2
"""Batches whose memory is not free yet when their place in flight is: one more than fits would double the pool."""
_MEMORY_SHARE = 4
"""Rows in flight take at most one part in so many of the host's memory."""
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def choose_sizes(spec: ExtractSpec, bytes_per_token: int, config: ModelConfig | None = None) -> Sizes:
    """What this machine does best with a spec, where the spec does not say."""
    lanes = _lanes(spec.output)
    tokens = _batch_tokens(spec, bytes_per_token)
    return Sizes(
        batch_tokens=tokens,
        batch_size=spec.batch_size,
        longest=spec.data.max_seq_length,
        shard_bytes=spec.shard_size_gb * 1e9 * jax.process_count(),  # each host has a file of its own
        lanes=lanes,
        finishers=_finishers(spec.output),
        in_flight=in_flight(lanes, tokens * bytes_per_token * jax.local_device_count(), host_memory()),
        shortest_row=_ROWS[jax.default_backend()][0],
        short_tail=_ROWS[jax.default_backend()][1] and _worth_a_program(spec, tokens, config),
    )


def _worth_a_program(spec: ExtractSpec, batch_tokens: int, config: ModelConfig | None) -> bool:
    if config is None or spec.backend == "torch":  # which compiles nothing
        return True
    return flops_per_token(config, spec.data.max_seq_length) * batch_tokens >= _PROGRAM_FLOPS


def _batch_tokens(spec: ExtractSpec, bytes_per_token: int) -> int:
    """As asked; with ``--batch-size`` alone, room for that many of the longest samples.

    Else what keeps the device busy, but no more rows than about a quarter of a shard's: what is in flight is pinned
    memory, which takes a run's start to get and its end to give back.
    """
    if spec.batch_tokens is not None:
        return spec.batch_tokens
    if spec.batch_size is not None:
        return spec.batch_size * spec.data.max_seq_length
    most = int(spec.shard_size_gb * 1e9 / 4 / bytes_per_token)
    floor, ceiling = _BATCH_TOKENS[jax.default_backend()]
    return max(floor, min(ceiling, 1 << max(most, 1).bit_length() - 1))


def _lanes(output: str) -> int:
    """Shards to fill side by side: several where an accelerator is faster than one file.

    One where the sink is a bucket, whose writer is a buffer in memory and whose upload is parallel by itself; and one
    per host on a pod, whose hosts commit together.
    """
    if jax.default_backend() == "cpu" or is_remote(output) or jax.process_count() > 1:
        return 1
    return min(_MOST_LANES, max(1, (os.cpu_count() or 2) // 2))


def _finishers(output: str) -> int | None:
    """Two for a bucket: the next shard goes up while the last one's parts become an object and its commit is made.

    One per host on a pod, whose hosts commit together and in one order.
    """
    return 2 if is_remote(output) and jax.process_count() == 1 else None


def in_flight(lanes: int, batch_bytes: int, memory: int) -> int:
    """A batch in each lane, one waiting behind every second, and those ahead; fewer where memory is short.

    Never fewer than two: one is written while the next is computed. An accelerator's pool of pinned memory has the size
    of a power of two and takes half a second per GiB, so that for several lanes there are as many as fit below one.
    """
    wanted = lanes + lanes // 2 + AHEAD
    if lanes > 1:
        pool = 1 << (wanted * batch_bytes).bit_length() - 1
        wanted = max(lanes + 2, pool // batch_bytes - IN_HAND)
    return max(2, min(wanted, memory // _MEMORY_SHARE // batch_bytes))


def host_memory() -> int:
    """Bytes that this host has, or that its container may use."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    texts = (Path(name).read_text().strip() for name in _CGROUP_LIMITS if Path(name).is_file())
    return min([total, *(int(text) for text in texts if text.isdigit())])
