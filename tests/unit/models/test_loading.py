"""Tensors arrive as the files hold them, each device its part; what should not be in a file is named."""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from safetensors.numpy import load_file, save_file
from tests.fakes import random_weights

from spile.errors import ModelError
from spile.models import model_files, params, safetensors_files, weights
from spile.models.params import LayerRun
from unit.models.toy_models import copy_model, edit_tensors, shard_model, tensors


def equal(left: Any, right: Any) -> None:
    jax.tree.map(np.testing.assert_array_equal, left, right)


def test_every_tensor_is_the_files(tmp_path: Path) -> None:
    folder = copy_model(tmp_path / "m")
    raw = tensors(folder)
    loaded = weights.load(model_files.find(str(folder)), jnp.bfloat16)
    np.testing.assert_array_equal(loaded.embed, raw["model.embed_tokens.weight"])
    np.testing.assert_array_equal(loaded.layers[2].down, raw["model.layers.2.mlp.down_proj.weight"])
    np.testing.assert_array_equal(loaded.layers[3].k_bias, raw["model.layers.3.self_attn.k_proj.bias"])
    expected = random_weights.abstract(model_files.find("embedded").config, jnp.bfloat16)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), loaded) == jax.tree.map(lambda x: (x.shape, x.dtype), expected)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads the mappings of the process from /proc")
@pytest.mark.parametrize("runs", [(), (LayerRun(0, 1, 4),)])
def test_weights_on_a_cpu_are_in_memory_once(tmp_path: Path, runs: tuple[LayerRun, ...]) -> None:
    folder = copy_model(tmp_path / "m")
    files, place = model_files.find(str(folder)), SingleDeviceSharding(jax.devices()[0])
    loaded = weights.load(files, jnp.bfloat16, sharding=lambda _axes, _shape: place, runs=runs)
    jax.block_until_ready(loaded)
    assert files.weights_hash()
    assert str(folder) not in Path("/proc/self/maps").read_text()
    array = safetensors_files.aligned((3, 5), np.float32)
    array[:] = 1
    placed = jax.make_array_from_callback(array.shape, place, lambda index: array[index])
    assert placed.unsafe_buffer_pointer() == array.ctypes.data


def test_float32_from_bfloat16_and_float16(tmp_path: Path) -> None:
    folder = copy_model(tmp_path / "m")
    exact = weights.load(model_files.find(str(folder)), jnp.float32)
    raw = tensors(folder)
    np.testing.assert_array_equal(exact.embed, raw["model.embed_tokens.weight"].astype(np.float32))
    save_file({name: value.astype(np.float16) for name, value in raw.items()}, folder / "model.safetensors")
    halved = weights.load(model_files.find(str(folder)), jnp.float32)
    np.testing.assert_allclose(exact.embed, halved.embed, rtol=1e-3, atol=1e-6)


def test_an_index_of_files_is_the_same_model(tmp_path: Path) -> None:
    single = weights.load(model_files.find("embedded"))
    equal(weights.load(model_files.find(str(shard_model(copy_model(tmp_path / "m"))))), single)


def test_only_the_layers_asked_for(tmp_path: Path) -> None:
    files = model_files.find("embedded")
    two = weights.load(files, n_layers=2)
    assert len(two.layers) == 2
    equal(two.layers, weights.load(files).layers[:2])


def test_a_separate_head_that_should_equal_the_embedding(tmp_path: Path) -> None:
    """A copy is passed over. Another one counts for transformers 5 and not for config.json: no logits are made."""
    model = copy_model(tmp_path / "model")
    stored = load_file(model / "model.safetensors")
    head = stored["model.embed_tokens.weight"].copy()
    save_file({**stored, "lm_head.weight": head}, model / "model.safetensors")
    assert weights.load(model_files.find(str(model)), head=True).head is None
    head[-1, -1] += 1
    save_file({**stored, "lm_head.weight": head}, model / "model.safetensors")
    assert weights.load(model_files.find(str(model))).head is None
    with pytest.raises(ModelError, match=r"a head of its own, .* expected lm_head\.weight equal to model\.embed"):
        weights.load(model_files.find(str(model)), head=True)


def test_the_final_norm_and_the_head_are_loaded_when_asked_for(tmp_path: Path) -> None:
    tied = weights.load(model_files.find("embedded"), head=True)
    raw = tensors(copy_model(tmp_path / "m"))
    np.testing.assert_array_equal(tied.final_norm, raw["model.norm.weight"].astype(np.float32))
    assert tied.head is None
    assert weights.load(model_files.find("embedded")).final_norm is None
    folder = copy_model(tmp_path / "untied")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    weights.load(model_files.find(str(folder)))  # The head is not needed.
    with pytest.raises(ModelError, match=r"has only \d+ of its .* found no lm_head.weight"):
        weights.load(model_files.find(str(folder)), head=True)


