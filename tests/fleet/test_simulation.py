"""Random histories of a fleet: it finishes once the cloud allows it, and never violates an invariant."""

from __future__ import annotations

import os
from collections import Counter

import pytest
from tests.fakes.cloud import Cloud, CloudTimes
from tests.fakes.cloud_server import Api

from fleet_simulation import DirectSession, Simulation
from spile.fleet.cloud_tpu import CloudSettings, CloudTpu
from spile.fleet.monitor import run_round
from spile.fleet.provider import NodeRequest
from spile.fleet.spec import FleetSpec, History, WorkerHealth, plan_workers
from spile.spec.phase import Phase

ORDERS = (
    "redeployed", "is refused", "another fleet", "the budget of", "stopped by", "the hub is out", "scaled",
    "no monitor runs for a while", "a sample kills the worker", "quarantined [", "is suspended",
    "is fenced from stream",
)  # fmt: skip
"""What owners and the world do, as a history's log has it."""


@pytest.mark.parametrize("block", [0, 1, 2, *(pytest.param(block, marks=pytest.mark.slow) for block in range(3, 8))])
def test_histories_end_well(block: int) -> None:
    for seed in range(block * 25, block * 25 + 25):
        Simulation(seed).run()


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(20))
def test_ten_thousand_histories_end_well(block: int) -> None:
    first = int(os.environ.get("SPILE_TEST_SEED", "1000"))
    for seed in range(first + block * 500, first + block * 500 + 500):
        Simulation(seed).run()


def test_histories_meet_everything() -> None:
    """Over several seeds, every kind of fault occurs and is recovered from."""
    met: Counter[str] = Counter()
    for seed in (*range(30), 65, 71):  # A fenced worker is rare: claims keep workers apart.
        simulation = Simulation(seed).run()
        text = "\n".join(simulation.log)
        met.update(
            word
            for word in ("no capacity", "no quota", "no answer", "PREEMPTED", "heartbeat", "crashed")
            if word in text
        )
        met["moved"] += "had no capacity" in text
        met["monitors"] += len({line.split()[1] for line in simulation.log if " create " in line}) > 1
        met["poisoned"] += simulation.poisoned is not None
        met.update(word for word in ORDERS if word in text)
    assert all(
        met[word] > 0 for word in ("no quota", "no answer", "PREEMPTED", "crashed", "moved", "monitors", "poisoned")
    ), met
    assert all(met[word] > 0 for word in ORDERS), met


def test_a_seed_replays() -> None:
    assert Simulation(7).run().log == Simulation(7).run().log


def test_a_failure_names_its_seed() -> None:
    simulation = Simulation(3)
    simulation._watch = lambda _: None  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match=r"seed 3, .*did not converge"):
        simulation.run()


def test_256_workers_cost_a_request_a_zone() -> None:
    """The requests of a round grow with zones and pending operations, not with healthy workers."""
    zones = ("us-central1-a", "us-south1-a", "us-west1-c", "us-west4-a")
    fleet = FleetSpec("big", "p", zones, plan_workers(zones, 64), NodeRequest("v5litepod-8", "r"), deployment="d")
    now = [1_000_000.0]
    api = Api(Cloud(lambda: now[0], times=CloudTimes(60, 30, 20)), check_answers=False)
    settings = CloudSettings("p", endpoint="http://sim/", anonymous=True)
    client = CloudTpu(settings, session=DirectSession(api))
    history, saved = History(), []

    def turn() -> list[tuple[str, str]]:
        """A round, and the requests that it made."""
        nonlocal history
        now[0] += 90.0
        before = len(api.calls)
        health = {worker.id: WorkerHealth(now[0], Phase.RUNNING) for worker in fleet.workers}
        history = run_round(
            fleet, client, history, health,
            clock=lambda: now[0], held=lambda: True, metadata=lambda _: {}, save=saved.append,
        ).history  # fmt: skip
        return api.calls[before:]

    first, second = turn(), turn()
    assert Counter(method for method, _ in first) == {"GET": len(zones), "POST": 256}
    assert Counter(path.split("/")[-2] for _, path in second)["operations"] == 256, "each was asked about"
    saved.clear()
    lists = [("GET", f"/v2/projects/p/locations/{zone}/nodes") for zone in zones]
    for _ in range(10):
        assert turn() == lists
    assert len(saved) == 10
    api.cloud.preempt(zones[0], fleet.workers[3].name)
    assert len(turn()) == len(lists) + 2, "the one that was taken is looked at and deleted"


def test_streams_in_one_place_for_all_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulation would fail if a deployment replaced another's streams."""
    monkeypatch.setattr("fleet_simulation.place_of", lambda below, _digest: below)
    with pytest.raises(AssertionError, match="streams were replaced by others"):
        _ = [Simulation(seed).run() for seed in range(20)]


def test_a_healthy_sample_in_quarantine_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulation would fail if the samples of a lost machine, or of a whole group, were blamed like any other."""
    monkeypatch.setattr(
        "spile.store.quarantine.Suspects.must_be_quarantined", property(lambda self: len(self.causes) >= 2)
    )
    monkeypatch.setattr("spile.store.quarantine.Suspects.divided", lambda self: [self])
    with pytest.raises(AssertionError, match=r"quarantined \["):
        _ = [Simulation(seed).run() for seed in range(40)]
