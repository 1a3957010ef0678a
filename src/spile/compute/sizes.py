"""Choose sizes for a run on this machine: tokens per batch, parallel writers, batches in memory.

No stored number depends on them.
"""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import jax

from spile.compute.batches import AHEAD, Sizes
from spile.models.architecture import ModelConfig, flops_per_token
from spile.objects import is_remote
from spile.spec.run import AUTO, RunSpec
from spile.spec.sample import Sample

if TYPE_CHECKING:
    from spile.data.samples import SampleReader

_BATCH_TOKENS = {"cpu": (4096, 4096), "gpu": (4096, 32768), "tpu": (4096, 16384)}
"""Least and most tokens per device and batch: enough to keep the device busy, and a fraction of a shard."""
_ROWS = {"cpu": (4096, True), "gpu": (1024, False), "tpu": (1024, False)}
"""Least length of a batch row, and whether the last batch gets a shape of its own. On an accelerator, compiling another
program takes longer than computing the padding of one batch, and attention costs the whole length of a row. A CPU
compiles faster, and longer rows pack better."""
_PROGRAM_FLOPS = 4e11
"""On a CPU, the cost of a batch from which on another program for the last batch takes less time than its padding."""
_MOST_WRITERS = 8
UNRELEASED = 2
"""Batches whose memory is still in use when their place in flight is free."""
_MEMORY_SHARE = 4
"""Rows in flight, and the finished answers of ``infer``, take at most a quarter of the host's memory."""
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def choose_sizes(spec: RunSpec, bytes_per_token: int, config: ModelConfig | None = None) -> Sizes:
    """Choose sizes for this machine, except those that the spec gives."""
    writers = _writers(spec.output)
    tokens = _batch_tokens(spec, bytes_per_token)
    shard_bytes = spec.shard_size_gb * 1e9
    if spec.generation is not None:  # answers wait in memory: one shard is collected, one queued, the others written
        shard_bytes = min(shard_bytes, host_memory() / _MEMORY_SHARE / (writers + 2))
    return Sizes(
        batch_tokens=tokens,
        batch_size=spec.batch_size,
        longest=spec.data.longest,
        shard_bytes=shard_bytes * jax.process_count(),  # each host of a pod writes its own file
        writers=writers,
        # The next shard is uploaded to a bucket while the last one is completed. Hosts of a pod commit in one order.
        finishers=2 if is_remote(spec.output) and jax.process_count() == 1 else None,
        in_flight=_in_flight(writers, tokens, spec.data.longest, bytes_per_token * jax.local_device_count()),
        shortest_row=_ROWS[jax.default_backend()][0],
        short_tail=_ROWS[jax.default_backend()][1] and _needs_own_program(spec, tokens, config),
    )


def sizes_for_stream(sizes: Sizes, spec: RunSpec, reader: SampleReader, groups: int) -> Sizes:
    """Reduce the batch if the samples that are left are few, unless the spec gives a batch size."""
    sizes = replace(sizes, groups=groups)
    if spec.batch_tokens is not None or spec.batch_size is not None or spec.data.prompt.pack:
        return sizes
    lengths = remaining_lengths(reader, sizes.batch_tokens * groups)
    return sizes if lengths is None else sizes.for_samples(lengths, groups)


def remaining_lengths(reader: SampleReader, most: int) -> list[int] | None:
    """Return the lengths of all samples that are left, or None if they have more than ``most`` tokens in total."""
    lengths: list[int] = []
    tokens = 0
    for number, item in enumerate(reader.peek()):
        if isinstance(item, Sample):
            lengths.append(len(item))
            tokens += len(item)
        if tokens > most or number >= most:
            return None
    return lengths


def _needs_own_program(spec: RunSpec, batch_tokens: int, config: ModelConfig | None) -> bool:
    if config is None or spec.backend == "torch":  # PyTorch compiles nothing
        return True
    return flops_per_token(config, min(spec.data.longest, batch_tokens)) * batch_tokens >= _PROGRAM_FLOPS


def _batch_tokens(spec: RunSpec, bytes_per_token: int) -> int:
    """Return the tokens per batch: as the spec says, or what keeps the device busy.

    With ``--batch-size`` alone there is room for that many of the longest samples, unless their length is the automatic
    limit, which few samples reach. Otherwise a batch is at most about a
    quarter of a shard: batches in flight are pinned memory, which takes time to allocate and to release.
    """
    if spec.batch_tokens is not None:
        return spec.batch_tokens
    rows = None if spec.batch_size is None else spec.batch_size * spec.data.longest
    if rows is not None and spec.data.max_seq_length != AUTO:
        return rows
    most = int(spec.shard_size_gb * 1e9 / 4 / bytes_per_token)
    floor, ceiling = _BATCH_TOKENS[jax.default_backend()]
    usual = max(floor, min(ceiling, 1 << max(most, 1).bit_length() - 1))
    return usual if rows is None else min(rows, max(usual, spec.data.longest))


def _writers(output: str) -> int:
    """Return how many shards are filled in parallel: several if an accelerator is faster than one file.

    One for a bucket, whose writer is a buffer in memory and whose upload is parallel by itself, and one per host of a
    pod, whose hosts commit together.
    """
    if jax.default_backend() == "cpu" or is_remote(output) or jax.process_count() > 1:
        return 1
    return min(_MOST_WRITERS, max(1, (os.cpu_count() or 2) // 2))


def _in_flight(writers: int, tokens: int, longest: int, token_bytes: int) -> int:
    """Return how many batches may be in flight, if one of them may also be a single sample of the longest length."""
    memory = host_memory()
    most = memory // _MEMORY_SHARE // (longest * token_bytes) if longest > tokens else memory
    return max(2, min(most, in_flight(writers, tokens * token_bytes, memory)))


def in_flight(writers: int, batch_bytes: int, memory: int) -> int:
    """Return how many batches may be in flight, at least two: one is written while the next is computed.

    One per writer, one waiting behind every second writer, and those ahead; fewer if memory is short. An accelerator's
    pool of pinned memory has the size of a power of two and takes half a second per GiB to allocate, so for several
    writers there are as many batches as fit below a power of two.
    """
    wanted = writers + writers // 2 + AHEAD
    if writers > 1:
        pool = 1 << (wanted * batch_bytes).bit_length() - 1
        wanted = max(writers + 2, pool // batch_bytes - UNRELEASED)
    return max(2, min(wanted, memory // _MEMORY_SHARE // batch_bytes))


def host_memory() -> int:
    """Return the bytes of memory that this host has or that its container may use."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    texts = (Path(name).read_text().strip() for name in _CGROUP_LIMITS if Path(name).is_file())
    return min([total, *(int(text) for text in texts if text.isdigit())])
