"""Streams from ``spile data streams`` to ``spile verify``: those that no worker began are missing."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path

import pytest

from spile.data.split import prepare_streams
from spile.engines.local import LocalEngine
from spile.engines.run import _stream_count
from spile.engines.supervisor import StreamTask, WorkerEnd
from spile.reading.dataset import open as open_dataset
from spile.spec.run import DataSpec, RunSpec
from unit.cli.refusals import SMALL, lines, spile


def test_streams_that_no_worker_began(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = lines(tmp_path / "texts.jsonl", *({"text": f"{n} {n + 1}"} for n in range(9)))
    streams, out = tmp_path / "streams", tmp_path / "out"
    assert spile("data", "streams", "--dataset", data, "--num-streams", 3, "--output-dir", streams) == 0
    work = ("extract", "--model", "embedded", "--dataset-dir", streams, "--output", out, *SMALL, "--worker-id")
    assert spile(*work, 0) == 0
    capfd.readouterr()
    assert spile("verify", out) == 1
    assert f"missing: {out}: streams 1-2 were never begun (2 of 3)" in capfd.readouterr().out
    assert spile("verify", out, "--streams", "0") == 0
    for number in (1, 2):
        assert spile(*work, number) == 0
    capfd.readouterr()
    assert spile("verify", out, "--json") == 0
    report = json.loads(capfd.readouterr().out)
    assert (report["streams_expected"], report["never_begun"]) == (3, [])


def test_an_engines_streams_are_not_taken_for_other_rows(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """They were made of the first six; without --split the whole dataset is meant."""
    data = lines(tmp_path / "texts.jsonl", *({"text": f"{n} {n + 1}"} for n in range(9)))
    out = tmp_path / "out"
    first = DataSpec(dataset=str(data), split="train[:6]")
    prepare_streams(str(data), f"{out}/streams", 2, data=first, log=lambda _: None)
    run = ("extract", "--model", "embedded", "--engine", "local", "--dataset", data, "--output", out, *SMALL)
    assert spile(*run) == 2
    output = capfd.readouterr().err
    assert "holds streams of another selection: rows: expected 0 to 6, found 0 to the last. Give --split" in output
    assert not list(out.glob("*_[0-9]*"))


@pytest.mark.slow
def test_an_engine_takes_no_streams_of_another_dataset(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Without --dataset the embedded one is meant, not the streams in the folder."""
    data = lines(tmp_path / "texts.jsonl", *({"text": f"{n} {n + 1}"} for n in range(4)))
    out = tmp_path / "out"
    prepare_streams(str(data), f"{out}/streams", 2, data=DataSpec(dataset=str(data)), log=lambda _: None)
    run = ("extract", "--model", "embedded", "--engine", "local", "--num-workers", 1, "--output", out, *SMALL)
    for named, found in (((), "embedded. "), (("--dataset", "embedded"), "embedded. ")):
        assert spile(*run, *named) == 2
        output = capfd.readouterr().err
        assert f"{out}/streams holds streams of another dataset: expected {data}, found {found}" in output
        assert f"Continue with --dataset {data}" in output
    assert not list(out.glob("*_[0-9]*"))
    assert spile(*run, "--dataset", data) == 0
    assert f"2 streams of {data}, made by an earlier run: {out}/streams" in capfd.readouterr().out


@pytest.mark.parametrize(("rows", "streams"), [(1, 1), (2, 2), (4, 2), (12, 2), (40, 2), (64, 4), (500, 8)])
def test_the_number_of_streams_follows_the_data(tmp_path: Path, rows: int, streams: int) -> None:
    """Two workers refused a file of four lines, and cut twelve into eight streams."""
    data = lines(tmp_path / "texts.jsonl", *({"text": f"{n} {n + 1}"} for n in range(rows)))
    spec = RunSpec(data=DataSpec(dataset=str(data)))
    assert _stream_count(str(data), spec, 2) == streams
    prepare_streams(str(data), f"{tmp_path}/streams", streams, data=spec.data, log=lambda _: None)


