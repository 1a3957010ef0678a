from __future__ import annotations

import json
import math
from typing import Any

import pytest

from spile.spec.phase import Phase
from spile.store.heartbeat import Beat

_BEAT: dict[str, Any] = {
    "attempt": "a1b2", "host": "vm-1", "phase": "running", "samples": 4, "samples_committed": 2, "tokens": 40,
    "shards_written": 1, "shards_committed": 1, "tokens_per_second": 2.5, "retries": 0, "expected": 9,
    "started": "2026-01-01T00:00:00Z", "updated": "2026-01-01T00:01:00Z", "version": "0.1",
}  # fmt: skip


def test_a_phase_is_its_own_json() -> None:
    assert json.loads(json.dumps({"phase": Phase.COMPILING})) == {"phase": "compiling"}
    assert all(Phase(phase.value) is phase for phase in Phase)


@pytest.mark.parametrize("found", ["evaluating", None, 7, ["running"]])
def test_a_word_that_only_a_newer_version_knows_is_no_error(found: object) -> None:
    assert Phase(found) is Phase.UNKNOWN
    assert Beat.from_json({**_BEAT, "phase": found}).phase is Phase.UNKNOWN


def test_what_a_phase_tells() -> None:
    """Early: a signal ends at once. Slow: a heartbeat may be long in coming. Ended: nobody is at work."""
    early = {Phase.LOOKING, Phase.LOADING, Phase.COMPILING}
    ended = {Phase.DONE, Phase.STOPPED, Phase.FAILED}
    before = {Phase.UNKNOWN, Phase.BOOTING, Phase.INSTALLING, Phase.STARTING}
    assert {phase for phase in Phase if phase.early} == early
    assert {phase for phase in Phase if phase.ended} == ended
    assert {phase for phase in Phase if phase.slow} == early | before


def test_an_old_heartbeat_and_a_newer_one_are_read() -> None:
    assert Beat.from_json({**_BEAT, "phase": "starting"}).phase is Phase.STARTING
    beat = Beat.from_json({**_BEAT, "temperature": {"chip": 60}, "log_tail": ["one"]})
    assert (beat.phase, beat.log_tail, beat.progressed, beat.age(1_767_225_720.0)) == (
        Phase.RUNNING, ("one",), None, 60.0,
    )  # fmt: skip
    assert Beat.from_json(json.loads(json.dumps(beat.to_json()))) == beat


@pytest.mark.parametrize("broken", [
    {"updated": "yesterday"}, {"progressed": "?"}, {"updated": None},
    {"interval": 0}, {"interval": math.nan}, {"interval": 1e9},
])  # fmt: skip
def test_a_time_that_cannot_be_read_is_no_heartbeat(broken: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)):
        Beat.from_json({**_BEAT, **broken})
