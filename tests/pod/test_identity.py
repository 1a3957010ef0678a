"""The host's identity from every source, with fake VM metadata and variables of an earlier launch."""

from __future__ import annotations

import pytest

from spile.errors import SpecError
from spile.run.pod.identity import find_identity

FOUR = "10.0.0.2,10.0.0.3,10.0.0.4,10.0.0.5"


def vm(**attributes: str):  # type: ignore[no-untyped-def]
    return lambda key: attributes.get(key.replace("-", "_"))


def test_nothing_is_one_process() -> None:
    identity = find_identity({})
    assert (identity.process, identity.count, identity.first) == (0, 1, True)


def test_flags_alone() -> None:
    def never(key: str) -> str:
        raise AssertionError(key)

    identity = find_identity({}, coordinator_address="10.0.0.2:6000", process_id=3, num_processes=4, metadata=never)
    assert (identity.process, identity.count, identity.coordinator, identity.port) == (3, 4, "10.0.0.2", 6000)


def test_the_guides_spelling_is_a_host_without_a_port() -> None:
    identity = find_identity({}, coordinator_address="10.0.0.2", process_id=3, num_processes=4)
    assert (identity.coordinator, identity.port) == ("10.0.0.2", 5555)


@pytest.mark.parametrize("endpoints", [FOUR, "a:1:10.0.0.2,b:2:10.0.0.3,c:3:10.0.0.4,d:4:10.0.0.5"])
def test_metadata_in_both_formats(endpoints: str) -> None:
    identity = find_identity({}, metadata=vm(agent_worker_number="2", worker_network_endpoints=endpoints))
    assert (identity.process, identity.count, identity.coordinator) == (2, 4, "10.0.0.2")
    assert identity.host(3) == "worker 3 (10.0.0.5)"


def test_the_slices_secret_is_in_its_metadata_and_in_no_text_of_it() -> None:
    slice_of_four = vm(agent_worker_number="2", worker_network_endpoints=FOUR, spile_secret="5ec2e7")
    identity = find_identity({}, metadata=slice_of_four)
    assert identity.secret == "5ec2e7"
    assert "5ec2e7" not in repr(identity)
    assert find_identity({"SPILE_POD_SECRET": "told"}, metadata=slice_of_four).secret == "told"
    by_hand = find_identity({}, coordinator_address="h", process_id=1, num_processes=2, metadata=slice_of_four)
    assert by_hand.secret == "", "hosts of several slices share none"


def test_metadata_beats_variables_of_an_earlier_launch() -> None:
    stale = {"CLOUD_TPU_TASK_ID": "9", "TPU_WORKER_ID": "7", "TPU_WORKER_HOSTNAMES": "old-0,old-1"}
    identity = find_identity(stale, metadata=vm(agent_worker_number="2", worker_network_endpoints=FOUR))
    assert (identity.process, identity.count, identity.coordinator) == (2, 4, "10.0.0.2")


def test_metadata_is_not_asked_where_jax_would_not() -> None:
    def never(key: str) -> str:
        raise AssertionError(key)

    assert find_identity({"TPU_SKIP_MDS_QUERY": "1"}, metadata=never).count == 1


def test_the_task_id_among_the_hosts() -> None:
    identity = find_identity({"CLOUD_TPU_TASK_ID": "1", "TPU_WORKER_HOSTNAMES": FOUR})
    assert (identity.process, identity.count, identity.coordinator) == (1, 4, "10.0.0.2")
    assert "CLOUD_TPU_TASK_ID" in identity.source


def test_the_task_id_and_a_topology() -> None:
    identity = find_identity({"CLOUD_TPU_TASK_ID": "5"}, hosts=16, coordinator_address="10.0.0.2")
    assert (identity.process, identity.count) == (5, 16)


def test_gke() -> None:
    identity = find_identity({"TPU_WORKER_ID": "3", "TPU_WORKER_HOSTNAMES": FOUR})
    assert (identity.process, identity.count) == (3, 4)


def test_a_worker_id_alone_names_a_stream_and_no_host() -> None:
    assert find_identity({"TPU_WORKER_ID": "5"}).count == 1
    assert find_identity({"TPU_WORKER_ID": "5", "TPU_WORKER_HOSTNAMES": "localhost"}).count == 1


def test_multislice() -> None:
    slices = {
        "MEGASCALE_NUM_SLICES": "2",
        "MEGASCALE_SLICE_ID": "1",
        "MEGASCALE_COORDINATOR_ADDRESS": "10.1.0.2:8080",
    }
    on_gke = find_identity({"TPU_WORKER_ID": "3", "TPU_WORKER_HOSTNAMES": FOUR, **slices})
    lines = "\n".join(f"{name}: '{value}'" for name, value in slices.items())
    on_gce = find_identity({}, metadata=vm(agent_worker_number="3", worker_network_endpoints=FOUR, tpu_env=lines))
    for identity in (on_gke, on_gce):
        assert (identity.process, identity.count, identity.coordinator, identity.port) == (7, 8, "10.1.0.2", 5555)


def test_jax_detects_the_rest() -> None:
    identity = find_identity({}, detect=lambda: ("node-1:1234", 8, 6))
    assert (identity.process, identity.count, identity.coordinator) == (6, 8, "node-1")
    variables = {"JAX_COORDINATOR_ADDRESS": "n:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
    assert find_identity(variables).process == 1
    assert find_identity({"JAX_COORDINATOR_ADDRESS": "n:1"}).count == 1  # a stale one alone means nothing


@pytest.mark.parametrize(
    ("environment", "flags", "says"),
    [
        (
            {"CLOUD_TPU_TASK_ID": "3"},
            {},
            "CLOUD_TPU_TASK_ID says that this is worker 3, but the number of workers is unknown",
        ),
        ({"CLOUD_TPU_TASK_ID": "x", "TPU_WORKER_HOSTNAMES": FOUR}, {}, "expected a number, found 'x'"),
        ({"TPU_WORKER_ID": "4", "TPU_WORKER_HOSTNAMES": FOUR}, {}, "expected from 0 to 3, found 4"),
        ({"TPU_WORKER_ID": "0", "TPU_WORKER_HOSTNAMES": FOUR}, {"hosts": 16}, "expected 16 (--topology), found 4"),
        ({}, {"hosts": 16}, "16 processes, but the number of this one is unknown"),
        ({}, {"process_id": 1, "num_processes": 2}, "does not know where worker 0 is"),
        ({}, {"num_processes": 1, "hosts": 4}, "expected 4 (--topology), found 1"),
    ],
)
def test_mistakes_are_one_line(environment: dict[str, str], flags: dict[str, int], says: str) -> None:
    with pytest.raises(SpecError) as caught:
        find_identity(environment, **flags)  # type: ignore[arg-type]
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
