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
from numerics.test_packed_rows import LENGTH, of_piece, packed, ragged
from spile.models import attention
from spile.models.decoder import forward
from spile.models.params import choose_runs, stack_layers, tap_groups

_LEFT_OUT = ("logits_ids", "loss")
"""Names of tokens, of which near ones are as wrong as others, and small differences of large numbers. In float32, with
every other kind, they equal the goldens."""
_ROUNDED = [case for case in cases.CASES if cases.config(case).experts is None]
"""Where a router chooses by rounded scores, it chooses others at times."""

pytestmark = pytest.mark.skipif(jax.default_backend() != "gpu", reason="no GPU")


@pytest.mark.parametrize("case", cases.CASES)
def test_float32_equals_the_goldens(case: str, tmp_path: Path) -> None:
    golden = load_file(cases.golden_path(case))
    errors = worst(run(*load(case, tmp_path, jnp.float32), golden["tokens"], case), golden, case)
    assert max(errors.values()) <= TOLERANCE, errors


@pytest.mark.parametrize("case", _ROUNDED)
def test_bfloat16_with_the_attention_that_is_chosen(case: str, tmp_path: Path) -> None:
    golden = load_file(cases.golden_path(case))
    params, config = load(case, tmp_path, jnp.bfloat16)
    rounded = jax.tree.map(lambda weight: weight.astype(jnp.float32), params)
    chosen = attention.choose(config, "gpu", jnp.bfloat16)
    assert chosen == ("cudnn" if config.head_dim % 8 == 0 and config.attention_softcap is None else "xla")
    found = run(params, config, golden["tokens"], case, chosen)
    exact = run(rounded, config, golden["tokens"], case)
    for tap, value, once in zip(cases.taps(case), found, exact, strict=True):
        if tap.kind not in _LEFT_OUT:
            assert rms(value - golden[str(tap)]) < 3 * rms(once - golden[str(tap)]), tap


@pytest.mark.parametrize("case", _ROUNDED)
def test_packed_rows_in_bfloat16(case: str, tmp_path: Path) -> None:
    """Packed samples, scanned layers and the chosen attention are as close to the goldens as single samples."""
    golden = load_file(cases.golden_path(case))
    params, config = load(case, tmp_path, jnp.bfloat16)
    chosen = attention.choose(config, "gpu", jnp.bfloat16)
    pieces = ragged(golden["tokens"])
    rows = packed(pieces, golden["tokens"], np.zeros((3, LENGTH), np.int32))
    alone = run(params, config, golden["tokens"], case, chosen)
    taps = cases.taps(case)
    runs = choose_runs(config, taps, config.n_layers, 2)
    step = jax.jit(functools.partial(forward, config=config, taps=taps, attention=chosen, runs=runs))
    for group, kept in zip(tap_groups(taps, runs), step(stack_layers(params, runs, jnp.stack), *rows), strict=True):
        for number, value in zip(group, kept if len(group) > 1 else [kept], strict=True):
            tap, values = taps[number], np.asarray(value.astype(jnp.float32))
            whole = golden[str(tap)]
            for piece in pieces if tap.kind not in _LEFT_OUT else ():
                found = values[piece.row, piece.start : piece.start + piece.size]
                assert rms(found - of_piece(tap, whole, piece)) < 3 * rms(alone[number] - whole), (tap, piece)


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
    ids = np.sort(draw.integers(1, 6, (2, length))).astype(np.int32) if several else np.ones((2, length), np.int32)
    options = attention.AttentionOptions(window)
    found = jax.jit(functools.partial(attention.cudnn, options=options))(q, k, v, ids).astype(jnp.float32)
    # on the CPU: a float32 product of each chunk's shape takes the GPU's compiler longer than the test is worth
    wide = jax.device_put([x.astype(jnp.float32) for x in (q, k, v)], jax.devices("cpu")[0])
    exact = jax.device_put(jax.jit(functools.partial(attention.xla, options=options))(*wide, ids), jax.devices()[0])
    assert float(jnp.max(jnp.abs(found - exact))) < 0.03
