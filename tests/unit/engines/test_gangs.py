"""Hosts that act as one worker are chosen together and end together."""

from __future__ import annotations

from spile.engines.ray import Gang, find_gangs
from spile.engines.supervisor import StreamTask, WorkerEnd


def node(name: str, slice_name: str = "", worker: int = 0) -> dict[str, object]:
    labels = {"ray.io/tpu-slice-name": slice_name, "ray.io/tpu-worker-id": str(worker)} if slice_name else {}
    return {"NodeID": name, "Labels": labels}


def found(nodes: list[dict[str, object]], size: int, taken: set[str] = frozenset()) -> list[list[object]]:  # type: ignore[assignment]
    return [[each["NodeID"] for each in gang] for gang in find_gangs(nodes, size, taken)]


def test_a_slices_hosts_are_together_and_in_order() -> None:
    nodes = [node("b1", "b", 1), node("a1", "a", 1), node("a0", "a", 0), node("b0", "b", 0)]
    assert found(nodes, 2) == [["a0", "a1"], ["b0", "b1"]]
    assert found(nodes, 2, {"a1"}) == [["b0", "b1"]], "half a slice is none"
    assert found(nodes[:3], 2) == [["a0", "a1"]]
    assert found(nodes, 4) == [], "two slices are no gang"


def test_other_nodes_come_as_they_are() -> None:
    nodes = [node(name) for name in "abcde"]
    assert found(nodes, 2) == [["a", "b"], ["c", "d"]]
    assert found(nodes, 2, {"b"}) == [["a", "c"], ["d", "e"]]
    assert found(nodes, 6) == []


def gang(size: int = 3) -> Gang:
    return Gang(StreamTask(5, ("extract",)), list(range(size)))


def test_the_failure_of_one_host_ends_all_and_its_cause_is_shown() -> None:
    made, cancelled = gang(), list[object]()
    assert made.record_ends({1: WorkerEnd(5, 1, "n1", "spile: sorry")}, cancelled.append) is None
    assert cancelled == [0, 2]
    assert made.record_ends({0: WorkerEnd(5, 130)}, cancelled.append) is None
    end = made.record_ends({2: WorkerEnd(5, 1, "n2", "spile: worker 1 has gone")}, cancelled.append)
    assert end is not None
    assert (end.code, end.where) == (1, "n1")


def test_it_is_done_when_all_are() -> None:
    made = gang(2)
    assert made.record_ends({0: WorkerEnd(5, 0)}, lambda _: None) is None
    end = made.record_ends({1: WorkerEnd(5, 0)}, lambda _: None)
    assert (end.code if end else None) == 0


def test_a_lost_node_is_a_loss_even_if_other_hosts_report_errors() -> None:
    made = gang(2)
    made.record_ends({0: WorkerEnd(5, 1, "n0")}, lambda _: None)
    end = made.record_ends({1: WorkerEnd(5, None)}, lambda _: None)
    assert end is not None
    assert end.code is None


def test_one_that_waits_for_nodes_can_be_stopped() -> None:
    made = Gang(StreamTask(5, ("extract",)))
    assert made.record_ends({}, lambda _: None) is None
    made.stopped = True
    end = made.record_ends({}, lambda _: None)
    assert (end.code if end else None) == 130
