"""The numeric contract and greedy answers on a real trained model.

`scripts/make_real_model.py` makes the folder; the tests are skipped without it.
"""

from __future__ import annotations

import functools
import json
import os
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer

from numerics import cases
from numerics.reference import transformers_taps
from spile.models import model_files, weights
from spile.models.decoder import forward
from spile.spec.taps import parse_tap_words, select_taps

pytestmark = [pytest.mark.torch, pytest.mark.slow]

TEXTS = (
    "The capital of France is Paris, and the capital of Italy is Rome.",
    "def add(a, b):\n    return a + b\n",
    "In the beginning the Universe was created. This has made a lot of people very angry.",
)


@pytest.fixture(scope="module")
def folder() -> Path:
    found = Path(os.environ.get("SPILE_REAL_MODEL", Path(__file__).parents[2] / "build" / "real" / "smollm2"))
    if not (found / "config.json").is_file():
        pytest.skip("no real model: run scripts/make_real_model.py build/real/smollm2")
    pytest.importorskip("torch")
    return found


@pytest.fixture(scope="module")
def samples(folder: Path) -> list[Any]:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return [np.asarray(tokenizer.encode(text).ids, np.int32) for text in TEXTS]


def test_packed_rows_meet_the_numeric_contract(folder: Path, samples: list[Any]) -> None:
    files = model_files.find(str(folder))
    taps = select_taps(parse_tap_words(("residual", "attn", "mlp")), None, files.config.n_layers, top=1)
    tokens = np.concatenate(samples)[None]
    positions = np.concatenate([np.arange(len(each), dtype=np.int32) for each in samples])[None]
    segments = np.concatenate([np.full(len(each), n, np.int32) for n, each in enumerate(samples, 1)])[None]
    step = jax.jit(functools.partial(forward, config=files.config, taps=taps, attention="blocked"))
    found = [np.asarray(tap)[0] for tap in step(weights.load(files), tokens, positions, segments)]
    narrow, wide = ([transformers_taps(folder, each[None], taps, wide=w) for each in samples] for w in (False, True))
    distances, own = {}, {}
    for tap, ours in zip(map(str, taps), found, strict=True):
        reference = np.concatenate([each[tap][0] for each in wide])
        distances[tap] = cases.distance(ours, reference)
        own[tap] = cases.distance(np.concatenate([each[tap][0] for each in narrow]), reference)
    each = cases.ratios(distances, own)
    print(json.dumps({"mean": float(np.mean(list(each.values()))), "worst": max(each.values())}))
    print(
        json.dumps(
            {"spile": float(np.mean(list(distances.values()))), "transformers": float(np.mean(list(own.values())))}
        )
    )
    assert not cases.contract(distances, own)
