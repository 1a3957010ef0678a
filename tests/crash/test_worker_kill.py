"""SIGKILL at any step of the real worker loop, then a run with other batch and shard sizes: the dataset is complete."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from killing import Switch
from worker_main import KILLED, Life, assert_whole, committed, start, visit

from spile.objects import open_folder
from spile.proof.verification import verify

COUNT = 150


def any_life(dice: random.Random, seconds: float = 0.0) -> Life:
    """Return random sizes, independent of those of the previous worker."""
    return Life(
        writers=dice.choice([1, 3]),
        groups=dice.choice([1, 2, 3]),
        batch_tokens=dice.choice([64, 128, 300]),
        batch_size=dice.choice([None, 1, 5]),
        shard_bytes=dice.choice([3_000, 12_000, 10**6]),
        commit_every=dice.choice([None, 0.02]),
        seconds=seconds,
    )


def resumed(url: str, dice: random.Random) -> None:
    """Check that committed data is unchanged and the rest is added."""
    before = committed(open_folder(url))
    if before:
        kinds = {problem.kind for problem in verify(open_folder(url)).all_problems}
        assert kinds <= {"missing"}, kinds
    finished, stream = visit(url, COUNT, any_life(dice))
    assert finished
    assert not before - stream.ledger.done
    assert_whole(url, COUNT)
    shards = stream.ledger.shards
    assert visit(url, COUNT, any_life(dice))[1].ledger.shards == shards  # nothing is left to do


def random_kills(url: str, kills: int, seed: int) -> None:
    """Datasets killed two or three times each at random instants, then finished."""
    dice = random.Random(seed)
    for number in range(2):  # the first also starts the fork server
        began = time.monotonic()
        process = start(f"{url}/whole{number}", COUNT, any_life(dice, 0.004))
        process.join(120)
        whole = time.monotonic() - began
        assert process.exitcode == 0
    died = 0
    for number in range(kills):
        home = f"{url}/{number // 2}"
        process = start(home, COUNT, any_life(dice, 0.004))
        time.sleep(dice.uniform(0, 0.4 * whole))
        process.kill()
        process.join(120)
        assert process.exitcode in (0, KILLED)
        died += process.exitcode == KILLED
        if number % 2 or number == kills - 1:
            resumed(home, dice)
    assert died  # how many depends on the machine's other work


def test_kills_at_random_instants(tmp_path: Path) -> None:
    random_kills(str(tmp_path), 10, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_fifty_kills_at_random_instants(folder_url: str) -> None:
    random_kills(folder_url, 50, seed=2)


def kills_at_steps(url: str, steps: list[int], seed: int) -> int:
    """Kill at these write steps, counted over all threads; return how many workers reached their step."""
    dice = random.Random(seed)
    died = 0
    for step in steps:
        process = start(f"{url}/{step}", COUNT, any_life(dice), switch=Switch(step))
        process.join(120)
        assert process.exitcode in (0, KILLED)
        died += process.exitcode == KILLED
        resumed(f"{url}/{step}", dice)
    return died


def test_kills_at_write_steps_of_the_loop(tmp_path: Path) -> None:
    assert kills_at_steps(str(tmp_path), [0, 3, 7, 12, 25, 40, 70], seed=3)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_kill_at_every_write_step_of_the_loop(tmp_path: Path) -> None:
    assert kills_at_steps(str(tmp_path), list(range(150)), seed=4) > 50


def test_kills_before_and_after_requests_of_the_loop(cloud_url: str) -> None:
    assert kills_at_steps(cloud_url, [1, 5, 12, 29], seed=6)


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_a_kill_before_and_after_every_request_of_the_loop(cloud_url: str) -> None:
    assert kills_at_steps(cloud_url, list(range(60)), seed=7) > 20


def test_a_bucket_worker_killed_and_resumed(cloud_url: str) -> None:
    random_kills(cloud_url, 2, seed=5)
