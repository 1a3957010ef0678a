"""What users see: at 80, 120 and 200 columns, in a pipe and in a notebook.

The screens are the files in ``tests/screens``. After a change that is meant, write them again and look at each one:

    SPILE_WRITE_SCREENS=1 pytest tests/unit/view/test_screens.py; git diff tests/screens

Clocks, rates and sizes that depend on the machine are fixed, or masked with ``#``.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console, RenderableType

from spile.cli.main import main
from spile.cli.verify import print_report
from spile.compute.progress import Progress, ProgressSnapshot, Summary, WallTime
from spile.fleet.monitor import FleetStatus, WorkerStatus
from spile.fleet.provider import NodeRequest, NodeState
from spile.fleet.spec import FleetSpec, History, Policy, WorkerHistory, plan_workers
from spile.objects import open_folder
from spile.planning import forecast, tpu_compiler
from spile.proof.verification import verify
from spile.spec.phase import Phase
from spile.store.snapshot import Snapshot, State, StreamView
from spile.view import fleet
from spile.view import stream_table as streams
from spile.view.table import print_facts
from spile.view.worker import notebook_html, progress_line, progress_row, summary_rows
from unit.cli.refusals import lines
from world import produce, run_identity

SCREENS = Path(__file__).parents[2] / "screens"
WIDTHS = (80, 120, 200)
NOW = ProgressSnapshot(
    phase=Phase.RUNNING, detail="", samples=21_400, tokens=33_072_118, bytes=17_000_000_000, shards_written=17,
    shards_committed=16, samples_committed=20_000, computed_tokens=36_000_000, skipped={"too long": 12},
    compile_seconds=9.0, shapes=2, seconds=640.0, busy={"model": 520.0, "sink": 100.0},
    wall=WallTime(4.2, 9.0, 631.0, 1.5), recent_tokens_per_second=52_400,
)  # fmt: skip
DONE = Summary(
    root="./activations", stream="./activations/stream_0", complete=True, interrupted=False, progress=NOW,
    samples=21_400, tokens=33_072_118, bytes=17_000_000_000, shards=17, skipped=12,
    cut="3 of 21,412 prompts were cut at 2,048 tokens (expected: about 0.1 %)",
    device="1 × NVIDIA H200, bfloat16, cudnn attention", sink="disk", peak_memory=4_862_000_000,
)  # fmt: skip
VIEWS = (
    StreamView(
        0, "stream_0", State.WORKING, 1250, 2000, 150, 149, 10**6, 3 * 10**9, 61_000.0, 540.0, Phase.RUNNING, age=12.0
    ),
    StreamView(
        1, "stream_1", State.DONE, 1180, 1180, 142, 142, 10**6, 2 * 10**9, seconds_left=0.0, age=500.0, skipped=3
    ),
    StreamView(2, "stream_2", State.FAILED, 7, 1000, 1, 1, age=60.0, last_error="cannot write: found a full disk"),
    StreamView(3, "stream_3", State.SILENT, 310, 1000, 31, 30, 10**5, 6 * 10**8, age=900.0),
)
SNAPSHOT = Snapshot("gs://bucket/activations", 1_768_573_935.0, VIEWS)


@pytest.fixture(autouse=True)
def _home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Paths on the screens are relative, so that lines break at the same place on every machine."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("spile.view.worker._LINE_EVERY", 1e6)  # no lines about progress, even on a busy machine


def check(name: str, text: str) -> None:
    """Compare a screen with its file."""
    text = "".join(f"{each.rstrip()}\n" for each in text.splitlines())
    file = SCREENS / f"{name}.txt"
    if os.environ.get("SPILE_WRITE_SCREENS"):
        SCREENS.mkdir(exist_ok=True)
        file.write_text(text)
    assert text == file.read_text(), f"{name}: see the docstring of this module"


def drawn(*parts: RenderableType, width: int) -> str:
    return captured(lambda console: console.print(*parts, sep="\n"), width)


def captured(show: Callable[[Console], None], width: int) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, no_color=True, highlight=False)
    with console.capture() as capture:
        show(console)
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", capture.get())


def typed(*words: object, width: int | None = None) -> str:
    """Return what a command prints: in a terminal of this width, or in a pipe."""
    screen = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    terminal = {"FORCE_COLOR": "1", "COLUMNS": str(width), "LINES": "50", "TERM": "xterm"}
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(screen), redirect_stderr(screen):
        for name in ("NO_COLOR", "FORCE_COLOR", "COLUMNS"):
            patch.delenv(name, raising=False)
        for name, value in terminal.items() if width else ():
            patch.setenv(name, value)
        with pytest.raises(SystemExit):
            main([str(word) for word in words])
        screen.flush()
        text = screen.buffer.getvalue().decode()  # type: ignore[attr-defined]
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text).replace("\r", "")


def masked(text: str) -> str:
    """Replace what depends on the machine and its load."""
    text = re.sub(r"[\d.,]+( [kM])? tokens/s", "# tokens/s", text)
    text = re.sub(r"\b\d[\d.]*( min \d+)? (ms|s|min)\b", "# s", text)
    text = re.sub(r"at most [\d.]+ [MG]B of host", "at most # of host", text)
    text = re.sub(r"(limited by +).*", r"\1#", text)
    passing = r"^([⠀-⣿] |verifying ━|(starting|looking|loading|compiling|running|writing)\b).*\n"
    return re.sub(passing, "", text, flags=re.MULTILINE)


def at_each_width(draw: Callable[[int], str]) -> str:
    """Return one screen per width, below each other."""
    return "\n".join(f"── {width} columns ──\n{draw(width)}" for width in WIDTHS)


# -- a run ------------------------------------------------------------------------------------------------------------


def test_progress() -> None:
    kinds = {
        "compiling": replace(NOW, phase=Phase.COMPILING, detail="for 4 × 960 tokens", samples=0, computed_tokens=0),
        "extract": NOW,
        "the end, on a disk": replace(NOW, phase=Phase.WRITING, samples=48_000),
        "the end, in a bucket": replace(NOW, phase=Phase.UPLOADING, samples=48_000),
        "infer": replace(NOW, generated_tokens=1_234_567),
        "a dataset that is read during the run": NOW,
    }
    totals = {name: None if name.startswith("a dataset") else 48_000 for name in kinds}

    def screen(width: int) -> str:
        return "".join(
            f"{name}:\n{drawn(progress_row(now, totals[name], width), width=width)}" for name, now in kinds.items()
        )

    check("progress", at_each_width(screen))
    check("progress-pipe", "\n".join(progress_line(now, totals[name]) for name, now in kinds.items()))


def test_progress_in_a_notebook() -> None:
    progress = Progress(total_samples=48)
    html = [notebook_html(progress)]
    for now in (NOW, replace(NOW, generated_tokens=1_234_567), replace(NOW, phase=Phase.DONE)):
        shown = SimpleNamespace(snapshot=lambda now=now: now, total_samples=48_000)
        html.append(notebook_html(shown))  # type: ignore[arg-type]
    check("progress-notebook", "\n".join(html))


def test_summary() -> None:
    skipped = {"bad row": 2, "too long": 12}
    bad = tuple(f"reviews.csv row {row}, from line {row + 2}: 3 cells, but the header has 2" for row in (17, 405))
    resumed = replace(DONE, progress=replace(NOW, samples=400, skipped=skipped, bad_rows=bad), retries=2)
    stopped = replace(DONE, interrupted=True, complete=False)

    def screen(width: int) -> str:
        ends = (DONE, resumed, stopped, replace(DONE, scattered=True, root="/data/activations"))
        return "\n".join(captured(lambda out, end=end: print_facts(out, summary_rows(end)), width) for end in ends)

    check("summary", at_each_width(screen))


def test_extract_and_a_resumed_run_in_a_pipe() -> None:
    data = lines(Path("texts.jsonl"), *({"text": f"the cat sat on mat {n} " * (n + 1)} for n in range(5)))
    words = ("extract", "--dataset", data, "--output", "activations", "--taps", "residual.0", "mlp.3-4")
    first = typed(*words, "--max-samples", "2")
    second, third = typed(*words), typed(*words)
    text = f"$ spile extract --max-samples 2 …\n{first}$ spile extract …\n{second}$ spile extract …\n{third}"
    check("extract-pipe", masked(text))


@pytest.mark.slow
def test_infer_in_a_pipe() -> None:
    Path("prompts.txt").write_text("one and one\ntwo and two\n")
    words = ("infer", "--dataset", "prompts.txt", "--output", "inference", "--layers", 0)
    check("infer-pipe", masked(typed(*words, "--max-new-tokens", 4, "--max-seq-length", 16)))


# -- a dataset --------------------------------------------------------------------------------------------------------


def test_inspect() -> None:
    for number in range(2):
        produce(open_folder("activations"), 45, worker_id=number)
    words = ("inspect", "activations", "--stats")
    check("inspect", at_each_width(lambda width: masked(typed(*words, width=width))))
    check("inspect-pipe", masked(typed(*words)))


def test_verify() -> None:
    good, bad = open_folder("good"), open_folder("bad")
    for number in range(2):
        produce(good, 45, worker_id=number, run=run_identity(folders="stream"))
        produce(bad, 45, worker_id=number)
    Path("bad/tpu_0/commits/0005.json").unlink()
    shard = min(Path("bad/tpu_1").glob("shard_0001-*"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    for name, root in (("good", good), ("bad", bad)):
        found = verify(root)

        def screen(width: int, found: object = found) -> str:
            console = Console(file=io.StringIO(), width=width, highlight=False)
            print_report(found, console)  # type: ignore[arg-type]
            text = console.file.getvalue()  # type: ignore[attr-defined]
            return re.sub(r"-[0-9a-f]{12}\b", "-<attempt>", re.sub(r"crc32c [0-9a-f]{8}", "crc32c #", text))

        check(f"verify-{name}", at_each_width(screen))
        assert found.ok == (name == "good")


# -- commands ---------------------------------------------------------------------------------------------------------


def test_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast.os, "sched_getaffinity", lambda _process: set(range(16)))
    monkeypatch.setattr(forecast, "host_memory", lambda: 64 << 30)
    monkeypatch.setattr(tpu_compiler, "available", lambda: False)
    monkeypatch.setattr(forecast, "_matmul_flops", lambda: 8e11)
    monkeypatch.setattr(forecast.shutil, "disk_usage", lambda _place: SimpleNamespace(free=2 * 10**12))
    data = lines(Path("texts.jsonl"), *({"text": f"the cat sat on mat {n}"} for n in range(500)))
    for name, gpus in (("cpu", []), ("gpu", ["NVIDIA H200", "NVIDIA H200"])):
        monkeypatch.setattr(forecast, "_gpu_names", lambda gpus=gpus: gpus)

        def screen(width: int) -> str:
            text = typed("plan", "--dataset", data, width=width)
            return re.sub(r"These prices are from[^:]*:[^.]*\.\n", "", text)

        check(f"plan-{name}", at_each_width(screen))


@pytest.mark.parametrize("words", [(), ("extract",), ("infer",), ("verify",)])
def test_help(words: tuple[str, ...]) -> None:
    check_help("-".join(("help", *words)), partial(typed, *words, "--help"))


def test_help_all() -> None:
    def first_screen(width: int) -> str:
        return "\n".join(typed("extract", "--help-all", width=width).splitlines()[:50]) + "\n"

    check_help("help-all", first_screen)


def check_help(name: str, screen: Callable[..., str]) -> None:
    """Compare usage, description and examples, and check that no line is too long.

    The panels change with each flag. Their files are for looking at them, and are not compared.
    """
    shown = {width: screen(width=width) for width in WIDTHS}
    assert all(len(each) <= width for width, text in shown.items() for each in text.splitlines())
    heads = {width: text.partition("╭")[0] for width, text in shown.items()}
    if os.environ.get("SPILE_WRITE_SCREENS"):
        check(name, at_each_width(shown.__getitem__))
    known = (SCREENS / f"{name}.txt").read_text()
    for head in heads.values():
        assert "".join(f"{each.rstrip()}\n" for each in head.splitlines()) in known


def test_errors() -> None:
    commands = (
        "extract --dataset data/x.jsonl", "extract --model ./modl", "extract --layrs 5", "extract --layers 99",
        "extract --max-samples many", "extrct", "verify nowhere", "plan --budget -1",
    )  # fmt: skip

    def screen(width: int | None = None) -> str:
        return "".join(f"$ spile {each}\n{masked(typed(*each.split(), width=width))}" for each in commands)

    check("errors", f"{at_each_width(screen)}\n── pipe ──\n{screen()}")


# -- many workers -----------------------------------------------------------------------------------------------------


def test_monitor() -> None:
    def screen(width: int) -> str:
        return drawn(streams.render(SNAPSHOT, interval=60, height=40), width=width)

    check("monitor", at_each_width(screen))
    check("monitor-pipe", "\n".join(streams.plain_lines(SNAPSHOT)))


def test_fleet() -> None:
    zones = ("us-central1-a", "europe-west4-b")
    spec = FleetSpec(
        "default", "project", zones, plan_workers(zones, 2), NodeRequest("v5litepod-8", "r", preemptible=True),
        run={"output": "gs://bucket/activations"}, deployment="d", policy=Policy(budget=500.0),
    )  # fmt: skip
    states = (NodeState.READY, NodeState.NOT_FOUND, NodeState.PREEMPTED, NodeState.READY)
    past = partial(WorkerHistory, zones[0])
    pasts = (
        past(),
        past(finished=True),
        past(preemptions=3),
        past(crashes=5, gave_up="5 crashes in a row: out of memory"),
    )
    views = tuple(replace(view, name=f"tpu_{view.number}") for view in VIEWS)
    workers = tuple(
        WorkerStatus(worker, worker.zone, state, view, known, place < 2, place >= 2, "")
        for place, (worker, state, view, known) in enumerate(zip(spec.workers, states, views, pasts, strict=True))
    )
    status = FleetStatus(
        spec, replace(SNAPSHOT, streams=views), History(settled=123.45), workers,
        actions=("delete tpu-europe-west4-b-0 in europe-west4-b: it is PREEMPTED",), machines=3, taken=SNAPSHOT.taken,
    )  # fmt: skip
    check("fleet", at_each_width(lambda width: drawn(fleet.render(status, interval=60, height=40), width=width)))
    check("fleet-pipe", "\n".join(fleet.plain_lines(status)))
