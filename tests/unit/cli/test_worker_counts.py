"""The number of workers changes nothing that a user sees: results, limits, files and errors."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import spile as api
from spile.data.split import in_turn, make_streams, of_stream
from spile.errors import DataError, SpecError, UserError
from spile.spec.run import DataSpec
from unit.cli.refusals import lines, listing

ROWS = [{"id": f"row-{number}", "text": f"the number {number} of a list", "label": number % 3} for number in range(40)]
SMALL = ("--layers", "1", "--max-seq-length", "64")


def run(folder: Path, *words: object, count: int) -> tuple[int, str, str]:
    """Run a command as a user does, with ``--num-workers`` if there are several."""
    more = () if count == 1 else ("--num-workers", count)
    ended = subprocess.run(
        [sys.executable, "-m", "spile.cli.main", *map(str, (*words, *more))],
        cwd=folder, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    return ended.returncode, ended.stdout, ended.stderr


def fact(text: str, name: str) -> str:
    found = re.search(rf"^{name} +(.*)$", text, re.MULTILINE)
    assert found, text
    return found[1]


COUNTS = [2, pytest.param(4, marks=pytest.mark.slow)]


def contents(root: Path) -> list[tuple[Any, ...]]:
    dataset = api.open(str(root))
    return [(sample.ref.task_id, sample.ref.kept, sample.tokens.tolist()) for sample in dataset]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one worker made."""
    folder = tmp_path_factory.mktemp("alone")
    lines(folder / "rows.jsonl", *ROWS)
    assert run(folder, "extract", "--dataset", "rows.jsonl", "--max-samples", 10, *SMALL, count=1)[0] == 0
    return folder


@pytest.mark.parametrize("count", COUNTS)
def test_several_workers_store_the_same_samples_and_a_limit_is_the_runs(
    alone: Path, tmp_path: Path, count: int
) -> None:
    lines(tmp_path / "rows.jsonl", *ROWS)
    words = ("extract", "--dataset", "rows.jsonl", "--max-samples", 10, *SMALL)
    code, out, err = run(tmp_path, *words, count=count)
    assert (code, err) == (0, "")
    assert contents(tmp_path / "activations") == contents(alone / "activations")
    assert fact(out, "dataset").startswith("10 samples,")
    assert fact(out, "next") == "spile verify ./activations"
    verdicts = [run(folder, "verify", "activations", count=1)[1].splitlines()[-1] for folder in (alone, tmp_path)]
    plain = [re.sub(r" in \d+ streams?|\d+ shards?", "", verdict) for verdict in verdicts]
    assert plain[0] == plain[1]
    assert plain[0].startswith("✓ proven: 10 samples, each exactly once")
    assert plain[0].endswith("; limited with --max-samples 10")
    names = {re.sub(r"stream_\d", "stream_N", path.relative_to(tmp_path).parts[1]) for path in tmp_path.glob("*/*")}
    assert names - {"streams", "index"} == {"run.json", "spec.json", "stream_N"}
    code, out, err = run(tmp_path, *words[:4], 25, *SMALL, count=count)
    assert (code, err) == (0, ""), out
    assert [each[0] for each in contents(tmp_path / "activations")] == [row["id"] for row in ROWS[:25]]


MISTAKES: list[tuple[str, ...]] = [
    ("--dataset", "rows.jsonl", "--taps", "residual.99"),
    ("--dataset", "rows.jsonl", "--column", "nothing"),
    ("--dataset", "rows.jsonl", "--model", "./nothing"),
    ("--dataset", "nothing.jsonl"),
    ("--dataset", "rows.jsonl", "--prompt", "tokens"),
    ("--dataset", "rows.jsonl", "--device", "cuda"),
    ("--dataset", "bad.jsonl"),
    ("--dataset", "spile:nothing"),
]


@pytest.mark.parametrize("mistake", [pytest.param(each, id=" ".join(each)) for each in MISTAKES])
def test_a_mistake_is_refused_once_in_the_same_words_and_nothing_is_written(
    mistake: tuple[str, ...], tmp_path: Path
) -> None:
    lines(tmp_path / "rows.jsonl", *ROWS)
    lines(tmp_path / "bad.jsonl", *ROWS, "{")
    before = listing(tmp_path)
    answers = [run(tmp_path, "extract", *mistake, *SMALL, count=count) for count in (1, 2)]
    absolute = [(code, out, err.replace(f"{tmp_path}/", "").replace("./", "")) for code, out, err in answers]
    assert absolute[0] == absolute[1]
    assert answers[0][0] == 2
    assert answers[0][2].count("\n") == 1
    assert listing(tmp_path) == before


