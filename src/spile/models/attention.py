"""Causal attention with grouped heads, within segments: several implementations that agree except for rounding.

All take queries ``[rows, seq, heads, head_dim]``, keys and values with fewer heads, and segments ``[rows, seq]``: which
tokens of a batch row belong to one sample. A token attends to those before it in its own segment. The tokens of a
segment are neighbours at rising positions, so a distance in the row is a distance in the sample.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from spile.models.architecture import ModelConfig
from spile.spec.taps import Tap

Queries = Float[Array, "rows seq heads head_dim"]
Keys = Float[Array, "rows seq kv_heads head_dim"]
Segments = Int[Array, "rows seq"]
Sinks = Float[Array, " heads"] | None


class AttentionOptions(NamedTuple):
    """The options of attention in one layer."""

    window: int | None = None
    """How many positions a token attends to, including its own; None: all of its segment before it."""
    softcap: float | None = None
    """The bound that tanh puts on the scores; None: no bound."""
    sinks: Sinks = None
    """``[heads]``: a score of each head that takes part in the softmax and belongs to no token; None: there is none."""
    top: int = 0
    """How many of the largest weights of each token and head are reported."""


Attention = Callable[[Array, Array, Array, Array, AttentionOptions], Array]
"""Returns softmax(q·k / √head_dim)·v: takes queries, keys, values, segments and options."""


def precision(dtype: DTypeLike) -> jax.lax.Precision:
    """Return the precision of matrix products: full float32 for float32 on accelerators too.

    Products of bfloat16 numbers are exact in float32 anyway.
    """
    return jax.lax.Precision.HIGHEST if np.dtype(dtype) == np.float32 else jax.lax.Precision.DEFAULT


def _chunk(length: int) -> int:
    """Return the number of queries per chunk. Keys after a chunk are skipped, and only its own scores are in memory."""
    return min(length, max(256, min(1024, -(-length // 8))))


def xla(q: Queries, k: Keys, v: Keys, segments: Segments, options: AttentionOptions) -> Queries:
    """Compute attention with plain XLA, one chunk of queries at a time over the keys within its window."""

    @jax.checkpoint  # a gradient computes the scores again: together they would grow with the square of the length
    def attend(q: Array, k: Array, v: Array, mask: Array, _: Any) -> Array:
        return masked_attention(q, k, v, mask, options)

    out: Array = _by_chunk(attend, q, k, v, segments, options.window)
    return out


def _by_chunk(attend: Callable[..., Any], q: Array, k: Array, v: Array, segments: Array, window: int | None) -> Any:
    """Call ``attend(q, k, v, mask, first key)`` for each chunk of queries, and join the results."""
    length = q.shape[1]
    if length > _MOST_UNROLLED:
        return _in_turn(attend, q, k, v, segments, window)
    chunks = [
        attend(q[:, queries], k[:, keys], v[:, keys], mask, keys.start)
        for queries, keys, mask in _chunks(segments, window)
    ]
    return chunks[0] if len(chunks) == 1 else jax.tree.map(lambda *parts: jnp.concatenate(parts, axis=1), *chunks)


_MOST_UNROLLED = 4096
"""The length up to which all chunks are one piece of program. XLA may then compute them at once, with the scores of all
of them in memory, which grow with the square of the length."""
_PARTS = 4
"""Parts of a long row without an attention window. The chunks of a part have the same keys: those up to its end."""


def _in_turn(attend: Callable[..., Any], q: Array, k: Array, v: Array, segments: Array, window: int | None) -> Any:
    """Do what :func:`_by_chunk` does for a long row, one chunk after another."""
    length, size = q.shape[1], _chunk(q.shape[1])
    more = -length % size
    q, k, v = (jnp.pad(x, [(0, 0), (0, more), (0, 0), (0, 0)]) for x in (q, k, v))
    segments = jnp.pad(segments, [(0, 0), (0, more)], constant_values=-1)
    whole = length + more
    part = whole if window is not None else -(-whole // (_PARTS * size)) * size

    def chunk(begin: Array, keys: int) -> Any:
        first = jnp.clip(begin + size - keys, 0) if window is not None else jnp.zeros_like(begin)
        queries, place = begin + jnp.arange(size), first + jnp.arange(keys)
        ahead = queries[:, None] - place[None]
        mask = (ahead >= 0) if window is None else (ahead >= 0) & (ahead < window)
        own, others = (jax.lax.dynamic_slice_in_dim(segments, at, n, 1) for at, n in ((begin, size), (first, keys)))
        mask = mask[None] & (own[:, :, None] == others[:, None])
        cut = functools.partial(jax.lax.dynamic_slice_in_dim, axis=1)
        return attend(cut(q, begin, size), cut(k, first, keys), cut(v, first, keys), mask, first)

    found = []
    for start in range(0, whole, part):
        stop = min(start + part, whole)
        keys = stop if window is None else min(whole, size + -(-window // size) * size)
        found.append(jax.lax.map(functools.partial(chunk, keys=keys), jnp.arange(start, stop, size)))

    def join(*parts: Array) -> Array:
        joined = jnp.concatenate(parts).swapaxes(0, 1)
        return joined.reshape(joined.shape[0], whole, *joined.shape[3:])[:, :length]

    return jax.tree.map(join, *found)


def _chunks(segments: Segments, window: int | None) -> Iterator[tuple[slice, slice, Array]]:
    """Yield chunks of queries, the keys within their window, and which key each query attends to."""
    length = segments.shape[1]
    size = _chunk(length)
    for start in range(0, length, size):
        stop = min(start + size, length)
        first = 0 if window is None else max(0, start - window + 1)
        ahead = np.arange(start, stop)[:, None] - np.arange(first, stop)[None, :]
        mask = jnp.asarray((ahead >= 0) if window is None else (ahead >= 0) & (ahead < window))[None]
        mask &= segments[:, start:stop, None] == segments[:, None, first:stop]
        yield slice(start, stop), slice(first, stop), mask


def largest_weights(
    q: Queries, k: Keys, segments: Segments, options: AttentionOptions
) -> tuple[Float[Array, "rows seq heads top"], Int[Array, "rows seq heads top"]]:
    """Return the ``options.top`` largest attention weights of each token and head, and their places in the row."""

    def largest(q: Array, k: Array, _: Array, mask: Array, first: Any) -> tuple[Array, Array]:
        weights, places = masked_weights(q, k, mask, options)
        return weights, jnp.where(places < 0, -1, places + first)

    found: tuple[Array, Array] = _by_chunk(largest, q, k, k, segments, options.window)
    return found


def masked_attention(
    q: Float[Array, "rows queries heads head_dim"],
    k: Float[Array, "rows keys kv_heads head_dim"],
    v: Float[Array, "rows keys kv_heads head_dim"],
    mask: Bool[Array, "#rows queries keys"],
    options: AttentionOptions,
) -> Float[Array, "rows queries heads head_dim"]:
    """Compute attention over the keys that ``mask`` marks for each query (at least one), with softmax in float32.

    The window is part of ``mask``. Keys and values are not repeated for their groups of heads: the queries of a group
    are joined, so that each product is one product per key/value head. On a CPU that is two to three times as fast.
    """
    rows, length, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    shape = (rows, kv_heads, heads // kv_heads, length, head_dim)
    weights, total = _softmax(q, k, mask, options)
    flat = (rows, kv_heads, heads // kv_heads * length, -1)
    product = functools.partial(jnp.matmul, precision=precision(q.dtype), preferred_element_type=jnp.float32)
    out = product(weights.astype(q.dtype).reshape(flat), v.transpose(0, 2, 1, 3)).reshape(shape)
    return (out / total).astype(q.dtype).transpose(0, 3, 1, 2, 4).reshape(q.shape)


def _softmax(q: Array, k: Array, mask: Array, options: AttentionOptions) -> tuple[Array, Array]:
    """Return the weights ``[rows, kv_heads, group, queries, keys]``, not yet divided by their sum, and the sum."""
    rows, length, heads, head_dim = q.shape
    kv_heads = k.shape[2]
    shape = (rows, kv_heads, heads // kv_heads, length, -1)
    product = functools.partial(jnp.matmul, precision=precision(q.dtype), preferred_element_type=jnp.float32)
    grouped = q.reshape(rows, length, kv_heads, heads // kv_heads, head_dim).transpose(0, 2, 3, 1, 4)
    grouped = grouped.reshape(rows, kv_heads, heads // kv_heads * length, head_dim)
    scores = scale_scores(product(grouped, k.transpose(0, 2, 3, 1)).reshape(shape), head_dim, options.softcap)
    scores = jnp.where(mask[:, None, None], scores, -jnp.inf)
    highest = jnp.max(scores, axis=-1, keepdims=True)
    sinks = None if options.sinks is None else options.sinks.astype(jnp.float32)
    sink = None if sinks is None else sinks.reshape(1, kv_heads, heads // kv_heads, 1, 1)
    highest = highest if sink is None else jnp.maximum(highest, sink)
    weights = jnp.exp(scores - highest)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    return weights, total if sink is None else total + jnp.exp(sink - highest)


def masked_weights(
    q: Float[Array, "rows queries heads head_dim"],
    k: Float[Array, "rows keys kv_heads head_dim"],
    mask: Bool[Array, "#rows queries keys"],
    options: AttentionOptions,
) -> tuple[Float[Array, "rows queries heads top"], Int[Array, "rows queries heads top"]]:
    """Return the largest attention weights of each query and head, and the numbers of their keys; else 0 and -1."""
    weights, total = _softmax(q, k, mask, options)
    rows, length, heads, _ = q.shape
    found, keys = jax.lax.top_k((weights / total).reshape(rows, heads, length, -1), min(options.top, k.shape[1]))
    keys = jnp.where(found > 0, keys.astype(jnp.int32), -1)
    more = [(0, 0), (0, 0), (0, 0), (0, options.top - found.shape[-1])]
    found, keys = jnp.pad(found, more), jnp.pad(keys, more, constant_values=-1)
    return found.transpose(0, 2, 1, 3), keys.transpose(0, 2, 1, 3)


def scale_scores(scores: Float[Array, "..."], head_dim: int, cap: float | None) -> Float[Array, "..."]:
    """Scale the products of queries and keys, and apply the soft cap."""
    return softcap(scores * jnp.float32(head_dim**-0.5), cap)


def softcap(x: Array, cap: float | None) -> Array:
    """Bound the values smoothly by ±cap."""
    return x if cap is None else jnp.tanh(x / jnp.asarray(cap, x.dtype)) * jnp.asarray(cap, x.dtype)


def cudnn_masked(q: Array, k: Array, v: Array, mask: Array, options: AttentionOptions) -> Array:
    """Compute :func:`masked_attention` with the fused kernel of cuDNN, which has neither a soft cap nor sinks."""
    _refuse_options("cuDNN", options.softcap, options.sinks)
    return jax.nn.dot_product_attention(q, k, v, mask=mask[:, None], implementation="cudnn")


_KEYS = 256
"""Keys per block. A block has half as many queries, so that its scores stay in a core's cache."""
_INITIAL_MAXIMUM, _MASKED_SCORE = np.float32(-1e29), np.float32(-1e30)
"""The initial maximum, and the score of a masked key: far below the maximum, but finite."""


