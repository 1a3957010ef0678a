"""LoRA adapters against PEFT itself: what it saves is read, and merged to the weights that it merges to."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from numerics import cases
from spile.models import model_files, weights
from spile.models.adapters import find_adapter

RANK = 3


@pytest.mark.torch
def test_peft_merges_to_the_same_weights(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    model = cases.write_model("llama-sites", tmp_path / "model")
    about = peft.LoraConfig(
        r=RANK, lora_alpha=5, target_modules=["q_proj", "v_proj", "down_proj"], rank_pattern={"down_proj": 2},
        use_rslora=True, init_lora_weights=False,
    )  # fmt: skip
    adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model), about)
    adapted.save_pretrained(tmp_path / "adapter")
    adapted.merge_and_unload().save_pretrained(tmp_path / "merged")
    (tmp_path / "merged" / "config.json").write_bytes((model / "config.json").read_bytes())
    ours = weights.load(replace(model_files.find(str(model)), adapter=find_adapter(str(tmp_path / "adapter"))))
    theirs = weights.load(model_files.find(str(tmp_path / "merged")))
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-5), ours, theirs)
    plain = weights.load(model_files.find(str(model)))
    assert np.abs(np.asarray(ours.layers[1].down) - np.asarray(plain.layers[1].down)).max() > 1e-3


@pytest.mark.torch
def test_a_head_that_is_the_embedding(tmp_path: Path) -> None:
    """PEFT adds to what the head says, and leaves the embedding as it is: so do both backends."""
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    from spile.compute.torch_backend import load_model

    model = cases.write_model("qwen2-tied", tmp_path / "model")
    about = peft.LoraConfig(r=RANK, lora_alpha=5, target_modules=["q_proj", "lm_head"], init_lora_weights=False)
    with pytest.warns(UserWarning, match="tie_word_embeddings"):
        theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model), about).eval()
    theirs.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    files = model_files.find(str(model)).with_adapter(find_adapter(str(tmp_path / "adapter")))
    tokens = torch.arange(7)[None]
    ours = load_model(files, "float32")
    with torch.no_grad():
        torch.testing.assert_close(ours(tokens).logits, theirs(tokens).logits, atol=1e-4, rtol=1e-4)
    tree = weights.load(files, head=True)
    np.testing.assert_allclose(tree.head, ours.lm_head.weight, atol=1e-5)
    np.testing.assert_allclose(tree.embed, ours.model.embed_tokens.weight.detach(), atol=1e-5)
