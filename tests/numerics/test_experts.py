"""Routed experts: the same experts as the reference for every token, and no token is dropped."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numerics import cases
from numerics.test_against_transformers import load
from spile.models.decoder import forward
from spile.models.experts import MIXTURES, ExpertWeights, route
from spile.spec.taps import Tap

MOE = ["mixtral", pytest.param("qwen3-moe", marks=pytest.mark.slow), "qwen3-moe-mixed"]


def reference_choices(folder: Path, tokens: np.ndarray) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """By layer, the experts that transformers takes for each token, and their weights."""
    import torch
    from transformers import AutoModelForCausalLM

    logging.getLogger("transformers").setLevel(logging.ERROR)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    found: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def hear(layer: int) -> Any:
        def heard(_module: Any, _given: Any, out: Any) -> None:
            found[layer] = out[2].numpy(), out[1].numpy()

        return heard

    for layer, block in enumerate(model.model.layers):
        if hasattr(block.mlp, "gate") and hasattr(block.mlp, "experts"):
            block.mlp.gate.register_forward_hook(hear(layer))
    with torch.no_grad():
        model(torch.from_numpy(tokens).long())
    return found


@pytest.mark.torch
@pytest.mark.parametrize("case", MOE)
def test_every_token_goes_to_the_references_experts(case: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    tokens = cases.tokens(case, batch=3, length=150)
    params, config = load(case, tmp_path)
    expected = reference_choices(tmp_path, tokens)
    assert config.experts is not None
    assert sorted(expected) == [n for n in range(config.n_layers) if n not in config.experts.dense_layers]
    taps = tuple(Tap("router", layer) for layer in sorted(expected))
    heard = jax.jit(lambda p, t: forward(p, t, config=config, taps=taps))(params, tokens)
    for tap, logits in zip(taps, heard, strict=True):
        chosen, weights = route(logits, config.experts)
        theirs, weighed = expected[tap.layer]
        np.testing.assert_array_equal(np.asarray(chosen).reshape(theirs.shape), theirs)
        np.testing.assert_allclose(np.asarray(weights).reshape(weighed.shape), weighed, atol=1e-5)


@functools.cache
def mixing(name: str) -> Any:
    return jax.jit(functools.partial(MIXTURES[name], config=cases.config("mixtral")))


@pytest.mark.parametrize("name", MIXTURES)
@settings(max_examples=15)
@given(data=st.data())
def test_no_token_is_dropped(name: str, data: st.DataObject) -> None:
    """If all tokens choose one expert, every pair is still computed."""
    config = cases.config("mixtral")
    assert config.experts is not None
    count, per_token, width = config.experts.count, config.experts.per_token, config.d_model
    crowd = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=count))
    draw = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    tokens = data.draw(st.sampled_from([1, 7, 40]))
    x = draw.standard_normal((1, tokens, width), np.float32)
    chosen = draw.choice(crowd, (1, tokens, per_token)).astype(np.int32)
    weights = draw.random((1, tokens, per_token), np.float32)
    shapes = ((count, 6, width), (count, 6, width), (count, width, 6))
    gate, up, down = (draw.standard_normal(shape, np.float32) for shape in shapes)
    found = mixing(name)(x, chosen, weights, ExpertWeights(gate, up, down))
    for token in range(tokens):
        parts = []
        for expert, weight in zip(chosen[0, token], weights[0, token], strict=True):
            before = gate[expert] @ x[0, token]
            hidden = before / (1 + np.exp(-before)) * (up[expert] @ x[0, token])
            parts.append(weight * (down[expert] @ hidden))
        np.testing.assert_allclose(np.asarray(found)[0, token], sum(parts), rtol=1e-3, atol=1e-3)
