"""The text part of a model with a vision tower, as transformers saves it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from spile.models.decoder import forward
from spile.models.families import read_config
from spile.models.model_files import find
from spile.models.weights import load
from spile.spec.taps import Tap

DEFAULTS = {
    "model_type": "gemma3",
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 2560,
        "intermediate_size": 10_240,
        "num_hidden_layers": 34,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        "sliding_window": 1024,
    },
    "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152},
    "mm_tokens_per_image": 256,
}
"""The fields of Gemma 3 4B: heads, vocabulary and head size are defaults of the config class."""


def test_missing_fields_have_the_defaults_of_the_text_config() -> None:
    from transformers import AutoConfig

    raw: dict[str, Any] = {key: value for key, value in DEFAULTS.items() if key != "model_type"}
    theirs, ours = AutoConfig.for_model("gemma3", **raw).get_text_config(), read_config(DEFAULTS)
    assert (ours.n_heads, ours.n_kv_heads, ours.head_dim) == (8, 4, 256)
    assert (ours.vocab_size, ours.tied) == (theirs.vocab_size, theirs.tie_word_embeddings)
    assert ours.windows == tuple(1024 if kind == "sliding_attention" else None for kind in theirs.layer_types)
    assert (ours.rope.theta, ours.rope.factor) == (1e6, 8.0)
    assert ours.local_rope is not None
    assert ours.local_rope.theta == 1e4


@pytest.mark.torch
def test_gemma_3_with_its_vision_tower_equals_transformers(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, Gemma3ForConditionalGeneration

    text = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 99, "sliding_window": 4, "initializer_range": 0.3,
        "sliding_window_pattern": 2,
    }  # fmt: skip
    vision = {
        "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
        "patch_size": 14,
    }  # fmt: skip
    torch.manual_seed(0)
    config = AutoConfig.for_model("gemma3", text_config=text, vision_config=vision, mm_tokens_per_image=1)
    config._attn_implementation = "eager"
    model = Gemma3ForConditionalGeneration(config).eval()
    model.save_pretrained(tmp_path)
    tokens = np.random.default_rng(0).integers(3, 90, (2, 12)).astype(np.int32)
    files = find(str(tmp_path))
    found = jax.jit(lambda p, t: forward(p, t, config=files.config, taps=(Tap("residual", 0),)))(load(files), tokens)
    with torch.no_grad():
        states = model(torch.from_numpy(tokens).long(), output_hidden_states=True).hidden_states
    expected = states[1].numpy()
    np.testing.assert_allclose(np.asarray(found[0]), expected, rtol=1e-4, atol=1e-5 * float(np.abs(expected).max()))
