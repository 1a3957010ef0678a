from __future__ import annotations

import pytest
from google.cloud import tpu_v2

from spile.fleet.provider import NodeState, QueuedState, Stage


def test_every_state_of_the_real_client_is_known() -> None:
    for state in tpu_v2.Node.State:
        assert NodeState.parse(state.name).value == state.name or state.name == "UNKNOWN"
    for queued in tpu_v2.QueuedResourceState.State:
        assert QueuedState.parse(queued.name).value == queued.name


@pytest.mark.parametrize("kind", [NodeState, QueuedState])
def test_every_state_says_what_it_means(kind: type[NodeState]) -> None:
    assert all(len(state.meaning) > 10 for state in kind)


def test_what_states_ask_of_us() -> None:
    assert {state for state in NodeState if state.stage is Stage.RUNNING} == {NodeState.READY}
    assert NodeState.PREEMPTED.stage is NodeState.TERMINATED.stage is Stage.DEAD
    assert NodeState.parse("SOMETHING_NEW") is NodeState.UNKNOWN
    assert NodeState.parse(None).stage is Stage.STARTING
    assert QueuedState.SUSPENDED.node.stage is Stage.DEAD
