"""``--max-samples``, ``--max-tokens`` and ``--max-bytes``: a run ends there, a higher limit continues it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import spile as api
from spile.compute.producer import TokenLimit
from spile.proof.verification import verify
from spile.spec.ranges import Ranges
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
