from __future__ import annotations

import json
import time
from dataclasses import replace

import pytest

from spile.errors import StoreError
from spile.objects import Folder
from spile.store.cleanup import clear_stream, is_alive
from spile.store.ledger import Limit
from spile.store.run import join_run
from spile.store.snapshot import SnapshotReader, State
from spile.store.writer import StreamWriter, join_stream
from world import produce, run_identity, sample_of, stream_identity, write_shard

NOW = 1_800_000_000.0


def put_beat(folder: Folder, stream: int, age: float = 10, **fields: object) -> None:
    stamp = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(NOW - age))
    beat = {
        "attempt": "a1b2", "host": "vm-1", "phase": "running", "samples": 0, "samples_committed": 0, "tokens": 0,
        "shards_written": 0, "shards_committed": 0, "tokens_per_second": 0.0, "retries": 0, "expected": None,
        "started": stamp, "updated": stamp, "version": "0", "log_tail": [], "last_error": None,
    }  # fmt: skip
    folder.put(f"tpu_{stream}/progress.json", json.dumps({**beat, **fields}).encode())


def begun(folder: Folder, number: int, samples: int | None = 100, stored: int = 0) -> StreamWriter:
    join_run(folder, run_identity())
    store = join_stream(folder, number, stream_identity(samples), run_identity())
    if stored:
        made = [sample_of(index) for index in range(stored)]
        builder = store.begin(made)
        write_shard(builder, made)
        store.commit([builder.finish()])
    return store


def take(folder: Folder) -> dict[int, object]:
    return {stream.number: stream for stream in SnapshotReader(folder, lambda: NOW).take().streams}


def test_states_come_from_the_ledger_first_and_the_heartbeat_second(folder: Folder) -> None:
    produce(folder, 20, worker_id=0)
    begun(folder, 1)
    begun(folder, 2, stored=10)
    put_beat(folder, 2, samples=14, samples_committed=10, shards_written=2, shards_committed=1, tokens_per_second=50)
    begun(folder, 3, stored=10)
    lost = {"samples": 14, "samples_committed": 10, "shards_written": 2, "shards_committed": 1}
    put_beat(folder, 3, age=3600, tokens_per_second=50, **lost)
    begun(folder, 4)
    put_beat(folder, 4, phase="failed", last_error="disk full")
    begun(folder, 5, stored=1)
    put_beat(folder, 5, phase="stopped")
    begun(folder, 6, stored=4).commit([], limit=Limit(4, "--max-samples 4"))
    put_beat(folder, 6, phase="done", expected=4)
    begun(folder, 7)
    folder.put("tpu_7/commits/0002.json", b"junk")
    begun(folder, 8)
    put_beat(folder, 8, phase="done", age=5)  # It reports that it is done, but the ledger is authoritative.
    snapshot = SnapshotReader(folder, lambda: NOW).take()
    assert {view.number: view.state for view in snapshot.streams} == {
        0: State.DONE,
        1: State.WAITING,
        2: State.WORKING,
        3: State.SILENT,
        4: State.FAILED,
        5: State.STOPPED,
        6: State.DONE,
        7: State.DAMAGED,
        8: State.STOPPED,
    }
    working = snapshot.streams[2]
    tokens = sum(len(sample_of(index)) for index in range(10))
    assert (working.samples, working.shards, working.committed, working.tokens) == (14, 2, 1, tokens)
    assert working.seconds_left == pytest.approx(86 * tokens / 10 / 50)
    assert (working.status, working.host, working.age) == ("running", "vm-1", 10.0)
    assert [snapshot.streams[number].status for number in (3, 4, 5)] == ["silent", "failed", "stopped"]
    silent = snapshot.streams[3]  # Its uncommitted work is lost.
    assert (silent.samples, silent.shards, silent.committed, silent.tokens_per_second) == (10, 1, 1, 0)
    assert snapshot.streams[4].last_error == "disk full"
    assert "0002.json is incomplete" in (snapshot.streams[7].last_error or "")
    assert (snapshot.healthy, snapshot.working, snapshot.needs_recovery) == (4, 1, 5)
    assert snapshot.total("samples") == 20 + 14 + 10 + 1 + 4
    assert snapshot.seconds_left is None
    assert not snapshot.done
    assert json.loads(json.dumps(snapshot.to_json()))["totals"]["committed"] == 2 + 1 + 1 + 1 + 1


def test_percent_and_time_left_of_a_healthy_root(folder: Folder) -> None:
    for number in (0, 1):
        begun(folder, number, stored=10)
        put_beat(folder, number, tokens_per_second=10 * (number + 1))
    snapshot = SnapshotReader(folder, lambda: NOW).take()
    assert snapshot.percent == 10.0
    tokens = sum(len(sample_of(index)) for index in range(10))
    assert snapshot.seconds_left == pytest.approx(90 * tokens / 10 / 10)


