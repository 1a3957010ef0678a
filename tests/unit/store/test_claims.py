"""Claims: one owner per stream, takeover after expiry, and no stream is lost when workers come and go."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.gcs import FakeGcs

from spile.objects import Folder, open_folder
from spile.store.claims import Claim, ClaimBook, ClaimReader, remove_finished_marks


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(params=["disk", "gcs"])
def root(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folder]:
    if request.param == "disk":
        yield open_folder(str(tmp_path))
        return
    with FakeGcs() as gcs:
        gcs.add_bucket("b")
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs.url)
        yield open_folder("gs://b/activations")


def book(root: Folder, worker: str, clock: Clock) -> ClaimBook:
    return ClaimBook(root, worker, expiry=90.0, clock=clock, rng=random.Random(worker))


def holders(root: Folder) -> dict[int, str]:
    return {stream: each.worker for stream, each in ClaimReader(root).owners().items() if each.active}


def taken(found: Claim | None) -> int | None:
    return None if found is None else found.stream


def test_each_stream_has_one_owner(root: Folder) -> None:
    clock = Clock()
    books = [book(root, f"w{number}", clock) for number in range(3)]
    claims = [each.take([0, 1]) for each in books]
    assert sorted(taken(claim) for claim in claims[:2]) == [0, 1]  # type: ignore[type-var]
    assert claims[2] is None
    assert holders(root) == {claim.stream: claim.worker for claim in claims if claim is not None}


def test_a_claim_that_is_renewed_is_not_taken_over(root: Folder) -> None:
    clock = Clock()
    claim, other = book(root, "a", clock).take([0]), book(root, "b", clock)
    assert claim is not None
    for _ in range(6):
        assert other.take([0]) is None
        assert claim.renew()
        clock.now += 60
    assert other.all_busy([0])


def test_a_claim_that_is_not_renewed_is_taken_over_once_and_its_owner_notices(root: Folder) -> None:
    clock = Clock()
    claim, b, c = book(root, "a", clock).take([0]), book(root, "b", clock), book(root, "c", clock)
    assert claim is not None
    assert (b.take([0]), c.take([0])) == (None, None)
    clock.now += 89
    assert b.take([0]) is None
    assert not b.all_busy([0]), "it is not known to be alive"
    clock.now += 1
    assert [taken(b.take([0])), taken(c.take([0]))] == [0, None]
    assert not claim.renew()
    assert holders(root) == {0: "b"}


def test_a_candidate_that_has_just_come_waits_its_own_time(root: Folder) -> None:
    """Wall clocks are not compared: a claim of long ago is watched for the whole time first."""
    clock = Clock()
    book(root, "a", clock).take([0])
    clock.now += 10_000
    assert book(root, "b", clock).take([0]) is None


def test_a_released_claim_and_ones_own_are_free_at_once(root: Folder) -> None:
    clock = Clock()
    first = book(root, "a", clock).take([0])
    assert first is not None
    again = book(root, "a", clock).take([0])
    assert taken(again) == 0, "the same worker after a restart"
    assert not first.renew()
    assert again is not None
    again.release()
    assert holders(root) == {}
    third = book(root, "b", clock).take([0])
    assert third is not None
    assert third.number == 3, "a number is never used twice"
    assert len(list(root.list("claims/"))) <= 3, "earlier claims are removed"


def test_a_restarted_worker_prefers_its_own_stream(root: Folder) -> None:
    """Its successor must find the samples that it was killed by, among many streams that are as large."""
    clock = Clock()
    first = ClaimBook(root, "a", clock=clock).take(range(8))
    for _ in range(8):
        assert taken(ClaimBook(root, "a", clock=clock).take(range(8))) == taken(first)


def test_a_claim_is_kept_and_released(root: Folder) -> None:
    claim = ClaimBook(root, "a", expiry=0.04).take([7])
    assert claim is not None
    lines: list[str] = []
    with claim.keep_renewed(lines.append):
        other = ClaimBook(root, "b", expiry=30.0)
        while not other.all_busy([7]):
            assert other.take([7]) is None
    assert lines == []
    assert taken(other.take([7])) == 7


def test_an_owner_that_was_replaced_is_notified(root: Folder) -> None:
    claim = ClaimBook(root, "a", expiry=0.04).take([7])
    assert claim is not None
    lines: list[str] = []
    with claim.keep_renewed(lines.append):
        assert ClaimBook(root, "a").take([7]) is not None
        for _ in range(500):
            if lines:
                break
            time.sleep(0.02)
    assert lines == ["stream 7: another worker has taken it over"]
    assert ClaimBook(root, "b").take([7]) is None, "the release of a claim that was lost frees nothing"


def test_strange_objects_are_no_claims(root: Folder) -> None:
    for key in ("claims/0000/000001.txt", "claims/x/000001.json", "claims/note.json"):
        root.put(key, b"{}")
    root.put("claims/0001/000001.json", b"half")
    assert holders(root) == {1: ""}
    assert taken(book(root, "a", Clock()).take([0])) == 0


def test_a_finished_stream_is_not_offered_again_unless_the_goal_changes(root: Folder) -> None:
    first = ClaimBook(root, "a", goal="100 samples")
    claim = first.take([0, 1])
    assert claim is not None
    claim.finished = True
    claim.release()
    other = ClaimBook(root, "b", goal="100 samples")
    assert taken(other.take([0, 1])) == 1 - claim.stream
    assert other.is_done(claim.stream)
    assert holders(root) == {1 - claim.stream: "b"}
    assert taken(ClaimBook(root, "c", goal="200 samples").take([claim.stream])) == claim.stream
    claim = ClaimBook(root, "c", goal="x").take([7])
    assert claim is not None
    claim.finished = True
    claim.release()
    assert ClaimBook(root, "d", goal="x").take([7]) is None
    remove_finished_marks(root, 7)
    assert taken(ClaimBook(root, "c", goal="x").take([7])) == 7, "its owner continues at once"


def test_many_workers_that_start_together_rarely_collide(root: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    tried: list[int] = []
    create = Claim.create
    monkeypatch.setattr(Claim, "create", lambda claim: tried.append(claim.stream) or create(claim))
    monkeypatch.setattr(ClaimBook, "_refresh", lambda _: None)  # none has seen the claims of the others
    for number in range(12):
        assert ClaimBook(root, f"w{number}", rng=random.Random(number)).take(range(200)) is not None
    assert len(tried) <= 12 + 4
    assert max(tried) < 50, "the first ones are preferred"
