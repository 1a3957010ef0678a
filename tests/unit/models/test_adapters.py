"""LoRA adapters: merged while the weights are read, part of their hash, and refused if they are more than a LoRA."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from numerics import cases
from spile.errors import ModelError
from spile.models import model_files, weights
from spile.models.adapters import find_adapter
from spile.run.worker import run_stream
from spile.spec.run import DataSpec, GenerationSpec, RunSpec

RANK = 3


def write_adapter(folder: Path, model: Path, modules: list[str], **config: Any) -> Path:
    """A random LoRA for these modules of a model, as PEFT saves it."""
    folder.mkdir()
    base, draw = load_file(model / "model.safetensors"), np.random.default_rng(0)
    tensors = {}
    for module in modules:
        outer, inner = base[f"{module}.weight"].shape
        if config.get("fan_in_fan_out"):
            outer, inner = inner, outer
        tensors[f"base_model.model.{module}.lora_A.weight"] = draw.standard_normal((RANK, inner)).astype(np.float32)
        tensors[f"base_model.model.{module}.lora_B.weight"] = draw.standard_normal((outer, RANK)).astype(np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    about = {"peft_type": "LORA", "r": RANK, "lora_alpha": 6, "bias": "none", "target_modules": ["x"], **config}
    (folder / "adapter_config.json").write_text(json.dumps(about))
    return folder


def merged_by_hand(model: Path, adapter: Path, target: Path, scale: float, turned: bool = False) -> Path:
    """The same model with the adapter in its files."""
    target.mkdir()
    tensors, lora = load_file(model / "model.safetensors"), load_file(adapter / "adapter_model.safetensors")
    for name in [name for name in lora if "lora_A" in name]:
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        change = scale * lora[name.replace("lora_A", "lora_B")] @ lora[name]
        tensors[f"{module}.weight"] = tensors[f"{module}.weight"] + (change.T if turned else change)
    save_file(tensors, target / "model.safetensors")
    (target / "config.json").write_bytes((model / "config.json").read_bytes())
    return target


CASES = {
    "llama-sites": (["model.layers.0.self_attn.q_proj", "model.layers.2.mlp.down_proj"], {}, 2.0),
    "phi3": (
        ["model.layers.1.self_attn.qkv_proj", "model.layers.1.mlp.gate_up_proj"],
        {"use_rslora": True},
        6 / 3**0.5,
    ),
    "gpt2": (["transformer.h.0.attn.c_attn", "transformer.h.1.mlp.c_proj"], {"fan_in_fan_out": True}, 2.0),
    "mixtral": (["model.layers.0.block_sparse_moe.experts.2.w1", "model.layers.0.self_attn.o_proj"], {}, 2.0),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_the_model_with_the_product_added(case: str, tmp_path: Path) -> None:
    modules, config, scale = CASES[case]
    model = cases.write_model(case, tmp_path / "model")
    adapter = write_adapter(tmp_path / "adapter", model, modules, **config)
    by_hand = merged_by_hand(model, adapter, tmp_path / "merged", scale, turned=case == "gpt2")
    plain = model_files.find(str(model))
    files = replace(plain, adapter=find_adapter(str(adapter)))
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs, atol=1e-5),
        weights.load(files),
        weights.load(model_files.find(str(by_hand))),
    )
    assert files.weights_hash() != plain.weights_hash()


@pytest.mark.parametrize("written", [False, True])
def test_a_head_that_is_the_embedding_is_changed_alone(written: bool, tmp_path: Path) -> None:
    """As PEFT runs it, whether or not the files hold the head as well."""
    model = cases.write_model("qwen2-tied", tmp_path / "model")
    tensors = load_file(model / "model.safetensors")
    whole = cases.write_model("qwen2-tied", tmp_path / "whole")
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"]}, whole / "model.safetensors")
    adapter = write_adapter(tmp_path / "adapter", whole, ["lm_head", "model.layers.0.self_attn.q_proj"])
    by_hand = merged_by_hand(whole, adapter, tmp_path / "merged", 2.0)
    config = json.loads((by_hand / "config.json").read_text())
    (by_hand / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    files = model_files.find(str(whole if written else model)).with_adapter(find_adapter(str(adapter)))
    ours, theirs = weights.load(files, head=True), weights.load(model_files.find(str(by_hand)), head=True)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-5), ours, theirs)
    assert np.abs(np.asarray(ours.head) - np.asarray(ours.embed)).max() > 0.1
    jax.tree.map(np.testing.assert_array_equal, weights.load(files).embed, ours.embed)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another kind": ({"peft_type": "IA3"}, "expected a LoRA.*found 'IA3'"),
    "dora": ({"use_dora": True}, "use_dora: expected a plain LoRA"),
    "after some tokens only": ({"alora_invocation_tokens": [3]}, "alora_invocation_tokens: expected a plain LoRA"),
    "biases": ({"bias": "all"}, "bias: expected none, found 'all'"),
    "more modules": ({"modules_to_save": ["lm_head"]}, "modules_to_save: expected a plain LoRA.*merge_and_unload"),
    "alphas": ({"alpha_pattern": {"q": 3}}, "alpha_pattern: expected a plain LoRA"),
    "no number": ({"lora_alpha": "x"}, "lora_alpha: expected a number"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_plain_lora_is_refused_by_name(name: str, tmp_path: Path) -> None:
    changed, text = REFUSED[name]
    model = cases.write_model("llama-sites", tmp_path / "model")
    adapter = write_adapter(tmp_path / "adapter", model, ["model.layers.0.self_attn.q_proj"], **changed)
    with pytest.raises(ModelError, match=text):
        find_adapter(str(adapter))


def test_another_models_adapter(tmp_path: Path) -> None:
    model = cases.write_model("llama-sites", tmp_path / "model")
    other = cases.write_model("phi3", tmp_path / "other")
    adapter = find_adapter(str(write_adapter(tmp_path / "adapter", other, ["model.layers.0.self_attn.qkv_proj"])))
    with pytest.raises(ModelError, match=r"is not for this model: expected a tensor .*qkv_proj\.weight"):
        weights.load(replace(model_files.find(str(model)), adapter=adapter))
    with pytest.raises(ModelError, match="no adapter in"):
        find_adapter(str(model))


def test_layers_that_were_saved_whole_are_refused_with_what_to_do(tmp_path: Path) -> None:
    """PEFT writes the head along where the head is adapted."""
    model = cases.write_model("llama-sites", tmp_path / "model")
    adapter = write_adapter(tmp_path / "adapter", model, ["lm_head"])
    head = {"base_model.model.lm_head.base_layer.weight": load_file(model / "model.safetensors")["lm_head.weight"]}
    save_file({**load_file(adapter / "adapter_model.safetensors"), **head}, adapter / "adapter_model.safetensors")
    with pytest.raises(
        ModelError, match=r"not part of a LoRA: found .*base_layer\.weight\. If PEFT .*save_embedding_layers=False"
    ):
        model_files.find(str(model)).with_adapter(find_adapter(str(adapter))).adapter.changes({})  # type: ignore[union-attr]


@pytest.mark.slow
def test_answers_come_from_the_merged_model(tmp_path: Path) -> None:
    embedded = model_files.find("embedded").tokenizer_folder
    modules = ["model.layers.0.self_attn.q_proj", "model.layers.3.mlp.down_proj"]
    adapter = write_adapter(tmp_path / "adapter", embedded, modules)
    by_hand = merged_by_hand(embedded, adapter, tmp_path / "merged", 2.0)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (by_hand / name).write_bytes((embedded / name).read_bytes())

    def answer_tokens(output: Path, **which: Any) -> str:
        data = DataSpec(max_seq_length=512, max_samples=2)
        generation = GenerationSpec(max_new_tokens=8)
        run_stream(RunSpec(**which, data=data, output=str(output), layers=(0,), batch_size=2, generation=generation))
        return (output / "stream_0" / "predictions.jsonl").read_text()

    found = answer_tokens(tmp_path / "a", model=str(embedded), adapter=str(adapter))
    assert [json.loads(line)["tokens"] for line in found.splitlines()] == [
        json.loads(line)["tokens"] for line in answer_tokens(tmp_path / "b", model=str(by_hand)).splitlines()
    ]
