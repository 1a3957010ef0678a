"""Streams from ``spile data streams`` to ``spile verify``: those that no worker began are missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spile.cli.engines import _stream_count
from spile.fleet.deploy import prepare_streams
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


def test_an_engine_takes_no_streams_of_another_dataset(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Without --dataset the embedded one is meant, not the streams in the folder."""
    data = lines(tmp_path / "texts.jsonl", *({"text": f"{n} {n + 1}"} for n in range(4)))
    out = tmp_path / "out"
    prepare_streams(str(data), f"{out}/streams", 2, data=DataSpec(dataset=str(data)), log=lambda _: None)
    run = ("extract", "--model", "embedded", "--engine", "local", "--num-workers", 1, "--output", out, *SMALL)
    for named, found in (((), "no --dataset, which is embedded"), (("--dataset", "embedded"), "embedded. ")):
        assert spile(*run, *named) == 2
        output = capfd.readouterr().err
        assert f"{out}/streams holds streams of another dataset: expected {data}, found {found}" in output
        assert f"Continue with --dataset {data}" in output
    assert not list(out.glob("*_[0-9]*"))
    assert spile(*run, "--dataset", data) == 0
    assert f"2 streams of {data}, as made before: {out}/streams" in capfd.readouterr().out


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
