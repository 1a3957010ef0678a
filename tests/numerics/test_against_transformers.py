"""Every tap of every layer meets the numeric contract: its distance from a float64 forward of transformers."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from numerics import cases
from numerics.reference import transformers_taps
from spile.models import model_files, weights
from spile.models.architecture import ModelConfig, Rope
from spile.models.decoder import forward, head_needed
from spile.models.params import Params

TOLERANCE = 1e-4
PAIR = ("qwen2-tied", "mistral-window")
"""Cases without and with an attention window."""


def run(params: Params, config: ModelConfig, tokens: Any, case: str, attention: str = "xla") -> list[np.ndarray]:
    step = jax.jit(lambda p, t: forward(p, t, config=config, taps=cases.taps(case), attention=attention))
    return [np.asarray(tap, np.float32) for tap in step(params, tokens)]


def load(case: str, folder: Path, dtype: Any = jnp.float32) -> tuple[Params, ModelConfig]:
    files = model_files.find(str(cases.write_model(case, folder)))
    return weights.load(files, dtype, head=head_needed(cases.taps(case))), files.config


def worst(found: list[np.ndarray], expected: dict[str, np.ndarray], case: str) -> dict[str, float]:
    names = [str(tap) for tap in cases.taps(case)]
    assert len(found) == len(names)
    return {name: cases.error(tap, expected[name]) for name, tap in zip(names, found, strict=True)}


@pytest.mark.parametrize(
    "case", [case if case in PAIR else pytest.param(case, marks=pytest.mark.slow) for case in cases.FIRST_KINDS]
)
def test_golden(case: str, tmp_path: Path) -> None:
    golden = load_file(cases.golden_path(case))
    np.testing.assert_array_equal(golden["tokens"], cases.tokens(case))
    found = run(*load(case, tmp_path), golden["tokens"], case)
    assert not cases.contract(distances(found, golden, case), cases.own_distances(golden, case))


@pytest.mark.torch
@pytest.mark.parametrize("case", cases.LIVE)
def test_live(case: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    logging.getLogger("transformers").setLevel(logging.ERROR)
    tokens = cases.tokens(case, batch=3, length=150)
    params, config = load(case, tmp_path)
    narrow, wide = (transformers_taps(tmp_path, tokens, cases.taps(case), wide=each) for each in (False, True))
    found = distances(run(params, config, tokens, case), wide, case)
    assert not cases.contract(found, {tap: cases.distance(narrow[tap], wide[tap]) for tap in found})


@pytest.mark.torch
def test_live_embedded() -> None:
    pytest.importorskip("torch")
    files = model_files.find("embedded")
    tokens = np.random.default_rng(0).integers(0, files.config.vocab_size, (2, 700)).astype(np.int32)
    case = "qwen2-tied"
    taps = tuple(tap for tap in cases.taps(case) if tap.layer < 3)
    found = jax.jit(lambda p, t: forward(p, t, config=files.config, taps=taps))(weights.load(files), tokens)
    errors = worst([np.asarray(tap) for tap in found], transformers_taps(files.tokenizer_folder, tokens, taps), case)
    assert max(errors.values()) <= TOLERANCE, errors


def distances(found: list[np.ndarray], reference: dict[str, np.ndarray], case: str) -> dict[str, float]:
    every = zip(cases.taps(case), found, strict=True)
    return {str(tap): cases.distance(v, reference[str(tap)]) for tap, v in every if tap.kind != "logits_ids"}


def _without(*names: str) -> Callable[[Params], Params]:
    def strip(params: Params) -> Params:
        nothing = dict.fromkeys(names)
        return dataclasses.replace(params, layers=tuple(dataclasses.replace(x, **nothing) for x in params.layers))

    return strip


def _first_head(params: Params) -> Params:
    """The norms' weights of the first head, for all."""

    def cut(layer: Any) -> Any:
        return dataclasses.replace(layer, q_norm=layer.q_norm[:6], k_norm=layer.k_norm[:6])

    return dataclasses.replace(params, layers=tuple(cut(layer) for layer in params.layers))


def _same(params: Params) -> Params:
    return params


