"""Kills between a shard, its answers and their commit: each sample is answered exactly once."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from answering import RUN, answer, expected, start, stored
from killing import KILLED, Switch
from whole import assert_rows

from spile.objects import open_folder
from spile.proof.verification import verify
from spile.spec.sample import Sample
from spile.store.layout import stream_folder
from spile.store.predictions import read_answers
from spile.store.stored_stream import open_streams
from world import TAPS, items, rows_of

COUNT = 60


def assert_answered(url: str) -> None:
    root = open_folder(url)
    wanted = [item for item in items(COUNT) if isinstance(item, Sample)]
    (stream,) = open_streams(root, RUN)
    assert read_answers(root.child(stream_folder(0, "tpu")), stream.commits) == [expected(sample) for sample in wanted]
    report = verify(root)
    assert report.ok, report.all_problems
    assert report.streams[0].predictions == len(wanted)
    assert_rows(root, [stored(sample) for sample in wanted], TAPS, rows_of)


def killed_and_resumed(folder: Path, steps: list[int], seed: int) -> int:
    dice = random.Random(seed)
    died = 0
    for step in steps:
        url = str(folder / str(step))
        for at in (step, dice.randrange(60)):
            process = start(url, COUNT, dice.choice([5, 9, 30]), Switch(at))
            process.join(120)
            assert process.exitcode in (0, KILLED)
            died += process.exitcode == KILLED
        answer(url, COUNT, dice.choice([4, 11]))
        assert_answered(url)
    return died


def test_kills_at_write_steps(tmp_path: Path) -> None:
    assert killed_and_resumed(tmp_path, [1, 9, 14, 22, 31], seed=1) >= 5


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_kill_at_every_write_step(tmp_path: Path) -> None:
    assert killed_and_resumed(tmp_path, list(range(60)), seed=2) > 40


def test_many_that_end_at_once_are_several_shards(tmp_path: Path) -> None:
    def sizes(folder: Path) -> list[int]:
        return [file.stat().st_size for file in folder.glob("tpu_0/*.safetensors")]

    answer(str(tmp_path / "one"), COUNT, COUNT)
    (whole,) = sizes(tmp_path / "one")
    answer(str(tmp_path / "four"), COUNT, COUNT, shard_bytes=whole / 4, writers=3)
    assert 3 <= len(sizes(tmp_path / "four")) <= 5
    assert max(sizes(tmp_path / "four")) < whole / 2
    assert_answered(str(tmp_path / "four"))


def test_verify_names_answers_that_were_changed(tmp_path: Path) -> None:
    answer(str(tmp_path), COUNT, 20)
    file = sorted(tmp_path.glob("tpu_0/predictions_0001-*.jsonl"))[0]
    whole = file.read_bytes()
    for damaged in (whole.replace(b'"stop"', b'"lost"', 1), whole[: whole.rindex(b"\n{") + 1], b""):
        file.write_bytes(damaged)
        (problem,) = verify(str(tmp_path)).all_problems
        assert (problem.kind, "predictions_0001" in problem.text) == ("damaged", True), problem
    file.unlink()
    (problem,) = verify(str(tmp_path)).all_problems
    assert "the shard, or its answers, are gone" in problem.text


def test_answers_that_no_commit_names_are_garbage(tmp_path: Path) -> None:
    process = start(str(tmp_path), COUNT, 20, Switch(2, name="link"))  # run.json, stream.json, the first commit
    process.join(120)
    assert process.exitcode == KILLED
    assert list(tmp_path.glob("tpu_0/predictions_*.jsonl"))
    answer(str(tmp_path), COUNT, 20)
    report = verify(str(tmp_path), remove=True, older_than=0)
    assert {item.state for item in report.garbage} == {"removed"}
    assert len([item for item in report.garbage if "predictions_" in item.key]) == 1
    assert_answered(str(tmp_path))
