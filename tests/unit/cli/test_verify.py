from __future__ import annotations

import io
import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from spile.cli.main import main
from spile.cli.verify import print_report
from spile.objects import open_folder
from spile.proof.report import Problem, Report, StreamReport
from spile.spec.ranges import Ranges
from spile.store.run import join_run
from spile.store.writer import join_stream
from world import produce, run_identity, sample_of, stream_identity, write_shard


def spile(*words: str) -> int:
    with pytest.raises(SystemExit) as exit_:
        main(words)
    assert isinstance(exit_.value.code, int)
    return exit_.value.code


def test_a_whole_dataset(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    produce(open_folder(str(tmp_path)), 45)
    assert spile("verify", str(tmp_path)) == 0
    text = capsys.readouterr().out
    assert "│ tpu_0  │      42 │       3 │ 45 │      5 │" in text
    assert "✓ proven; 5 of 45 prompts were cut at 64 tokens" in text
    assert ": 42 samples in 1 stream, each exactly once; 5 shards, every checksum right, no NaN" in text


def test_problems_are_reported_and_exit_with_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = produce(open_folder(str(tmp_path)), 45)
    (tmp_path / "tpu_0" / "commits" / "0005.json").unlink()
    assert spile("verify", str(tmp_path)) == 1
    text = capsys.readouterr().out
    assert f"✗ missing: {tmp_path}/tpu_0: samples 43-44 (2 of 45)" in text
    assert "2 missing" in text
    assert "✗ not proven: 2 samples missing; run the same spile extract again to finish it" in text
    assert spile("verify", str(tmp_path), "--max-samples", "43") == 1
    assert "tpu_0/metadata.json: differs from what the commits say" in capsys.readouterr().out
    (tmp_path / "tpu_0" / "metadata.json").unlink()
    assert spile("verify", str(tmp_path), "--max-samples", "43") == 0
    capsys.readouterr()
    (tmp_path / "tpu_0" / store.ledger.files[0].name).unlink()
    assert spile("verify", str(tmp_path), "--json") == 1
    report = json.loads(capsys.readouterr().out)
    assert [problem["kind"] for problem in report["problems"]] == ["damaged", "missing"]


def test_streams_that_were_never_started_are_reported_and_exit_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root, run = open_folder(str(tmp_path)), run_identity()
    join_run(root, run)
    identity = replace(stream_identity(45), streams=4, split="5" * 32)
    for number in (0, 2):
        join_stream(root, number, identity, run)
        produce(root, 45, worker_id=number)
    assert spile("verify", str(tmp_path)) == 1
    text = capsys.readouterr().out
    assert f"✗ missing: {tmp_path}: streams 1, 3 were never begun (2 of 4)" in text
    begin = "begin the others: spile extract with --worker-id 1 …, or prove some alone with --streams"
    assert text.splitlines()[-1] == f"✗ not proven: 2 streams missing; {begin}"
    assert spile("verify", str(tmp_path), "--json") == 1
    assert json.loads(capsys.readouterr().out)["never_begun"] == [[1, 2], [3, 4]]
    assert spile("verify", str(tmp_path), "--streams", "0,2") == 0
    assert ": 84 samples in 2 of 4 streams, each exactly once" in capsys.readouterr().out
    assert spile("verify", str(tmp_path), "--streams", "0-1") == 1
    assert "stream 1 was never begun (1 of 2)" in capsys.readouterr().out


def test_garbage_is_listed_then_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = produce(open_folder(str(tmp_path)), 20)
    builder = store.begin([sample_of(3)])
    write_shard(builder, [sample_of(3)])
    name = builder.finish().name
    old = time.time() - 7200
    os.utime(tmp_path / "tpu_0" / name, (old, old))
    assert spile("verify", str(tmp_path), "--gc") == 0
    text = capsys.readouterr().out
    assert f"orphaned shard: {tmp_path}/tpu_0/{name}, " in text
    assert "1 can be removed (" in text
    assert f"spile verify {tmp_path} --gc --yes removes them" in text
    assert spile("verify", str(tmp_path), "--gc", "--older-than", "3", "--yes") == 0
    assert (tmp_path / "tpu_0" / name).exists()
    assert spile("verify", str(tmp_path), "--gc", "--yes") == 0
    assert not (tmp_path / "tpu_0" / name).exists()
    assert spile("verify", str(tmp_path)) == 0


def test_mistakes_exit_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert spile("verify", str(tmp_path / "nowhere")) == 2
    assert "expected a folder with run.json" in capsys.readouterr().err
    assert spile("verify", str(tmp_path), "--yes") == 2
    assert "--yes: expected --gc or --repair as well" in capsys.readouterr().err
    assert spile("verify", str(tmp_path), "--recompute", "-1") == 2
    capsys.readouterr()
    assert spile("verify", str(tmp_path), "--gc", "--streams", "0") == 2
    assert "--gc: expected all streams, found --streams" in capsys.readouterr().err
    assert spile("verify", str(tmp_path), "--streams", "three") == 2
    assert "--streams: expected all, or numbers and ranges such as 0-11,20, found 'three'" in capsys.readouterr().err


def test_a_narrow_terminal_still_shows_the_state() -> None:
    stream = StreamReport(3, 10_000, 9_999, shards=12, tokens=10**9, bytes=10**12, missing=Ranges.of([7]))
    report = Report("r", "f", (stream,))
    for width, gone in ((100, None), (60, "TOKENS"), (40, "SKIPPED")):
        console = Console(file=io.StringIO(), width=width)
        print_report(report, console)
        assert isinstance(console.file, io.StringIO)
        table = console.file.getvalue()
        assert "…" not in table
        assert "complete" in table
        assert gone is None or gone not in table


def test_a_pipe_has_no_width(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    produce(open_folder(str(tmp_path)), 45)
    assert spile("verify", str(tmp_path)) == 0
    assert "│ tpu_0  │      42 │       3 │ 45 │      5 │" in capsys.readouterr().out


def test_samples_and_streams_are_counted_in_the_verdict() -> None:
    doubled = Problem("doubled", "r/tpu_0", "samples 1-3")
    damaged = Problem("damaged", "r/tpu_0", "a shard")
    stream = StreamReport(0, 9, doubled=Ranges([(1, 4)]), problems=(doubled, damaged, damaged))
    console = Console(file=io.StringIO(), width=100)
    print_report(Report("r", "f", (stream,)), console)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().endswith("✗ not proven: 3 samples doubled, 2 damaged\n")
