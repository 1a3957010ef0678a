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
from numerics.test_packed_rows import LENGTH, RAGGED, packed
from spile.model import attention
from spile.model.decoder import forward

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


@pytest.mark.parametrize("case", cases.CASES)
def test_packed_rows_in_bfloat16(case: str, tmp_path: Path) -> None:
    """Several samples per row with the attention that is chosen: as near to the goldens as one sample per row is."""
    golden = load_file(cases.golden_path(case))
    params, config = load(case, tmp_path, jnp.bfloat16)
    chosen = attention.choose(config, "gpu", jnp.bfloat16)
    rows = packed(RAGGED, golden["tokens"], np.zeros((3, LENGTH), np.int32))
    alone = run(params, config, golden["tokens"], case, chosen)
    step = jax.jit(functools.partial(forward, config=config, taps=cases.taps(case), attention=chosen))
    for name, tap, single in zip(map(str, cases.taps(case)), step(params, *rows), alone, strict=True):
        values = np.asarray(tap.astype(jnp.float32))
        for piece in RAGGED:
            found = values[piece.row, piece.start : piece.start + piece.size]
            wanted = golden[name][piece.sample, : piece.size]
            assert rms(found - wanted) < 3 * rms(single - golden[name]), (name, piece)


SHAPES = [(1024, 14, 2, 64), (1000, 28, 4, 128), (129, 4, 4, 16)]
"""Length, heads, key/value heads, head_dim."""


@pytest.mark.parametrize("several", [False, True], ids=["one sample per row", "packed rows"])
@pytest.mark.parametrize("window", [None, 1, 50, 300])
@pytest.mark.parametrize("shape", SHAPES)
def test_cudnn_equals_xla(shape: tuple[int, int, int, int], window: int | None, several: bool) -> None:
    length, heads, kv_heads, head_dim = shape
    window = window if window is None or window < length else None
    draw = np.random.default_rng(0)
    sizes = [(2, length, count, head_dim) for count in (heads, kv_heads, kv_heads)]
    q, k, v = (jnp.asarray(draw.standard_normal(size), jnp.bfloat16) for size in sizes)
    ids = np.sort(draw.integers(1, 6, (2, length))).astype(np.int32) if several else None
    found = jax.jit(functools.partial(attention.cudnn, window=window))(q, k, v, ids).astype(jnp.float32)
    # on the CPU: a float32 product of each chunk's shape takes the GPU's compiler longer than the test is worth
    wide = jax.device_put([x.astype(jnp.float32) for x in (q, k, v)], jax.devices("cpu")[0])
    exact = jax.device_put(jax.jit(functools.partial(attention.xla, window=window))(*wide, ids), jax.devices()[0])
    assert float(jnp.max(jnp.abs(found - exact))) < 0.03
