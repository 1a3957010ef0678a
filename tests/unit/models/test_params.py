"""The tree of weights: shapes without memory, axes for each dimension, and random weights that depend only on names."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from tests.fakes import random_weights

from spile.models.architecture import ModelConfig, parameter_count

CONFIG = ModelConfig(
    "llama", 24, 3, 4, 2, 8, 40, 50, qkv_bias=True, o_bias=True, mlp_bias=True, qk_norm=True, tied=True
)
SQUARE = replace(CONFIG, d_model=32, d_ff=32, vocab_size=32)
"""Few shapes, so that few samplers compile."""
PLAIN = ModelConfig("llama", 24, 3, 4, 2, 8, 40, 50, tied=True)


@pytest.mark.parametrize("config", [CONFIG, PLAIN])
def test_abstract_holds_what_parameter_count_counts(config: ModelConfig) -> None:
    leaves = jax.tree.leaves(random_weights.abstract(config, jnp.bfloat16))
    assert {leaf.dtype for leaf in leaves} == {jnp.dtype(jnp.bfloat16)}
    final_norm = config.d_model
    assert sum(leaf.size for leaf in leaves) + final_norm == parameter_count(config)


@pytest.mark.parametrize("config", [CONFIG, PLAIN])
def test_axes_name_every_dimension(config: ModelConfig) -> None:
    def check(leaf: jax.ShapeDtypeStruct, names: tuple[str, ...]) -> None:
        assert len(leaf.shape) == len(names)

    jax.tree.map(check, random_weights.abstract(config, jnp.float32, 2), random_weights.axes(config, 2))


def test_random_is_the_abstract_tree_filled() -> None:
    tree = random_weights.random(SQUARE, jax.random.key(0), jnp.bfloat16)
    assert jax.eval_shape(lambda: tree) == random_weights.abstract(SQUARE, jnp.bfloat16)


def test_random_depends_on_the_key_and_the_name_only() -> None:
    key = jax.random.key(3)
    all_layers, two = random_weights.random(SQUARE, key), random_weights.random(SQUARE, key, n_layers=2)
    jax.tree.map(np.testing.assert_array_equal, all_layers.layers[:2], two.layers)
    assert not np.array_equal(two.layers[0].q, two.layers[1].q)
    assert not np.array_equal(two.layers[0].gate, two.layers[0].up)
    assert not np.array_equal(two.embed, random_weights.random(SQUARE, jax.random.key(4), n_layers=1).embed)
    placed = random_weights.random(SQUARE, key, sharding=lambda axes, shape: SingleDeviceSharding(jax.devices()[0]))
    np.testing.assert_array_equal(placed.embed, two.embed)


def test_layers_out_of_range() -> None:
    for count in (0, 4):
        with pytest.raises(ValueError, match=f"n_layers: expected 1 to 3, found {count}"):
            random_weights.abstract(CONFIG, jnp.float32, count)
