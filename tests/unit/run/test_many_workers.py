"""A small version of the simulated run of 10^12 tokens: claims, commits and retries on a virtual clock and bucket."""

from __future__ import annotations

import pytest
from bench.trillion import Run, World

from spile.errors import Damaged
from spile.store.writer import StreamWriter


def simulated(**more: float) -> Run:
    run = Run(World(tokens=2e9, workers=8, streams=24, commits=6, **more))  # type: ignore[arg-type]
    run.simulate()
    return run


def test_each_sample_is_stored_once_although_machines_are_lost() -> None:
    run = simulated(lost_per_hour=2.0, suspended_share=0.5, seed=3)
    _, commits = run.prove()
    assert commits >= 24 * 6
    world = run.world
    assert world.lost > 5
    assert world.suspended > 0
    assert world.fenced > 0, "a suspended worker is fenced when it comes back"
    assert world.refused > 0
    assert 1 < world.now / 3600 / run.estimate.hours < 3


def test_the_simulation_notices_samples_that_are_stored_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    def created(store: StreamWriter, commit: object) -> bool:
        """Take the next number if another worker has this one, as a store without fences would."""
        return store.folder.create(f"commits/{commit.number:04d}.json", commit.to_bytes())  # type: ignore[attr-defined]

    monkeypatch.setattr(StreamWriter, "_created", created)
    with pytest.raises((AssertionError, Damaged), match=r"stream.\d+"):
        simulated(lost_per_hour=2.0, suspended_share=0.5, seed=3).prove()
