"""A bucket that refuses, fails or hangs under the real worker loop: one line, an exit code, and a run that resumes."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from tests.fakes.server import random_faults
from worker_main import Life, assert_whole, committed, start, until, visit

from backends import Clouds
from spile.objects import open_folder
from spile.objects.retry import Retry

COUNT = 150
LIFE = Life(shard_bytes=12_000)


@pytest.mark.parametrize(("status", "writers"), [(403, 1), (404, 3), (507, 1)])
def test_an_upload_that_cannot_succeed(
    clouds: Clouds, cloud_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int, writers: int
) -> None:
    monkeypatch.setenv("SPILE_RETRY_SECONDS", "0.5")
    faults = clouds.faults(cloud_url)
    faults.add("status", status=status, method="PUT", target="shard_0004", count=-1)
    process = start(cloud_url, COUNT, LIFE, writers=writers, stderr=str(tmp_path / "errors"))
    process.join(120)
    assert process.exitcode == 1
    (line,) = (tmp_path / "errors").read_text().splitlines()
    assert f"{cloud_url}/tpu_0/shard_0004" in line
    assert str(status) in line
    faults.clear()
    before = committed(open_folder(cloud_url))
    finished, stream = visit(cloud_url, COUNT, Life(writers=1, batch_tokens=300))
    assert finished
    assert not before - stream.ledger.done
    assert_whole(cloud_url, COUNT)


def test_a_commit_whose_reply_is_lost_is_recognised_as_our_own(clouds: Clouds, cloud_url: str) -> None:
    clouds.faults(cloud_url).add("reset_after", method="PUT", target="commits/0002", count=1)
    finished, stream = visit(cloud_url, COUNT, LIFE)
    assert finished
    assert open_folder(cloud_url).stats.retries == 0
    assert stream.folder.stats.retries > 0
    assert_whole(cloud_url, COUNT)


def test_a_second_signal_does_not_wait_for_a_bucket_that_hangs(clouds: Clouds, cloud_url: str, tmp_path: Path) -> None:
    mark, stopping = tmp_path / "mark", tmp_path / "stopping"
    clouds.faults(cloud_url).add("hang", method="PUT", target="shard_0002", count=-1)
    process = start(cloud_url, COUNT, LIFE, seconds=0.01, mark=(str(mark), 3), stopping=str(stopping))
    for sign in (mark, stopping):
        until(sign, process)
        os.kill(process.pid or 0, signal.SIGINT)
    process.join(120)
    assert process.exitcode == 130
    clouds.faults(cloud_url).clear()
    assert visit(cloud_url, COUNT, Life(writers=3))[0]
    assert_whole(cloud_url, COUNT)


def schedule(clouds: Clouds, url: str, seed: int) -> None:
    """Start workers under random faults until one finishes."""
    faults = clouds.faults(url)
    faults.extend(random_faults(seed, 4 + seed % 20, requests=10 + seed % 60))
    for life in range(30):
        process = start(url, COUNT, Life(writers=1 + 2 * (seed % 2), shard_bytes=8000 + 999 * life))
        process.join(120)
        assert process.exitcode in (0, 1)
        if process.exitcode == 0:
            break
    else:
        pytest.fail("it never got to the end")
    faults.clear()
    assert_whole(url, COUNT)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPILE_RETRY_SECONDS", "0.4")
    monkeypatch.setattr(Retry, "first", 0.005)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("seed", [1])
def test_random_faults(clouds: Clouds, cloud_url: str, seed: int) -> None:
    schedule(clouds, cloud_url, seed)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("quick")
def test_a_hundred_random_faults(clouds: Clouds, cloud_url: str) -> None:
    for seed in range(100, 200):
        schedule(clouds, f"{cloud_url}/{seed}", seed)
