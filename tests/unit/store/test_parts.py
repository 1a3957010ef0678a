"""Verifying and inspecting a dataset in parts gives the same result as doing it in one process."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import spile
from spile.cli.engines import part_workers
from spile.cli.main import main
from spile.engines.registry import WorkerOptions
from spile.errors import Failure
from spile.objects import open_folder
from spile.proof.verification import verify, verify_part
from spile.reading.inspection import commit_sizes, merged_parts, part_statistics
from spile.store.parts import CommitSizes, DatasetPart, divide
from world import produce

SIZES = st.dictionaries(
    st.integers(0, 30), st.dictionaries(st.integers(1, 20), st.integers(0, 1000), max_size=12), max_size=12
)


@given(SIZES, st.integers(1, 9))
def test_each_commit_is_in_exactly_one_part(sizes: dict[int, dict[int, int]], workers: int) -> None:
    parts = [DatasetPart.parse(str(part)) for part in divide(sizes, workers)]
    for stream, commits in sizes.items():
        assert sum(part.has_stream(stream) for part in parts) >= 1
        for commit in commits:
            (part,) = (part for part in parts if part.has_commit(stream, commit))
            assert part.has_stream(stream)


def test_parts_have_similar_sizes() -> None:
    sizes = {0: dict.fromkeys(range(1, 101), 10), **{n: {1: 10} for n in range(1, 101)}}
    parts = divide(sizes, 4)
    assert 16 <= len(parts) <= 20
    assert max(part.size for part in parts) <= 2000 // 16


def in_turn(root: Path) -> Any:
    """Run each part as another process would, with its result as JSON, and in another order."""

    def run(sizes: CommitSizes) -> Iterable[Mapping[str, Any]]:
        for part in reversed(divide(sizes, 3)):
            yield json.loads(json.dumps(verify_part(open_folder(str(root)), part, None, ["why"])))

    return run


def damage(root: Path) -> None:
    first, second, *_ = sorted((root / "tpu_1").glob("shard_*"))
    first.unlink()
    with second.open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x55")
    (root / "tpu_2" / "commits" / "0005.json").unlink()


@pytest.mark.parametrize("damaged", [False, True])
def test_the_report_of_parts_is_that_of_one_process(tmp_path: Path, damaged: bool) -> None:
    for number in range(4):
        produce(open_folder(str(tmp_path)), 45, worker_id=number)
    if damaged:
        damage(tmp_path)
    alone, together = verify(str(tmp_path)), verify(str(tmp_path), run_parts=in_turn(tmp_path))
    assert {**together.to_json(), "unchecked": list(alone.unchecked)} == alone.to_json()
    assert together.unchecked == ("why", *alone.unchecked)
    assert alone.ok is not damaged


def test_a_shard_that_no_worker_has_checked_is_checked_here(tmp_path: Path) -> None:
    produce(open_folder(str(tmp_path)), 45, worker_id=1)
    produce(open_folder(str(tmp_path)), 45, worker_id=2)
    damage(tmp_path)
    assert verify(str(tmp_path), run_parts=lambda _: []).to_json() == verify(str(tmp_path)).to_json()
    stale = {"path": "tpu_1", "stream": "0" * 16, "commits": list(range(1, 99)), "problems": {}}
    found = verify(str(tmp_path), run_parts=lambda _: [{"checked": [stale], "unchecked": []}])
    assert found.to_json() == verify(str(tmp_path)).to_json()
    with pytest.raises(Failure, match="malformed"):
        verify(str(tmp_path), run_parts=lambda _: [{"checked": 1}])


def test_statistics_of_parts_are_those_of_the_dataset(tmp_path: Path) -> None:
    for number in range(3):
        produce(open_folder(str(tmp_path)), 45, worker_id=number)
    dataset = spile.open(str(tmp_path))
    parts = divide(commit_sizes(dataset), 2)
    assert len(parts) > 3
    found = merged_parts(json.loads(json.dumps(part_statistics(dataset, part))) for part in parts)
    for tap in dataset.taps:
        alone = dataset.stats(tap)
        assert (found[tap].count, found[tap].norms, found[tap].top) == (alone.count, alone.norms, alone.top)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["verify", "inspect"])
def test_processes_of_this_machine(tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str) -> None:
    for number in range(2):
        produce(open_folder(str(tmp_path)), 45, worker_id=number)
    if command == "verify":
        (tmp_path / "tpu_1" / "commits" / "0005.json").unlink()
    texts, codes = [], []
    for more in (["--stats"] if command == "inspect" else [], ["--engine", "local", "--num-workers", "1"]):
        with pytest.raises(SystemExit) as exit_:
            main([command, str(tmp_path), "--json", *more])
        codes.append(exit_.value.code)
        texts.append(capsys.readouterr().out)
    assert codes == ([1, 1] if command == "verify" else [0, 0])
    assert texts[0] == texts[1]
    with pytest.raises(SystemExit) as exit_:
        main([command, str(tmp_path / "none"), "--engine", "local"])
    assert exit_.value.code == 2


def test_what_an_engine_prints_is_not_part_of_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    """As Ray does when it loses a node."""
    with part_workers("verify", ".", WorkerOptions(num_workers=1)):
        print("a node was lost")
    assert capsys.readouterr() == ("", "a node was lost\n")
