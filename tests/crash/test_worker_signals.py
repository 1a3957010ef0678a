"""Signals and competing workers in the real worker loop: finished work is committed, and the loser reports one line."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from worker_main import Life, assert_whole, committed, start, until, visit

from spile.objects import open_folder
from spile.store.heartbeat import read_beat

COUNT = 150
FENCED = 3
ENDLESS = 10**9
"""The shard is never full, so an early commit is caused by the signal."""


def signalled(url: str, tmp_path: Path, number: int, **changes: object) -> int | None:
    """The exit code of a worker that got a signal after its fourth batch."""
    mark = tmp_path / "mark"
    process = start(url, COUNT, Life(shard_bytes=ENDLESS, mark=(str(mark), 4), holds=True), **changes)
    until(mark, process)
    os.kill(process.pid or 0, number)
    process.join(120)
    return process.exitcode


def test_a_signal_commits_the_short_shard(folder_url: str, tmp_path: Path) -> None:
    number = signal.SIGINT if folder_url.startswith("gs") else signal.SIGTERM
    assert signalled(folder_url, tmp_path, number) == 130
    folder = open_folder(folder_url)
    assert 4 <= len(committed(folder)) < COUNT
    assert not list(folder.unfinished())
    beat = read_beat(folder.child("tpu_0"))
    assert beat is not None
    assert visit(folder_url, COUNT, Life(writers=3, batch_tokens=300, shard_bytes=3000))[0]
    assert_whole(folder_url, COUNT)


# Small batches: with three groups all of them could be in flight before the mark.
@pytest.mark.parametrize("groups", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_signal_commits_the_short_shard_of_every_writer(tmp_path: Path, groups: int) -> None:
    url = str(tmp_path / "root")
    life = {"writers": 3, "shard_bytes": 20_000, "groups": groups, "batch_tokens": 64}
    assert signalled(url, tmp_path, signal.SIGTERM, **life) == 130
    assert 0 < len(committed(open_folder(url))) < COUNT
    assert not list(tmp_path.rglob(".tmp-*"))
    assert visit(url, COUNT, Life(writers=1, batch_size=2, commit_every=0.02))[0]
    assert_whole(url, COUNT)


@pytest.mark.parametrize("numbers", [(signal.SIGINT, signal.SIGINT), (signal.SIGTERM, signal.SIGTERM)])
def test_a_second_signal_does_not_wait_for_a_device_that_hangs(tmp_path: Path, numbers: tuple[int, int]) -> None:
    url, mark = str(tmp_path / "root"), tmp_path / "mark"
    stopping = tmp_path / "stopping"
    # The mark appears when the device hangs: a signal before that ends the worker in the ordinary way.
    life = Life(shard_bytes=3000, seconds=0.01, mark=(str(mark), COUNT), stuck_after=6, stopping=str(stopping))
    process = start(url, COUNT, life)
    until(mark, process)
    os.kill(process.pid or 0, numbers[0])
    until(stopping, process)
    time.sleep(0.6)  # a SIGTERM at once is the same request
    os.kill(process.pid or 0, numbers[1])
    process.join(120)
    assert process.exitcode == 130
    assert visit(url, COUNT, Life(writers=3))[0]
    assert_whole(url, COUNT)


def test_a_sigterm_that_comes_twice_is_one_request(tmp_path: Path) -> None:
    """As Slurm sends it when it preempts a job."""
    url, mark = str(tmp_path / "root"), tmp_path / "mark"
    process = start(url, COUNT, Life(shard_bytes=ENDLESS, seconds=0.3, mark=(str(mark), 4)))
    until(mark, process)
    os.kill(process.pid or 0, signal.SIGTERM)
    time.sleep(0.02)
    os.kill(process.pid or 0, signal.SIGTERM)
    process.join(120)
    assert process.exitcode == 130
    assert 4 <= len(committed(open_folder(url))) < COUNT


def test_a_second_signal_takes_the_unfinished_shard_away(tmp_path: Path) -> None:
    url, mark = str(tmp_path / "root"), tmp_path / "mark"
    stopping = tmp_path / "stopping"
    process = start(url, 2000, Life(shard_bytes=ENDLESS, seconds=0.3, mark=(str(mark), 2), stopping=str(stopping)))
    until(mark, process)
    os.kill(process.pid or 0, signal.SIGINT)
    until(stopping, process)
    os.kill(process.pid or 0, signal.SIGINT)
    process.join(120)
    assert process.exitcode == 130
    assert not list(tmp_path.rglob(".tmp-*shard*"))


def test_two_workers_one_wins(folder_url: str, tmp_path: Path) -> None:
    life = Life(writers=1 if folder_url.startswith("gs") else 3, shard_bytes=6000, seconds=0.02)
    errors = [tmp_path / "first", tmp_path / "second"]
    mark = tmp_path / "mark"
    first = start(folder_url, COUNT, life, stderr=str(errors[0]), mark=(str(mark), 3))
    until(mark, first)
    second = start(folder_url, COUNT, life, stderr=str(errors[1]), batch_tokens=200)
    codes = []
    for process in (first, second):
        process.join(120)
        codes.append(process.exitcode)
    if codes == [0, 0]:  # the first was done before the second had read the ledger: nothing was left
        assert_whole(folder_url, COUNT)
        return
    assert sorted(codes, key=str) == [0, FENCED]
    (line,) = errors[codes.index(FENCED)].read_text().splitlines()
    assert line.startswith("spile: another worker owns this stream: ")
    assert "expected attempt" in line
    assert errors[codes.index(0)].read_text() == ""
    assert_whole(folder_url, COUNT)
