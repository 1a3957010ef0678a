"""A worker that claims streams: which ones it takes, and that one that fails does not stop the others."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TypeVar, cast

import pytest

from fleet.ssh.loopback import wait_until
from spile.data.split import make_streams
from spile.errors import DataError, Fenced, Interrupted, SpileError, StoreError
from spile.objects import open_folder
from spile.proof.verification import verify
from spile.run.claiming import work_on_claims
from spile.run.pod.pod import WorkerGroup
from spile.spec.run import DataSpec, PromptSpec
from spile.store.claims import ClaimReader
from spile.store.snapshot import State, StreamView
from unit.cli.refusals import lines, spile

T = TypeVar("T")


class Run:
    """Stands in for the computation: the first attempt of some streams fails."""

    def __init__(self, folder: Path, **errors: SpileError) -> None:
        self.folder, self.errors = folder, errors
        self.began: list[int] = []
        self.lines: list[str] = []
        (folder / "streams").mkdir(exist_ok=True)
        for stream in range(4):
            (folder / "streams" / f"stream_{stream:03d}.jsonl").write_text("{}\n" * (40 - stream))

    def __call__(self, stream: int) -> int:
        self.began.append(stream)
        error = self.errors.pop(f"stream_{stream}", None)
        if error is not None:
            raise error
        return 0

    def work(self, hosts: WorkerGroup | None = None) -> int:
        output = str(self.folder / "out")
        data = DataSpec(dataset_dir=str(self.folder / "streams"))
        return work_on_claims(data, output, self, worker="a", hosts=hosts, log=self.lines.append)


@pytest.mark.parametrize("error", [DataError("stream 1 is damaged"), StoreError("no answer")])
def test_a_stream_that_fails_does_not_stop_the_others(tmp_path: Path, error: SpileError) -> None:
    run = Run(tmp_path, stream_1=error)
    with pytest.raises(type(error), match=error.problem):
        run.work()
    assert sorted(run.began) == [0, 1, 2, 3]
    assert f"stream 1 failed: {error}" in run.lines
    assert not any(each.active for each in ClaimReader(open_folder(str(tmp_path / "out"))).owners().values())


def test_a_cause_that_all_streams_share_ends_the_worker(tmp_path: Path) -> None:
    errors = {f"stream_{stream}": DataError(f"no such model, stream {stream}") for stream in range(4)}
    run = Run(tmp_path, **errors)
    with pytest.raises(DataError):
        run.work()
    assert len(run.began) == 2


def test_a_fenced_stream_is_left_to_the_other_worker(tmp_path: Path) -> None:
    run = Run(tmp_path, stream_2=Fenced("another worker owns this stream"))
    assert run.work() == 0
    assert sorted(run.began) == [0, 1, 2, 2, 3]


def test_an_interrupt_and_a_failure_on_a_pod_end_the_worker(tmp_path: Path) -> None:
    run = Run(tmp_path, **{f"stream_{stream}": Interrupted("interrupted") for stream in range(4)})
    with pytest.raises(Interrupted):
        run.work()
    assert len(run.began) == 1
    hosts = WorkerGroup()
    hosts.name = "worker 0 of 2"
    run = Run(tmp_path, **{f"stream_{stream}": DataError("damaged") for stream in range(4)})
    with pytest.raises(DataError):
        run.work(hosts)
    assert len(run.began) == 1, "the other hosts cannot know what happened here"


def views(*found: StreamView) -> Callable[[object], object]:
    """Return a stand-in for the reader of the dataset, which always sees these streams."""

    class Reader:
        def __init__(self, _root: object) -> None: ...

        def stream(self, number: int) -> StreamView:
            return next(view for view in found if view.number == number)

    return Reader


FOUR, FIVE = PromptSpec(predictions_per_task=4), "--max-samples 5"


@pytest.mark.parametrize(
    ("view", "data", "runs"),
    [
        (StreamView(0, "s", State.DONE, samples=48, expected=48), DataSpec(prompt=FOUR), False),
        (StreamView(0, "s", State.STOPPED, samples=35, expected=48), DataSpec(prompt=FOUR), True),
        # Its worker was killed while it stored the last samples, and its last heartbeat is recent.
        (StreamView(0, "s", State.WORKING, samples=12, expected=12), DataSpec(), True),
        (StreamView(0, "s", State.DONE, samples=5, expected=5, limits=FIVE), DataSpec(max_samples=5), False),
        (StreamView(0, "s", State.DONE, samples=5, expected=5, limits=FIVE), DataSpec(max_samples=6), True),
        (StreamView(0, "s", State.DONE, samples=5, expected=5, limits=FIVE), DataSpec(), True),
        (StreamView(0, "s", State.DONE, samples=5, expected=5), DataSpec(prompt=PromptSpec(pack=True)), False),
        (StreamView(0, "s", State.SILENT, samples=50, expected=None), DataSpec(prompt=PromptSpec(pack=True)), True),
        (StreamView(0, "s", State.DONE, samples=5, expected=5), DataSpec(max_tokens=100), False),
        (StreamView(0, "s", State.DONE, samples=5, expected=5, limits=FIVE), DataSpec(max_tokens=100), True),
    ],
)
def test_only_a_complete_ledger_makes_a_stream_done(
    view: StreamView, data: DataSpec, runs: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker that is restarted must not leave a stream of 12 rows at its 35th of 48 samples."""
    lines(tmp_path / "rows.jsonl", *({"text": str(number)} for number in range(12)))
    make_streams(str(tmp_path / "rows.jsonl"), tmp_path / "streams", 1)
    monkeypatch.setattr("spile.run.claiming.SnapshotReader", views(view))
    ran: list[int] = []
    data = replace(data, dataset_dir=str(tmp_path / "streams"))
    assert work_on_claims(data, str(tmp_path / "out"), lambda stream: ran.append(stream) or 0) == 0
    assert ran == ([0] if runs else [])


