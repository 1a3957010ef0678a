"""``spile verify --recompute``: the run's own model again, and only that."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import spile
from spile.errors import DataError, ModelError
from spile.models.model_files import ModelFiles
from spile.objects import open_folder
from spile.proof.comparison import distances
from spile.proof.rerun import recomputer
from spile.proof.verification import verify
from spile.run.worker import run_stream
from spile.spec.run import DataSpec, RunSpec
from spile.spec.sample import Sample
from spile.store.stored_stream import open_streams
from unit.models.toy_models import copy_model, edit_tensors, tensors


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small run of a model in a folder."""
    folder = tmp_path_factory.mktemp("made")
    model = copy_model(folder / "model")
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps({"text": f"{n} a b {n} c"}) + "\n" for n in range(6)))
    run_stream(
        RunSpec(
            model=str(model),
            data=DataSpec(dataset=str(data), max_seq_length=64),
            output=str(folder / "out"),
            layers=(0, 2),
            taps=("residual", "mlp"),
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


def measured(out: str, taps: tuple[str, ...], **options: int) -> dict[int, np.ndarray]:
    """The distances of all samples, with the rows that are stored."""
    dataset = spile.open(out)
    (stream,) = open_streams(open_folder(out), dataset.run)
    kinds = [kind for kind in stream.kinds(dataset.run) if kind.name in taps]
    samples = {ref.index: dataset.sample(0, ref.index) for ref in dataset.samples}
    given = [Sample(n, "", np.asarray(s.tokens), np.zeros(len(s.tokens), np.uint8)) for n, s in samples.items()]
    rows = {n: [np.asarray(s.rows(kind.name)) for kind in kinds] for n, s in samples.items()}
    found = {}
    for reference, fresh in recomputer(out)(given, kinds, **options):
        for number in reference:
            each = zip(reference[number], fresh[number], rows[number], kinds, strict=True)
            found[number] = np.stack([distances(*of_tap) for of_tap in each])
    return found


def test_rows_are_those_of_the_store(made: Path) -> None:
    for index, values in measured(str(made / "out"), ("residual.2",)).items():
        norm, noise, encoding, stored, longer, stored_longer = values[0]
        dataset = spile.open(str(made / "out")).sample(0, index)
        np.testing.assert_allclose(norm, np.linalg.norm(dataset.rows("residual.2").astype(float), axis=1), rtol=2**-7)
        # The run computes in float32 and stores bfloat16: all of the distance is the rounding.
        assert (noise == 0).all()
        assert (encoding / norm > 0).all()
        assert (encoding / norm < 2**-8).all()
        np.testing.assert_allclose(stored, encoding, rtol=0.02)
        np.testing.assert_allclose(stored_longer, longer, atol=2**-12 * norm.max())


@pytest.mark.slow
def test_a_bfloat16_run_is_judged_by_the_noise_of_bfloat16(made: Path, tmp_path: Path) -> None:
    spec = RunSpec(
        model=str(made / "model"),
        data=DataSpec(dataset=str(made / "data.jsonl"), max_seq_length=64),
        output=str(tmp_path / "out"),
        layers=(2,),
        dtype="bfloat16",
    )
    run_stream(spec)
    report = verify(spec.output, recompute=recomputer(spec.output), k=6)
    assert not report.all_problems
    assert report.recomputed is not None
    noise = report.recomputed.taps["residual.2"]
    assert 2.0**-9 < noise.fresh < 2.0**-4
    assert noise.fresh / 1.5 < noise.stored < noise.fresh * 1.5
    plain, other = (measured(spec.output, ("residual.2",), variant=variant) for variant in (0, 1))
    assert any((plain[index][0, 1] != other[index][0, 1]).any() for index in plain)
    for index in plain:
        np.testing.assert_array_equal(plain[index][0, [0, 3]], other[index][0, [0, 3]])


def test_rows_of_other_weights_are_found(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checksums and records are correct but the numbers are wrong: only a recomputation finds it."""
    run = spile.open(str(made / "out")).run
    model = Path(run.model)
    kept = (model / "model.safetensors").read_bytes()
    name = "model.layers.0.mlp.down_proj.weight"
    try:
        edit_tensors(model, **{name.replace(".", "__"): tensors(model)[name] * 1.1})
        monkeypatch.setattr(ModelFiles, "weights_hash", lambda _: run.weights)
        report = verify(str(made / "out"), recompute=recomputer(str(made / "out")), k=2)
    finally:
        (model / "model.safetensors").write_bytes(kept)
    assert {problem.kind for problem in report.all_problems} == {"wrong"}
    assert all("float32 reference" in problem.text for problem in report.all_problems)


def test_another_model_under_the_same_name_is_refused(made: Path, tmp_path: Path) -> None:
    model = Path(json.loads((made / "out" / "run.json").read_text())["model"])
    kept = (model / "model.safetensors").read_bytes()
    try:
        edit_tensors(model, model__norm__weight=tensors(model)["model.norm.weight"] * 2)
        with pytest.raises(ModelError, match=r"is not the model of .*: expected weights .*, found weights "):
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
