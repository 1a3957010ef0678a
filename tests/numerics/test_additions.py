"""What the taps of a layer say is added to the residual stream adds up to it, in every family and on both backends."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from numerics import cases
from numerics.reference import transformers_taps
from numerics.test_against_transformers import load
from spile.models.architecture import ModelConfig
from spile.models.decoder import forward
from spile.spec.taps import Tap

TOLERANCE = 1e-6


def taps_of(config: ModelConfig, *, heads: bool) -> tuple[Tap, ...]:
    kinds = ["resid_pre", "attn", "mlp", "residual", *["resid_mid"] * (not config.parallel), *["head_out"] * heads]
    return (Tap("embed"), *(Tap(kind, layer) for layer in range(config.n_layers) for kind in kinds))


def check(found: Mapping[str, Any], config: ModelConfig) -> None:
    wide = {tap: np.asarray(values, np.float64) for tap, values in found.items()}
    for layer in range(config.n_layers):
        before, attn, mlp, after = (wide[f"{kind}.{layer}"] for kind in ("resid_pre", "attn", "mlp", "residual"))
        assert cases.distance(before + attn + mlp, after) < TOLERANCE, layer
        if not config.parallel:
            assert cases.distance(before + attn, wide[f"resid_mid.{layer}"]) < TOLERANCE, layer
    if config.learned_positions is None:
        assert cases.distance(wide["embed"], wide["resid_pre.0"]) < TOLERANCE


@pytest.mark.parametrize("case", cases.EACH_OPTION)
def test_the_parts_of_a_layer_add_up(case: str, tmp_path: Path) -> None:
    params, config = load(case, tmp_path)
    taps = taps_of(config, heads=True)
    step = jax.jit(lambda p, t: forward(p, t, config=config, taps=taps))
    found = dict(zip(map(str, taps), step(params, cases.tokens(case)), strict=True))
    check(found, config)
    if config.norm_place == "pre":  # a norm of the sum of heads is not a sum over heads
        for layer, weights in enumerate(params.layers):
            heads = np.asarray(found[f"head_out.{layer}"], np.float64)
            total = heads.reshape(*heads.shape[:2], config.n_heads, -1).sum(axis=2)
            bias = 0.0 if weights.o_bias is None else np.asarray(weights.o_bias, np.float64)
            attn = total + bias * (config.residual_scale or 1.0)
            assert cases.distance(attn, found[f"attn.{layer}"]) < TOLERANCE, layer


@pytest.mark.torch
@pytest.mark.parametrize("case", cases.CASES)
def test_the_parts_of_a_layer_add_up_in_torch(case: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    config = cases.config(case)
    cases.write_model(case, tmp_path)
    check(transformers_taps(tmp_path, cases.tokens(case), taps_of(config, heads=False)), config)
