from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from spile.errors import StoreError
from spile.store.snapshot import Snapshot, State, StreamView
from spile.view.stream_table import plain_lines, render, watch

VIEWS = (
    StreamView(0, "tpu_0", State.WORKING, 1250, 2000, 150, 149, 10**6, 3 * 10**9, 61_000.0, 540.0, "running", age=12.0),
    StreamView(1, "tpu_1", State.DONE, 1180, 1180, 142, 142, 10**6, 2 * 10**9, seconds_left=0.0, age=500.0),
    StreamView(2, "tpu_2", State.FAILED, 7, 1000, 1, 1, age=60.0, last_error="cannot write: found a full disk"),
)
SNAPSHOT = Snapshot("gs://bucket/activations", 1_768_573_935.0, VIEWS)


def drawn(snapshot: Snapshot, width: int = 100) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(render(snapshot, interval=60))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def row(text: str, name: str) -> list[str]:
    return next(line for line in text.splitlines() if line.split()[:1] == [name]).split()


def test_the_table_has_the_guides_shape() -> None:
    text = drawn(SNAPSHOT)
    assert row(text, "NAME") == ["NAME", "STATUS", "SAMPLES", "SHARDS", "COMMITTED", "SIZE", "TOKENS/S", "HEARD"]
    assert row(text, "tpu_0") == [
        "tpu_0",
        "running",
        "1,250/2,000",
        "150",
        "149",
        "3",
        "GB",
        "61",
        "k",
        "12",
        "s",
        "ago",
    ]
    assert row(text, "tpu_1")[:5] == ["tpu_1", "done", "1,180/1,180", "142", "142"]
    assert row(text, "tpu_2")[1] == "failed"
    assert row(text, "TOTALS")[:4] == ["TOTALS", "2,437/4,180", "293", "292"]
    for line in (
        "gs://bucket/activations",
        "Total workers: 3 · check interval: 60 s · 58.3 % done",
        "tpu_2: cannot write: found a full disk",
        "✓ Healthy: 2",
        "⟳ Working: 1",
        "✗ Needs recovery: 1",
        "Last update: 2026-01-16 14:32:15 UTC",
        "Press Ctrl+C to stop monitoring",
    ):
        assert line in text


def test_it_fits_eighty_columns() -> None:
    assert "…" not in drawn(SNAPSHOT, 80)


@pytest.mark.parametrize("width", [40, 50, 60, 70])
def test_a_narrow_terminal_has_fewer_columns_and_whole_cells(width: int) -> None:
    text = drawn(SNAPSHOT, width)
    assert "…" not in text
    assert row(text, "tpu_0")[:3] == ["tpu_0", "running", "1,250/2,000"]
    assert len(row(text, "NAME")) < 8


def test_the_narrowest_has_what_matters_most() -> None:
    assert row(drawn(SNAPSHOT, 32), "NAME") == ["NAME", "STATUS", "SAMPLES"]


def test_streams_that_were_never_started_are_not_done() -> None:
    one = replace(SNAPSHOT, streams=(replace(VIEWS[1], streams=4),))
    assert "Total workers: 1 of 4; 3 not begun" in drawn(one)
    assert "% done" not in drawn(one)
    assert plain_lines(one)[-1].endswith("needs recovery 0, not begun 3")
    assert (one.never_begun, one.done, one.to_json()["never_begun"]) == (3, False, 3)
    assert replace(SNAPSHOT, streams=(VIEWS[1],)).done


@pytest.mark.parametrize(("width", "height"), [(80, 24), (50, 30), (200, 18)])
def test_64_streams_never_overflow_the_terminal_and_those_in_trouble_are_kept(width: int, height: int) -> None:
    views = [replace(VIEWS[number % 2], number=number, name=f"tpu_{number}") for number in range(64)]
    for number in (31, 63):
        views[number] = replace(VIEWS[2], number=number, name=f"tpu_{number}", last_error="a long story " * 40)
    console = Console(file=io.StringIO(), width=width, height=height)
    console.print(render(replace(SNAPSHOT, streams=tuple(views)), interval=60, height=height))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) < height, "the cursor has a line too"
    assert max(map(len, lines)) <= width
    text = "\n".join(lines)
    assert row(text, "tpu_31")[1] == row(text, "tpu_63")[1] == "failed"
    assert "more" in text
    assert "Needs recovery: 2" in text


def test_markup_in_an_error_is_shown_as_it_is() -> None:
    odd = replace(VIEWS[2], last_error="[red]not markup[/red] [/]")
    assert "tpu_2: [red]not markup[/red] [/]" in drawn(replace(SNAPSHOT, streams=(odd,)))


def test_plain_lines_for_a_log() -> None:
    lines = plain_lines(SNAPSHOT)
    assert lines[0] == "tpu_0 running: 1,250/2,000 samples, 150 shards, 149 committed, 3 GB, 61 k tokens/s"
    assert lines[2].endswith("last error: cannot write: found a full disk")
    assert lines[-1].startswith("total: 2,437 samples, 292 shards committed, 5 GB, 61 k tokens/s; healthy 2, working 1")


def watched(terminal: bool, takes: list[Snapshot | type[BaseException]], once: bool = False) -> tuple[str, list[float]]:
    file, slept = io.StringIO(), []
    console = Console(file=file, width=100, force_terminal=terminal)

    def take() -> Snapshot:
        following = takes.pop(0)
        if isinstance(following, type):
            raise following
        return following

    watch(take, console, interval=7, once=once, sleep=slept.append)
    return file.getvalue(), slept


DONE = replace(SNAPSHOT, streams=(VIEWS[1],))


def test_watching_ends_when_everything_is_done() -> None:
    for terminal in (True, False):
        text, slept = watched(terminal, [SNAPSHOT, SNAPSHOT, DONE])
        assert slept == [7, 7]
        assert "1,180/1,180" in text


def test_ctrl_c_stops_the_view() -> None:
    for terminal in (True, False):
        text, _ = watched(terminal, [SNAPSHOT, KeyboardInterrupt])
        assert "1,250/2,000" in text


def test_an_update_that_fails_is_reported_and_retried() -> None:
    for terminal in (True, False):
        text, slept = watched(terminal, [SNAPSHOT, _Hiccup, DONE])
        assert slept == [7, 7]
        assert "Could not refresh, retrying in 7 s: no answer" in text
        assert "1,180/1,180" in text
    with pytest.raises(StoreError):
        watched(False, [_Hiccup])


class _Hiccup(StoreError):
    def __init__(self) -> None:
        super().__init__("no answer")


def test_once_looks_once() -> None:
    text, slept = watched(False, [SNAPSHOT], once=True)
    assert slept == []
    assert "Status summary:" in text
