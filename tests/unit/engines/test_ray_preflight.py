"""Other versions of Ray, Python or spile are reported before the run starts, for each node.

What nodes answer is given here, at the edge: Ray's own calls. Real ones of two versions are in
``tests/fleet/test_ray_versions.py``, where a second interpreter is.
"""

from __future__ import annotations

import platform
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from spile.engines.ray import RayEngine, check_node
from spile.engines.registry import EngineOptions
from spile.engines.supervisor import ClusterCheck, StreamTask
from spile.errors import UserError
from spile.version import __version__

ASKED = ClusterCheck("gs://b/out", "token", ("gs://b/streams",))
WELL = {"python": platform.python_version(), "ray": "2.60.0", "spile": __version__, "problem": ""}


class StandInRay(ModuleType):
    """A cluster of nodes with given answers."""

    __version__ = "2.60.0"

    def __init__(
        self,
        answers: dict[str, dict[str, Any] | None],
        refuses: Exception | None = None,
        resources: dict[str, float] | None = None,
    ) -> None:
        super().__init__("ray")
        self.answers, self.refuses, self.resources = answers, refuses, resources or {"CPU": 1.0}
        self.exceptions = SimpleNamespace(RayError=RuntimeError)
        self.cloudpickle = SimpleNamespace(
            register_pickle_by_value=lambda _: None, unregister_pickle_by_value=lambda _: None
        )

    def init(self, **_: object) -> None:
        if self.refuses:
            raise self.refuses

    def shutdown(self) -> None:
        pass

    def nodes(self) -> list[dict[str, Any]]:
        address = {"NodeManagerAddress": "10.0.0.1"}
        return [
            {"Alive": True, "NodeID": name, "NodeName": name, "Resources": self.resources, **address}
            for name in self.answers
        ]

    def remote(self, **_: object) -> Any:
        look = SimpleNamespace(remote=None)
        look.options = lambda scheduling_strategy: SimpleNamespace(remote=lambda *_: scheduling_strategy)
        return lambda _function: look

    def wait(self, refs: list[str], **_: object) -> tuple[list[str], list[str]]:
        late = [ref for ref in refs if self.answers[ref] is None]
        return [ref for ref in refs if ref not in late], late

    def get(self, ref: str) -> dict[str, Any] | None:
        return self.answers[ref]


@pytest.fixture
def address() -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def engine(
    monkeypatch: pytest.MonkeyPatch,
    ray: StandInRay,
    address: str,
    workers: int | None = None,
    hosts: int = 1,
    **needs: float,
) -> RayEngine:
    strategies = ModuleType("ray.util.scheduling_strategies")
    strategies.NodeAffinitySchedulingStrategy = lambda node, soft: node  # type: ignore[attr-defined]
    for name, module in {
        "ray": ray, "ray.exceptions": ModuleType("x"), "ray.util": ModuleType("u"),
        "ray.util.scheduling_strategies": strategies,
    }.items():  # fmt: skip
        monkeypatch.setitem(sys.modules, name, module)
    resources = [f"{name}={amount}" for name, amount in needs.items()]
    options = EngineOptions(num_workers=workers, resources=resources, ray_address=address, hosts_per_worker=hosts)
    return RayEngine(options, "gs://runs/out")


@pytest.mark.parametrize(
    ("workers", "needs", "threads"),
    [(None, {}, "1"), (2, {}, "8"), (4, {"CPU": 8.0}, "8"), (16, {"CPU": 0.5}, "1"), (1, {"GPU": 1.0}, None)],
)
def test_workers_share_the_cores_of_the_cluster(
    workers: int | None,
    needs: dict[str, float],
    threads: str | None,
    monkeypatch: pytest.MonkeyPatch,
    address: str,
) -> None:
    """As many threads as were asked for, or an even share of all where fewer workers than would fit are wanted."""
    ray = StandInRay({"node1": WELL, "node2": WELL}, resources={"CPU": 8.0, "GPU": 1.0})
    seen: list[dict[str, str]] = []
    ray.remote = lambda **_: lambda _f: SimpleNamespace(remote=lambda _w, env: seen.append(env))  # type: ignore[method-assign]
    engine(monkeypatch, ray, address, workers, **needs).start(StreamTask(0, ("extract",), env={"A": "b"}))
    limits = {} if threads is None else dict.fromkeys(("OMP_NUM_THREADS", "RAYON_NUM_THREADS", "NPROC"), threads)
    assert seen == [{**limits, "A": "b"}]


