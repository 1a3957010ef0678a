"""The model that ships inside the package."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jax
import numpy as np

from spile.models import model_files, weights
from spile.models.decoder import forward
from spile.spec.taps import select_taps
from unit.models.toy_models import EMBEDDED

SCRIPT = Path(__file__).parents[3] / "scripts" / "make_embedded_model.py"


def test_all_but_its_weights_is_made_by_its_script_to_the_byte(tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(SCRIPT), str(tmp_path)], check=True, capture_output=True)
    made = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    there = {path.name: path.read_bytes() for path in EMBEDDED.iterdir() if path.is_file()}
    assert sum(map(len, there.values())) < 8_000_000
    assert len(there.pop("model.safetensors")) < 6_000_000
    assert made == there


def test_its_tokenizer() -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(EMBEDDED)
    assert len(tokenizer) <= model_files.find("embedded").config.vocab_size
    text = "Grid 12x3:\n1 007\n naïve 你好 don't"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    tokens = tokenizer.convert_ids_to_tokens(ids)
    assert not [token for token in tokens if len(token) > 1 and any(sign.isdigit() for sign in token)]
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer(chat).input_ids[0] == 1
    assert (tokenizer.pad_token_id, tokenizer.eos_token_id) == (0, 2)


def test_its_activations_are_well_scaled() -> None:
    files = model_files.find("embedded")
    tokens = np.random.default_rng(0).integers(0, 900, (2, 64)).astype(np.int32)
    taps = select_taps(("residual", "attn", "mlp"), None, files.config.n_layers)
    step = jax.jit(lambda params, batch: forward(params, batch, config=files.config, taps=taps))
    for tap, value in zip(taps, step(weights.load(files), tokens), strict=True):
        assert 0.05 < float(np.std(value)) < 60, tap
