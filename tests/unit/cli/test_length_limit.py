"""No prompt is cut without a word: before the run, in its summary, and in everything that reports on the dataset."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import spile.run.worker as worker
from spile.compute import length
from spile.objects import open_folder
from spile.spec.run import AUTO, DataSpec, RunSpec
from spile.store.ledger import ShardRecord, read_ledger
from spile.store.run import read_run
from spile.store.writer import read_stream
from unit.cli.refusals import lines, spile

LAYER = ("--layers", "0", "--column", "input_ids")
FORECAST = "64 tokens: 25 % of prompts are longer and lose their end. 128 keeps 100 % whole and takes 1.2 times the tok"
CUT = "1 of 4 prompts was cut at 64 tokens"


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    rows = [{"input_ids": list(range(1, 1 + count))} for count in (20, 100, 30, 40)]
    return lines(folder / "ids.jsonl", *rows)


@pytest.fixture(scope="module")
def run(texts: Path) -> Path:
    root = texts.parent / "run"
    assert spile("extract", "--dataset", texts, "--output", root, *LAYER, "--max-seq-length", 64) == 0
    return root


def test_plan_and_the_first_line_of_a_run_say_what_the_limit_does(
    texts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert spile("plan", "--dataset", texts, *LAYER, "--max-seq-length", 64, "--no-compile") == 0
    planned = " ".join(capfd.readouterr().out.split())
    assert FORECAST in planned
    assert "lengths 5 % 20, 25 % 20, 50 % 30, 75 % 40, 95 % 100, longest 100" in planned
    assert spile("plan", "--dataset", texts, *LAYER, "--max-seq-length", 64, "--no-compile", "--json") == 0
    assert FORECAST in json.loads(capfd.readouterr().out)["run"]["length"]["sentence"]
    words = ("--dataset", texts, "--output", tmp_path / "run", *LAYER)
    assert spile("extract", *words, "--max-seq-length", 64) == 0
    first, *rest = capfd.readouterr().out.splitlines()
    assert FORECAST in first
    summary = " ".join(" ".join(rest).split())
    assert f"length {CUT} (expected: 25 %)" in summary


def test_an_engine_says_it_before_its_workers_start(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = lines(tmp_path / "texts.jsonl", *({"text": f"a text of several words, {number}"} for number in range(4)))
    words = ("--dataset", data, "--output", tmp_path / "run", "--layers", "0", "--max-seq-length", 2)
    assert spile("extract", *words, "--engine", "local", "--num-workers", 1) == 0
    first, *rest = capfd.readouterr().out.splitlines()
    assert first.startswith("2 tokens: 100 % of prompts are longer and lose their end.")
    assert "4 of 4 prompts were cut at 2 tokens" in " ".join(rest)


def test_infer_skips_and_says_it(texts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ("--dataset", texts, "--output", tmp_path / "run", *LAYER, "--max-new-tokens", 2)
    assert spile("infer", *words, "--max-seq-length", 64) == 0
    out = capfd.readouterr().out
    assert "64 tokens: 25 % of prompts are longer and are skipped." in out.splitlines()[0]
    assert "1 of 4 prompts was skipped as longer than 64 tokens (expected: 25 %)" in " ".join(out.split())


def test_verify_monitor_and_metadata_count_what_was_cut(run: Path, capfd: pytest.CaptureFixture[str]) -> None:
    capfd.readouterr()
    assert spile("verify", run) == 0
    assert f"✓ proven; {CUT}: 4 samples in 1 stream" in capfd.readouterr().out
    assert spile("verify", run, "--json") == 0
    report = json.loads(capfd.readouterr().out)
    assert (report["cut"], report["streams"][0]["cut"]) == (CUT, 1)
    assert spile("monitor", run, "--once") == 0
    assert CUT in capfd.readouterr().out
    metadata = json.loads((run / "stream_0" / "metadata.json").read_bytes())
    assert (metadata["cut_samples"], metadata["max_seq_length"]) == (1, 64)


def test_a_commit_whose_count_is_not_that_of_the_shard_is_damaged(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from spile.proof.verification import verify

    known = ShardRecord.from_json
    monkeypatch.setattr(ShardRecord, "from_json", staticmethod(lambda fields: replace(known(fields), cut=0)))
    assert any("counts 0 cut samples, the header 1" in each.text for each in verify(str(run)).all_problems)


def test_the_count_is_in_the_commits(run: Path) -> None:
    folder = open_folder(str(run / "stream_0"))
    record = read_stream(folder)
    assert record is not None
    assert read_ledger(folder, record.id).cut == 1


def test_auto_is_resolved_once_and_kept(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "run"
    words = ("extract", "--dataset", texts, "--output", root, *LAYER)
    monkeypatch.setattr(length, "host_memory", lambda: 100_000_000)
    assert spile(*words, "--max-samples", 2) == 0
    run = read_run(open_folder(str(root)))
    assert run is not None
    assert 1024 <= run.max_seq_length < 32_768, "as much as the machine that began the run holds"
    assert json.loads((root / "spec.json").read_bytes())["max_seq_length"] == AUTO
    monkeypatch.undo()
    assert spile(*words) == 0, "a larger machine continues with the same limit"
    assert read_run(open_folder(str(root))) == run
    assert spile(*words, "--max-seq-length", 64) == 2
    assert f"max_seq_length {run.max_seq_length}, but this command asks for max_seq_length 64" in capfd.readouterr().err
    assert spile("verify", root) == 0


def test_a_worker_that_loses_the_race_takes_the_limit_of_the_winner(
    texts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = RunSpec(data=DataSpec(dataset=str(texts)), output=str(tmp_path / "run"), layers=(0,))
    load, said = worker.make_producer, list[str]()

    def create_first(run: worker.ResolvedRun, *rest: object) -> object:
        monkeypatch.setattr(worker, "make_producer", load)
        worker.join_run(run.root, replace(run.identity, max_seq_length=2048))
        return load(run, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(worker, "make_producer", create_first)
    summary = worker.run_stream(spec, progress=worker.Progress(log=said.append))
    assert summary.complete
    assert any("was just created with --max-seq-length 2048" in line for line in said)
    stored = read_run(open_folder(spec.output))
    assert stored is not None
    assert stored.max_seq_length == 2048


def test_tasks_above_an_automatic_limit_are_skipped_and_texts_are_cut() -> None:
    automatic, explicit = DataSpec(), DataSpec(max_seq_length=64)
    assert [automatic.long_policy(kind) for kind in ("arc", "chat", "text", "tokens")] == [
        "skip", "skip", "truncate", "truncate",
    ]  # fmt: skip
    assert {explicit.long_policy(kind) for kind in ("arc", "chat", "text", "tokens")} == {"truncate"}
    assert DataSpec(long="truncate").long_policy("arc") == "truncate"


def test_packed_sequences_need_a_number(texts: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert spile("extract", "--dataset", texts, "--pack", "--prompt", "text") == 2
    error = capfd.readouterr().err
    assert error.startswith("spile: --pack: expected a number of tokens as --max-seq-length, found auto")
    assert error.count("\n") == 1
