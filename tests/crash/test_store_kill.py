"""SIGKILL at every write step of the store (``make test``: at some), then a second run: nothing is lost or damaged.

The store alone, in one thread, so that the steps are the same at each run and none is left out: a commit has several.
``test_worker_kill`` kills the real worker's loop at the same steps, where threads mix them, and at random instants.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from killing import KILLED, Switch, assert_whole, start

from spile.objects import Folder, open_folder
from spile.proof.verification import verify
from spile.reading.dataset import open as open_dataset
from world import produce


def steps_killed(root: str, samples: int, each: int = 1, **options: int) -> int:
    """Kill at step 0, ``each``, 2 × ``each``, …, each in a new folder, and resume; return the number of steps."""
    step = 0
    while True:
        url = f"{root}/{step}"
        process = start(url, samples, Switch(step), **options)
        process.join(120)
        assert process.exitcode in (0, KILLED)
        ended = process.exitcode == 0
        before = _committed(open_folder(url))
        # Another shard size and batch size than before: resume must not care.
        store = produce(open_folder(url), samples, shard=5, step=2)
        assert [file.name for file in store.ledger.files][: len(before)] == before
        assert_whole(open_folder(url), samples)
        if ended:
            return step
        step += each


def _committed(folder: Folder) -> list[str]:
    if not any(info.key == "run.json" for info in folder.list()):
        return []
    return [shard.name for stream in open_dataset(folder).streams for shard in stream.shards]


@pytest.mark.parametrize("each", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_a_kill_at_every_system_call_of_a_local_run(tmp_path: Path, each: int) -> None:
    steps = steps_killed(str(tmp_path), 14, each, shard=7, step=4)
    assert steps > 60


@pytest.mark.parametrize("each", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_a_kill_at_every_system_call_while_shards_are_cut_short(tmp_path: Path, each: int) -> None:
    """Compaction moves bytes in place: an incomplete file must never be read as a shard."""
    assert steps_killed(str(tmp_path), 7, each, shard=7, step=4, cut=4) > 40


@pytest.mark.parametrize("each", [4, pytest.param(1, marks=pytest.mark.slow)])
def test_a_kill_at_every_request_of_a_cloud_run(cloud_url: str, each: int) -> None:
    assert steps_killed(cloud_url, 12, each, shard=12) > 12


@pytest.mark.parametrize("cloud_url", ["az"], indirect=True)
def test_a_kill_at_requests_of_an_azure_run(cloud_url: str) -> None:
    assert steps_killed(cloud_url, 12, each=4, shard=12) > 12


def test_what_a_kill_leaves_behind_is_invisible_and_can_be_collected(tmp_path: Path) -> None:
    url = str(tmp_path)
    process = start(url, 20, Switch(60), shard=10)
    process.join(120)
    assert process.exitcode == KILLED
    folder = open_folder(url)
    assert list(tmp_path.rglob(".tmp-*"))
    produce(folder, 20)
    assert_whole(folder, 20)
    report = verify(folder, gc=True, remove=True, older_than=-1)
    assert {item.state for item in report.garbage} == {"removed"}
    assert not list(tmp_path.rglob(".tmp-*"))
    assert_whole(folder, 20)
