"""``spile verify --recompute``: the run's own model again, and only that."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import spile
from spile.errors import DataError, ModelError
from spile.spec.run import DataSpec, ExtractSpec
from spile.store.verification import verify
from spile.worker.extract import extract
from spile.worker.recompute import recomputer
from unit.models.toy_models import copy_model, edit_tensors, tensors


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run of a model in a folder."""
    folder = tmp_path_factory.mktemp("made")
    model = copy_model(folder / "model")
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps({"text": f"{n} a b {n} c"}) + "\n" for n in range(6)))
    extract(
        ExtractSpec(
            model=str(model),
            data=DataSpec(dataset=str(data), max_seq_length=64),
            output=str(folder / "out"),
            layers=(0, 2),
            sites=("residual", "mlp"),
        )
    )
    return folder


def test_a_run_is_recomputed(made: Path) -> None:
    out = str(made / "out")
    report = verify(out, recompute=recomputer(out), k=4, seed=1)
    assert report.ok
    assert report.recomputed is not None
    assert report.recomputed.samples == 4
    assert set(report.recomputed.worst) == {"mlp.0", "residual.0", "mlp.2", "residual.2"}
    assert max(report.recomputed.worst.values()) <= 1


def test_rows_are_those_of_the_store(made: Path) -> None:
    dataset = spile.open(str(made / "out"))
    sample = dataset.sample(0, 3)
    (rows,) = recomputer(str(made / "out"))(sample.tokens, ("residual.2",))
    stored = np.asarray(sample.rows("residual.2"), np.float32)
    assert rows.shape == stored.shape
    np.testing.assert_allclose(rows, stored, rtol=2**-7, atol=1e-3)


def test_rows_of_another_model_are_told(made: Path) -> None:
    """Right checksums over wrong numbers: only the model itself can tell."""
    out = str(made / "out")
    real = recomputer(out)
    report = verify(out, recompute=lambda tokens, taps: [rows * 1.1 for rows in real(tokens, taps)], k=2)
    assert not report.ok
    assert {problem.kind for problem in report.all_problems} == {"wrong"}


def test_another_model_under_the_same_name_is_refused(made: Path, tmp_path: Path) -> None:
    model = Path(json.loads((made / "out" / "run.json").read_text())["model"])
    kept = (model / "model.safetensors").read_bytes()
    try:
        edit_tensors(model, model__norm__weight=tensors(model)["model.norm.weight"] * 2)
        with pytest.raises(ModelError, match=r"is not the model of this run: expected weights .*, found weights "):
            recomputer(str(made / "out"))
    finally:
        (model / "model.safetensors").write_bytes(kept)


def test_no_run(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"no run in {tmp_path}: expected a run.json"):
        recomputer(str(tmp_path))


def test_a_run_that_was_moved(made: Path, tmp_path: Path) -> None:
    shutil.copytree(made / "out", tmp_path / "moved")
    report = verify(str(tmp_path / "moved"), recompute=recomputer(str(tmp_path / "moved")), k=1)
    assert report.ok