def test_the_tokens_of_a_stored_dataset(alone: Path, tmp_path: Path) -> None:
    words = ("extract", "--dataset", f"spile:{alone / 'activations'}", *SMALL)
    for _ in range(2):  # the same command resumes
        code, out, err = run(tmp_path, *words, count=2)
        assert (code, err) == (0, "")
        assert fact(out, "dataset").startswith("10 samples,")
    assert contents(tmp_path / "activations") == contents(alone / "activations")


def test_verify_advises_the_same_command_after_a_kill(tmp_path: Path) -> None:
    lines(tmp_path / "rows.jsonl", *ROWS)
    words = ("extract", "--dataset", "rows.jsonl", *SMALL)
    assert run(tmp_path, *words, count=2)[0] == 0
    for file in (tmp_path / "activations" / "stream_1").rglob("*"):
        if file.is_file():
            file.unlink()
    code, out, _ = run(tmp_path, "verify", "activations", count=1)
    assert code == 1
    assert out.rstrip().endswith("; run the same spile extract again to finish it")


def test_python_takes_the_number_of_workers(alone: Path, tmp_path: Path) -> None:
    lines(tmp_path / "rows.jsonl", *ROWS)
    given = {"layers": 1, "max_seq_length": 64, "max_samples": 10, "num_workers": 2}
    data, out = tmp_path / "rows.jsonl", tmp_path / "activations"
    summary = api.extract("embedded", data, out, **given)  # type: ignore[arg-type]
    assert (summary.samples, summary.complete, summary.exit_code) == (10, True, 0)
    assert contents(out) == contents(alone / "activations")
    with pytest.raises(UserError, match=r"residual.99: expected layers 0 to 5 \(the model has 6\), found 99"):
        api.extract("embedded", data, tmp_path / "other", taps="residual.99", num_workers=2)
    assert not (tmp_path / "other").exists()
    with pytest.raises(SpecError, match="num_workers: expected data by its name, found Python list"):
        api.extract("embedded", ["a text"], tmp_path / "other", num_workers=2)


# -- parts of a limit -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limit", "streams", "turn"), [(10, 3, 1), (1, 4, 1), (7, 2, 3), (12, 5, 4), (100, 3, 2)])
def test_streams_in_turn_have_the_first_samples_of_the_input(limit: int, streams: int, turn: int) -> None:
    first = [row % streams for row in range(limit) for _ in range(turn)][:limit]
    assert [in_turn(limit, number, streams, turn) for number in range(streams)] == [
        first.count(number) for number in range(streams)
    ]


def test_the_streams_of_a_folder_have_the_first_samples_stream_by_stream(tmp_path: Path) -> None:
    data = lines(tmp_path / "rows.jsonl", *ROWS)
    make_streams(str(data), tmp_path / "shuffled", 3)
    make_streams(str(data), tmp_path / "turn", 3, seed=None)

    def shares(folder: str, **limits: Any) -> list[int | None]:
        spec = DataSpec(dataset_dir=str(tmp_path / folder), **limits)
        return [of_stream(replace(spec, worker_id=number)).sample_limit for number in range(3)]

    size = len((tmp_path / "shuffled" / "stream_000.jsonl").read_text().splitlines())
    assert shares("shuffled", max_samples=20) == [20, 20 - size, 0]
    assert shares("shuffled", max_samples_per_stream=5) == [5, 5, 5]
    assert shares("turn", max_samples=10) == [4, 3, 3]
    assert shares("turn") == [None] * 3
    spec = DataSpec(dataset_dir=str(tmp_path / "turn"), max_tokens=100)
    assert [of_stream(replace(spec, worker_id=number)).token_limit(1) for number in range(3)] == [34] * 3
    (tmp_path / "shuffled" / "streams.json").unlink()
    with pytest.raises(DataError, match=r"no streams.json. Limit each stream instead: --max-samples-per-stream"):
        shares("shuffled", max_samples=20)
    assert json.loads((tmp_path / "turn" / "streams.json").read_text())["seed"] is None
