"""Equal layers are one scan for any taps, and a scan gives the same result as its layers one by one."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.fakes import random_weights

from spile.models import params
from spile.models.architecture import Experts, ModelConfig, Rope
from spile.models.decoder import forward, layers_needed
from spile.models.params import LayerRun, choose_runs, layer_runs, one_run_per_layer, tap_groups
from spile.spec.taps import Tap, select_taps

PLAIN = ModelConfig("qwen2", 32, 8, 4, 2, 8, 32, 32, qkv_bias=True)
LOCAL = Rope(theta=500.0)
CONFIGS = {
    "plain": PLAIN,
    "windows take turns": replace(PLAIN, windows=(3, None) * 4, local_rope=LOCAL, norm_place="sandwich"),
    "five windows and one without": replace(
        PLAIN, n_layers=14, windows=((4,) * 5 + (None,)) * 2 + (4, 4), qk_norm=True
    ),
    "windows at the end": replace(PLAIN, windows=(None,) * 3 + (5,) * 5),
    "experts": replace(PLAIN, experts=Experts(4, 2, 16, normalized=True, dense_layers=(0, 5))),
    "learned positions": replace(
        PLAIN, learned_positions=64, norm="layer", gated=False, activation="gelu", parallel=True
    ),
}
_LARGE = ("five windows and one without", "learned positions", "windows at the end")
"""Their programs take long to compile."""


@pytest.mark.parametrize(
    ("config", "layers", "runs"),
    [
        ("plain", None, [LayerRun(0, 1, 8)]),
        ("plain", (5,), [LayerRun(0, 1, 5), LayerRun(5)]),
        ("plain", (0, 2, 4, 6), [LayerRun(0, 2, 3), LayerRun(6)]),
        ("plain", (1,), [LayerRun(0), LayerRun(1)]),
        ("windows take turns", None, [LayerRun(0, 2, 4)]),
        (
            "five windows and one without",
            None,
            [LayerRun(0, 1, 5), LayerRun(5), LayerRun(6, 1, 5), LayerRun(11), *map(LayerRun, (12, 13))],
        ),
        ("windows at the end", None, [LayerRun(0, 1, 3), LayerRun(3, 1, 5)]),
        ("experts", None, [LayerRun(0), LayerRun(1, 1, 4), LayerRun(5), LayerRun(6), LayerRun(7)]),
    ],
)
def test_runs_by_hand(config: str, layers: tuple[int, ...] | None, runs: list[LayerRun]) -> None:
    about = CONFIGS[config]
    taps = select_taps(("residual",), layers, about.n_layers)
    assert list(layer_runs(about, taps, layers_needed(taps, about.n_layers), 99)) == runs


def test_a_large_model_is_stacked_in_parts_and_a_turn_of_six_is_found() -> None:
    large = replace(PLAIN, d_model=8192, d_ff=65536, n_layers=80, windows=())
    taps = select_taps(("residual",), None, 80)
    assert [run.steps for run in choose_runs(large, taps, 80, 2)] == [4] * 20
    gemma3 = replace(PLAIN, n_layers=26, windows=((4,) * 5 + (None,)) * 4 + (4, 4))
    every = select_taps(("residual",), None, 26)
    assert layer_runs(gemma3, every, 26, 99) == (LayerRun(0, 6, 4), LayerRun(24), LayerRun(25))


@given(st.data())
def test_runs_are_all_layers_in_order_and_their_turns_are_alike(data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 30))
    windows = tuple(data.draw(st.lists(st.sampled_from([None, 4, 7]), min_size=count, max_size=count)))
    config = replace(PLAIN, n_layers=count, windows=windows)
    layers = tuple(sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1))))
    taps = data.draw(st.permutations(select_taps(("residual", "mlp"), layers, count)))
    most = data.draw(st.integers(1, 40))
    runs = layer_runs(config, taps, layers[-1] + 1, most)
    assert [layer for run in runs for layer in range(run.first, run.stop)] == list(range(layers[-1] + 1))
    for run in runs:
        assert run.steps == 1 or 3 <= run.steps <= most
        for place in range(run.period):
            assert len({(windows[layer], layer in layers) for layer in run.at(place)}) == 1
    groups = tap_groups(taps, runs)
    assert sorted(number for group in groups for number in group) == list(range(len(taps)))
    for group in groups:
        members = [taps[number] for number in group]
        assert len({tap.kind for tap in members}) == 1
        assert [tap.layer for tap in members] == sorted(tap.layer or 0 for tap in members)
        assert len(group) in {1, *(run.steps for run in runs if members[0].layer in range(run.first, run.stop))}


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        *((name, None) for name in CONFIGS if name not in _LARGE),
        ("plain", (1, 3, 5, 7)),
        *(pytest.param(name, (1, 3, 5, 7), marks=pytest.mark.slow) for name in CONFIGS if name != "plain"),
        *(pytest.param(name, None, marks=pytest.mark.slow) for name in _LARGE),
        *(pytest.param(name, (6,), marks=pytest.mark.slow) for name in CONFIGS),
    ],
    ids=str,
)
def test_a_scan_gives_what_its_layers_give_one_by_one(name: str, layers: tuple[int, ...] | None) -> None:
    config = CONFIGS[name]
    kinds = ("residual", "attn", "z", "embed", "final_norm")
    taps = tuple(
        tap for tap in select_taps(kinds, layers, config.n_layers) if tap.kind != "final_norm" or layers is None
    )
    taps += tuple(Tap("k", layer, (1,)) for layer in (layers or range(config.n_layers)))
    taps = tuple(np.random.default_rng(1).permutation(np.array(taps, dtype=object)))
    count, head = layers_needed(taps, config.n_layers), layers is None
    runs = layer_runs(config, taps, count, 99)
    assert any(run.steps > 1 for run in runs) or layers == (1, 3, 5, 7)
    tree = random_weights.random(config, jax.random.key(0), n_layers=count, head=head)
    joined = params.stack_layers(tree, runs, jnp.stack)
    draw = np.random.default_rng(0)
    tokens = jnp.asarray(draw.integers(0, 32, (2, 12)), jnp.int32)
    segments = jnp.asarray([[1] * 5 + [2] * 7, [1] * 12], jnp.int32)
    positions = jnp.asarray([[*range(5), *range(7)], [*range(12)]], jnp.int32)
    alone = forward(tree, tokens, positions, segments, config=config, taps=taps, runs=one_run_per_layer(count))
    grouped = forward(joined, tokens, positions, segments, config=config, taps=taps, runs=runs)
    groups = tap_groups(taps, runs)
    assert len(grouped) == len(groups)
    assert len(groups) < len(taps) or layers is not None
    for group, found in zip(groups, grouped, strict=True):
        assert found.ndim == 4 if len(group) > 1 else found.ndim == 3
        for number, value in zip(group, found if len(group) > 1 else [found], strict=True):
            np.testing.assert_allclose(value, alone[number], rtol=2e-5, atol=2e-5)
