"""``--max-samples``, ``--max-tokens`` and ``--max-bytes``: a run ends there, a higher limit continues it."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import spile as api
from spile.cli.flags import ExtractFlags
from spile.compute.producer import TokenLimit
from spile.data.split import make_streams
from spile.proof.verification import verify
from spile.spec.ranges import Ranges
from spile.spec.run import LIMITS
from spile.spec.sample import Sample, Skip
from unit.cli.refusals import lines, spile
from world import sample_of

COMMON = ("--layers", "0", "--prompt", "text")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return lines(tmp_path / "texts.jsonl", *({"text": "1 2 3 " * (1 + n % 5)} for n in range(40)))


def run(output: Path, texts: Path, *more: object) -> int:
    return spile("extract", "--dataset", texts, "--output", output, *COMMON, *more)


def held(output: Path) -> tuple[int, int]:
    (stream,) = verify(str(output)).streams
    assert stream.missing == Ranges()
    return stream.samples, stream.tokens


def test_a_limit_in_tokens_ends_a_run_and_a_higher_one_continues_it(
    tmp_path: Path, texts: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    assert run(output, texts, "--max-tokens", "0.1k") == 0
    samples, tokens = held(output)
    assert 100 <= tokens < 100 + 5 * 8, "it ends with the sample that reaches the limit"
    capfd.readouterr()
    assert spile("verify", output) == 0
    assert "limited with --max-tokens 100" in capfd.readouterr().out
    assert run(output, texts, "--max-tokens", "100") == 0
    assert "nothing was left to do" in capfd.readouterr().out
    assert run(output, texts, "--max-tokens", "200") == 0
    more = held(output)
    assert more[0] > samples
    assert more[1] >= 200
    assert sorted(ref.index for ref in api.open(str(output)).samples) == list(range(more[0])), "the first ones"
    assert run(output, texts) == 0
    assert held(output)[0] == 40
    assert verify(str(output)).ok


def test_a_limit_in_bytes_is_the_limit_of_what_is_stored(tmp_path: Path, texts: Path) -> None:
    output = tmp_path / "out"
    assert run(output, texts, "--max-bytes", "20kB") == 0
    (stream,) = verify(str(output)).streams
    assert stream.ok
    assert 20_000 <= stream.bytes < 60_000
    assert stream.samples < 40


@pytest.mark.parametrize("flags", [("--max-samples", "7"), ("--max-tokens", "90"), ("--max-bytes", "1MB")])
def test_a_limited_stream_with_a_hole_is_not_complete(tmp_path: Path, texts: Path, flags: tuple[str, str]) -> None:
    output = tmp_path / "out"
    assert run(output, texts, *flags, "--shard-size-gb", "0.000005", "--batch-size", "1", "--batch-tokens", "64") == 0
    assert verify(str(output)).ok
    last = sorted((output / "stream_0" / "commits").iterdir())[-1]
    last.unlink()
    assert not verify(str(output)).ok
    assert run(output, texts, *flags) == 0
    assert verify(str(output)).ok


def edit_spec(output: Path, **fields: object) -> None:
    """Change fields of the stored spec."""
    spec = output / "spec.json"
    spec.write_text(json.dumps(json.loads(spec.read_text()) | fields))


def test_the_commits_say_where_a_limited_run_ended_and_not_the_spec(tmp_path: Path, texts: Path) -> None:
    output = tmp_path / "out"
    assert run(output, texts, "--max-samples", "7") == 0
    last = sorted((output / "stream_0" / "commits").iterdir())[-1]
    assert json.loads(last.read_text())["limit"] == {"samples": 7, "flags": "--max-samples 7"}
    assert run(output, texts, "--max-samples", "5") == 0, "it holds more than that"
    edit_spec(output, max_samples=None)
    assert held(output)[0] == 7
    last.unlink()
    edit_spec(output, max_samples=7)
    (stream,) = verify(str(output)).streams
    assert (stream.expected, len(stream.missing)) == (40, 33), "without the commit, all of the data is expected"
    assert run(output, texts, "--max-samples", "7") == 0
    assert verify(str(output)).ok, "the same command commits the limit although nothing else was left to do"
    assert verify(str(output)).limits == "--max-samples 7"


def test_a_run_that_was_killed_behind_its_limit_is_not_complete(tmp_path: Path, texts: Path) -> None:
    output = tmp_path / "out"
    assert run(output, texts, "--max-samples", "7") == 0
    commits = output / "stream_0" / "commits"
    before = set(commits.iterdir())
    assert run(output, texts, "--max-samples", "20") == 0
    assert verify(str(output)).limits == "--max-samples 20"
    max(set(commits.iterdir()) - before).unlink()
    (stream,) = verify(str(output)).streams
    assert (stream.samples, stream.expected, stream.limits) == (20, 40, "")
    assert run(output, texts) == 0
    assert verify(str(output)).ok
    assert verify(str(output)).limits == ""


@pytest.mark.slow
def test_answers_end_at_the_limit(tmp_path: Path, texts: Path) -> None:
    output = tmp_path / "out"
    words = ("--max-new-tokens", "2", "--max-tokens", "60", "--batch-size", "2")
    assert spile("infer", "--dataset", texts, "--output", output, *COMMON, *words) == 0
    samples, tokens = held(output)
    assert tokens >= 60
    assert samples < 40
    assert verify(str(output)).ok
    assert spile("infer", "--dataset", texts, "--output", output, *COMMON, *words, "--capture", "none") == 2


def test_the_limits_are_in_the_spec_and_not_in_the_identity(tmp_path: Path, texts: Path) -> None:
    assert run(tmp_path / "out", texts, "--max-tokens", "1M", "--max-bytes", "1GiB") == 0
    spec = json.loads((tmp_path / "out" / "spec.json").read_text())
    assert (spec["max_tokens"], spec["max_bytes"]) == (1_000_000, 1 << 30)
    assert "max_tokens" not in (tmp_path / "out" / "run.json").read_text()


@pytest.mark.parametrize("text", ["", "0", "-1", "1GB", "many", "1Mi", "1e9"])
def test_wrong_amounts_are_one_line(text: str, tmp_path: Path, texts: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(tmp_path / "out", texts, f"--max-tokens={text}") == 2
    assert "--max-tokens" in capfd.readouterr().err


def test_the_first_samples_are_done_wherever_an_earlier_run_ended() -> None:
    """Gaps below the last committed sample are filled even if the limit is reached without them."""
    done = Ranges([(1, 3), (5, 6)])
    left: list[Sample | Skip] = [sample_of(index) for index in (0, 3, 4, 6, 7)]
    cut = TokenLimit(most=1, stored=10, done=done).cut(left, count=True)
    assert [item.index for item in cut] == [0, 3, 4]


# -- several streams ----------------------------------------------------------------------------------------------


def begin(texts: Path, streams: int, source: str, *limits: object) -> tuple[str, ...]:
    """Prepare the streams of a run and return its flags."""
    if source == "rows in turn":
        return ("--dataset", str(texts), *map(str, limits))
    folder = texts.parent / "streams"
    if not folder.exists():
        make_streams(str(texts), folder, streams, seed=None if source == "prepared in turn" else 0)
    return ("--dataset-dir", str(folder), *map(str, limits))


def run_streams(output: Path, streams: int, source: str, words: tuple[str, ...]) -> None:
    """Run each stream with the command of a user or, if the rows are read in turn, with that of a launcher."""
    for number in range(streams):
        if source == "rows in turn":
            flags = ExtractFlags(dataset=words[1], output=str(output), layers=(0,), prompt="text")
            limit = {words[2].removeprefix("--").replace("-", "_"): int(words[3])} if len(words) > 2 else {}
            found = flags.spec()
            data = replace(found.data, of_streams=streams, **limit)
            words_of_one = ("worker", "--spec", json.dumps(replace(found, data=data).to_dict()), "--stream", number)
            assert spile(*words_of_one) == 0
        else:
            assert spile("extract", *words, "--output", output, *COMMON, "--worker-id", number) == 0


@pytest.mark.parametrize("source", ["rows in turn", "prepared in turn", "prepared"])
@pytest.mark.parametrize("streams", [2, 3])
def test_the_spec_of_several_streams_is_compared_with_the_share_of_each(
    tmp_path: Path, texts: Path, streams: int, source: str
) -> None:
    output = tmp_path / "out"
    run_streams(output, streams, source, begin(texts, streams, source, "--max-samples", 10))
    report = verify(str(output))
    assert report.ok
    assert sum(stream.samples for stream in report.streams) == 10
    own = {stream.number: stream.samples for stream in report.streams}

    def missing(**limits: object) -> list[str]:
        edit_spec(output, **(dict.fromkeys(LIMITS) | limits))
        problems = verify(str(output)).all_problems
        assert all(problem.kind == "missing" for problem in problems)
        assert all("it ended with --max-samples 10, but spec.json" in problem.text for problem in problems)
        return [problem.where.rpartition("_")[2] for problem in problems]

    short = [0] if source == "prepared" else [10 % streams]
    every = [str(number) for number in range(streams)]
    assert missing(max_samples=9) == missing(max_samples=1) == missing(max_samples=10) == []
    assert missing(max_samples=11) == [str(number) for number in short]
    assert missing() == missing(max_samples=1000) == every
    assert missing(max_samples_per_stream=1000) == every
    assert missing(max_samples=10, max_samples_per_stream=1000) == []
    assert missing(max_samples_per_stream=1) == [str(number) for number in own if not own[number]]
    assert missing(max_tokens=2) == ([] if min(own.values()) else every[1:])
    assert missing(max_tokens=1_000_000) == every
    edit_spec(output, max_tokens=None, max_samples=11)
    (problem,) = verify(str(output)).all_problems
    assert problem.text.endswith(f"with --streams {short[0]} --max-samples {own[short[0]]}")
    assert spile("verify", output, "--streams", short[0], "--max-samples", own[short[0]]) == 0


@pytest.mark.parametrize("source", ["rows in turn", "prepared in turn", "prepared"])
def test_a_limit_in_tokens_of_several_streams_is_shared(tmp_path: Path, texts: Path, source: str) -> None:
    output = tmp_path / "out"
    run_streams(output, 2, source, begin(texts, 2, source, "--max-tokens", 100))
    report = verify(str(output))
    assert report.ok
    assert all(50 <= stream.tokens < 100 for stream in report.streams)
    for limits, ok in (
        ({"max_tokens": 100}, True), ({"max_tokens": 99}, True), ({"max_tokens": 40}, True),
        ({"max_tokens": 400}, False), ({}, False), ({"max_samples": 2}, True),
        ({"max_tokens": 100, "max_samples_per_stream": 3}, True), ({"max_bytes": 1000}, True),
    ):  # fmt: skip
        edit_spec(output, **(dict.fromkeys(LIMITS) | limits))
        assert verify(str(output)).ok == ok, limits


def test_a_selected_stream_behind_others_of_unknown_size_is_not_reported(tmp_path: Path, texts: Path) -> None:
    output = tmp_path / "out"
    run_streams(output, 2, "prepared", begin(texts, 2, "prepared", "--max-samples", 25))
    edit_spec(output, max_samples=30)
    assert [stream.ok for stream in verify(str(output)).streams] == [True, True]
    assert len(verify(str(output)).all_problems) == 1
    assert verify(str(output), streams=[1]).ok