def test_streams_of_the_data_that_were_never_started(folder: Folder) -> None:
    join_run(folder, run_identity())
    join_stream(folder, 1, replace(stream_identity(20), streams=3, split="5" * 32), run_identity())
    produce(folder, 20, worker_id=1)
    snapshot = SnapshotReader(folder, lambda: NOW).take()
    assert snapshot.streams[0].state is State.DONE
    assert (snapshot.never_begun, snapshot.done, snapshot.percent, snapshot.seconds_left) == (2, False, None, None)


def test_a_limit_that_was_not_committed_does_not_make_a_stream_done(folder: Folder) -> None:
    store = begun(folder, 0, stored=4)
    put_beat(folder, 0, phase="done", expected=4)
    assert SnapshotReader(folder, lambda: NOW).stream(0).state is State.STOPPED
    store.commit([], limit=Limit(4, "--max-samples 4"))
    view = SnapshotReader(folder, lambda: NOW).stream(0)
    assert (view.state, view.limits) == (State.DONE, "--max-samples 4")


def test_the_time_left_before_the_first_commit_is_the_heartbeats(folder: Folder) -> None:
    begun(folder, 0)
    put_beat(folder, 0, samples=10, tokens=2000, tokens_per_second=100)
    assert SnapshotReader(folder, lambda: NOW).take().seconds_left == pytest.approx(90 * 200 / 100)


def test_a_packed_stream_has_no_percent(folder: Folder) -> None:
    begun(folder, 0, samples=None, stored=3)
    snapshot = SnapshotReader(folder, lambda: NOW).take()
    assert (snapshot.percent, snapshot.streams[0].expected, snapshot.streams[0].percent) == (None, None, None)


def test_a_packed_stream_is_done_when_its_end_is_recorded(folder: Folder) -> None:
    store = begun(folder, 0, samples=None, stored=3)
    store.commit([], end=3)
    snapshot = SnapshotReader(folder, lambda: NOW).take()
    assert (snapshot.streams[0].state, snapshot.streams[0].expected, snapshot.percent) == (State.DONE, 3, 100.0)


def test_only_new_commits_are_read_again(folder: Folder) -> None:
    from counting import Counting

    produce(folder, 45)
    counting = Counting(folder)
    reader = SnapshotReader(counting, lambda: NOW)
    before = reader.take()
    assert sum("commits/" in key for key in counting.gets) == 5
    counting.gets.clear()
    assert reader.take() == before
    assert not any("commits/" in key for key in counting.gets)
    clear_stream(folder, 0)
    begun(folder, 0, stored=2)
    assert reader.take().streams[0].samples == 2


def test_an_empty_root(folder: Folder) -> None:
    join_run(folder, run_identity())
    snapshot = SnapshotReader(folder, lambda: NOW).take()
    assert (snapshot.streams, snapshot.done, snapshot.percent, snapshot.seconds_left) == ((), False, None, None)


def test_a_stream_without_a_heartbeat_is_silent_once_its_last_commit_is_old(folder: Folder) -> None:
    begun(folder, 0, stored=2)
    states = [SnapshotReader(folder, lambda now=now: now).take().streams[0].state for now in (time.time(), 4e9)]  # type: ignore[misc]
    assert states == [State.WAITING, State.SILENT]


def test_a_store_that_does_not_answer_is_no_damage(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fleet replaces the machine of a damaged stream; it must not replace all of them in an outage."""
    begun(folder, 0, stored=3)

    def out_of_reach(*_: object, **__: object) -> None:
        raise StoreError("the bucket is out of reach")

    monkeypatch.setattr("spile.store.snapshot.read_commits", out_of_reach)
    with pytest.raises(StoreError, match="out of reach"):
        take(folder)


@pytest.mark.parametrize("hours", [-3, 3])
def test_the_clock_of_a_worker_may_be_wrong_by_hours(folder: Folder, hours: int) -> None:
    """The time at which the bucket received the heartbeat counts, not the time in it."""
    begun(folder, 0)
    now = time.time()
    put_beat(folder, 0, age=NOW - now - 3600 * hours)
    (alive,) = SnapshotReader(folder, lambda: now + 60).take().streams
    assert alive.state is State.WORKING
    assert alive.age is not None
    assert 30 < alive.age < 90
    (dead,) = SnapshotReader(folder, lambda: now + 3600).take().streams
    assert dead.state is State.SILENT


@pytest.mark.parametrize(("age", "state", "alive"), [
    (590, State.WORKING, True), (610, State.SILENT, True), (2410, State.SILENT, False),
])  # fmt: skip
def test_a_worker_is_judged_by_the_interval_of_its_own_heartbeats(
    folder: Folder, age: float, state: State, alive: bool
) -> None:
    begun(folder, 0)
    put_beat(folder, 0, age=age, interval=120.0)
    assert SnapshotReader(folder, lambda: NOW).stream(0).state is state
    assert is_alive(folder.child("tpu_0"), NOW) == alive
