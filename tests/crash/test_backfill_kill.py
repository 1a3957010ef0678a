"""``--add-taps`` is killed at every write step and run again: every added row exists exactly once."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from adding import ADDED, add, start
from killing import KILLED, Switch

import spile
from spile.data.lines import embedded_tasks
from spile.errors import Fenced
from spile.objects import open_folder
from spile.proof.verification import verify
from spile.spec.sample import Sample
from world import TAPS, items, produce, rows_of

COUNT = 24


def assert_added(root: Path, count: int = COUNT) -> None:
    """Check each sample's old and new rows, and that one read returns both."""
    report = verify(str(root))
    assert report.ok, report.all_problems
    dataset = spile.open(str(root))
    names = [str(tap) for tap in (*TAPS, *ADDED)]
    assert list(dataset.taps) == names
    for sample in items(count):
        if isinstance(sample, Sample):
            stored = dataset.sample(0, sample.index)
            for number, name in enumerate(names):
                assert np.array_equal(stored.rows(name), rows_of(sample, number % len(TAPS))), (sample.index, name)
    for batch in dataset.shuffled(["residual.0", "mlp.0", "residual.1", "z.1"], 16, context=True):
        assert np.array_equal(batch.rows["residual.0"], batch.rows["mlp.0"])
        assert np.array_equal(batch.rows["residual.1"], batch.rows["z.1"])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("base")
    produce(open_folder(str(root)), COUNT, shard=9)
    return root


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


@pytest.mark.parametrize("each", [3, pytest.param(1, marks=pytest.mark.slow)])
def test_a_kill_at_every_system_call(base: Path, tmp_path: Path, each: int) -> None:
    before, step, seen = files(base), 0, set()
    while True:
        root = tmp_path / str(step)
        shutil.copytree(base, root)
        process = start(str(root), Switch(step))
        process.join(120)
        assert process.exitcode in (0, KILLED)
        report = verify(str(root))
        assert {problem.kind for problem in report.all_problems} <= {"missing"}, report.all_problems
        seen.add(len(list(root.glob("tpu_0/added_*/commits/*.json"))))
        visible = spile.open(str(root)).taps
        assert visible == tuple(map(str, TAPS)) or report.ok  # never some of the rows of a tap
        add(open_folder(str(root)), groups=2, writers=2)
        assert_added(root)
        now = files(root)
        assert {name: now[name] for name in before} == before  # what was there is as it was
        if process.exitcode == 0:
            break
        step += each
    assert step > 30
    assert len(seen) > 2


@pytest.mark.parametrize(
    ("groups", "writers", "fits"), [(1, 1, None), (3, 1, None), (2, 3, None), (1, 1, 64), (2, 1, 64)]
)
def test_any_batch_gives_the_same_order(
    base: Path, tmp_path: Path, groups: int, writers: int, fits: int | None
) -> None:
    """If the device runs out of memory and batches are halved, a shard is started again and not divided."""
    root = tmp_path / "root"
    shutil.copytree(base, root)
    finished, store = add(open_folder(str(root)), groups, writers, fits)
    assert finished
    assert store.ledger.shards == len(list(root.glob("tpu_0/shard_*")))
    assert_added(root)
    commits = store.ledger.commits
    assert add(open_folder(str(root)))[1].ledger.commits == commits  # nothing is left to do


@pytest.mark.parametrize("writers", [1, 2])
def test_a_stop_at_every_batch(base: Path, tmp_path: Path, writers: int) -> None:
    """An unfinished shard is dropped, an incomplete tap is not read, and verify names the command that finishes it."""
    interrupted = 0
    for batches in range(12):
        root = tmp_path / str(batches)
        shutil.copytree(base, root)
        folder = open_folder(str(root))
        finished, store = add(folder, writers=writers, batches=batches)
        assert not list(root.rglob(".tmp-*"))
        shards = len(list(root.glob("tpu_0/added_*/shard_*")))
        assert shards == store.ledger.shards
        if not finished:
            interrupted += 1
            (problem,) = verify(folder).all_problems
            assert problem.kind == "missing"
            assert problem.text.startswith(
                f"mlp.0 mlp.1 z.1: not yet added to {3 - shards} of 3 shards; spile extract --add-taps"
            )
            assert spile.open(str(root)).taps == tuple(map(str, TAPS))
            assert add(folder)[0]
        assert_added(root)
    assert interrupted > 3


def test_two_that_add_the_same_taps(base: Path, tmp_path: Path) -> None:
    """The worker that commits second is fenced, and nothing is stored twice."""
    root = tmp_path / "root"
    shutil.copytree(base, root)
    folder = open_folder(str(root))
    with pytest.MonkeyPatch.context() as patch:
        import adding

        real, met = adding.join_addition, []

        def both(*args: object) -> object:
            joined = real(*args)
            if not met:
                met.append(True)
                add(folder)  # another worker, from beginning to end, just after this one joined
            return joined

        patch.setattr(adding, "join_addition", both)
        with pytest.raises(Fenced, match="another worker owns this stream"):
            add(folder)
    assert_added(root)


@pytest.mark.slow
def test_the_command_killed_in_the_middle(tmp_path: Path) -> None:
    """``spile extract --add-taps`` with a real model."""
    tasks = tmp_path / "tasks.jsonl"
    tasks.write_text("\n".join(sorted(embedded_tasks().read_text().splitlines(), key=len)[:12]) + "\n")
    root = tmp_path / "out"
    made = ["--model", "embedded", "--dataset", tasks, "--max-seq-length", "512", "--store-dtype", "float32"]

    def words(*more: object) -> list[str]:
        return [sys.executable, "-m", "spile.cli.main", *map(str, more)]

    subprocess.run(words("extract", *made, "--layers", "0,3", "--shard-size-gb", "0.001", "--output", root), check=True)
    adding = words("extract", "--add-taps", "mlp.3", "residual.1", "--to", root, "--batch-size", "1")
    process = subprocess.Popen(adding)
    deadline = time.monotonic() + 200
    while not list(root.glob("stream_0/added_*/commits/*.json")):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert set(spile.open(str(root)).taps) == {"residual.0", "residual.3"}
    subprocess.run(words("extract", "--add-taps", "mlp.3", "residual.1", "--to", root), check=True)
    subprocess.run(words("verify", root, "--recompute", "3"), check=True)
    whole = tmp_path / "whole"
    subprocess.run(
        words("extract", *made, "--layers", "0,1,3", "--taps", "residual", "mlp", "--output", whole), check=True
    )
    ours, theirs = spile.open(str(root)), spile.open(str(whole))
    for ref in theirs.samples:
        for tap in ("residual.0", "residual.1", "residual.3", "mlp.3"):
            left, right = ours.sample(0, ref.index).rows(tap), theirs.sample(0, ref.index).rows(tap)
            assert np.abs(left - right).max() <= 1e-4 * float(np.sqrt(np.mean(right**2)))