def test_rows_that_are_not_selected_do_not_count(tmp_path: Path) -> None:
    data = tmp_path / "texts.csv"
    data.write_text("text\n" + "a b\n" * 100)
    spec = RunSpec(data=DataSpec(dataset=str(data), split="train[:3]"))
    assert _stream_count(str(data), spec, 4) == 3


ROWS = 300
"""More than a run reads before it begins: that is lowered to 200."""


def large_csv(file: Path, edited: int | None = None, rows: int = ROWS) -> Path:
    texts = (f'"say ""{n}"", fox",{n % 3},s{n}' if n != edited else "dog,0,s" for n in range(rows))
    file.write_text("\ufeffprompt,label,source\n" + "".join(f"{text}\n" for text in texts), encoding="utf-8")
    return file


def run_in_turn(tmp_path: Path, out: Path, *words: object) -> int:
    """Run ``extract --num-workers 2`` on a large CSV file, with the workers in this process."""
    data = ("--dataset", tmp_path / "large.csv", "--column", "prompt", "--output", out)
    return spile("extract", "--model", "embedded", "--num-workers", 2, *data, *SMALL, *words)


def kept(out: Path) -> list[tuple[str, str, str]]:
    """Return the name and the fields of each sample."""
    return sorted((ref.task_id, ref.kept["label"], ref.kept["source"]) for ref in open_dataset(str(out)).samples)


class InProcess(LocalEngine):
    """Runs each worker in the process of the test, one after the other."""

    def start(self, task: StreamTask, avoid: Collection[str] = ()) -> None:
        self.ends = [*getattr(self, "ends", ()), WorkerEnd(task.stream, spile(*task.words), "", "")]

    def wait(self, seconds: float) -> Sequence[WorkerEnd]:
        ends, self.ends = self.ends, []
        return ends