@pytest.mark.parametrize("sharded", [False, True])
def test_layers_of_a_run_arrive_stacked(tmp_path: Path, sharded: bool) -> None:
    files = model_files.find(str(shard_model(copy_model(tmp_path / "m"))))
    place = (lambda _axes, _shape: SingleDeviceSharding(jax.devices()[0])) if sharded else None
    runs = (LayerRun(0), LayerRun(1, 1, 3))
    loaded = weights.load(files, jnp.float32, 4, place, runs=runs)
    equal(loaded, params.stack_layers(weights.load(files, jnp.float32, 4), runs, jnp.stack))
    assert loaded.layers[1].up.shape == (3, *loaded.layers[0].up.shape)


def test_with_a_sharding() -> None:
    files = model_files.find("embedded")
    asked: list[tuple[Any, ...]] = []

    def place(axes: tuple[str | None, ...], shape: tuple[int, ...]) -> SingleDeviceSharding:
        asked.append((axes, shape))
        return SingleDeviceSharding(jax.devices()[0])

    equal(weights.load(files, jnp.float32, 1, place), weights.load(files, jnp.float32, 1))
    assert (("vocab", "d_model"), (1024, 192)) in asked


MESH = """
import jax, numpy as np, jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from spile.models import model_files, weights
from spile.models.safetensors_files import Piece
mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))
rules = {"heads": "model", "kv_heads": "model", "d_ff": "model", "vocab": "model"}
place = lambda axes, shape: NamedSharding(mesh, PartitionSpec(*(rules.get(axis) for axis in axes)))
reads = []
plain = Piece.read
Piece.read = lambda piece, folder, bounds=(): reads.append(piece.entry.name) or plain(piece, folder, bounds)
files = model_files.find("embedded")
spread = weights.load(files, jnp.float32, None, place)
assert len(reads) == len(set(reads)) * 2 - sum(1 for n in set(reads) if "norm" in n), "each half is read once"
whole = weights.load(files, jnp.float32)
jax.tree.map(np.testing.assert_array_equal, spread, whole)
assert spread.layers[0].q.sharding.shard_shape((64, 64)) == (32, 64)
from spile.models.params import stack_layers
from spile.models.decoder import LayerRun
runs = (LayerRun(0, 1, files.config.n_layers),)
reads.clear()
scanned = weights.load(files, jnp.float32, None, place, runs=runs)
assert len(reads) == len(set(reads)) * 2 - sum(1 for n in set(reads) if "norm" in n), "each half is read once"
jax.tree.map(np.testing.assert_array_equal, scanned, stack_layers(whole, runs, jnp.stack))
assert scanned.layers[0].q.sharding.shard_shape((4, 64, 64)) == (4, 32, 64)
assert spread.layers[0].down.sharding.shard_shape((64, 192)) == (64, 96)
from spile.models.decoder import forward
from spile.models.attention import attention_over_mesh
from spile.spec.taps import select_taps
tokens = np.random.default_rng(0).integers(0, 1000, (4, 30)).astype(np.int32)
taps = select_taps(("residual", "attn"), None, 4)
run = lambda p, attend: jax.jit(lambda p, t: forward(p, t, config=files.config, taps=taps, attention=attend))(p, tokens)
for one, many in zip(run(whole, "xla"), run(spread, attention_over_mesh("xla", mesh, "data", "model")), strict=True):
    np.testing.assert_allclose(one, many, atol=2e-5)
print("ok")
"""


def test_each_device_reads_its_part_on_a_mesh() -> None:
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", MESH], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "ok", done.stderr


@pytest.mark.parametrize("place", [None, lambda axes, shape: SingleDeviceSharding(jax.devices()[0])])
def test_a_change_on_disk_does_not_reach_the_model(place: Any, tmp_path: Path) -> None:
    folder = copy_model(tmp_path / "m")
    loaded = weights.load(model_files.find(str(folder)), jnp.bfloat16, None, place)
    before = jax.tree.map(np.array, loaded)
    with (folder / "model.safetensors").open("r+b") as file:
        file.write(b"\xff" * (folder / "model.safetensors").stat().st_size)
    equal(loaded, before)


def one_line(folder: Path) -> str:
    with pytest.raises(ModelError) as caught:
        weights.load(model_files.find(str(folder)), n_layers=1)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_an_unknown_tensor(tmp_path: Path) -> None:
    folder = edit_tensors(copy_model(tmp_path / "m"), model__layers__1__extra=np.zeros(3, np.float32))
    assert "has a tensor that qwen2 does not: found model.layers.1.extra" in one_line(folder)


