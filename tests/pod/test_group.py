"""Real processes on JAX's coordination service: barriers, deaths, ends."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from pod.launching import launch

TOGETHER = """
times = PodTimes(roll_call=120, barrier=120, heartbeat={heartbeat})
with join(identity, times=times, log=lambda line: print(line, flush=True)) as pod:
    print("agreed", pod.agree("plan", [me, "x"]), flush=True)
    pod.barrier("model_loaded")
    pod.report("computing batch 7")
    {then}
    pod.barrier("complete")
print("left", flush=True)
"""


def body(then: str = "pass", heartbeat: float = 20) -> str:
    return TOGETHER.format(then=then, heartbeat=heartbeat)


@pytest.mark.slow
def test_all_meet_and_leave(tmp_path: Path) -> None:
    with launch(tmp_path, body(), 3) as group:
        ended = group.wait()
    assert [end.code for end in ended] == [0] * 3
    assert all("agreed [0, 'x']" in end.out and end.out.endswith("left\n") for end in ended)
    assert all("Synchronized! Starting JAX init..." in end.out for end in ended)
    assert "Worker ID: 0\n   Is barrier server: True" in ended[0].out
    assert "Worker ID: 2\n   Is barrier server: False" in ended[2].out


def test_a_late_host_is_named_to_all(tmp_path: Path) -> None:
    then = """
    pod.times = PodTimes(60, 6, 20)
    if me in (1, 2): time.sleep(60)
    """
    with launch(tmp_path, body(then), 3) as group:
        ended = group.wait()
    assert [end.code for end in ended] == [1] * 3
    for end in ended:
        (line,) = end.lines
        assert "2 of 3 workers did not come to the barrier 'complete' within 6 s" in line
        assert "worker 1 (host-1, process" in line
        assert "worker 2 (host-2, process" in line
        assert "last reported: computing batch 7" in line
        assert "the others: waiting at barrier 'complete'" in line


@pytest.mark.parametrize(("victim", "hosts"), [(0, 2), pytest.param(2, 3, marks=pytest.mark.slow)])
def test_a_killed_host_ends_all_by_name(tmp_path: Path, victim: int, hosts: int) -> None:
    then = f"if me == {victim}: time.sleep(3); os.kill(os.getpid(), signal.SIGKILL)"
    with launch(tmp_path, body(then, heartbeat=6), hosts) as group:
        ended = group.wait()
    assert ended[victim].code == -signal.SIGKILL
    for number, end in enumerate(ended):
        if number != victim:
            assert end.code == 4, "which decides whether it is started again"
            (line,) = end.lines
            assert f"worker {victim} (host-{victim}" in line
            assert "died or was cut off: no sign of life for 6 s; it last reported: computing batch 7" in line


@pytest.mark.parametrize("hosts", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_an_error_on_one_is_everyones_line_and_code(tmp_path: Path, hosts: int) -> None:
    then = """
    from spile.errors import Fenced
    if me == 1: raise Fenced("another worker owns this stream")
    """
    with launch(tmp_path, body(then), hosts) as group:
        ended = group.wait()
    assert [end.code for end in ended] == [3] * hosts
    assert ended[1].lines == ["spile: another worker owns this stream"]
    assert all("worker 1 (host-1" in end.lines[0] and "ended: another worker" in end.lines[0] for end in ended[::2])


def test_what_jax_hides_is_where_we_look_for_it() -> None:
    """Fails when a new JAX moves what :mod:`spile.run.pod.coordination` uses."""
    from jax._src import distributed, xla_bridge
    from jax._src.clusters import ClusterEnv
    from jax._src.lib import _jax

    assert {"client", "service", "process_id", "num_processes", "coordinator_address"} <= {
        *vars(type(distributed.global_state)),
        *type(distributed.global_state).__annotations__,
    }
    assert callable(xla_bridge.backends_are_initialized)
    assert {kind.name for kind in ClusterEnv._cluster_types} >= {"gcetpu", "gketpu"}
    needed = {
        "connect",
        "shutdown",
        "key_value_set",
        "key_value_delete",
        "key_value_dir_get",
        "blocking_key_value_get",
    }
    assert needed <= set(dir(_jax.DistributedRuntimeClient))
    for function, words in (
        (_jax.get_distributed_runtime_client, ("init_timeout", "heartbeat_timeout", "shutdown_on_destruction")),
        (_jax.get_distributed_runtime_service, ("heartbeat_timeout", "shutdown_timeout", "recoverable")),
    ):
        assert all(word in (function.__doc__ or "") for word in words)
