"""``--add-taps``: existing and added rows are aligned, and invalid requests are refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import spile
from spile.cli.main import main
from spile.errors import ModelError, RunMismatch, SpecError, UserError
from spile.objects import open_folder
from spile.proof.rerun import recomputer
from spile.proof.verification import verify
from spile.run.backfill import add_taps
from spile.run.worker import run_stream
from spile.spec.run import BackfillSpec, DataSpec, RunSpec
from spile.spec.taps import parse_taps
from spile.store.cleanup import stream_version
from unit.models.toy_models import copy_model, edit_tensors, tensors

ADDED = parse_taps(["mlp.2", "residual.1", "z.2"])


def spec(folder: Path, name: str, **more: object) -> RunSpec:
    data = DataSpec(dataset=str(folder / "texts.jsonl"), max_seq_length=64, keep=("label",))
    base = RunSpec(
        data=data, output=str(folder / name), layers=(0, 2), store_dtype="float32", shard_size_gb=3e-5, batch_tokens=64
    )
    return replace(base, **more)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("backfill")
    rows = [{"text": f"{n} a b c d {n} e f g {'h ' * n}", "label": n} for n in range(8)]
    rows.append({"text": " ", "label": 8})  # which is skipped
    (folder / "texts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_stream(spec(folder, "base"))
    run_stream(spec(folder, "whole", taps=("residual", "mlp", "z"), layers=(0, 1, 2)))
    return folder


@pytest.fixture
def base(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "base", tmp_path / "base"))


@pytest.fixture(scope="module")
def made_with_added(made: Path) -> Path:
    root = Path(shutil.copytree(made / "base", made / "added"))
    add_taps(backfill(root))
    return root


@pytest.fixture
def with_added(made_with_added: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made_with_added, tmp_path / "base"))


def backfill(root: Path, **more: object) -> BackfillSpec:
    return BackfillSpec(str(root), ADDED, batch_tokens=64, **more)  # type: ignore[arg-type]


def close(left: np.ndarray, right: np.ndarray) -> bool:
    return bool(np.abs(left - right).max() <= 1e-4 * np.sqrt(np.mean(right**2)))


def test_added_rows_are_those_of_one_run(made: Path, base: Path) -> None:
    before = {path: path.read_bytes() for path in base.rglob("*") if path.is_file()}
    summary = add_taps(backfill(base))
    assert (summary.complete, summary.samples) == (True, 8)
    ours, theirs = spile.open(str(base)), spile.open(str(made / "whole"))
    assert ours.taps == ("residual.0", "residual.2", "residual.1", "mlp.2", "z.2")
    assert len(ours.streams[0].shards) > 1
    assert ours.sample(0, 3).ref.kept == {"label": 3}
    for ref in theirs.samples:
        left, right = ours.sample(0, ref.index), theirs.sample(0, ref.index)
        assert np.array_equal(left.tokens, right.tokens)
        assert all(close(left.rows(tap), right.rows(tap)) for tap in ours.taps)
    report = verify(str(base), recompute=recomputer(str(base)), k=8)
    assert report.ok, report.all_problems
    assert report.streams[0].added == ("residual.1", "mlp.2", "z.2")
    assert report.recomputed is not None
    assert set(report.recomputed.worst) == set(ours.taps)
    assert all(path.read_bytes() == data for path, data in before.items())


def test_every_reader_reads_both(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spile.add_taps(backfill(base))
    dataset = spile.open(str(base))
    wanted = {
        (ref.index, place): (sample.rows("residual.0")[place], sample.rows("mlp.2")[place])
        for ref in dataset.samples
        for sample in [dataset.sample(0, ref.index)]
        for place in range(ref.length)
    }
    (batch,) = dataset.shuffled(["residual.0", "mlp.2"], 10_000, context=True)
    for number, key in enumerate(zip(batch.samples.tolist(), batch.positions.tolist(), strict=True)):
        assert np.array_equal(batch.rows["residual.0"][number], wanted[key][0])
        assert np.array_equal(batch.rows["mlp.2"][number], wanted[key][1])
    rows = np.concatenate(list(dataset.rows("mlp.2", 5)))
    monkeypatch.setattr("spile.store.shard_reader.SMALL_SHARD", 0)
    small = np.concatenate(list(dataset.shuffled("mlp.2", 10_000, memory=100)))
    assert sorted(row.tobytes() for row in small) == sorted(row.tobytes() for row in rows)
    assert dataset.stats("mlp.2").count == len(rows) == len(wanted)
    np.testing.assert_allclose(dataset.stats("mlp.2").mean, rows.astype(np.float64).mean(0))
    assert all("mlp.2" in shard.statistics for shard in dataset.streams[0].shards)
    from spile.reading.export import export_dataset

    export_dataset(dataset, str(tmp_path / "npy"), to="npy", taps=("residual.0", "mlp.2"))
    assert np.array_equal(np.load(tmp_path / "npy" / "mlp.2.npy"), rows)


def test_again_there_is_nothing_to_do(with_added: Path) -> None:
    base = with_added
    commits = sorted(base.glob("stream_0/added_*/commits/*"))
    assert commits
    again = add_taps(backfill(base))
    assert (again.complete, again.progress.samples, again.samples) == (True, 0, 8)
    assert "nothing was left to do" in again.device
    assert sorted(base.glob("stream_0/added_*/commits/*")) == commits


@pytest.mark.parametrize(
    "more",
    [
        {"positions": "random:4"},
        pytest.param({"store_dtype": "int8"}, marks=pytest.mark.slow),
        pytest.param({"positions": "last"}, marks=pytest.mark.slow),
    ],
)
def test_positions_and_encodings_are_the_dataset_s(made: Path, tmp_path: Path, more: dict[str, str]) -> None:
    root = tmp_path / "root"
    run_stream(spec(made, "unused", output=str(root), **more))
    add_taps(backfill(root))
    report = verify(str(root), recompute=recomputer(str(root)), k=8)
    assert report.ok, report.all_problems
    dataset, whole = spile.open(str(root)), spile.open(str(made / "whole"))
    for ref in dataset.samples:
        sample = dataset.sample(0, ref.index)
        wanted = whole.sample(0, ref.index).rows("mlp.2")[sample.positions]
        step = np.abs(wanted).max(1, keepdims=True) / 127 if "store_dtype" in more else 1e-4
        assert (np.abs(sample.rows("mlp.2") - wanted) <= step).all()


def test_a_second_addition(with_added: Path) -> None:
    base = with_added
    add_taps(BackfillSpec(str(base), parse_taps(["attn.0"]), batch_tokens=64))
    assert spile.open(str(base)).taps[-1] in ("attn.0", "z.2")
    assert set(spile.open(str(base)).taps) == {"residual.0", "residual.2", "residual.1", "mlp.2", "z.2", "attn.0"}
    assert verify(str(base)).ok


def refusal(kind: type[Exception], wanted: str, asked: BackfillSpec) -> None:
    before = sorted(Path(asked.root).rglob("*"))
    with pytest.raises(kind) as error:
        add_taps(asked)
    assert wanted in str(error.value)
    assert "\n" not in str(error.value)
    assert sorted(Path(asked.root).rglob("*")) == before  # nothing was written


def test_what_is_refused(made: Path, base: Path, tmp_path: Path) -> None:
    refusal(UserError, "no dataset at", backfill(tmp_path / "nowhere"))
    refusal(SpecError, "expected layers 0 to 5", BackfillSpec(str(base), parse_taps(["mlp.60"])))
    refusal(
        SpecError,
        "--add-taps residual.0: expected taps that the dataset does not have",
        BackfillSpec(str(base), parse_taps(["residual.0", "mlp.1"])),
    )
    refusal(
        RunMismatch,
        "created with dtype float32, but this command asks for dtype bfloat16",
        backfill(base, dtype="bfloat16"),
    )
    refusal(
        RunMismatch,
        "with store_dtype float32, but this command asks for store_dtype int8",
        backfill(base, store_dtype="int8"),
    )
    refusal(
        RunMismatch,
        "created with positions all, but this command asks for positions last",
        backfill(base, positions="last"),
    )
    refusal(SpecError, "found no stream 7", backfill(base, worker_id=7))
    add_taps(backfill(base))
    refusal(SpecError, "residual.1 mlp.2 z.2 are added already", BackfillSpec(str(base), parse_taps(["mlp.2"])))


def test_an_unfinished_dataset_is_refused(made: Path, tmp_path: Path) -> None:
    root = tmp_path / "some"
    asked = spec(made, "unused", output=str(root))
    run_stream(replace(asked, data=replace(asked.data, max_samples=3)))
    last = max(root.glob("*/commits/*"))
    limit = last.read_bytes()
    last.unlink()
    refusal(SpecError, f"expected a finished dataset in {root}, found 3 of 9 samples in stream 0", backfill(root))
    last.write_bytes(limit)
    add_taps(backfill(root))  # the limit in its last commit says that it is finished
    assert verify(str(root)).ok
    run_stream(asked)  # the dataset grows: what was added lacks the new rows, and is finished by the same command
    assert "mlp.2" not in spile.open(str(root)).taps
    add_taps(backfill(root))
    assert "mlp.2" in spile.open(str(root)).taps
    assert verify(str(root)).ok


def test_another_model_or_tokenizer_is_refused(made: Path, base: Path, tmp_path: Path) -> None:
    model = copy_model(tmp_path / "model")
    add_taps(backfill(base, model=str(model)))  # the same weights elsewhere
    edit_tensors(model, model__norm__weight=tensors(model)["model.norm.weight"] * 2)
    other = BackfillSpec(str(base), parse_taps(["attn.0"]), model=str(model))
    refusal(ModelError, f"{model} is not the model of {base}: expected weights", other)
    shutil.rmtree(model)
    model = copy_model(tmp_path / "model")
    (model / "tokenizer.json").write_text((model / "tokenizer.json").read_text() + " ")
    refusal(ModelError, f"{model} is not the model of {base}: expected tokenizer", other)


def test_a_stream_that_is_begun_again_takes_its_additions_with_it(made: Path, with_added: Path) -> None:
    base = with_added
    run_stream(spec(made, "unused", output=str(base)), clear=stream_version(open_folder(str(base)), 0))
    assert not list(base.glob("stream_0/added_*/**/*.safetensors"))
    assert spile.open(str(base)).taps == ("residual.0", "residual.2")
    assert verify(str(base)).ok
    add_taps(backfill(base))
    assert verify(str(base)).ok
    assert "mlp.2" in spile.open(str(base)).taps


def test_taps_added_before_the_stream_was_started_again_are_ignored(
    made: Path, with_added: Path, tmp_path: Path
) -> None:
    """As an older version, which did not know added taps, would leave it."""
    other = tmp_path / "other"
    run_stream(spec(made, "unused", output=str(other)))
    (folder,) = with_added.glob("stream_0/added_*")
    shutil.copytree(folder, other / "stream_0" / folder.name)
    assert spile.open(str(other)).taps == ("residual.0", "residual.2")
    assert verify(str(other)).ok
    add_taps(backfill(other))
    assert "mlp.2" in spile.open(str(other)).taps
    assert verify(str(other)).ok


def test_damage_to_what_was_added_is_found(with_added: Path) -> None:
    base = with_added
    shard = sorted(base.glob("stream_0/added_*/shard_*"))[0]
    data = bytearray(shard.read_bytes())
    data[5000] ^= 1
    shard.write_bytes(data)
    (problem, *_) = verify(str(base)).all_problems
    assert (problem.kind, shard.name in problem.where) == ("damaged", True)
    shard.unlink()
    assert verify(str(base)).all_problems[0].text == "the shard is gone"


def test_garbage_of_an_addition(with_added: Path) -> None:
    base = with_added
    (folder,) = base.glob("stream_0/added_*")
    orphan = folder / "shard_0009-abcdef.safetensors"
    orphan.write_bytes(b"x" * 100)
    report = verify(str(base), gc=True, remove=True, older_than=-1)
    assert [(item.key, item.state) for item in report.garbage] == [(str(orphan.relative_to(base)), "removed")]
    assert not orphan.exists()
    assert verify(str(base)).ok


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["--add-taps", "mlp.1"], "--add-taps and --to: expected both"),
        (["--to", "x"], "--add-taps and --to: expected both"),
        (["--add-taps", "mlp", "--to", "x"], "not a tap: expected KIND.LAYER such as residual.12"),
        (["--add-taps", "mlp.1", "--to", "x", "--layers", "3"], "--layers cannot be used with --add-taps"),
        (["--add-taps", "mlp.1", "--to", "x", "--dataset", "y"], "--dataset cannot be used with --add-taps"),
        (["--add-taps", "mlp.1", "--to", "/nowhere/at/all"], "no dataset at /nowhere/at/all"),
    ],
)
def test_the_command_s_mistakes(words: list[str], wanted: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["extract", *words])
    assert ended.value.code == 2
    found = capsys.readouterr().err
    assert wanted in found
    assert len(found.strip().splitlines()) == 1


def test_the_command(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def code(*words: str) -> int:
        with pytest.raises(SystemExit) as ended:
            main(list(words))
        return int(ended.value.code or 0)

    assert code("extract", "--add-taps", "mlp.1,attn.0", "--to", str(base), "--batch-tokens", "64") == 0
    message = " ".join(capsys.readouterr().out.split())
    assert f"activations {base}/stream_0: attn.0, mlp.1" in message
    assert f"spile verify {base}" in message
    assert code("verify", str(base)) == 0
    assert "2 taps added row for row" in " ".join(capsys.readouterr().out.split())


def test_how_taps_are_spelled() -> None:
    found = [str(tap) for tap in parse_taps(["mlp.12,residual.3 z.3.0-3,7", "loss"])]
    assert found == ["loss", "residual.3", "z.3.0-3,7", "mlp.12"]
    assert parse_taps(["mlp.2", "mlp.1"]) == parse_taps(["mlp.1,mlp.2"])
    with pytest.raises(SpecError, match=r"--add-taps: expected taps such as mlp\.12, found none"):
        parse_taps([" "])
