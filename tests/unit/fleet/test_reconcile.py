"""The decisions, one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spile.errors import CloudError, SpecError
from spile.fleet.monitor import events_between
from spile.fleet.provider import (
    LostReply,
    Missing,
    Node,
    NodeRequest,
    NodeState,
    NotAllowed,
    Operation,
    Quota,
    Stockout,
)
from spile.fleet.reconcile import Action, decide, record, record_unanswered, retry_delay, update_history
from spile.fleet.spec import (
    FLEET_LABEL,
    WORKER_LABEL,
    FleetSpec,
    History,
    Observed,
    Pending,
    Policy,
    WorkerHealth,
    WorkerHistory,
    ZoneBlock,
    plan_workers,
)
from spile.spec.phase import Phase

A, B = "us-central1-a", "us-central1-b"
NOW = 100_000.0


def a_fleet(**policy: object) -> FleetSpec:
    return FleetSpec(
        "f", "p", (A, B), plan_workers((A, B), 1), NodeRequest("v3-8", "r", preemptible=True), deployment="d",
        policy=Policy(**policy),  # type: ignore[arg-type]
    )  # fmt: skip


def a_node(worker: int, state: NodeState = NodeState.READY, **more: object) -> Node:
    zone = (A, B)[worker]
    fields: dict[str, object] = {
        "uid": f"u{worker}",
        "created": NOW - 3600,
        "accelerator_type": "v3-8",
        "preemptible": True,
        "labels": {FLEET_LABEL: "f", WORKER_LABEL: str(worker)},
        "zone": zone,
        **more,
    }
    return Node(f"tpu-{zone}-0", state=state, **fields)  # type: ignore[arg-type]


def fresh(phase: Phase = Phase.RUNNING) -> WorkerHealth:
    return WorkerHealth(NOW - 10, phase)


def turn(
    fleet: FleetSpec, seen: Observed, history: History | None = None, now: float = NOW
) -> tuple[History, tuple[Action, ...]]:
    grown = update_history(fleet, seen, history or History(), now)
    return grown, decide(fleet, seen, grown, now)


def see(*nodes: Node, **more: object) -> Observed:
    return Observed("f", nodes, **more)  # type: ignore[arg-type]


def words(actions: tuple[Action, ...]) -> list[tuple[str, int, str]]:
    return [(action.verb, action.worker, action.zone) for action in actions]


def test_names_and_numbers() -> None:
    assert [(w.id, w.name) for w in plan_workers((A, B), 2)] == [
        (0, "tpu-us-central1-a-0"),
        (1, "tpu-us-central1-a-1"),
        (2, "tpu-us-central1-b-0"),
        (3, "tpu-us-central1-b-1"),
    ]
    with pytest.raises(SpecError, match="--zones: expected zones, each once"):
        plan_workers((A, A), 2)
    with pytest.raises(SpecError, match="--workers-per-zone: expected 1 or more, found 0"):
        plan_workers((A,), 0)


def test_nothing_there_makes_everything() -> None:
    _, actions = turn(a_fleet(), see())
    assert words(actions) == [("create", 0, A), ("create", 1, B)]


def test_a_healthy_fleet_needs_no_action() -> None:
    _, actions = turn(a_fleet(), see(a_node(0), a_node(1, NodeState.CREATING), health={0: fresh()}))
    assert actions == ()


@pytest.mark.parametrize("state", [NodeState.PREEMPTED, NodeState.TERMINATED, NodeState.STOPPED])
def test_a_dead_machine_is_deleted_then_made_again(state: NodeState) -> None:
    fleet = a_fleet()
    history, actions = turn(fleet, see(a_node(0, state), a_node(1), health={1: fresh()}))
    assert words(actions) == [("delete", 0, A)]
    assert state.value in actions[0].reason
    assert history.workers[0].preemptions == 1
    history = record(fleet, history, [(actions[0], Operation("o", A, False))], NOW)
    history, actions = turn(fleet, see(a_node(0, NodeState.DELETING), a_node(1), health={1: fresh()}), history)
    assert actions == (), "it waits until it is gone"
    history, actions = turn(fleet, see(a_node(1), health={1: fresh()}), history)
    assert words(actions) == [("create", 0, A)]
    assert history.workers[0].preemptions == 1, "counted once"


def test_a_machine_that_vanished_counts_as_preempted() -> None:
    fleet = a_fleet()
    history, _ = turn(fleet, see(a_node(0), a_node(1), health={0: fresh(), 1: fresh()}))
    history, actions = turn(fleet, see(a_node(1), health={1: fresh()}), history)
    assert words(actions) == [("create", 0, A)]
    assert history.workers[0].preemptions == 1


@pytest.mark.parametrize(
    ("age", "phase", "dead"),
    [
        (290, Phase.RUNNING, False),
        (310, Phase.RUNNING, True),
        (310, Phase.COMPILING, False),
        (1210, Phase.COMPILING, True),
    ],
)
def test_stale_heartbeats(age: float, phase: Phase, dead: bool) -> None:
    history, actions = turn(
        a_fleet(), see(a_node(0), a_node(1), health={0: WorkerHealth(NOW - age, phase), 1: fresh()})
    )
    assert words(actions) == ([("delete", 0, A)] if dead else [])
    assert history.workers[0].silences == int(dead)
    assert not dead or f"its heartbeat is {age} s old" in actions[0].reason


@pytest.mark.parametrize(
    ("idle", "phase", "dead"),
    [(1700, Phase.RUNNING, False), (1900, Phase.RUNNING, True), (1900, Phase.COMPILING, True)],
)
def test_fresh_heartbeats_of_a_worker_that_gets_no_further(idle: float, phase: Phase, dead: bool) -> None:
    """The device hangs, but the heartbeat thread continues."""
    old = a_node(0, created=NOW - 9000)
    seen = see(old, a_node(1), health={0: WorkerHealth(NOW - 10, phase, progress=NOW - idle), 1: fresh()})
    history, actions = turn(a_fleet(), seen)
    assert words(actions) == ([("delete", 0, A)] if dead else [])
    assert history.workers[0].silences == int(dead)
    assert not dead or actions[0].reason == "it sends heartbeats but has made no progress for 1900 s (limit 1800)"


def test_how_far_the_machine_before_got_does_not_count() -> None:
    young = a_node(0, created=NOW - 100)
    seen = see(young, a_node(1), health={0: WorkerHealth(NOW - 10, Phase.RUNNING, progress=NOW - 5000), 1: fresh()})
    assert turn(a_fleet(), seen)[1] == ()


@pytest.mark.parametrize(("age", "dead"), [(590, False), (610, True)])
def test_a_worker_with_rare_heartbeats_is_judged_by_its_own_interval(age: float, dead: bool) -> None:
    rare = WorkerHealth(NOW - age, Phase.RUNNING, interval=120.0)
    seen = see(a_node(0, created=NOW - 5000), a_node(1), health={0: rare, 1: fresh()})
    assert bool(turn(a_fleet(), seen)[1]) == dead


def test_the_heartbeat_of_the_machine_before_does_not_count() -> None:
    young = a_node(0, created=NOW - 100)
    _, actions = turn(a_fleet(), see(young, a_node(1), health={0: WorkerHealth(NOW - 500, Phase.RUNNING), 1: fresh()}))
    assert actions == ()
    old = a_node(0, created=NOW - 1300)
    _, actions = turn(a_fleet(), see(old, a_node(1), health={0: WorkerHealth(NOW - 1400, Phase.RUNNING), 1: fresh()}))
    assert "no heartbeat since it was created" in actions[0].reason


def test_finished_machines_are_deleted_by_default() -> None:
    seen = see(a_node(0), a_node(1), health={0: WorkerHealth(NOW, Phase.DONE, "finished", NOW), 1: fresh()})
    assert words(turn(a_fleet(), seen)[1]) == [("delete", 0, A)]
    assert turn(a_fleet(delete_finished=False), seen)[1] == ()
    history, actions = turn(a_fleet(), see(a_node(1), health=seen.health))
    assert actions == (), "and none is made for what is finished"
    assert history.workers[0].finished


def test_a_crash_is_tried_on_a_fresh_machine_then_reported_with_its_log() -> None:
    fleet = a_fleet()
    health = {0: WorkerHealth(NOW - 5, Phase.RUNNING, "crashed", NOW - 5, "Traceback\nboom"), 1: fresh()}
    history, actions = turn(fleet, see(a_node(0), a_node(1), health=health))
    assert words(actions) == [("delete", 0, A)]
    assert (history.workers[0].crashes, history.workers[0].preemptions) == (1, 0)
    assert history.workers[0].retry_at > NOW, "with a delay"
    history, actions = turn(fleet, see(a_node(0, uid="second"), a_node(1), health=health), history)
    assert words(actions) == [("report", 0, A), ("delete", 0, A)]
    assert "crashed on 2 machines: Traceback" in actions[0].reason
    assert "boom" in actions[0].reason
    history = record(fleet, history, [(actions[0], Operation())], NOW)
    _, actions = turn(fleet, see(a_node(1), health=health), history, NOW + 9999)
    assert 0 not in {action.worker for action in actions}, "reported once and never made again"


def test_a_refused_task_is_not_tried_again() -> None:
    health = {0: WorkerHealth(NOW - 5, Phase.UNKNOWN, "refused", NOW - 5, "spile: --layers: expected …"), 1: fresh()}
    _, actions = turn(a_fleet(), see(a_node(0), a_node(1), health=health))
    assert words(actions) == [("report", 0, A), ("delete", 0, A)]
    assert "--layers" in actions[0].reason


def stockouts(fleet: FleetSpec, times: int, history: History | None = None, now: float = NOW) -> tuple[History, float]:
    history = history or History()
    error = Stockout("no capacity")
    for number in range(times):
        seen = see(a_node(1), health={1: WorkerHealth(now, Phase.RUNNING)})
        history, actions = turn(fleet, seen, history, now)
        creates = [action for action in actions if action.worker == 0]
        assert creates, f"try {number}"
        history = record(fleet, history, [(creates[0], Operation(f"o{number}", creates[0].zone, False))], now)
        failed = {f"o{number}": Operation(f"o{number}", creates[0].zone, True, error)}
        history = update_history(fleet, replace(seen, operations=failed), history, now)
        assert history.workers[0].retry_at > now
        now = history.workers[0].retry_at
    return history, now


def test_repeated_stockouts_change_the_zone() -> None:
    assert stockouts(a_fleet(), 2)[0].workers[0].zone == A
    history, now = stockouts(a_fleet(), 3)
    assert history.workers[0].zone == B
    _, actions = turn(a_fleet(), see(a_node(1), health={1: WorkerHealth(now, Phase.RUNNING)}), history, now)
    assert words(actions) == [("create", 0, B)]
    assert "us-central1-a had no capacity 3 times" in actions[0].reason
    assert stockouts(a_fleet(move=False), 4)[0].workers[0].zone == A


def test_a_dry_zone_is_not_left_for_one_that_is_known_to_be_without_quota() -> None:
    fleet = replace(a_fleet(), zones=(A, B, "us-east1-d"))
    for blocked, zone in (((), B), ((B,), "us-east1-d"), ((B, "us-east1-d"), A)):
        history, now = stockouts(fleet, 2)
        history = replace(history, blocks={each: ZoneBlock(now + 9000, "no quota") for each in blocked})
        history, _ = stockouts(fleet, 1, history, now)
        assert history.workers[0].zone == zone
        assert set(history.blocks) == set(blocked), "and what is known of quota stays known"


def test_tries_in_a_dry_zone_become_rare() -> None:
    _, now = stockouts(a_fleet(move=False), 20)
    assert now - NOW > 12 * 900 / 2
    assert retry_delay(Policy(), 0, 1) <= 30
    assert 450 <= retry_delay(Policy(), 0, 50) <= 900
    assert len({retry_delay(Policy(), worker, 3) for worker in range(50)}) == 50, "jittered"


def test_quota_stops_the_zone_and_says_so() -> None:
    fleet = a_fleet()
    history, actions = turn(fleet, see())
    refused = Quota("no quota to create", found="Limit: 0")
    history = record(
        fleet, history, [(actions[0], Operation(error=refused)), (actions[1], Operation(error=refused))], NOW
    )
    assert history.blocks[A].why == "no quota to create: found Limit: 0"
    assert turn(fleet, see(), history, NOW + 60)[1] == ()
    assert words(turn(fleet, see(), history, NOW + 1801)[1]) == [("create", 0, B), ("create", 1, B)]


def test_a_zone_without_quota_is_left_for_another() -> None:
    history, actions = turn(a_fleet(), see())
    refused = Quota("no quota to create", found="Limit: 0")
    history = record(a_fleet(), history, [(actions[0], Operation(error=refused))], NOW)
    _, actions = turn(a_fleet(), see(a_node(1), health={1: fresh()}), history, NOW + 60)
    assert words(actions) == [("create", 0, B)]
    assert "us-central1-a had no quota" in actions[0].reason
    stays = a_fleet(move=False)
    history, actions = turn(stays, see())
    history = record(stays, history, [(actions[0], Operation(error=refused))], NOW)
    assert turn(stays, see(a_node(1), health={1: fresh()}), history, NOW + 60)[1] == (), "unless it may not move"


def test_a_worker_without_a_machine_for_long_is_reported_once() -> None:
    fleet = a_fleet()

    def later(history: History | None, now: float, *nodes: Node) -> History:
        return turn(fleet, see(a_node(1), *nodes, health={1: WorkerHealth(now - 10, Phase.RUNNING)}), history, now)[0]

    before = later(None, NOW)
    assert before.workers[0].no_machine_since == NOW
    after = later(before, NOW + 1799)
    assert list(events_between(fleet, before, after)) == []
    late = later(after, NOW + 1801)
    assert [kind for kind, _ in events_between(fleet, after, late)] == ["no machine"]
    assert list(events_between(fleet, late, later(late, NOW + 1900))) == []
    there = later(late, NOW + 1901, a_node(0, NodeState.CREATING))
    assert (there.workers[0].no_machine_since, there.workers[0].alarmed) == (0.0, False)


def test_a_machine_that_goes_gives_quota_back() -> None:
    fleet = a_fleet()
    history, _ = turn(fleet, see(a_node(0), health={0: fresh()}))
    history = replace(history, blocks={A: ZoneBlock(NOW + 1800, "quota")})
    finished = {0: WorkerHealth(NOW, Phase.DONE, "finished", NOW)}
    history, _ = turn(fleet, see(health=finished), history, NOW + 60)
    assert history.blocks == {}


def test_a_lost_answer_is_waited_for_then_asked_again_in_the_same_zone() -> None:
    fleet = a_fleet()
    history, actions = turn(fleet, see())
    lost = LostReply("no answer")
    history = record(fleet, history, [(action, Operation(error=lost)) for action in actions], NOW)
    assert turn(fleet, see(), history, NOW + 60)[1] == ()
    assert words(turn(fleet, see(), history, NOW + 121)[1]) == [("create", 0, A), ("create", 1, B)]
    arrived = see(a_node(0, NodeState.CREATING), a_node(1, NodeState.CREATING))
    assert turn(fleet, arrived, history, NOW + 200)[1] == ()


def test_what_is_asked_for_is_remembered_before_it_is_asked() -> None:
    fleet = a_fleet()
    history, actions = turn(fleet, see())
    dead_monitors = History.from_json(record_unanswered(fleet, history, actions, NOW).to_json())
    assert dead_monitors.workers[0].pending == Pending("create", A, NOW)
    assert turn(fleet, see(), dead_monitors, NOW + 60)[1] == ()


def test_a_zone_without_an_answer_stops_only_workers_that_may_be_there() -> None:
    fleet = a_fleet()
    _, actions = turn(fleet, see(unanswered={A: CloudError("no answer")}))
    assert words(actions) == [("create", 1, B)]
    moved = History({0: WorkerHistory(zone=B, other_zones=(A, B))}, deployment="d")
    _, actions = turn(fleet, see(unanswered={A: CloudError("no answer")}), moved)
    assert words(actions) == [("create", 1, B)], "its old machine may still be in the zone that does not answer"
    _, actions = turn(
        fleet,
        see(a_node(1), unanswered={A: CloudError("no answer")}, health={1: WorkerHealth(NOW - 9999, Phase.RUNNING)}),
    )
    assert words(actions) == [("delete", 1, B)], "and a visible sick one is still deleted"


def test_two_machines_for_one_worker_lose_the_worse() -> None:
    twin = a_node(0, NodeState.CREATING, zone=B, uid="twin", created=NOW - 60)
    _, actions = turn(a_fleet(), see(a_node(0), twin, a_node(1), health={0: fresh(), 1: fresh()}))
    assert [(action.uid, action.reason) for action in actions] == [("twin", "another machine serves this worker")]


def test_foreign_machines_are_left_alone() -> None:
    foreign = a_node(0, NodeState.PREEMPTED, labels={FLEET_LABEL: "other", WORKER_LABEL: "0"})
    fleet = a_fleet()
    _, actions = turn(fleet, see(foreign, a_node(1), health={1: fresh()}))
    assert words(actions) == [("create", 0, B)], "its name is taken there"
    assert turn(a_fleet(move=False), see(foreign, a_node(1), health={1: fresh()}))[1] == ()


def test_the_budget_stops_the_fleet() -> None:
    seen = see(a_node(0), a_node(1), health={0: fresh(), 1: fresh()})
    history, actions = turn(a_fleet(budget=4.81), seen)
    assert actions == ()
    assert history.dollars == pytest.approx(2 * 0.60 * 4), "an hour each so far"
    history, actions = turn(a_fleet(budget=4.5), seen)
    assert words(actions) == [("delete", 0, A), ("delete", 1, B)]
    assert actions[0].reason == "the budget of $4.50 is spent ($4.80)"
    assert turn(a_fleet(budget=4.5), see(), history)[1] == ()


def test_a_machine_that_never_gets_ready_is_replaced() -> None:
    fleet = a_fleet()
    seen = see(a_node(0, NodeState.CREATING), a_node(1), health={1: WorkerHealth(NOW + 1801, Phase.RUNNING)})
    history, _ = turn(fleet, seen)
    _, actions = turn(fleet, seen, history, NOW + 1801)
    assert words(actions) == [("delete", 0, A)]
    queued = see(a_node(0, NodeState.QUEUED), a_node(1), health={1: WorkerHealth(NOW + 90_000, Phase.RUNNING)})
    history, _ = turn(fleet, queued)
    assert turn(fleet, queued, history, NOW + 90_000)[1] == (), "a queue may be long"


def test_machines_that_die_young_are_replaced_ever_more_slowly() -> None:
    fleet, history, now = a_fleet(), History(), NOW
    waits = []
    for number in range(6):
        born = a_node(0, created=now, uid=f"n{number}")
        history, _ = turn(fleet, see(born, a_node(1), health={1: WorkerHealth(now, Phase.RUNNING)}), history, now)
        dead = replace(born, state=NodeState.PREEMPTED)
        history, _ = turn(fleet, see(dead, a_node(1), health={1: WorkerHealth(now, Phase.RUNNING)}), history, now + 60)
        waits.append(max(0.0, history.workers[0].retry_at - now - 60))
        now += 1000
    assert waits[0] == 0
    assert waits[5] > waits[1] > 0


def test_a_refusal_to_delete_is_tried_again_and_a_missing_one_is_no_error() -> None:
    fleet = a_fleet()
    seen = see(a_node(0, NodeState.PREEMPTED), a_node(1), health={1: fresh()})
    history, actions = turn(fleet, seen)
    refused = record(fleet, history, [(actions[0], Operation(error=NotAllowed("no")))], NOW)
    assert words(turn(fleet, seen, refused, NOW + 60)[1]) == [("delete", 0, A)]
    gone = record(fleet, history, [(actions[0], Operation(error=Missing("gone")))], NOW)
    assert gone.workers[0].pending is None


def test_a_new_deployment_resets_the_history_but_not_the_bill() -> None:
    fleet = a_fleet()
    old = History(
        {0: WorkerHistory(zone=A, finished=True, gave_up="x")}, settled=3.0, stopped="budget", deployment="old"
    )
    history, actions = turn(fleet, see(), old)
    assert words(actions) == [("create", 0, A), ("create", 1, B)]
    assert history.dollars == 3.0


def test_fleet_and_history_survive_json() -> None:
    fleet = a_fleet(budget=3.0)
    assert FleetSpec.from_json(fleet.to_json()) == fleet
    history, actions = turn(fleet, see(a_node(0), health={0: fresh()}))
    history = record_unanswered(fleet, history, actions, NOW)
    history = replace(history, blocks={A: ZoneBlock(1.0, "why")})
    assert History.from_json(history.to_json()) == history
    with pytest.raises(SpecError, match="--fleet: expected a label"):
        replace(fleet, name="No Such")


def test_a_machine_that_vanished_unobserved_is_billed_until_its_last_heartbeat() -> None:
    fleet = a_fleet()
    history, _ = turn(fleet, see(a_node(0), a_node(1), health={0: fresh(), 1: fresh()}))
    before = history.dollars
    later = NOW + 8 * 3600
    finished = {0: WorkerHealth(NOW + 3600, Phase.DONE, "finished", NOW + 3600), 1: WorkerHealth(later, Phase.RUNNING)}
    history, _ = turn(fleet, see(a_node(1), health=finished), history, later)
    assert history.settled == pytest.approx(2 * 2.40), "an hour before, an hour unseen"
    assert history.dollars == pytest.approx(before + 2.40 + 8 * 2.40)


def test_machines_of_an_earlier_larger_deployment_are_deleted() -> None:
    fleet = a_fleet()
    left = a_node(0, labels={FLEET_LABEL: "f", WORKER_LABEL: "7"}, uid="left")
    unnumbered = a_node(0, labels={FLEET_LABEL: "f"}, uid="adopted")
    seen = see(a_node(0), a_node(1), left, unnumbered, health={0: fresh(), 1: fresh()})
    history, actions = turn(fleet, seen)
    assert [(action.uid, action.reason) for action in actions] == [("left", "no worker of this deployment needs it")]
    assert 7 not in record(fleet, history, [(actions[0], Operation("o", A, False))], NOW).workers
    shrunk = replace(fleet, zones=(A,), workers=fleet.workers[:1], former_zones=(B,))
    assert shrunk.possible_zones == (A, B), "the zone that is no longer used is still looked at"
    assert words(turn(shrunk, see(a_node(0), a_node(1), health={0: fresh()}))[1]) == [("delete", 1, B)]


def test_a_name_of_another_fleet_is_reported() -> None:
    foreign = a_node(0, labels={})
    history, _ = turn(a_fleet(move=False), see(foreign, a_node(1), health={1: fresh()}))
    assert history.workers[0].note == "tpu-us-central1-a-0 in us-central1-a is a machine that is not of this fleet"


def test_machines_that_never_speak_are_given_up() -> None:
    """Otherwise a bucket that machines cannot write to would cost a new machine every 20 minutes."""
    fleet, history, now = a_fleet(), History(), NOW
    for number in range(3):
        born = a_node(0, uid=f"m{number}", created=now)
        now += 1300
        assert not history.workers or not history.workers[0].gave_up
        history, actions = turn(fleet, see(born, a_node(1), health={1: WorkerHealth(now, Phase.RUNNING)}), history, now)
        assert ("delete", 0, A) in words(actions)
    assert words(actions)[0] == ("report", 0, A)
    assert "3 machines in a row never reported: may they read and write the bucket" in actions[0].reason
    history = replace(history, workers={**history.workers, 0: replace(history.workers[0], never_heard=2, gave_up="")})
    history, _ = turn(
        fleet,
        see(a_node(0, uid="ok"), a_node(1), health={0: WorkerHealth(now, Phase.RUNNING), 1: fresh()}),
        history,
        now,
    )
    assert history.workers[0].never_heard == 0


def test_a_raised_budget_lets_the_fleet_continue() -> None:
    seen = see(a_node(0), a_node(1), health={0: fresh(), 1: fresh()})
    history, actions = turn(a_fleet(budget=4.0), seen)
    assert len(actions) == 2
    history, actions = turn(a_fleet(budget=50.0), seen, history)
    assert (actions, history.stopped) == ((), "")
