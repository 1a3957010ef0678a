"""The display of a run: a one-line progress bar, plain lines in a pipe, and a useful summary."""

from __future__ import annotations

import io
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console

from spile.compute.progress import ProgressSnapshot, Summary, WallTime
from spile.spec.phase import Phase
from spile.view.worker import progress_line, progress_row, summary_rows, worker_display

NOW = ProgressSnapshot(
    phase=Phase.COMPILING,
    detail="for 4 × 960 tokens",
    samples=21,
    tokens=33_072,
    bytes=17_000_000,
    shards_written=1,
    shards_committed=1,
    samples_committed=20,
    computed_tokens=36_000,
    skipped={},
    compile_seconds=9.0,
    shapes=1,
    seconds=40.0,
    busy={"model": 20.0, "sink": 1.0},
    wall=WallTime(0.5, 1.0, 31.0, 0.5),
    recent_tokens_per_second=1_067,
)
DONE = Summary(
    root="./activations",
    stream="./activations/tpu_0",
    complete=True,
    interrupted=False,
    progress=NOW,
    samples=21,
    tokens=33_072,
    bytes=17_000_000,
    shards=1,
    skipped=0,
    device="1 × cpu, float32, xla attention",
    sink="disk",
    peak_memory=862_000_000,
)


def drawn(width: int, **changes: Any) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, no_color=True, highlight=False)
    with console.capture() as capture:
        console.print(progress_row(replace(NOW, **changes), 48, width))
    return capture.get()


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 120, 160])
def test_the_bar_is_one_line_at_any_width(width: int) -> None:
    assert drawn(width).count("\n") == 1


def test_what_matters_least_goes_first() -> None:
    everything = drawn(160)
    for part in ("compiling", "21/48 samples", "1,067 tokens/s", "1 shard, 17 MB", "40 s left", "limited by: model"):
        assert part in everything
    some = drawn(80, phase=Phase.RUNNING, detail="")
    assert "limited by" not in some
    assert "1 shard, 17 MB" in some
    assert "shard" not in drawn(60, phase=Phase.RUNNING, detail="")
    for part in ("running", "21/48 samples", "1,067 tokens/s", "40 s left"):
        assert part in some
    assert "21/48 samples" in drawn(40, phase=Phase.RUNNING, detail="")


def test_answers_in_progress_are_counted_by_their_tokens() -> None:
    """Before the first answer ends, nothing is stored yet."""
    begun = replace(NOW, phase=Phase.RUNNING, detail="", samples=0, tokens=0, generated_tokens=1_234)
    assert progress_line(begun, 48).startswith(
        "running: 0/48 samples, 0 tokens, 1,234 generated tokens, 1,067 tokens/s"
    )
    shown = drawn(120, phase=Phase.RUNNING, detail="", samples=0, tokens=0, generated_tokens=1_234)
    assert "1,234 generated tokens" in shown


def test_the_plain_line_counts_in_grammar() -> None:
    text = progress_line(NOW, 48)
    assert text.endswith("21/48 samples, 33,072 tokens, 1,067 tokens/s, 1 shard, 17 MB, 40 s left, limited by: model")


def test_the_last_lines() -> None:
    rows = dict(summary_rows(DONE))
    assert rows["bytes"] == "17 MB in 1 shard"
    assert rows["speed"].startswith("1,067 tokens/s over 40 s, 9.0 s of it waiting for 1 program to compile; ")
    assert rows["limited by"] == "model, 1,654 tokens/s"
    assert rows["next"] == "spile verify ./activations"
    assert "retries" not in rows


def test_a_slow_store_is_shown_in_fitting_units() -> None:
    slow = replace(DONE, progress=replace(NOW, bytes=70_300, compile_seconds=1.0, busy={"sink": 2.0}))
    assert dict(summary_rows(slow))["limited by"] == "disk, 35.1 kB/s"


def test_what_comes_next_depends_on_how_it_ended() -> None:
    assert dict(summary_rows(DONE))["next"] == "spile verify ./activations"
    assert dict(summary_rows(replace(DONE, interrupted=True)))["next"] == "the same command again resumes"
    assert dict(summary_rows(replace(DONE, complete=False)))["next"] == "the same command again resumes"


def shown(terminal: bool, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal, no_color=True, highlight=False)
    with worker_display(console=console) as watch:
        watch.progress.log("a line with [/brackets]")
        watch.finish(DONE)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_without_a_terminal_every_fact_is_one_whole_line() -> None:
    text = shown(terminal=False, width=40)
    assert "· a line with [/brackets]\n" in text
    assert "speed        1,067 tokens/s over 40 s, 9.0 s of it waiting for 1 program to compile; 8.1% padding\n" in text
    assert not any(each.endswith(" ") for each in text.splitlines())


def test_in_a_terminal_long_facts_are_wrapped_and_indented() -> None:
    text = shown(terminal=True, width=60)
    assert "a line with [/brackets]" in text
    assert "speed" in text
    assert all(len(each.rstrip()) <= 60 for each in text.splitlines() if each.startswith("speed"))
