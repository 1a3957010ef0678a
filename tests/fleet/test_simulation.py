"""Seeded histories of a fleet: it always ends well once the cloud allows it, and never breaks a rule on the way."""

from __future__ import annotations

import os
import time
from collections import Counter

import pytest

from fleet_simulation import Simulation
from spile.fleet.history import History
from spile.fleet.observed import Observed, Pulse
from spile.fleet.provider import Node, NodeRequest
from spile.fleet.spec import FLEET_LABEL, WORKER_LABEL, FleetSpec, plan_workers
from spile.fleet.states import NodeState


@pytest.mark.parametrize("block", range(4))
def test_histories_end_well(block: int) -> None:
    for seed in range(block * 20, block * 20 + 20):
        Simulation(seed).run()


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("block", range(20))
def test_ten_thousand_histories_end_well(block: int) -> None:
    first = int(os.environ.get("SPILE_TEST_SEED", "1000"))
    for seed in range(first + block * 500, first + block * 500 + 500):
        Simulation(seed).run()


def test_histories_meet_everything() -> None:
    """The chaos is worth its name: over some seeds every kind of trouble was met and overcome."""
    met: Counter[str] = Counter()
    for seed in range(30):
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
    assert all(
        met[word] > 0 for word in ("no quota", "no answer", "PREEMPTED", "crashed", "moved", "monitors", "poisoned")
    ), met


def test_a_seed_replays() -> None:
    assert Simulation(7).run().log == Simulation(7).run().log


def test_a_failure_names_its_seed() -> None:
    simulation = Simulation(3)
    simulation._watch = lambda _: None  # type: ignore[method-assign]
    with pytest.raises(AssertionError, match=r"seed 3, .*did not converge"):
        simulation.run()


def test_256_workers_are_watched_within_an_interval() -> None:
    from spile.fleet.absorb import absorb
    from spile.fleet.reconcile import decide

    zones = ("us-central1-a", "us-central1-b", "us-east1-d", "europe-west4-a")
    fleet = FleetSpec("big", "p", zones, plan_workers(zones, 64), NodeRequest("v3-8", "r"), deployment="d")
    nodes = tuple(
        Node(
            worker.name, worker.zone, NodeState.READY, "v3-8", uid=str(worker.id), created=0.0,
            labels={FLEET_LABEL: "big", WORKER_LABEL: str(worker.id)},
        )
        for worker in fleet.workers
    )  # fmt: skip
    history, began = History(), time.process_time()
    for round_number in range(10):
        now = 100.0 + 60 * round_number
        seen = Observed("big", nodes, pulses={worker.id: Pulse(now, "running") for worker in fleet.workers})
        history = absorb(fleet, seen, history, now)
        assert decide(fleet, seen, history, now) == ()
    assert time.process_time() - began < 60, "ten rounds took longer than one interval"
