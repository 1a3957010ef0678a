"""Causal attention with grouped heads: a table of implementations that agree to rounding.

All take queries ``[batch, seq, heads, head_dim]`` and keys and values with fewer heads, and a window: how many
positions a token sees, itself included (None: all before it). Padding stands on the right, where no real token looks.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from spile.spec.architecture import ModelConfig

__all__ = ["ATTENTIONS", "Attention", "choose", "cudnn", "flash", "over_mesh", "precision", "xla"]

Queries = Float[Array, "batch seq heads head_dim"]
Keys = Float[Array, "batch seq kv_heads head_dim"]


@runtime_checkable
class Attention(Protocol):
    """One implementation."""

    def __call__(self, q: Array, k: Array, v: Array, *, window: int | None) -> Array:
        """Softmax(q·k / √head_dim)·v under the causal mask and the window."""


def precision(dtype: DTypeLike) -> jax.lax.Precision:
    """float32 means float32, on accelerators too; bfloat16 products are exact in float32 anyway."""
    return jax.lax.Precision.HIGHEST if np.dtype(dtype) == np.float32 else jax.lax.Precision.DEFAULT


def _chunk(length: int) -> int:
    """Queries at a time: a causal chunk skips the keys after it, and only a chunk's scores exist at once."""
    return min(length, max(256, min(1024, -(-length // 8))))


def xla(q: Queries, k: Keys, v: Keys, *, window: int | None) -> Queries:
    """Plain XLA, chunk by chunk of the queries; keys and values are never repeated for their groups.

    A group's queries lie behind one another, so that each product is one matrix product a key/value head: on a CPU
    two to three times as fast as the same sums written over separate axes.
    """
    batch, length, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    grouped = q.reshape(batch, length, kv_heads, heads // kv_heads, head_dim).transpose(0, 2, 3, 1, 4)
    k, v = k.transpose(0, 2, 3, 1), v.transpose(0, 2, 1, 3)
    size = _chunk(length)
    chunks = []
    for start in range(0, length, size):
        stop = min(start + size, length)
        first = 0 if window is None else max(0, start - window + 1)
        part = grouped[:, :, :, start:stop]
        chunks.append(_attend(part, k[..., first:stop], v[:, :, first:stop], start - first, window))
    out = chunks[0] if len(chunks) == 1 else jnp.concatenate(chunks, axis=3)
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, head_dim)


def _attend(q: Array, k: Array, v: Array, offset: int, window: int | None) -> Array:
    """Queries ``[b, kv, g, s, d]`` that start ``offset`` positions after the first key; softmax in float32."""
    batch, kv_heads, groups, length, head_dim = q.shape
    product = functools.partial(jnp.matmul, precision=precision(q.dtype), preferred_element_type=jnp.float32)
    scores = product(q.reshape(batch, kv_heads, groups * length, head_dim), k)
    ahead = (offset + np.arange(length))[:, None] - np.arange(k.shape[-1])[None, :]
    seen = (ahead >= 0) if window is None else (ahead >= 0) & (ahead < window)
    mask = jnp.asarray(np.where(seen, 0, -np.inf).astype(np.float32))
    scores = scores.reshape(batch, kv_heads, groups, length, -1) * jnp.float32(head_dim**-0.5) + mask
    weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    out = product(weights.astype(q.dtype).reshape(batch, kv_heads, groups * length, -1), v)
    return (out.reshape(q.shape) / total).astype(q.dtype)


def cudnn(q: Queries, k: Keys, v: Keys, *, window: int | None) -> Queries:
    """The fused kernel of cuDNN: 16-bit floats on an NVIDIA GPU."""
    local: Any = None if window is None else (window - 1, 0)
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, local_window_size=local, implementation="cudnn")


_LANES = 128


def flash(q: Queries, k: Keys, v: Keys, *, window: int | None, interpret: bool = False) -> Queries:
    """The Pallas splash kernel for TPUs: scores exist a block at a time. Pads the sequence to a block inside."""
    length = q.shape[1]
    scale = jnp.asarray(q.shape[-1] ** -0.5, jnp.float32)  # the kernel has no scale of its own
    q = (q.astype(jnp.float32) * scale).astype(q.dtype)
    padding = [(0, 0), (0, 0), (0, -length % _LANES), (0, 0)]
    q, k, v = (jnp.pad(x.transpose(0, 2, 1, 3), padding) for x in (q, k, v))
    kernel = _splash(q.shape[1], q.shape[2], window, interpret)
    out: Array = jax.vmap(kernel)(q, k, v)[:, :, :length].transpose(0, 2, 1, 3)
    return out


@functools.lru_cache(maxsize=256)
def _splash(heads: int, length: int, window: int | None, interpret: bool) -> Any:
    """One kernel a shape; its block tables are made outside the trace that first asks, so that others may share it."""
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        BlockSizes,
        CausalMask,
        LocalMask,
        MultiHeadMask,
        make_splash_mha,
    )

    shape = (length, length)
    mask = CausalMask(shape) if window is None else LocalMask(shape, window_size=(window - 1, 0), offset=0)
    block = next(size for size in (512, 384, 256, _LANES) if length % size == 0)
    with jax.ensure_compile_time_eval():
        return make_splash_mha(
            MultiHeadMask([mask] * heads),
            block_sizes=BlockSizes(block_q=block, block_kv=block),
            head_shards=1,
            q_seq_shards=1,
            interpret=interpret,
        )


ATTENTIONS: Mapping[str, Attention] = {"xla": xla, "cudnn": cudnn, "flash": flash}


def over_mesh(attention: Attention | str, mesh: Mesh, batch: str | tuple[str, ...], heads: str | None) -> Attention:
    """An implementation run on each device's part: kernels cannot be partitioned by the compiler.

    ``batch`` and ``heads`` name the mesh axes that those dimensions are spread over.
    """
    inner = ATTENTIONS[attention] if isinstance(attention, str) else attention
    spec = PartitionSpec(batch, None, heads, None)

    def attend(q: Array, k: Array, v: Array, *, window: int | None) -> Array:
        part = functools.partial(inner, window=window)
        spread = jax.shard_map(part, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec, check_vma=False)
        out: Array = spread(q, k, v)
        return out

    return attend


def choose(config: ModelConfig, platform: str, dtype: DTypeLike) -> str:
    """The fastest implementation that is right for a platform (``cpu``, ``gpu``, ``tpu``) and a compute dtype.

    Both kernels multiply in 16 bits, so float32 stays with XLA.
    """
    sixteen = np.dtype(dtype).itemsize == 2
    if platform in ("gpu", "cuda") and sixteen and config.head_dim % 8 == 0 and config.head_dim <= 128:
        return "cudnn"
    return "flash" if platform == "tpu" and sixteen else "xla"
