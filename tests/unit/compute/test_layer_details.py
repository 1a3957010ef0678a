"""Attention patterns, heads and gradients in stored datasets, and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spile
from spile.errors import UserError
from spile.spec.taps import Tap, parse_tap_words, select_taps

TEXTS = ["The cat sat on the mat", "A dog", "Nobody knows the answer"]


def test_names_of_patterns_and_gradients() -> None:
    assert parse_tap_words(["pattern.2.0-1.top8"]) == ("pattern_ids.2.0-1.top8", "pattern.2.0-1.top8")
    taps = select_taps(["pattern", "residual.1", "embed"], (0, 1), 4, (3,), attention_top=5)
    names = [
        "pattern_ids.0.3.top5",
        "pattern_ids.1.3.top5",
        "embed",
        "pattern.0.3.top5",
        "residual.1",
        "pattern.1.3.top5",
    ]
    assert [str(tap) for tap in taps] == names
    for name in (*names, "grad.residual.1", "grad.z.1.0-2", "grad.embed"):
        assert str(Tap.parse(name)) == name
    for bad in ("grad.loss", "grad.pattern.1.top5", "pattern.1", "grad", "grad.grad.residual.1"):
        with pytest.raises(UserError, match="not a tap"):
            Tap.parse(bad)


@pytest.mark.slow
def test_generated_tokens_have_the_patterns_of_a_forward_pass(tmp_path: Path) -> None:
    taps = ["pattern.1", "head_out.2.0"]
    spile.infer("embedded", TEXTS, tmp_path, taps=taps, max_new_tokens=11, store_dtype="float32", attention_top=64)
    model, dataset = spile.load("embedded"), spile.open(tmp_path)
    again = model.tap([sample.context for sample in dataset], taps=taps, attention_top=64)
    for stored, fresh in zip(dataset, again, strict=True):
        found = stored.attention(1)
        assert found.shape == (4, len(stored), len(stored.context))
        np.testing.assert_allclose(found.sum(axis=-1), 1, atol=1e-5)
        np.testing.assert_allclose(found, fresh.attention(1), atol=1e-5)
        np.testing.assert_allclose(stored["head_out.2.0"], fresh["head_out.2.0"], atol=1e-4)
    with pytest.raises(UserError, match=r"no tap pattern\.2 in this dataset"):
        dataset[0].attention(2)
    assert spile.verify(tmp_path, recompute=3).ok


def test_gradients_are_stored_and_recomputed(tmp_path: Path) -> None:
    options: dict[str, Any] = {"taps": ["residual.1", "loss"], "store_dtype": "float32"}
    spile.extract("embedded", TEXTS, tmp_path, gradients="loss", **options)
    dataset = spile.open(tmp_path)
    assert dataset.taps == ("loss", "residual.1", "grad.residual.1")
    (alone,) = spile.tap("embedded", TEXTS[1:2], taps="residual.1", gradients="loss")
    np.testing.assert_allclose(dataset[1]["grad.residual.1"], alone["grad.residual.1"], atol=1e-6)
    for stored in dataset:
        assert stored["grad.residual.1"][:-1].any()
        assert not stored["grad.residual.1"][-1].any()  # nothing follows the last token
    assert spile.verify(tmp_path, recompute=3).ok


def test_gradients_that_cannot_be_computed_are_refused(tmp_path: Path) -> None:
    for call, line in (
        (lambda: spile.infer("embedded", TEXTS, tmp_path / "a", gradients="loss"), "expected spile extract"),
        (lambda: spile.extract("embedded", TEXTS, tmp_path / "a", taps="loss", gradients="loss"), "computes with"),
        (lambda: spile.extract("embedded", TEXTS, tmp_path / "a", gradients="norm"), "one of none, loss"),
    ):  # fmt: skip
        with pytest.raises(UserError, match=line):
            call()
    assert not (tmp_path / "a").exists()
