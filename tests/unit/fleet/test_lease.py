from __future__ import annotations

from fleet_simulation import MemoryFolder
from spile.fleet.heal.lease import Lease


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def two() -> tuple[Clock, Lease, Lease, MemoryFolder]:
    clock, folder = Clock(), MemoryFolder()
    first, second = (Lease(folder, clock=clock, ttl=100, owner=owner) for owner in ("ann", "bob"))  # type: ignore[arg-type]
    return clock, first, second, folder


def test_the_second_only_watches() -> None:
    clock, first, second, _ = two()
    assert first.take() is None
    holder = second.take()
    assert holder is not None
    assert holder.owner == "ann"
    assert (first.held(), second.held()) == (True, False)
    for _ in range(20):
        clock.now += 60
        assert first.take() is None
        assert second.take() is not None


def test_who_does_not_renew_loses_it_and_notices() -> None:
    clock, first, second, _ = two()
    first.take()
    clock.now += 81
    assert not first.held(), "it stops before anybody else may start"
    assert second.take() is not None
    clock.now += 20
    assert second.take() is None
    assert second.held()
    assert first.take() is not None
    assert not first.held()


def test_a_released_lease_is_free_at_once() -> None:
    _, first, second, _ = two()
    first.take()
    first.release()
    assert not first.held()
    assert second.take() is None
    assert second.number == 2


def test_one_wins_the_race() -> None:
    _clock, first, second, folder = two()
    real = folder.create

    def raced(key: str, data: bytes) -> bool:
        folder.create = real  # type: ignore[method-assign]
        assert second.take() is None
        return real(key, data)

    folder.create = raced  # type: ignore[method-assign]
    holder = first.take()
    assert holder is not None
    assert holder.owner == "bob"
    assert (first.held(), second.held()) == (False, True)


def test_a_lost_reply_is_not_a_lost_race() -> None:
    _, first, _, folder = two()
    real = folder.create
    folder.create = lambda key, data: real(key, data) and False  # type: ignore[method-assign]
    assert first.take() is None
    assert first.held()


def test_old_leases_are_forgotten() -> None:
    _, first, _, folder = two()
    for _ in range(30):
        first.take()
        first.release()
    assert len(folder.objects) < 12
