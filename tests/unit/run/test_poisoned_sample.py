"""A worker whose samples end it: the real pipeline and store, with a model of a few lines."""

from __future__ import annotations

import json
import random
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import spile.compute.progress as watching
from crash.whole import assert_rows
from spile.compute.batches import Batch, Sizes
from spile.compute.device import DeviceProducer
from spile.compute.producer import OutOfDeviceMemory
from spile.compute.progress import Progress, hang_limit, watch_for_hangs
from spile.data import lines as lines_module
from spile.data import samples as stream_module
from spile.errors import Failure, StoreError
from spile.objects import open_folder
from spile.proof.verification import verify
from spile.run.pod.pod import WorkerGroup
from spile.run.worker import StreamWork, run_stream
from spile.spec.ranges import Ranges
from spile.spec.run import DataSpec, RunSpec
from spile.spec.sample import Sample
from spile.store.quarantine import VARIABLE, Supervision, Trials, read_trials, write_trials
from spile.store.run import join_run
from spile.store.writer import StreamWriter, join_stream
from world import TAPS, NumpyProducer, items, rows_of, run_identity, stream_identity

COUNT = 150


class Killed(BaseException):
    """The process is gone."""


class Mortal:
    """A folder that nothing can be written to after the death of the process."""

    def __init__(self, inner: Any, life: SimpleNamespace) -> None:
        self._inner, self._life = inner, life

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._inner, name)
        if name == "child":
            return lambda *args: Mortal(found(*args), self._life)
        if name not in ("put", "create", "writer"):
            return found

        def write(*args: Any, **options: Any) -> Any:
            if self._life.dead:
                raise StoreError("the process is dead")
            return found(*args, **options)

        return write


class Poisoned(NumpyProducer):
    """Ends the process, or has no memory, if a batch has one of these samples."""

    def __init__(self, poison: dict[int, str], life: SimpleNamespace) -> None:
        super().__init__()
        self._poison, self._life = poison, life

    def start(self, batch: Batch) -> Batch:
        for sample in batch.samples:
            how = "kill" if self._life.broken else self._poison.get(sample.index)
            if how == "memory":
                raise OutOfDeviceMemory("the device's memory ran out")
            if how == "kill":
                self._life.dead = True
                raise Killed
        return super().start(batch)


class Reader:
    """The samples that are left."""

    parts = ()

    def __init__(self, done: Ranges, *_: object) -> None:
        self._items = items(COUNT, done)
        self.total = COUNT

    def __iter__(self) -> Any:
        return self._items

    def peek(self) -> Any:
        return iter(list(items(COUNT)))

    def close(self) -> None:
        pass


def attempt(root: Path, poison: dict[int, str], *, broken: bool = False) -> tuple[bool, StreamWriter, list[str]]:
    """One worker's life; it raises :class:`Killed` if a sample ends it."""
    life, said = SimpleNamespace(dead=False, broken=broken), list[str]()
    folder: Any = Mortal(open_folder(str(root)), life)
    identity = run_identity(store_dtype="float32")
    join_run(folder, identity)
    stream = join_stream(folder, 0, stream_identity(COUNT), identity)
    spec = RunSpec(output=str(root), batch_tokens=128)
    run: Any = SimpleNamespace(
        samples=SimpleNamespace(read=Reader, find_task_id=lambda index, *_: (f"task-{index}", ())),
        spec=spec,
        sizes=Sizes(128, None, 64, 12_000),
        stream_identity=stream_identity(COUNT),
        expected_samples=lambda _ledger: COUNT,
        token_limit=None,
    )
    status: Any = SimpleNamespace(progress=Progress(log=said.append), committed=lambda: None)
    work = StreamWork(run, stream, Poisoned(poison, life), status, threading.Event(), WorkerGroup())
    finished = work.run(Reader(stream.ledger.done))  # type: ignore[arg-type]
    stream.finish()
    return finished, stream, said


def wanted(poison: dict[int, str]) -> list[Sample]:
    return [item for item in items(COUNT) if isinstance(item, Sample) and item.index not in poison]


def assert_whole(root: Path, poison: dict[int, str]) -> None:
    assert_rows(open_folder(str(root)), wanted(poison), TAPS, lambda s, tap: rows_of(s, tap, dtype="float32"))
    found = verify(str(root)).quarantined
    assert sorted(skip.index for skip in found) == sorted(poison)
    assert all(skip.task_id == f"task-{skip.index}" for skip in found)


@pytest.mark.parametrize("seed", range(2))
def test_the_samples_that_kill_workers_are_quarantined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    rng = random.Random(seed)
    poison = dict.fromkeys(rng.sample([n for n in range(COUNT) if n % 17 != 5], 1 + seed % 2), "kill")
    supervision, kills = Supervision.begin(), 0
    while True:
        monkeypatch.setenv(VARIABLE, supervision.environment()[VARIABLE])
        try:
            finished, stream, said = attempt(tmp_path, poison)
            break
        except Killed:
            kills += 1
            supervision = supervision.after(137)
    assert finished
    assert kills <= 5 * len(poison)
    assert_whole(tmp_path, poison)
    assert {skip.detail["cause"] for skip in stream.ledger.quarantined} <= {
        f"worker killed by signal 9 {times}" for times in ("three times", "four times", "five times")
    }
    assert any(f"quarantined task-{index} (sample {index} of the stream)" in line for line in said for index in poison)
    record = read_trials(stream.folder)
    assert record is not None
    assert (record.groups, record.trial) == ((), Ranges())


