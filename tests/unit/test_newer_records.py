"""A record that a newer version wrote, with one field more at every level, is read by this one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import spile
from spile.errors import RunMismatch
from spile.fleet.home import Lease, WorkerReport
from spile.fleet.provider import NodeRequest
from spile.fleet.spec import Bill, FleetSpec, History, Pending, WorkerHistory, ZoneBlock, plan_workers
from spile.objects import open_folder
from spile.proof.verification import verify
from spile.spec.phase import Phase
from spile.store.ledger import seal, unseal
from spile.store.run import join_run, read_run
from spile.store.snapshot import SnapshotReader
from spile.store.writer import join_stream
from world import produce, run_identity, stream_identity

SAMPLES = 12


_TABLES = ("environment", "flags", "hashes", "labels", "metadata", "run", "workers", "blocks", "bills")
"""Objects whose keys are no fields."""


def newer(value: Any, name: str = "") -> Any:
    """The same record with a field more at every level."""
    if isinstance(value, list):
        return [newer(each) for each in value]
    if not isinstance(value, dict):
        return value
    more = {} if name in _TABLES else {"from_the_future": {"a": [1]}}
    return {key: newer(each, key) for key, each in value.items()} | more


FLEET = FleetSpec(
    "f", "p", ("us-a",), plan_workers(("us-a",), 2), NodeRequest("v3-8", "r", tags=("t",)), deployment="d"
)
HISTORY = History(
    {0: WorkerHistory("us-a", ("us-a",), Pending("create", "us-a", 5.0), early_deaths=2, last_dead="u", never_heard=1)},
    {"us-a": ZoneBlock(9.0, "no quota")},
    {"uid-1": Bill(0, "us-a", 1.0, 2.0, 3.0)},
    settled=4.0,
)
REPORT = WorkerReport("n", "d", Phase.STARTING, updated=5.0, launches=2)


@pytest.mark.parametrize(
    ("record", "read"),
    [
        pytest.param(FLEET, FleetSpec.from_json, id="fleet.json"),
        pytest.param(HISTORY, History.from_json, id="history"),
        pytest.param(REPORT, WorkerReport.from_json, id="report"),
    ],
)
def test_a_fleets_records(record: Any, read: Callable[[bytes], Any]) -> None:
    stored = newer(json.loads(record.to_json()))
    assert "from_the_future" in stored
    assert read(json.dumps(stored).encode()) == record


def test_a_fleet_record_without_newer_fields() -> None:
    """An older version did not write every field: the missing ones have their defaults."""
    fleet = json.loads(FLEET.to_json())
    del fleet["policy"]["max_never_heard"], fleet["former_zones"]
    assert FleetSpec.from_json(json.dumps(fleet).encode()) == FLEET


def test_a_lease(tmp_path: Path) -> None:
    folder = open_folder(str(tmp_path))
    Lease(folder, clock=lambda: 1.0, ttl=60, owner="ann").take()
    (key,) = [info.key for info in folder.list("lease/")]
    folder.put(key, json.dumps(newer(json.loads(folder.get(key)))).encode())
    holder = Lease(folder, clock=lambda: 2.0, ttl=60, owner="bob").take()
    assert holder is not None
    assert holder.owner == "ann"


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A small dataset whose every sealed record has a field more."""
    root = open_folder(str(tmp_path / "out"))
    produce(root, SAMPLES)
    for info in list(root.list()):
        if info.key.endswith(".json") and not info.key.endswith(("metadata.json", "progress.json")):
            fields = unseal(root.get(info.key), info.key)
            fields.pop("crc32c", None)
            assert (tmp_path / "out" / info.key).is_file()
            root.put(info.key, seal({**fields, "from_the_future": {"a": [1]}}))
    return tmp_path / "out"


def test_run_stream_and_commits(made: Path) -> None:
    root = open_folder(str(made))
    assert verify(root).ok
    assert len(list(spile.open(str(made)).samples)) > 0
    assert SnapshotReader(root).take().done
    assert join_stream(root, 0, stream_identity(SAMPLES), run_identity()).ledger.samples > 0


def test_a_run_that_compares_more_is_read_and_not_added_to(tmp_path: Path) -> None:
    """What a newer version compares changes what is stored; this one cannot know how."""
    root = open_folder(str(tmp_path / "out"))
    join_run(root, run_identity(unknown={"warp": "up"}))
    known = read_run(root)
    assert known is not None
    assert (known.unknown, known.fingerprint()) == (
        {"warp": "up"},
        run_identity(unknown={"warp": "up"}).fingerprint(),
    )
    with pytest.raises(RunMismatch, match="created with warp up, but this command asks for warp none"):
        join_run(root, run_identity())
