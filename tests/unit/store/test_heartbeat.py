from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from spile.errors import Fenced, Interrupted, StoreError
from spile.objects import Folder, open_folder
from spile.spec.phase import Phase
from spile.store.heartbeat import Heartbeat, Reading, read_beat


class Puts:
    """A folder that keeps every heartbeat, or fails."""

    def __init__(self, broken: bool = False) -> None:
        self.beats: list[dict[str, object]] = []
        self.came = threading.Semaphore(0)
        self.broken = broken

    def put(self, key: str, data: bytes) -> None:
        assert key == "progress.json"
        self.came.release()
        if self.broken:
            raise StoreError("cannot write progress.json", found="HTTP 403")
        self.beats.append(json.loads(data))


def reading() -> Reading:
    return Reading(
        Phase.RUNNING, samples=5, tokens=50, shards_written=2, shards_committed=1, tokens_per_second=9.5, retries=3
    )


def test_a_heartbeat_says_what_the_design_says(folder: Folder) -> None:
    with Heartbeat(folder, "a1b2", reading, clock=lambda: 1_800_000_000.0, host="here") as heart:
        heart.note("loaded the model")
    stored = json.loads(folder.get("progress.json"))
    assert stored == {
        "attempt": "a1b2",
        "host": "here",
        "phase": "running",
        "samples": 5,
        "samples_committed": 0,
        "tokens": 50,
        "shards_written": 2,
        "shards_committed": 1,
        "tokens_per_second": 9.5,
        "retries": 3,
        "expected": None,
        "started": "2027-01-15T08:00:00Z",
        "updated": "2027-01-15T08:00:00Z",
        "version": stored["version"],
        "log_tail": ["loaded the model"],
        "last_error": None,
        "missed": 0,
        "progressed": "2027-01-15T08:00:00Z",
        "interval": 30.0,
    }
    beat = read_beat(folder)
    assert beat is not None
    assert beat.log_tail == ("loaded the model",)
    assert beat.age(1_800_000_060.0) == 60.0


def test_no_secret_of_the_environment_is_in_a_heartbeat(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_very_secret")
    heart = Heartbeat(folder, "a1b2", reading)
    heart.note("x" * 390 + " asked with hf_very_secret")
    with pytest.raises(StoreError), heart:
        raise StoreError("refused", found="hf_very_secret")
    stored = folder.get("progress.json")
    assert b"hf_very" not in stored, "nor half of one, where the line was cut"
    assert b"refused: found ***" in stored


def test_it_beats_at_once_when_asked_and_at_the_end() -> None:
    puts = Puts()
    with Heartbeat(puts, "a1b2", reading, every=3600) as heart:  # type: ignore[arg-type]
        assert puts.came.acquire(timeout=120)
        heart.beat()
        assert puts.came.acquire(timeout=120)
    assert len(puts.beats) == 3


def test_it_says_when_the_worker_last_got_further() -> None:
    """A worker whose device hangs beats on; a rate that falls and a request tried again are no progress."""
    puts = Puts()
    turns = iter([(0.0, 5, 9.5, 0), (30.0, 5, 7.0, 2), (60.0, 6, 7.0, 2), (90.0, 6, 5.0, 3)])
    now = [next(turns)]

    def read() -> Reading:
        return Reading(Phase.RUNNING, samples=now[0][1], tokens_per_second=now[0][2], retries=now[0][3])

    with Heartbeat(puts, "a1b2", read, every=3600, clock=lambda: now[0][0]) as heart:  # type: ignore[arg-type]
        for turn in turns:
            assert puts.came.acquire(timeout=120)
            now[0] = turn
            heart.beat()
        assert puts.came.acquire(timeout=120)
    assert [str(beat["updated"])[14:19] for beat in puts.beats][:4] == ["00:00", "00:30", "01:00", "01:30"]
    assert [str(beat["progressed"])[14:19] for beat in puts.beats][:4] == ["00:00", "00:00", "01:00", "01:00"]


def test_it_beats_by_itself() -> None:
    puts = Puts()
    with Heartbeat(puts, "a1b2", reading, every=0.01):  # type: ignore[arg-type]
        for _ in range(4):
            assert puts.came.acquire(timeout=120)


def test_a_failing_heartbeat_is_counted_and_logged_and_ends_nothing() -> None:
    puts, output = Puts(broken=True), []
    with Heartbeat(puts, "a1b2", reading, every=0.01, log=output.append) as heart:  # type: ignore[arg-type]
        for _ in range(3):
            assert puts.came.acquire(timeout=120)
    assert heart.missed >= 3
    assert output[0] == "heartbeat not written (1 so far): cannot write progress.json: found HTTP 403"
    with Heartbeat(Puts(), "a1b2", lambda: 1 / 0, log=output.append) as heart:  # type: ignore[arg-type, return-value]
        pass
    assert "division by zero" in output[-1]


@pytest.mark.parametrize(
    ("error", "phase", "text"),
    [
        (StoreError("cannot write x"), "failed", "cannot write x"),
        (Interrupted("SIGTERM"), "stopped", "SIGTERM"),
        (RuntimeError("odd"), "failed", "RuntimeError: odd"),
        (KeyboardInterrupt(), "stopped", "interrupted"),
    ],
)
def test_the_last_heartbeat_tells_how_it_ended(error: BaseException, phase: str, text: str) -> None:
    puts = Puts()
    with pytest.raises(type(error)), Heartbeat(puts, "a1b2", reading, every=3600):  # type: ignore[arg-type]
        raise error
    assert (puts.beats[-1]["phase"], puts.beats[-1]["last_error"]) == (phase, text)


def test_a_fenced_worker_leaves_the_heartbeat_to_its_successor() -> None:
    puts = Puts()
    heart = Heartbeat(puts, "a1b2", reading, every=3600)  # type: ignore[arg-type]
    heart.__enter__()
    assert puts.came.acquire(timeout=120)
    heart.__exit__(Fenced, Fenced("another worker owns this stream"), None)
    assert len(puts.beats) == 1


def test_long_logs_are_cut() -> None:
    puts = Puts()
    with Heartbeat(puts, "a1b2", reading, every=3600) as heart:  # type: ignore[arg-type]
        for number in range(100):
            heart.note(f"{number} " + "x" * 10_000)
    tail = puts.beats[-1]["log_tail"]
    assert isinstance(tail, list)
    assert (len(tail), tail[-1][:3], len(tail[-1])) == (20, "99 ", 400)


def test_what_is_no_heartbeat_is_none(tmp_path: Path) -> None:
    folder = open_folder(str(tmp_path))
    assert read_beat(folder) is None
    for text in (b"", b"[]", b"{}", b'{"attempt": 1}', b"\xff"):
        folder.put("progress.json", text)
        assert read_beat(folder) is None