def test_a_sample_without_room_is_quarantined_by_one_worker(tmp_path: Path) -> None:
    finished, stream, said = attempt(tmp_path, {77: "memory"})
    assert finished
    assert_whole(tmp_path, {77: "memory"})
    # How often depends on what was committed before: shards are written in threads.
    assert str(stream.ledger.quarantined[0]) in {
        f"task-77 (out of memory {times} times)" for times in ("three", "four")
    }
    assert any("to find the sample at fault" in line for line in said)


@pytest.mark.slow
def test_a_sample_without_room_of_a_dataset_that_is_streamed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real model; the number of samples is not known before all have been read."""
    monkeypatch.setattr(stream_module, "HEAD_BYTES", 20)
    monkeypatch.setattr(lines_module, "_PART_ROWS", 2)
    rows = [{"task_id": f"task-{n}", "text": "1 2 3 " * (n % 7 + 1)} for n in range(60)]
    file, start = tmp_path / "rows.jsonl", DeviceProducer.start
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def start_unless_poisoned(self: DeviceProducer, batch: Batch) -> Any:
        if any(sample.index == 37 for sample in batch.samples):
            raise OutOfDeviceMemory("the device's memory ran out")
        return start(self, batch)

    monkeypatch.setattr(DeviceProducer, "start", start_unless_poisoned)
    spec = RunSpec(data=DataSpec(dataset=str(file)), output=str(tmp_path / "out"), layers=(1,))
    assert run_stream(spec).complete
    report = verify(str(tmp_path / "out"))
    assert report.ok, report.all_problems
    assert [skip.task_id for skip in report.quarantined] == ["task-37"]
    assert sum(stream.samples for stream in report.streams) == 59
    assert run_stream(spec).complete, "nothing is left to do"


def test_a_device_without_room_for_anything_is_an_error_and_no_samples_fault(tmp_path: Path) -> None:
    with pytest.raises(Failure, match="does not fit on the device"):
        attempt(tmp_path, dict.fromkeys(range(COUNT), "memory"))
    assert not verify(str(tmp_path)).quarantined


def test_a_machine_that_kills_every_worker_quarantines_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    supervision = Supervision.begin()
    for number in range(14):
        monkeypatch.setenv(VARIABLE, supervision.environment()[VARIABLE])
        with pytest.raises(Killed):
            attempt(tmp_path, {40: "kill"}, broken=number > 3)
        supervision = supervision.after(137)
    assert not verify(str(tmp_path)).quarantined
    monkeypatch.delenv(VARIABLE)
    with pytest.raises(Killed):
        attempt(tmp_path, {40: "kill"})
    assert attempt(tmp_path, {})[0], "it was the machine after all"
    assert_whole(tmp_path, {})


def test_more_than_a_few_quarantined_samples_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(Failure, match=r"16 samples of .* ended their workers and are quarantined, and there are more"):
        attempt(tmp_path, dict.fromkeys([n for n in range(2, COUNT, 5) if n % 17 != 5 and n // 5 % 3], "memory"))


def test_samples_that_fail_everywhere_are_an_error(tmp_path: Path) -> None:
    """Each group of the search has one: the device has too little memory for this run."""
    with pytest.raises(Failure, match="does not fit on the device"):
        attempt(tmp_path, dict.fromkeys([n for n in range(0, COUNT, 5) if n % 17 != 5], "memory"))
    assert not verify(str(tmp_path)).quarantined


def test_a_worker_that_hangs_leaves_word_and_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next worker blames the samples on trial, also without a supervisor."""
    stream = attempt(tmp_path, {})[1]
    fate: list[int] = []
    monkeypatch.setattr("spile.run.worker.os.kill", lambda _pid, number: fate.append(number))
    work = StreamWork.__new__(StreamWork)
    work._progress, work._stream = Progress(), stream
    work._trials = Trials(stream.record.id).with_trial(Ranges([(3, 4)]), controlled=True)
    work._end_hung_worker(700.0)
    assert fate == [9]
    left = read_trials(stream.folder)
    assert left is not None
    assert (left.ended, left.trial) == ("worker hung", Ranges([(3, 4)]))
    write_trials(stream.folder, left)


def test_only_waits_for_the_device_are_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "_HANG_POLL", 0.01)
    monkeypatch.setattr(watching, "_HANG_LEAST", 0.05)
    monkeypatch.setattr(watching, "_HANG_FIRST", 0.05)
    progress, hung, seen = Progress(), threading.Event(), list[float]()

    def heard(seconds: float) -> None:
        seen.append(seconds)
        hung.set()

    with watch_for_hangs(progress, heard):
        assert not hung.wait(0.3), "compiling, tokenizing or uploading, for as long as it takes"
        with progress.computing():
            assert hung.wait(30)
    assert [seconds > 0.05 for seconds in seen] == [True]


def test_the_limit_grows_with_the_batches() -> None:
    assert (hang_limit(None), hang_limit(0.5), hang_limit(300.0)) == (3600.0, 600.0, 9000.0)
