"""The recipe for a new model family works as written."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from spile.models import families
from spile.models.decoder import forward
from spile.models.families.base import Declared, Family, declared_fields
from spile.models.model_files import find
from spile.models.weights import load
from spile.spec.taps import Tap

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

CONFIG = {
    "model_type": "seed_oss",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "attention_out_bias": True,
}


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> Family:
    """The recipe's family: its file as the guide has it, registered, with the generated fields."""
    from make_config_fields import describe

    guide = (ROOT / "docs" / "guides" / "add-a-model.md").read_text()
    module: dict[str, Any] = {"__name__": "seed_oss"}
    exec(re.search(r"```python\n(.*?)```", guide, re.S)[1], module)  # type: ignore[index]
    monkeypatch.setitem(families.FAMILIES, "seed_oss", module["FAMILY"])  # type: ignore[arg-type]
    monkeypatch.setitem(declared_fields(), "seed_oss", Declared(**describe("seed_oss")))  # type: ignore[arg-type]
    return module["FAMILY"]  # type: ignore[no-any-return]


def test_its_config_is_read(family: Family) -> None:
    config = families.read_config(CONFIG)
    assert (config.qkv_bias, config.o_bias, config.mlp_bias) == (True, True, False)
    assert families.read_config({"model_type": "seed_oss", **family.example[1]}).n_layers == 64


@pytest.mark.torch
@pytest.mark.usefixtures("family")
def test_its_activations_equal_those_of_transformers(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(**CONFIG, initializer_range=0.3)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="eager").eval()
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "seed_oss"
    tokens = np.random.default_rng(0).integers(0, 64, (2, 20)).astype(np.int32)
    files = find(str(tmp_path))
    found = jax.jit(lambda p, t: forward(p, t, config=files.config, taps=(Tap("residual", 0),)))(load(files), tokens)
    with torch.no_grad():
        expected = model(torch.from_numpy(tokens).long(), output_hidden_states=True).hidden_states[1].numpy()
    np.testing.assert_allclose(np.asarray(found[0]), expected, rtol=1e-5, atol=1e-5 * float(np.abs(expected).max()))