SWITCHES: dict[str, tuple[str, dict[str, Any], Callable[[Params], Params]]] = {
    "qkv biases": ("qwen2-tied", {}, _without("q_bias", "k_bias", "v_bias")),
    "o bias": ("llama-biases", {}, _without("o_bias")),
    "mlp biases": ("llama-biases", {}, _without("gate_bias", "up_bias", "down_bias")),
    "qk-norm": ("qwen3", {}, _without("q_norm", "k_norm")),
    "no window": ("mistral-window", {"windows": (None,) * 3}, _same),
    "window off by one": ("qwen2-window", {"windows": (None, 5, 5)}, _same),
    "window on a wrong layer": ("qwen2-layer-types", {"windows": (5, 5, 5)}, _same),
    "window where there is none": ("qwen2-window-off", {"windows": (None, 6, 6)}, _same),
    "theta": ("llama-1", {"rope": Rope(theta=9e3)}, _same),
    "linear scaling": ("llama-linear", {"rope": Rope()}, _same),
    "llama3 scaling": ("llama-3", {"rope": Rope(theta=5e5)}, _same),
    "yarn": ("qwen2-yarn", {"rope": Rope()}, _same),
    "activation": ("llama-gelu", {"activation": "gelu"}, _same),
    "norm over all heads": ("olmo2", {"flat_qk_norm": False}, _first_head),
    "norm eps": ("llama-1", {"norm_eps": 1e-3}, _same),
    "longrope": ("phi3-longrope", {"rope": Rope()}, _same),
    "layers without rope": ("smollm3", {"no_rope": ()}, _same),
    "interleaved rope": ("glm", {"rope_interleaved": False}, _same),
    "residual scale": ("granite", {"residual_scale": None}, _same),
    "logits divisor": ("granite", {"logits_divisor": None}, _same),
    "input scale": ("granite", {"input_scale": None}, _same),
    "shared norm": ("phi", {"shared_norm": False}, _same),
    "sinks": ("gpt-oss", {}, _without("sinks")),
    "clamped gate": ("gpt-oss", {"swiglu_limit": None}, _same),
    "expert biases": ("gpt-oss", {}, _without("down_bias")),
    "router bias": ("gpt-oss", {}, _without("router_bias")),
    "local rope": ("olmo3", {"local_rope": None}, _same),
}


@pytest.mark.slow
@pytest.mark.parametrize("switch", SWITCHES)
def test_a_broken_switch_is_seen(switch: str, tmp_path: Path) -> None:
    case, changed, damage = SWITCHES[switch]
    params, config = load(case, tmp_path)
    golden = load_file(cases.golden_path(case))
    found = run(damage(params), dataclasses.replace(config, **changed), golden["tokens"], case)
    own = cases.own_distances(golden, case)
    assert max(cases.ratios(distances(found, golden, case), own).values()) > 10 * cases.WORST


@pytest.mark.parametrize("case", ["qwen2-tied", pytest.param("mistral-window", marks=pytest.mark.slow)])
def test_bfloat16_is_within_its_rounding_of_float32(case: str, tmp_path: Path) -> None:
    """The scale for comparison: the change of float32 results if only the weights are rounded to bfloat16."""
    golden = load_file(cases.golden_path(case))
    params, config = load(case, tmp_path, jnp.bfloat16)
    rounded = jax.tree.map(lambda weight: weight.astype(jnp.float32), params)
    found, yardstick = (run(tree, config, golden["tokens"], case) for tree in (params, rounded))
    for name, tap, once in zip(map(str, cases.taps(case)), found, yardstick, strict=True):
        off, rounding = rms(tap - golden[name]), rms(once - golden[name])
        assert 0 < off < 3 * rounding < 0.15 * rms(golden[name]), (name, off, rounding, rms(golden[name]))


def rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values))))


@pytest.mark.parametrize("case", [pytest.param("qwen2-tied", marks=pytest.mark.slow), "mistral-window"])
def test_padding_and_neighbours_change_nothing(case: str, tmp_path: Path) -> None:
    params, config = load(case, tmp_path)
    golden = load_file(cases.golden_path(case))
    length = golden["tokens"].shape[1]
    draw = np.random.default_rng(1)
    batch = draw.integers(0, config.vocab_size, (5, length + 13)).astype(np.int32)
    batch[3, :length] = golden["tokens"][1]
    first = run(params, config, batch, case)
    for name, tap in zip(map(str, cases.taps(case)), first, strict=True):
        assert cases.error(tap[3, :length], golden[name][1]) <= TOLERANCE
    other = draw.integers(0, config.vocab_size, batch.shape).astype(np.int32)
    other[3, :length] = golden["tokens"][1]
    for before, after in zip(first, run(params, config, other, case), strict=True):
        np.testing.assert_array_equal(before[3, :length], after[3, :length])
