"""What ``--max-seq-length auto`` stands for: the longest sample that the model takes and a device has memory for."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import NamedTuple

import jax

from spile.compute.mesh import device_memory
from spile.compute.sizes import host_memory
from spile.errors import SpecError
from spile.models.architecture import WEIGHTS_FRACTION, ModelConfig, parameter_count
from spile.models.generation import token_bytes
from spile.spec.amounts import size
from spile.spec.identity import RunIdentity
from spile.spec.run import AUTO, RunSpec
from spile.spec.taps import Tap

_UNLIMITED, _LEAST = 32_768, 1024
"""The automatic limit of a model that states none, and the smallest limit that a lack of memory leads to."""
_SHARES = {True: 0.6, False: 0.8}
"""The part of the memory of a host, which others use too, and of an accelerator that a run may plan with."""
_ROWS = 3
"""Batches whose rows are in memory at once."""
_SCORES = 1024 * 4 * 2
"""Bytes of attention scores per key and head: chunks of queries in float32, and their weights."""


class Room(NamedTuple):
    """The memory for one batch."""

    memory: int
    """Bytes of a device; of the host, for a CPU."""
    devices: int = 1
    """The devices that the weights can be divided over."""
    host: bool = False
    """Whether this is the memory of a host."""

    @property
    def usable(self) -> float:
        """The bytes that a run may plan with."""
        return _SHARES[self.host] * self.memory


def room_here(backend: str) -> Room:
    """Return the room on this machine."""
    memory = None if backend == "torch" else device_memory()
    if memory is None:
        return Room(_cuda_memory() or host_memory(), host=backend != "torch" or _cuda_memory() is None)
    return Room(memory, jax.device_count())


def _cuda_memory() -> int | None:
    """Return the memory of PyTorch's GPU, if this process uses one."""
    import sys

    torch = sys.modules.get("torch")
    return int(torch.cuda.mem_get_info()[1]) if torch is not None and torch.cuda.is_initialized() else None


def memory_needed(length: int, spec: RunSpec, config: ModelConfig, taps: Iterable[Tap], row: int, room: Room) -> int:
    """Return the memory of a device for a batch of one sample of this length; ``row``: the stored bytes of a token."""
    dtype = spec.dtype if spec.dtype != AUTO else "float32" if room.host else "bfloat16"
    item, parts = (4 if dtype == "float32" else 2), 1
    weights = item * parameter_count(config)
    while weights / parts > WEIGHTS_FRACTION * room.memory and parts < room.devices:
        parts *= 2
    inner = config.d_ff * (config.experts.per_token if config.experts else 1)
    heads = (config.n_heads + 2 * config.n_kv_heads) * config.head_dim
    token = item * (6 * config.d_model + 3 * heads + 3 * inner)
    if any(tap.gradient for tap in taps):  # the backward pass needs what every layer computed
        token *= config.n_layers
    token += _ROWS * row + (0 if room.host else _SCORES * config.n_heads // parts)
    if spec.generation is not None:
        token += token_bytes(config, dtype)
    return weights // parts + length * token


def model_limit(spec: RunSpec, config: ModelConfig, learned: int | None) -> int | None:
    """Return the longest sample that the model takes, room for the answer left; None if it states no limit.

    ``learned``: the number of learned positions, which no sample can exceed.
    """
    answer, stated = 0, config.positions
    if spec.generation is not None:
        answer = spec.generation.max_new_tokens
        learned = config.rope.original_length if config.rope.kind == "longrope" else learned
    if learned is not None:
        stated = min(learned, stated or learned)
    elif stated is not None and stated <= answer:  # rotations go on beyond it
        answer = 0
    return None if stated is None else stated - answer


def automatic_length(
    spec: RunSpec, config: ModelConfig, taps: Iterable[Tap], row: int, rooms: Iterable[Room], learned: int | None = None
) -> int:
    """Return the limit of the model, or the largest power of two below it that every machine has memory for."""
    stated, taps, rooms = model_limit(spec, config, learned), list(taps), list(rooms)
    limit = _UNLIMITED if stated is None else stated
    if limit < 1 and spec.generation is not None:
        most = limit + spec.generation.max_new_tokens
        raise SpecError(
            "--max-new-tokens",
            expected=f"fewer than {most}, the positions that {spec.model} has learned",
            found=spec.generation.max_new_tokens,
        )
    length = limit
    while length > _LEAST and any(memory_needed(length, spec, config, taps, row, room) > room.usable for room in rooms):
        length = max(_LEAST, 1 << (length - 1).bit_length() - 1)
    return min(length, limit)


def with_length(
    spec: RunSpec,
    existing: RunIdentity | None,
    config: ModelConfig,
    taps: Iterable[Tap],
    row: int,
    room: Callable[[], Room],
    learned: int | None = None,
) -> RunSpec:
    """Return the spec with its automatic limit of length resolved: that of the existing run, else of this machine.

    Raises:
        SpecError: The limit is larger than the learned positions of the model, or this machine cannot hold a sample of
            the length that the run was created with.

    """
    data, answer = spec.data, 0 if spec.generation is None else spec.generation.max_new_tokens
    if data.max_seq_length != AUTO:
        if learned is not None and data.longest + answer > learned:
            raise SpecError(
                "--max-seq-length and --max-new-tokens together" if answer else "--max-seq-length",
                expected=f"at most {learned}, the positions that {spec.model} has learned",
                found=data.longest + answer,
                fix=f"add --max-seq-length {max(1, learned - answer)}",
            )
        return spec
    if existing is None:
        length = automatic_length(spec, config, taps, row, [room()], learned)
        return replace(spec, data=replace(data, resolved_length=length))
    here, length, taps = room(), existing.max_seq_length, list(taps)
    if length > _LEAST and (needed := memory_needed(length, spec, config, taps, row, here)) > here.memory:
        fits = automatic_length(spec, config, taps, row, [here], learned)
        raise SpecError(
            f"this machine cannot hold samples of {length:,} tokens, the limit of the run in {spec.output}",
            expected=f"about {size(needed)} of memory",
            found=size(here.memory),
            fix=f"use a machine with more memory, or begin another run with --max-seq-length {fits}",
        )
    return replace(spec, data=data.of_run(length, existing.long))
