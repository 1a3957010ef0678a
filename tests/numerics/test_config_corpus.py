"""Real config.json files are accepted, or refused for a reason that changes numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spile.errors import ModelError
from spile.models.families import FAMILIES, read_config
from spile.models.families.base import ACTIVATIONS

FOLDER = Path(__file__).parents[1] / "data" / "configs"
INDEX: dict[str, dict[str, str]] = json.loads((FOLDER / "index.json").read_text())


def read(name: str) -> dict[str, Any]:
    raw: dict[str, Any] = json.loads((FOLDER / name).read_text())
    return raw


def test_the_corpus_is_large_and_its_index_complete() -> None:
    assert len(INDEX) >= 60
    assert set(INDEX) == {path.name for path in FOLDER.glob("*.json")} - {"index.json"}


@pytest.mark.parametrize("name", INDEX)
def test_a_real_config_is_accepted_or_changes_numbers(name: str) -> None:
    raw = read(name)
    if raw["model_type"] not in FAMILIES or raw.get("quantization_config"):
        with pytest.raises(ModelError, match=r"unknown architecture|quantized weights"):
            read_config(raw)
        return
    from transformers import AutoConfig

    config = read_config(raw)
    theirs = AutoConfig.for_model(raw["model_type"], **{key: raw[key] for key in raw if key != "model_type"})
    theirs = theirs.get_text_config()
    heads = theirs.num_attention_heads
    assert (config.d_model, config.n_layers, config.n_heads) == (theirs.hidden_size, theirs.num_hidden_layers, heads)
    assert config.head_dim == (getattr(theirs, "head_dim", None) or theirs.hidden_size // heads)
    assert config.n_kv_heads == (getattr(theirs, "num_key_value_heads", None) or heads)
    assert (config.vocab_size, config.tied) == (theirs.vocab_size, theirs.tie_word_embeddings)
    act = next(
        getattr(theirs, name)
        for name in ("hidden_activation", "hidden_act", "activation_function")
        if hasattr(theirs, name)
    )
    assert config.activation == ACTIVATIONS[act]
    rope = getattr(theirs, "rope_parameters", None)
    if rope:
        full = rope.get("full_attention", rope)
        assert (config.rope.theta, config.rope.kind) == (full["rope_theta"], full["rope_type"])


def test_most_are_accepted() -> None:
    accepted = []
    for name in INDEX:
        try:
            accepted.append(read_config(read(name)).architecture)
        except ModelError:
            continue
    assert len(accepted) >= 45
    assert len(set(accepted)) >= 12