def blocked(q: Queries, k: Keys, v: Keys, segments: Segments, options: AttentionOptions) -> Queries:
    """Compute attention on a CPU, one block of scores at a time.

    A chunk of queries starts at the block in which its first segment begins, so a packed row costs as much as its
    samples separately, and the scores stay in the cache: three to four times as fast as whole rows of scores
    (`bench.attention`). The softmax is computed online; a column of ones behind the values sums its weights within the
    same product.
    """
    rows, length, heads, head_dim = q.shape
    kv_heads, size = k.shape[2], min(_KEYS, -(-length // 64) * 64)
    more, half = -length % size, size // 2
    first = _first_attended(segments, options.window)
    q, k, v = (jnp.pad(x, [(0, 0), (0, more), (0, 0), (0, 0)]) for x in (q, k, v))
    first = jnp.pad(first, [(0, 0), (0, more)], constant_values=length)
    chunks = (length + more) // half
    queries = q.reshape(rows, chunks, half, kv_heads, heads // kv_heads, head_dim)
    queries = queries.transpose(0, 1, 3, 4, 2, 5).reshape(rows * chunks, kv_heads, -1, head_dim)
    keys = k.transpose(0, 2, 3, 1)
    values = jnp.concatenate([v, jnp.ones_like(v[..., :1])], axis=-1).transpose(0, 2, 1, 3)
    sinks = None if options.sinks is None else options.sinks.astype(jnp.float32)
    sink = None if sinks is None else jnp.repeat(sinks.reshape(kv_heads, -1), half, axis=1)

    def chunk(one: tuple[Array, Array, Array]) -> Array:
        number, block, begin = one
        row, start = number // chunks, number % chunks * half
        return _attend(block, keys, values, row, start, begin, size, options.softcap, sink)

    out = jax.lax.map(chunk, (jnp.arange(rows * chunks), queries, first.reshape(rows * chunks, half)))
    out = (
        out.astype(q.dtype)
        .reshape(rows, chunks, kv_heads, heads // kv_heads, half, head_dim)
        .transpose(0, 1, 4, 2, 3, 5)
    )
    whole: Array = out.reshape(rows, length + more, heads, head_dim)
    return whole[:, :length]


def _first_attended(segments: Segments, window: int | None) -> Int[Array, "rows seq"]:
    """Return the first position in its batch row that each token attends to."""
    place = jnp.broadcast_to(jnp.arange(segments.shape[1]), segments.shape)
    begins = jnp.pad(segments[:, 1:] != segments[:, :-1], [(0, 0), (1, 0)], constant_values=True)
    first = jax.lax.cummax(jnp.where(begins, place, 0), axis=1)
    return first if window is None else jnp.maximum(first, place - (window - 1))


def _attend(
    block: Float[Array, "kv_heads queries head_dim"],
    keys: Float[Array, "rows kv_heads head_dim keys"],
    values: Float[Array, "rows kv_heads keys more"],
    row: Int[Array, ""],
    start: Int[Array, ""],
    first: Int[Array, " chunk"],
    size: int,
    softcap: float | None,
    sink: Float[Array, "kv_heads queries"] | None,
) -> Float[Array, "kv_heads queries head_dim"]:
    """Compute a chunk of one batch row's queries over the blocks of keys that any of them attends to."""
    product = functools.partial(jnp.matmul, precision=precision(block.dtype), preferred_element_type=jnp.float32)
    kv_heads, count, head_dim = block.shape
    place = start + jnp.arange(len(first))

    def step(number: Array, so_far: tuple[Array, Array]) -> tuple[Array, Array]:
        highest, total = so_far
        at = number * size
        block_keys = jax.lax.dynamic_slice(keys, (row, 0, 0, at), (1, kv_heads, head_dim, size))[0]
        block_values = jax.lax.dynamic_slice(values, (row, 0, at, 0), (1, kv_heads, size, head_dim + 1))[0]
        where = at + jnp.arange(size)
        mask = (where[None] <= place[:, None]) & (where[None] >= first[:, None])
        scores = scale_scores(product(block, block_keys), head_dim, softcap)
        scores = jnp.where(mask, scores.reshape(kv_heads, -1, len(first), size), _MASKED_SCORE).reshape(scores.shape)
        higher = jnp.maximum(highest, jnp.max(scores, axis=-1, keepdims=True))
        weights = jnp.exp(scores - higher).astype(block.dtype)
        return higher, total * jnp.exp(highest - higher) + product(weights, block_values)

    initial = jnp.full((kv_heads, count, 1), _INITIAL_MAXIMUM), jnp.zeros((kv_heads, count, head_dim + 1), jnp.float32)
    if sink is not None:  # a score with the weight 1 and no value
        initial = sink[..., None], initial[1].at[..., -1].set(1.0)
    blocks = jnp.min(first) // size, (start + len(first) + size - 1) // size
    total = jax.lax.fori_loop(*blocks, step, initial)[1]
    # Only padding at the end of a batch row attends to nothing; its zeros stay zeros.
    out: Array = total[..., :-1] / jnp.maximum(total[..., -1:], np.finfo(np.float32).tiny)
    return out


def _refuse_options(kernel: str, softcap: float | None, sinks: Sinks) -> None:
    if softcap is not None or sinks is not None:
        raise ValueError(f"{kernel}'s attention does not have this option: soft cap {softcap}, sinks {sinks}")


def cudnn(q: Queries, k: Keys, v: Keys, segments: Segments, options: AttentionOptions) -> Queries:
    """Compute attention with the fused kernel of cuDNN, for 16-bit floats on an NVIDIA GPU. Segments become a mask."""
    _refuse_options("cuDNN", options.softcap, options.sinks)
    if q.shape[1] > _MOST_UNROLLED:  # a mask of all pairs grows with the square of the length

        def on_device(q: Array, k: Array, v: Array, mask: Array, _: Any) -> Array:
            return cudnn_masked(q, k, v, mask, options)

        out: Array = _by_chunk(on_device, q, k, v, segments, options.window)
        return out
    mask = segments[:, None, :, None] == segments[:, None, None, :]
    if options.window is not None:  # Some versions of the kernel do not take a window together with a mask.
        place = np.arange(q.shape[1])
        mask &= jnp.asarray(place[:, None] - place[None, :] < options.window)
    return jax.nn.dot_product_attention(q, k, v, is_causal=True, mask=mask, implementation="cudnn")


_LANES = 128


def flash(
    q: Queries, k: Keys, v: Keys, segments: Segments, options: AttentionOptions, *, interpret: bool = False
) -> Queries:
    """Compute attention with the Pallas splash kernel for TPUs. The sequence is padded to whole blocks."""
    from jax.experimental.pallas.ops.tpu.splash_attention import SegmentIds

    _refuse_options("splash", None, options.sinks)
    length = q.shape[1]
    scale = jnp.asarray(q.shape[-1] ** -0.5, jnp.float32)  # The kernel does not scale scores.
    q = (q.astype(jnp.float32) * scale).astype(q.dtype)
    more = -length % _LANES
    q, k, v = (jnp.pad(x.transpose(0, 2, 1, 3), [(0, 0), (0, 0), (0, more), (0, 0)]) for x in (q, k, v))
    kernel = _splash(q.shape[1], q.shape[2], options.window, options.softcap, interpret)
    ids = jnp.pad(segments, [(0, 0), (0, more)])
    out: Array = jax.vmap(kernel)(q, k, v, SegmentIds(q=ids, kv=ids))
    return out[:, :, :length].transpose(0, 2, 1, 3)


@functools.lru_cache(maxsize=256)
def _splash(heads: int, length: int, window: int | None, softcap: float | None, interpret: bool) -> Any:
    """Return the kernel of a shape. Its block tables are made outside of the current trace, to be shared."""
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
            attn_logits_soft_cap=softcap,
            interpret=interpret,
        )


ATTENTIONS: Mapping[str, Attention] = {"xla": xla, "blocked": blocked, "cudnn": cudnn, "flash": flash}


def attention_over_mesh(name: str, mesh: Mesh, batch: str | tuple[str, ...], heads: str | None) -> Attention:
    """Run an implementation on each device's part, because the compiler cannot partition kernels.

    ``batch`` and ``heads`` name the mesh axes that those dimensions are spread over.
    """
    spec = PartitionSpec(batch, None, heads, None)

    def attend(q: Array, k: Array, v: Array, segments: Array, options: AttentionOptions) -> Array:
        def part(q: Array, k: Array, v: Array, segments: Array, sinks: Array | None) -> Array:
            return ATTENTIONS[name](q, k, v, segments, options._replace(sinks=sinks))

        specs = (spec, spec, spec, PartitionSpec(batch, None), None if options.sinks is None else PartitionSpec(heads))
        spread = jax.shard_map(part, mesh=mesh, in_specs=specs, out_specs=spec, check_vma=False)
        out: Array = spread(q, k, v, segments, options.sinks)
        return out

    return attend


_NO_SPLASH = ("TPU v2", "TPU v3")
"""JAX's names of the TPUs for which the splash kernel does not compile: their matrix units take no 16-bit operand in
the kernel's layout. `make tpu-check` compiles the choice for every generation (docs/tpu.md)."""


def choose(config: ModelConfig, platform: str, kind: str, dtype: DTypeLike, taps: Sequence[Tap] = ()) -> str:
    """Return the fastest correct implementation for JAX's platform and kind of a device, and a compute dtype.

    Both kernels multiply in 16 bits, so float32 on an accelerator stays with XLA. Only XLA computes gradients.
    """
    if any(tap.gradient for tap in taps):
        return "xla"
    if platform == "cpu":
        return "blocked"
    if config.sinks or np.dtype(dtype).itemsize != 2:
        return "xla"
    if platform == "tpu":
        return "xla" if kind in _NO_SPLASH else "flash"
    fits = config.head_dim % 8 == 0 and config.head_dim <= 128 and config.attention_softcap is None
    return "cudnn" if platform in ("gpu", "cuda") and fits else "xla"
