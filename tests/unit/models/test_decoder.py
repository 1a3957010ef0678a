"""The decoder computes what is tapped, in the order asked, and nothing past the last tap."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.fakes import random_weights

from spile.models import params
from spile.models.architecture import ModelConfig
from spile.models.decoder import forward, layers_needed
from spile.spec.taps import TAP_KINDS, Tap, select_taps

CONFIG = ModelConfig("qwen2", 32, 4, 4, 2, 8, 32, 32, qkv_bias=True)
DENSE = tuple(
    kind for kind, spec in TAP_KINDS.items() if spec.layered and kind not in ("router", "pattern", "pattern_ids")
)
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 32, (2, 12)), jnp.int32)
PARAMS = random_weights.random(CONFIG, jax.random.key(0))


def run(taps: tuple[Tap, ...], tree: params.Params = PARAMS, **more: Any) -> list[np.ndarray]:
    return [np.asarray(tap) for tap in forward(tree, TOKENS, config=CONFIG, taps=taps, **more)]


def test_taps_come_in_the_order_asked() -> None:
    taps = select_taps(DENSE, None, 4)
    by_name = dict(zip(taps, run(taps), strict=True))
    shuffled = tuple(np.random.default_rng(1).permutation(np.array(taps, dtype=object)))
    for tap, value in zip(shuffled, run(shuffled), strict=True):
        np.testing.assert_array_equal(value, by_name[tap])


def test_the_residual_is_the_sum_of_its_parts() -> None:
    taps = select_taps(DENSE, None, 4)
    by_name = dict(zip(taps, run(taps), strict=True))
    for layer in range(1, 4):
        parts = by_name[Tap("residual", layer - 1)] + by_name[Tap("attn", layer)] + by_name[Tap("mlp", layer)]
        np.testing.assert_allclose(by_name[Tap("residual", layer)], parts, atol=1e-5)


def test_it_needs_no_layer_past_the_last_tap() -> None:
    taps = (Tap("residual", 1), Tap("attn", 0))
    assert layers_needed(taps, 4) == 2
    short = replace(PARAMS, layers=PARAMS.layers[:2])
    for one, other in zip(run(taps, short), run(taps), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_last_mlp_is_not_computed_for_an_attention_tap() -> None:
    def flops(taps: tuple[Tap, ...]) -> float:
        step = jax.jit(lambda p, t: forward(p, t, config=CONFIG, taps=taps))
        return float(step.lower(PARAMS, TOKENS).compile().cost_analysis()["flops"])

    mlp = 3 * 2 * TOKENS.size * CONFIG.d_model * CONFIG.d_ff
    assert flops((Tap("mlp", 0),)) - flops((Tap("attn", 0),)) > mlp
    assert flops((Tap("residual", 0),)) - flops((Tap("mlp", 0),)) < mlp / 10


def test_keep_sees_each_tap_once_inside_the_trace() -> None:
    seen: list[tuple[int, ...]] = []

    def keep(_tap: Tap, value: jax.Array) -> jax.Array:
        seen.append(value.shape)
        return value.astype(jnp.bfloat16)

    taps = select_taps(("residual", "mlp"), (0, 2), 4)
    found = jax.jit(lambda p, t: forward(p, t, config=CONFIG, taps=taps, keep=keep))(PARAMS, TOKENS)
    assert seen == [(2, 12, 32)] * 4
    assert {value.dtype for value in found} == {jnp.dtype(jnp.bfloat16)}


def test_the_profilers_names_are_the_taps() -> None:
    taps = select_taps(("residual",), None, 4)
    lowered = jax.jit(lambda p, t: forward(p, t, config=CONFIG, taps=taps)).lower(PARAMS, TOKENS)
    text = lowered.compile().as_text()
    names = set(re.findall(r"(layer\.\d)/jit\(\w+\)/(residual|attn|mlp)", text))
    assert {(f"layer.{layer}", kind) for kind in ("attn", "mlp") for layer in range(4)} <= names


def test_shapes_are_checked_in_tests() -> None:
    with pytest.raises(Exception, match="Type-check error"):
        forward(PARAMS, TOKENS[0], config=CONFIG, taps=(Tap("residual", 0),))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_the_compute_dtype_is_kept_throughout(dtype: Any) -> None:
    tree = random_weights.random(CONFIG, jax.random.key(0), dtype, n_layers=1)
    taps = select_taps(DENSE, (0,), 4)
    assert {value.dtype for value in forward(tree, TOKENS, config=CONFIG, taps=taps)} == {jnp.dtype(dtype)}


def test_float32_products_are_exact_on_every_device() -> None:
    taps = (Tap("residual", 0),)
    text = str(jax.make_jaxpr(lambda p, t: forward(p, t, config=CONFIG, taps=taps))(PARAMS, TOKENS))
    assert text.count("dot_general[") == text.count("precision=(Precision.HIGHEST, Precision.HIGHEST)") == 10
