"""Compare attention on a CPU with full scores, in blocks, and in torch: ``python -m bench.attention``.

Each batch row has two segments, as packing creates them. torch gets the same samples one per batch row, causal, and
padded with a mask.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spile.models.attention import ATTENTIONS, AttentionOptions

SHAPES = {
    "small: 8 heads, 2 for keys, of 32": (8, 2, 32),
    "Qwen2.5-0.5B: 14 heads, 2 for keys, of 64": (14, 2, 64),
    "GPT-2: 12 heads of 64": (12, 12, 64),
}
_TOKENS, _ROW, _TURNS = 4096, 2048, 5


def inputs(heads: int, kv_heads: int, width: int) -> list[np.ndarray]:
    """Return queries, keys and values of a batch."""
    draw = np.random.default_rng(0)
    sizes = (heads, kv_heads, kv_heads)
    return [draw.standard_normal((_TOKENS // _ROW, _ROW, size, width)).astype(np.float32) for size in sizes]


def with_jax(name: str, arrays: list[np.ndarray]) -> Callable[[], Any]:
    """Return one implementation, compiled."""
    segments = jnp.asarray(np.repeat([[1, 2]], _TOKENS // _ROW, 0).repeat(_ROW // 2, 1), jnp.int32)
    attend = jax.jit(lambda q, k, v, segments: ATTENTIONS[name](q, k, v, segments, AttentionOptions()))
    values = [jnp.asarray(array) for array in arrays]
    return lambda: attend(*values, segments).block_until_ready()


def with_torch(arrays: list[np.ndarray], *, mask: bool) -> Callable[[], Any] | None:
    """Return torch's fused attention over the same samples."""
    try:
        import torch
    except ImportError:
        return None
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    half = _ROW // 2
    q, k, v = (torch.from_numpy(x.reshape(-1, half, *x.shape[2:])).transpose(1, 2) for x in arrays)
    seen = torch.ones(half, half, dtype=torch.bool).tril()[None, None].expand(len(q), 1, half, half)
    how: Mapping[str, Any] = {"attn_mask": seen} if mask else {"is_causal": True}
    attend = torch.nn.functional.scaled_dot_product_attention
    return lambda: attend(q, k, v, enable_gqa=True, **how)


def best(run: Callable[[], Any] | None) -> str:
    """Return the shortest of several times, in milliseconds."""
    if run is None:
        return "no torch"
    run()
    seconds = []
    for _ in range(_TURNS):
        began = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - began)
    return f"{min(seconds) * 1e3:.0f} ms"


def main() -> None:
    print(f"{'4,096 tokens in segments of 1,024':46} {'xla':>8} {'blocked':>8} {'torch, causal':>14} {'mask':>8}")
    for name, shape in SHAPES.items():
        arrays = inputs(*shape)
        runs = [with_jax("xla", arrays), with_jax("blocked", arrays)]
        texts = [best(run) for run in (*runs, with_torch(arrays, mask=False), with_torch(arrays, mask=True))]
        print(f"{name:46} {texts[0]:>8} {texts[1]:>8} {texts[2]:>14} {texts[3]:>8}")


if __name__ == "__main__":
    main()
