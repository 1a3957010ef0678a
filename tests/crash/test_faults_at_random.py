"""Randomized fault schedules on the fake GCS and on S3: whatever the network does, the dataset ends up whole."""

from __future__ import annotations

import pytest
from killing import assert_whole
from tests.fakes.server import random_faults

from backends import Clouds
from spile.errors import Damaged, StoreError
from spile.objects import open_folder
from spile.objects.retry import Retry
from world import produce

SAMPLES = 24
LIVES = 25


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPILE_RETRY_SECONDS", "0.4")
    monkeypatch.setattr(Retry, "first", 0.005)


def _life(url: str, seed: int) -> str | None:
    try:
        produce(open_folder(url), SAMPLES, shard=4 + seed % 5)
    except (StoreError, Damaged) as error:
        return str(error)
    return None


def schedule(clouds: Clouds, url: str, seed: int) -> None:
    """Start workers under faults until one finishes, then verify the dataset without faults."""
    faults = clouds.faults(url)
    faults.extend(random_faults(seed, 4 + seed % 20, requests=10 + seed % 60))
    for _ in range(LIVES):
        if (trouble := _life(url, seed)) is None:
            break
        assert url in trouble  # it names the object
    else:
        pytest.fail("it never got to the end")
    faults.clear()
    folder = open_folder(url)
    assert_whole(folder, SAMPLES)
    produce(folder, SAMPLES)  # nothing is left to do
    assert_whole(folder, SAMPLES)
    assert folder.stats.retries == 0


@pytest.mark.parametrize("seed", range(8))
def test_random_faults(clouds: Clouds, cloud_url: str, seed: int) -> None:
    schedule(clouds, cloud_url, seed)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("first", range(100, 1100, 100))
def test_a_thousand_random_faults(clouds: Clouds, cloud_url: str, first: int) -> None:
    for seed in range(first, first + 100):
        schedule(clouds, f"{cloud_url}/{seed}", seed)


@pytest.mark.parametrize("status", [403, 404])
def test_an_upload_that_cannot_succeed_ends_the_run_and_resumes_once_fixed(
    clouds: Clouds, cloud_url: str, status: int
) -> None:
    """The bucket refuses requests in the middle of the run: one line names the object and the cause."""
    clouds.faults(cloud_url).add("status", status=status, method="PUT", target="shard_0003", count=-1)
    trouble = _life(cloud_url, 0)
    assert trouble is not None
    assert "shard_0003" in trouble
    assert str(status) in trouble
    assert len(trouble.splitlines()) == 1
    clouds.faults(cloud_url).clear()
    assert _life(cloud_url, 0) is None
    assert_whole(open_folder(cloud_url), SAMPLES)