def test_each_host_of_a_worker_is_told_its_number(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    ray, seen = StandInRay({"node1": WELL, "node2": WELL}), list[list[str]]()
    ray.remote = lambda **_: lambda _f: SimpleNamespace(remote=lambda words, _: seen.append(words))  # type: ignore[method-assign]
    ray.wait = lambda refs, **_: ([], refs)  # type: ignore[method-assign, assignment]
    runner = engine(monkeypatch, ray, address, hosts=2)
    runner.start(StreamTask(0, ("worker",)))
    runner.wait(0.0)
    place = ["--coordinator-address", "10.0.0.1", "--process-id"]
    assert seen == [["worker", *place, number, "--num-processes", "2"] for number in ("0", "1")]


def test_a_worker_of_several_hosts_that_waits_for_nodes_can_be_stopped(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    """Also if no task runs on the cluster."""
    ray = StandInRay({"node1": WELL, "node2": WELL})
    runner = engine(monkeypatch, ray, address, hosts=2)
    del ray.answers["node2"]
    runner.start(StreamTask(7, ("worker",)))
    assert runner.wait(0.0) == []
    runner.stop(7)
    ray.answers["node2"] = WELL
    assert [(end.stream, end.code) for end in runner.wait(0.0)] == [(7, 130)]
    assert runner.wait(0.0) == []


@pytest.mark.parametrize(
    ("other", "line"),
    [
        ({"ray": "2.49.1"}, "node2: expected ray 2.60.0, found 2.49.1"),
        ({"python": "3.99.1"}, f"node2: expected python {platform.python_version()}, found 3.99.1"),
        ({"spile": "0.0.1"}, f"node2: expected spile {__version__}, found 0.0.1"),
        ({"spile": None, "problem": "No module named 'spile'"}, "node2: no spile there (No module named 'spile')"),
        ({"problem": "cannot reach gs://b/out"}, "node2: cannot reach gs://b/out"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_node_with_another_version_is_named_before_the_run_starts(
    other: dict[str, Any], line: str, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    ray = StandInRay({"node1": WELL, "node2": {**WELL, **other}, "node3": WELL})
    with pytest.raises(UserError) as caught:
        engine(monkeypatch, ray, address).check(ASKED)
    assert str(caught.value).startswith(f"1 of 3 nodes cannot work: found {line}")


def test_nodes_that_differ_in_the_last_number_of_python_may_work(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    python = platform.python_version().rpartition(".")[0] + ".99"
    engine(monkeypatch, StandInRay({"node1": {**WELL, "python": python}}), address).check(ASKED)


def test_every_failing_node_is_named_and_so_is_one_that_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    ray = StandInRay({"node1": {**WELL, "spile": "0.0.1"}, "node2": None, "node3": {**WELL, "ray": "2.49.1"}})
    with pytest.raises(UserError, match="3 of 3 nodes cannot work") as caught:
        engine(monkeypatch, ray, address).check(ASKED)
    for word in ("node1: expected spile", "node2: no answer in 60 s", "node3: expected ray"):
        assert word in str(caught.value)


def test_a_ray_version_mismatch_names_both_versions(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    output = RuntimeError(
        "Version mismatch: The cluster was started with:\n    Ray: 2.49.1\n    Python: 3.12.1\nThis process on node "
        "127.0.0.1 was started with:\n    Ray: 2.60.0\n    Python: 3.11.7\n"
    )
    with pytest.raises(UserError) as caught:
        engine(monkeypatch, StandInRay({}, output), address)
    here = platform.python_version()
    assert str(caught.value) == (
        f"the Ray cluster at {address} has a different version: expected Ray 2.60.0 and Python {here}, as here, "
        "found Ray 2.49.1 and Python 3.12.1. Install the cluster's versions here, or start the command on one of its "
        "nodes."
    )


def test_a_node_that_only_reads_writes_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As for spile verify: the dataset may be read-only."""
    monkeypatch.setitem(sys.modules, "ray", StandInRay({}))
    (tmp_path / "run.json").write_text("{}")
    changed = tmp_path.stat().st_mtime_ns
    assert check_node("", "", [f"{tmp_path}/run.json"])["problem"] == ""
    assert check_node("", "", [f"{tmp_path}/no.json"])["problem"] == f"it does not see {tmp_path}/no.json"
    assert tmp_path.stat().st_mtime_ns == changed
