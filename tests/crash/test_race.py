"""Several workers on one stream, one of them suspended for a while: exactly one wins each commit."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import killing
import pytest
from killing import Switch
from worker_main import Life, assert_whole, start, visit

from spile.objects import Folder, open_folder
from spile.proof.verification import verify
from world import produce

FENCED = 3


def race(url: str, workers: int, samples: int) -> list[int | None]:
    processes = [
        start(url, samples, shard_bytes=6000 + 2000 * (number % 5), writers=1 + number % 2) for number in range(workers)
    ]
    for process in processes:
        process.join(120)
    return [process.exitcode for process in processes]


@pytest.mark.parametrize("workers", [2, 16])
def test_racing_workers(folder_url: str, workers: int) -> None:
    codes = race(folder_url, workers, 40)
    assert set(codes) <= {0, FENCED}, codes
    assert 0 in codes
    assert_whole(folder_url, 40)


@pytest.mark.soak
@pytest.mark.parametrize("turn", range(10))
def test_racing_workers_again_and_again(folder_url: str, turn: int) -> None:
    assert set(race(folder_url, 8, 60)) <= {0, FENCED}
    assert_whole(folder_url, 60)


def until_stopped(pid: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in ("T", "t"):
            return
        time.sleep(0.005)
    raise AssertionError("the worker did not stop")


@pytest.mark.parametrize("moment", ["before create commits/0002.json", "after finish", "before create stream.json"])
def test_a_zombie_that_wakes_after_its_successor(folder_url: str, moment: str) -> None:
    """A worker is suspended with a finished shard; its successor finishes the stream; then the worker continues."""
    switch = Switch(0, signal.SIGSTOP, moment)
    zombie = start(folder_url, 30, switch=switch)
    assert zombie.pid is not None
    until_stopped(zombie.pid)
    assert visit(folder_url, 30, Life(shard_bytes=20_000))[0]
    assert_whole(folder_url, 30)
    os.kill(zombie.pid, signal.SIGCONT)
    zombie.join(120)
    assert zombie.exitcode == (0 if "stream.json" in moment else FENCED)
    assert_whole(folder_url, 30)


def test_a_zombie_whose_shard_was_collected_cannot_commit_it(folder_url: str) -> None:
    """Only the store: the worker's loop would have started the next shard, which would be collected too."""
    zombie = killing.start(folder_url, 30, Switch(0, signal.SIGSTOP, "before create commits/0002.json"), shard=6)
    assert zombie.pid is not None
    until_stopped(zombie.pid)
    folder = open_folder(folder_url)
    report = verify(folder, gc=True, remove=True, older_than=-1)
    assert [item.state for item in report.garbage] == ["removed"]
    os.kill(zombie.pid, signal.SIGCONT)
    zombie.join(120)
    assert zombie.exitcode == FENCED
    produce(folder, 30)
    killing.assert_whole(folder, 30)


def test_a_worker_that_comes_later_takes_over(folder: Folder) -> None:
    produce(folder, 30, attempt="first")
    late = produce(folder, 30, attempt="second")
    assert late.ledger.done.pairs() == [(0, 30)]
    assert {file.name.split("-")[1] for file in late.ledger.files} == {"first.safetensors"}
    killing.assert_whole(folder, 30)
