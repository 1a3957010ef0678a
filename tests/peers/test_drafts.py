"""The loaders of speculators and SpecForge on what ``spile export`` writes for draft models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import spile

pytestmark = pytest.mark.filterwarnings("default")  # their own imports warn
TAPS = ["residual.0", "residual.2", "residual.5"]


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> spile.Dataset:
    root = str(tmp_path_factory.mktemp("answered") / "root")
    spile.infer("embedded", "embedded", root, taps=TAPS, max_samples=3, max_new_tokens=5)
    return spile.open(root)


def test_speculators_reads_its_training_data(answered: spile.Dataset, tmp_path: Path) -> None:
    data = pytest.importorskip("speculators.train.data", reason="no speculators here: make peers-install")
    spile.export(answered, tmp_path / "draft", to="speculators", taps=TAPS)
    loaded = data.ArrowDataset(4096, str(tmp_path / "draft"), on_missing="raise")
    assert len(loaded) == len(answered) == 3
    for found, sample in zip((loaded[number] for number in range(3)), answered, strict=True):
        aux = np.concatenate([sample[tap] for tap in TAPS[:-1]], axis=1)
        assert np.array_equal(found["hidden_states"].float().numpy(), aux)
        assert np.array_equal(found["verifier_last_hidden_states"].float().numpy(), sample[TAPS[-1]])
        assert np.array_equal(found["input_ids"].numpy(), sample.tokens)
        assert np.array_equal(found["loss_mask"].numpy(), sample.roles & 16 != 0)


def test_specforge_reads_its_training_data(tmp_path: Path) -> None:
    data = pytest.importorskip("specforge.data.preprocessing", reason="no SpecForge here: make peers-install")
    texts = ["The cat sat on the mat.", "A longer text about nothing much.", "Two words"]
    spile.extract("embedded", texts, tmp_path / "root", taps=[*TAPS, "final_norm"])
    spile.export(tmp_path / "root", tmp_path / "draft", to="specforge", taps=[*TAPS, "final_norm"])
    loaded, stored = data.build_offline_eagle3_dataset(str(tmp_path / "draft")), spile.open(tmp_path / "root")
    assert len(loaded) == len(stored) == 3
    for found, sample in zip((loaded[number] for number in range(3)), stored, strict=True):
        aux = np.concatenate([sample[tap] for tap in TAPS], axis=1)
        assert np.array_equal(found["hidden_state"][0].float().numpy(), aux)
        assert np.array_equal(found["target"][0].float().numpy(), sample["final_norm"])
        assert np.array_equal(found["input_ids"][0].numpy(), sample.tokens)
        assert found["loss_mask"][0].tolist() == [1] * (len(sample) - 1) + [0]  # SpecForge leaves the last token out.