def test_a_tensor_that_this_config_does_not_have(tmp_path: Path) -> None:
    folder = edit_tensors(copy_model(tmp_path / "m"), model__layers__6__mlp__up_proj__weight=np.zeros(3, np.float32))
    assert "found model.layers.6.mlp.up_proj.weight" in one_line(folder)


def test_a_missing_tensor_even_in_a_layer_that_is_not_needed(tmp_path: Path) -> None:
    folder = edit_tensors(copy_model(tmp_path / "m"), model__layers__3__self_attn__q_proj__bias=None)
    assert "has only 73 of its 74 tensors: found no model.layers.3.self_attn.q_proj.bias" in one_line(folder)
    edit_tensors(folder, model__embed_tokens__weight=None)
    assert "has only 72 of its 74 tensors: found no" in one_line(folder)


def test_a_misshapen_tensor(tmp_path: Path) -> None:
    folder = edit_tensors(copy_model(tmp_path / "m"), model__layers__0__self_attn__k_proj__weight=np.zeros((64, 32)))
    line = "the tensor model.layers.0.self_attn.k_proj.weight of .*: expected shape (96, 192), found (64, 32)"
    assert re.search(re.escape(line).replace(r"\.\*", ".*"), one_line(folder))


def test_a_doubled_tensor(tmp_path: Path) -> None:
    folder = copy_model(tmp_path / "m")
    embed = tensors(folder)["model.embed_tokens.weight"]
    assert "has a tensor twice" in one_line(edit_tensors(folder, embed_tokens__weight=embed))
    edit_tensors(folder, embed_tokens__weight=None)
    shard_model(folder)
    save_file({"model.norm.weight": np.ones(192, ml_dtypes.bfloat16)}, folder / "model-00004.safetensors")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["again"] = "model-00004.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "twice: found model.norm.weight in model-00002-of-00003.safetensors and" in one_line(folder)


def test_a_dtype_that_weights_cannot_have(tmp_path: Path) -> None:
    embed = np.zeros((1024, 192), np.int32)
    folder = edit_tensors(copy_model(tmp_path / "m"), model__embed_tokens__weight=embed)
    assert "expected one of BF16, F16, F32, found I32" in one_line(folder)


def test_names_without_the_prefix_and_old_buffers(tmp_path: Path) -> None:
    folder = copy_model(tmp_path / "m")
    found = {name.removeprefix("model."): value for name, value in tensors(folder).items()}
    found["layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    found["lm_head.weight"] = found["embed_tokens.weight"]
    save_file(found, folder / "model.safetensors")
    equal(weights.load(model_files.find(str(folder))), weights.load(model_files.find("embedded")))


@pytest.mark.parametrize("size", [0, 4, 8, 100, 5_000, -1, -70_000])
def test_a_truncated_file(size: int, tmp_path: Path) -> None:
    folder = copy_model(tmp_path / "m")
    path = folder / "model.safetensors"
    os.truncate(path, size if size >= 0 else path.stat().st_size + size)
    line = one_line(folder)
    assert line.startswith("model.safetensors is not a complete safetensors file: found ")
    assert line.endswith("Download or copy it again, then run the same command.")


@pytest.mark.parametrize(
    "header",
    [
        b"not json at all",
        b"[1, 2, 3]",
        b'{"a": {"dtype": "F32", "shape": [2]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, -4]}}',
        b'{"a": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}, '
        b'"b": {"dtype": "U8", "shape": [4], "data_offsets": [2, 6]}}',
    ],
)
def test_a_corrupt_header(header: bytes, tmp_path: Path) -> None:
    folder = copy_model(tmp_path / "m")
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    assert one_line(folder).startswith("model.safetensors is not a complete safetensors file: found ")


def test_every_bit_of_a_header_may_flip(tmp_path: Path) -> None:
    """A damaged file gives an error or the same shapes, never a crash or a silently wrong model."""
    folder = copy_model(tmp_path / "m")
    path = folder / "model.safetensors"
    content = path.read_bytes()
    shapes = jax.tree.map(np.shape, weights.load(model_files.find(str(folder)), jnp.bfloat16, n_layers=1))
    draw = np.random.default_rng(0)
    for position in draw.integers(0, 4000, 40):
        flipped = bytes([content[position] ^ (1 << int(draw.integers(0, 8)))])
        path.unlink()  # another file: JAX may still be copying from the one before, and to cut that is a bus error
        path.write_bytes(content[:position] + flipped + content[position + 1 :])
        with contextlib.suppress(ModelError):
            assert (
                jax.tree.map(np.shape, weights.load(model_files.find(str(folder)), jnp.bfloat16, n_layers=1)) == shapes
            )