@pytest.mark.parametrize(
    ("data", "streams"),
    [
        (DataSpec(dataset="rows.jsonl"), [0]),
        (DataSpec(dataset="gs://b/stream_007.jsonl", worker_id=7), [7]),
        (DataSpec(dataset="org/name", of_streams=3), [0, 1, 2]),
    ],
)
def test_streams_of_one_dataset_are_claimed(data: DataSpec, streams: list[int], tmp_path: Path) -> None:
    ran: list[int] = []
    assert work_on_claims(data, str(tmp_path / "out"), lambda stream: ran.append(stream) or 0) == 0
    assert sorted(ran) == streams


def test_the_spec_of_an_extraction_can_be_claimed(tmp_path: Path) -> None:
    texts = lines(tmp_path / "texts.jsonl", *({"text": str(n)} for n in range(6)))
    root = tmp_path / "out"
    assert spile("extract", "--dataset", texts, "--output", root, "--layers", "0", "--max-samples", "2") == 0
    spec = json.loads((root / "spec.json").read_text()) | {"max_samples": None}
    (root / "spec.json").write_text(json.dumps(spec))
    assert spile("worker", "--spec", root / "spec.json", "--claim") == 0
    (stream,) = verify(str(root)).streams
    assert (stream.ok, stream.samples) == (True, 6)


class Host(WorkerGroup):
    """One host of a pod of two, whose agreements are keys that keep their first value until it is overwritten."""

    def __init__(self, number: int, values: dict[str, object], both: threading.Barrier) -> None:
        self.first, self.name = number == 0, f"worker {number} of 2"
        self._values, self._both = values, both

    def agree(self, name: str, value: T | None = None) -> T:
        if self.first:
            self._values[name] = value
        assert wait_until(lambda: name in self._values)
        return cast("T", self._values[name])

    def run(self, ran: list[int]) -> Callable[[int], int]:
        def run(stream: int) -> int:
            ran.append(stream)
            self._both.wait(60)  # All hosts work on a stream together.
            return 0

        return run


def test_the_hosts_of_a_pod_work_on_the_same_streams(tmp_path: Path) -> None:
    """The others must not read the agreement about the stream before."""
    streams = Run(tmp_path).folder / "streams"
    values: dict[str, object] = {}
    both, ran = threading.Barrier(2), ([], [])  # type: ignore[var-annotated]
    hosts = [Host(number, values, both) for number in range(2)]

    def work(number: int) -> int:
        run = hosts[number].run(ran[number])
        data = DataSpec(dataset_dir=str(streams))
        return work_on_claims(data, str(tmp_path / "out"), run, worker="pod", hosts=hosts[number])

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(work, range(2))) == [0, 0]
    assert ran[0] == ran[1]
    assert sorted(ran[0]) == [0, 1, 2, 3]
