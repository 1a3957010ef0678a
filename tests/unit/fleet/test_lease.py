from __future__ import annotations

import ast
import time
from dataclasses import replace
from pathlib import Path

import pytest

import spile.fleet
from fleet_simulation import MemoryFolder
from spile.fleet.home import Lease, bucket_clock
from spile.objects import open_folder
from spile.objects.folder import ObjectInfo
from spile.objects.local import LocalFolder


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


def test_old_leases_go_by_their_exact_names_and_nothing_else_does() -> None:
    clock, first, _, folder = two()
    strangers = ["lease/2.json", "lease/000001.json.bak", "lease/0000001.json", "lease/notes/000001.json"]
    for name in strangers:
        folder.put(name, b"somebody's")
    for _ in range(12):
        first.take()
        first.release()
        clock.now += 1
    names = [info.key for info in folder.list("lease/")]
    assert [name for name in strangers if name in names] == strangers
    assert sorted(set(names) - set(strangers)) == [f"lease/{number:06d}.json" for number in range(4, 13)]


def test_all_that_a_fleet_removes_from_a_bucket_goes_through_the_one_piece() -> None:
    """Machines are deleted through the API; of objects, a fleet removes old leases and old logs."""
    found = set()
    for path in Path(spile.fleet.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute) and node.attr == "delete" and "folder" in ast.unparse(node.value):
                found.add((path.name, ast.unparse(node)))
    assert found == {("home.py", "self._folder.delete")}
    text = (Path(spile.fleet.__file__).parent / "home.py").read_text()
    assert text.count("_folder.delete") == text.count("remove=self._folder.delete") == 1


def test_monitors_whose_clocks_differ_by_hours_use_that_of_the_bucket(tmp_path: Path) -> None:
    """With the machine's own time, the second one would take the lease of the first one, and both would act."""
    folder = open_folder(str(tmp_path))
    for hours in (-3, 3):
        with pytest.MonkeyPatch.context() as patch:
            first = Lease(folder, ttl=60, owner="ann")
            assert first.take() is None
            real = time.time
            patch.setattr(time, "time", lambda hours=hours, real=real: real() + 3600 * hours)
            second = Lease(folder, ttl=60, owner="bob")
            holder = second.take()
            assert holder is not None
            assert holder.owner == "ann"
            assert abs(holder.renewed - real()) < 30
            assert first.held()
            first.release()


def test_a_clock_of_the_bucket_follows_the_bucket(tmp_path: Path) -> None:
    """The bucket is an hour behind this machine."""

    class Behind(LocalFolder):
        def info(self, key: str) -> ObjectInfo:
            return replace(super().info(key), updated=super().info(key).updated - 3600)

    clock = bucket_clock(Behind(tmp_path))
    assert abs(clock() - (time.time() - 3600)) < 30
