"""The mesh: which axes go where, what is replicated and said, what the default is."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec

from spile.compute.mesh import RULES, MeshPlan, default_shape, make_mesh
from spile.errors import SpecError
from spile.models.architecture import ModelConfig, Tensor, layer_tensors, model_tensors
from spile.planning.machines import parse_machine

QWEN_05 = ModelConfig("qwen2", 896, 24, 14, 2, 64, 4864, 151936, qkv_bias=True, tied=True)
QWEN_7 = ModelConfig("qwen2", 3584, 28, 28, 4, 128, 18944, 152064, qkv_bias=True)


def test_heads_are_never_cut() -> None:
    plan = MeshPlan(QWEN_05, 16, 16)
    # 14 × 64 = 896 does divide by 16, but a part would hold three quarters of a head.
    assert plan.spec(("heads", "d_model"), (896, 896)) == PartitionSpec(None, None)
    assert plan.spec(("d_ff", "d_model"), (4864, 896)) == PartitionSpec("model", None)
    assert plan.spec(("d_model", "d_ff"), (896, 4864)) == PartitionSpec(None, "model")
    assert plan.notes() == [
        "14 heads do not divide over 16 devices (model axis): replicated on each",
        "2 key/value heads do not divide over 16 devices (model axis): replicated on each",
    ]


def test_no_warning_if_everything_divides_evenly() -> None:
    assert MeshPlan(QWEN_05, 8, 2).notes() == []
    assert MeshPlan(QWEN_05, 8, 1).notes() == []
    assert MeshPlan(QWEN_05, 8, 2).spec(("heads", "d_model"), (896, 896)) == PartitionSpec("model", None)


def tensors_of(config: ModelConfig) -> list[Tensor]:
    return [*model_tensors(config, head=True).values(), *layer_tensors(config, 0).values()]


def test_every_axis_of_the_weights_has_a_rule() -> None:
    assert {axis for tensor in tensors_of(QWEN_7) for axis in tensor.axes} <= set(RULES)


@given(st.sampled_from([QWEN_05, QWEN_7]), st.integers(1, 64))
def test_every_part_is_whole(config: ModelConfig, width: int) -> None:
    plan = MeshPlan(config, 1, width)
    for tensor in tensors_of(config):
        spec = plan.spec(tensor.axes, tensor.shape)
        used = [part for part in spec if part is not None]
        assert len(used) <= 1
        for size, part in zip(tensor.shape, spec, strict=True):
            assert part is None or size % width == 0


@pytest.mark.parametrize(
    ("config", "machine", "shape"),
    [
        (QWEN_05, "v5e-256", (256, 1)),
        (QWEN_05, "v3-8", (8, 1)),
        (QWEN_7, "v5e-64", (16, 4)),
        (QWEN_7, "v5p-8", (4, 1)),
        (QWEN_7, "v6e-8", (4, 2)),
    ],
)
def test_the_default_mesh(config: ModelConfig, machine: str, shape: tuple[int, int]) -> None:
    kind = parse_machine(machine)
    found = default_shape(config, kind.devices, 2, kind.hbm_per_device)
    assert found == shape
    assert math.prod(found) == kind.devices
    assert MeshPlan(config, *found).weight_bytes(2) <= 0.4 * kind.hbm_per_device


def test_unknown_memory_is_data_parallel() -> None:
    assert default_shape(QWEN_7, 8, 2, None) == (8, 1)


def test_a_shape_that_is_not_the_devices() -> None:
    with pytest.raises(
        SpecError, match=r"--mesh-shape: expected DATA,MODEL whose product is the number of devices, \d+"
    ):
        make_mesh((16, 17))
