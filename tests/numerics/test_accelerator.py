"""On a GPU: float32 still equals transformers, and the fused kernel stays within bfloat16's rounding of float32."""

from __future__ import annotations

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from numerics import cases
from numerics.test_against_transformers import TOLERANCE, load, rms, run, worst
from spile.model import attention

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="no GPU")


@pytest.mark.parametrize("case", cases.CASES)
def test_bfloat16_with_the_attention_that_is_chosen(case: str, tmp_path: Path) -> None:
    golden = load_file(cases.golden_path(case))
    params, config = load(case, tmp_path, jnp.bfloat16)
    rounded = jax.tree.map(lambda weight: weight.astype(jnp.float32), params)
    chosen = attention.choose(config, "gpu", jnp.bfloat16)
    assert chosen == ("cudnn" if config.head_dim % 8 == 0 else "xla")
    found = run(params, config, golden["tokens"], case, chosen)
    exact = run(rounded, config, golden["tokens"], case)
    errors = worst(run(*load(case, tmp_path, jnp.float32), golden["tokens"], case), golden, case)
    assert max(errors.values()) <= TOLERANCE, errors
    for name, tap, once in zip(map(str, cases.taps(case)), found, exact, strict=True):
        assert rms(tap - golden[name]) < 3 * rms(once - golden[name]), name


SHAPES = [(1024, 14, 2, 64), (1000, 28, 4, 128), (129, 4, 4, 16)]
"""Length, heads, key/value heads, head_dim."""


@pytest.mark.parametrize("window", [None, 1, 50, 300])
@pytest.mark.parametrize("shape", SHAPES)
def test_cudnn_equals_xla(shape: tuple[int, int, int, int], window: int | None) -> None:
    length, heads, kv_heads, head_dim = shape
    window = window if window is None or window < length else None
    draw = np.random.default_rng(0)
    sizes = [(2, length, count, head_dim) for count in (heads, kv_heads, kv_heads)]
    q, k, v = (jnp.asarray(draw.standard_normal(size), jnp.bfloat16) for size in sizes)
    found = jax.jit(functools.partial(attention.cudnn, window=window))(q, k, v).astype(jnp.float32)
    # on the CPU: a float32 product of each chunk's shape takes the GPU's compiler longer than the test is worth
    wide = jax.device_put([x.astype(jnp.float32) for x in (q, k, v)], jax.devices("cpu")[0])
    exact = jax.device_put(jax.jit(functools.partial(attention.xla, window=window))(*wide), jax.devices()[0])
    assert float(jnp.max(jnp.abs(found - exact))) < 0.03