def test_workers_read_a_large_dataset_in_turn(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No row is written to a folder of streams; labels are those of one worker; an edit is found."""
    monkeypatch.setattr("spile.engines.local.LocalEngine", InProcess)
    monkeypatch.setattr("spile.data.samples.HEAD_ROWS", 200)
    large_csv(tmp_path / "large.csv")
    out = tmp_path / "out"
    assert run_in_turn(tmp_path, out, "--max-samples", 4) == 0
    printed = capfd.readouterr()
    assert "large.csv is read during the run, its rows by 2 streams in turn" in printed.out + printed.err
    assert not (out / "streams").exists()
    assert kept(out) == [(f"line-{n}", str(n % 3), f"s{n}") for n in range(4)]
    assert spile("verify", out) == 0
    assert run_in_turn(tmp_path, out, "--max-samples", 6) == 0
    assert len(open_dataset(str(out))) == 6
    for words, message in (
        (("--num-streams", 3), "--num-streams: expected 2, as at the start of the run, found 3"),
        (("--split", "train[:9]"), "holds streams of another dataset: expected --dataset"),
    ):
        capfd.readouterr()
        assert run_in_turn(tmp_path, out, *words) == 2
        assert message in capfd.readouterr().err
    large_csv(tmp_path / "large.csv", edited=5)
    capfd.readouterr()
    assert run_in_turn(tmp_path, out, "--max-samples", 6) == 2
    printed = capfd.readouterr()
    assert "but this command asks for" in printed.out + printed.err


def test_many_workers_continue_a_run_of_one_worker_as_one_stream(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second split of the data next to the first stream would store samples twice."""
    monkeypatch.setattr("spile.engines.local.LocalEngine", InProcess)
    data = tmp_path / "texts.txt"
    data.write_text("".join(f"{n} {n + 1}\n" for n in range(6)))
    out = tmp_path / "out"
    run = ("extract", "--model", "embedded", "--dataset", data, "--output", out, *SMALL)
    assert spile(*run, "--max-samples", 2) == 0
    assert spile(*run, "--engine", "local", "--num-workers", 2) == 0, capfd.readouterr()
    assert len(open_dataset(str(out))) == 6
    assert not (out / "streams").exists()
    assert spile("verify", out) == 0
    other = lines(tmp_path / "other.jsonl", {"text": "x"}, {"text": "y"})
    words = ("extract", "--model", "embedded", "--output", out, *SMALL, "--engine", "local", "--num-workers", 2)
    assert spile(*words, "--dataset", other) == 2
    assert f"holds streams of another dataset: expected --dataset {data}" in capfd.readouterr().err


def test_a_small_csv_file_keeps_its_labels_with_many_workers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spile.engines.local.LocalEngine", InProcess)
    large_csv(tmp_path / "large.csv", rows=9)
    out = tmp_path / "out"
    assert run_in_turn(tmp_path, out, "--num-streams", 2) == 0, capfd.readouterr()
    assert [fields for _, *fields in sorted(kept(out), key=lambda ref: ref[2])] == [
        [str(n % 3), f"s{n}"] for n in range(9)
    ]


@pytest.mark.parametrize("edit", ["a row", "one more row", "fewer rows"])
def test_an_edit_of_data_that_was_split_is_found(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, edit: str
) -> None:
    """The streams of an earlier run were taken for the edited file, and the command said that all was done."""
    monkeypatch.setattr("spile.engines.local.LocalEngine", InProcess)
    large_csv(tmp_path / "large.csv", rows=9)
    out = tmp_path / "out"
    assert run_in_turn(tmp_path, out, "--num-streams", 2) == 0, capfd.readouterr()
    before = kept(out)
    assert run_in_turn(tmp_path, out) == 0, capfd.readouterr()
    large_csv(
        tmp_path / "large.csv", 5 if edit == "a row" else None, {"one more row": 10, "fewer rows": 1}.get(edit, 9)
    )
    capfd.readouterr()
    assert run_in_turn(tmp_path, out) == 2
    assert "large.csv changed since it was read: expected the rows as they were" in capfd.readouterr().err
    assert kept(out) == before


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("large", [False, True])
def test_one_worker_continues_what_several_began(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, large: bool, overwrite: bool
) -> None:
    """It was refused with "give the same dataset"; when it was to begin again, it stored the samples of one twice."""
    monkeypatch.setattr("spile.engines.local.LocalEngine", InProcess)
    if large:
        monkeypatch.setattr("spile.data.samples.HEAD_ROWS", 4)
    data, out = large_csv(tmp_path / "large.csv", rows=9), tmp_path / "out"
    assert run_in_turn(tmp_path, out, "--num-streams", 2, *(() if overwrite else ("--max-samples", 4))) == 0
    run = ("extract", "--model", "embedded", "--dataset", data, "--column", "prompt", "--output", out, *SMALL)
    assert spile(*run, *(("--no-checkpointing", "--overwrite") if overwrite else ())) == 0, capfd.readouterr()
    assert kept(out) == [(f"line-{n}", str(n % 3), f"s{n}") for n in range(9)]
    assert spile("verify", out) == 0, capfd.readouterr()


def test_a_refused_run_does_not_advise_the_same_command(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spile.engines.local.LocalEngine", InProcess)
    data, out = lines(tmp_path / "texts.jsonl", {"text": "a b"}, {"text": "c d"}), tmp_path / "out"
    run = ("extract", "--model", "embedded", "--dataset", data, "--output", out, *SMALL)
    assert spile(*run) == 0
    lines(data, {"text": "a b"}, {"text": "c e"})
    capfd.readouterr()
    assert spile(*run, "--num-workers", 2) == 2
    printed = capfd.readouterr().out
    assert "the same command again resumes" not in printed
    assert "correct what was refused" in printed
