"""How the worker's loop ends: one error of several, an interrupt at any moment, or endless skipped samples."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from spile.compute.batches import Sizes
from spile.compute.progress import Progress
from spile.errors import Fenced, StoreError
from spile.run.pipeline import Pipeline, Sink, ThreadGroup, run_pipeline
from spile.spec.sample import Skip
from unit.run.test_pipeline import Script, check, open_stream, planned
from world import NumpyProducer, lengths, sample_of


class _Contested(Sink):
    """The first commit is refused; the commits that waited for it get a less useful error."""

    refused = False

    def commit(self, record, skipped=(), end=None) -> None:
        if self.refused:
            raise StoreError("it is unknown whether the last commit was stored")
        self.refused = True
        time.sleep(0.2)  # the others come to the lock
        raise Fenced("another worker owns this stream")


@pytest.mark.parametrize("turn", range(3))
def test_the_refusal_is_reported_and_not_its_consequences(tmp_path: Path, turn: int) -> None:
    items = [sample_of(i, length=n) for i, n in enumerate(lengths(60, seed=turn))]
    sizes = Sizes(128, None, 64, 1500, writers=3)
    sink = _Contested(open_stream(tmp_path, 60))
    pipeline = Pipeline(NumpyProducer(), sink, Script(), Progress(), sizes)
    with pytest.raises(Fenced):
        pipeline.run(planned(items, sizes))
    assert not list(tmp_path.glob("**/.tmp-*"))


def test_an_interrupt_while_the_crew_is_waited_for_ends_it() -> None:
    crew, over = ThreadGroup(), threading.Event()

    def work() -> None:
        while not crew.failed:
            time.sleep(0.01)
        over.set()

    def interrupted_join() -> None:
        threading.Timer(0.2, lambda: signal.raise_signal(signal.SIGINT)).start()
        crew.join()

    crew.start("stage", work)
    with pytest.raises(KeyboardInterrupt):
        interrupted_join()
    assert over.is_set()
    assert crew.ended


def test_an_interrupt_counts_more_than_what_it_broke() -> None:
    crew = ThreadGroup()
    crew.fail(StoreError("cut off"))
    crew.fail(KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        crew.join()


def test_skips_without_end_are_committed_on_the_way(tmp_path: Path) -> None:
    """A stream of nothing but samples that are too long needs the memory of a few of them."""
    alive: list[int] = []
    sizes = Sizes(128, None, 64, 10**9)

    def items() -> Iterator[Skip]:
        for index in range(100_000):
            alive.append(index)
            yield Skip(index, f"task-{index}", "too long")

    made = planned(items(), sizes)
    first = next(made)
    assert len(first.skipped) == len(alive) < 20_000
    assert sum(len(task.skipped) for task in made) + len(first.skipped) == 100_000


def test_samples_before_many_skips_are_stored_once(tmp_path: Path) -> None:
    items = [sample_of(i, length=n) if i % 7000 < 3 else Skip(i, "t", "empty") for i, n in enumerate(lengths(40_000))]
    stream = open_stream(tmp_path, len(items))
    sizes = Sizes(128, None, 64, 10**9)
    assert run_pipeline(items, NumpyProducer(), Sink(stream), sizes, progress=Progress(), control=Script())
    assert stream.ledger.done.pairs() == [(0, 40_000)]
    assert stream.ledger.commits == 3
    check(tmp_path, [item for item in items if not isinstance(item, Skip)])


_READER_GONE = """
import os, signal, sys, threading
from spile.view.worker import worker_display
with worker_display() as watch:
    sys.stdin.readline()
    os.kill(os.getpid(), signal.SIGTERM)
    watch.progress.log("one more line")
    watch.stop.wait(100)
    sys.stderr.write(f"stopped {watch.stop.is_set()}")
"""


def test_a_closed_output_does_not_end_a_run() -> None:
    """Ctrl+C in ``spile extract | tee log`` reaches tee as well: what is in flight must be committed all the same."""
    process = subprocess.Popen(
        [sys.executable, "-c", _READER_GONE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    process.stdout.close()
    process.stdout = None
    _, errors = process.communicate(b"\n", timeout=120)
    assert errors.decode() == "stopped True"
    assert process.returncode == 0


_TERMINATED_TWICE = """
import os, signal, sys, time
from spile.spec.phase import Phase
from spile.view.worker import worker_display
from spile.run import signals
signals._SAME_REQUEST, signals._EXIT_AFTER = 1, 0.1
with worker_display() as watch:
    watch.progress.phase(Phase.RUNNING)
    for number in {numbers}:
        os.kill(os.getpid(), number)
    time.sleep(4)  # the batches in flight take longer than any deadline of the signals
    sys.stderr.write(f"stopped {{watch.stop.is_set()}}")
"""


@pytest.mark.parametrize(("numbers", "commits"), [("(15, 15)", True), ("(2, 2)", False), ("(15, 2)", False)])
def test_only_a_repeated_sigterm_leaves_time_to_commit(numbers: str, commits: bool) -> None:
    """Slurm sends SIGTERM twice when it preempts a job; a second Ctrl+C ends at once."""
    words = [sys.executable, "-c", _TERMINATED_TWICE.format(numbers=numbers)]
    ended = subprocess.run(words, capture_output=True, text=True, timeout=120)
    assert ended.stderr.endswith("stopped True") == commits
    assert (ended.returncode == 0) == commits


_HANGS_AT_EXIT = """
import os, signal, sys, time
from concurrent.futures import ThreadPoolExecutor
from spile.view.worker import worker_display
ThreadPoolExecutor(1).submit(time.sleep, 3600)  # an upload that hangs: the interpreter would wait for it
try:
    with worker_display() as watch:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)
except KeyboardInterrupt:
    sys.exit(130)
"""


def test_a_second_signal_ends_a_process_whose_threads_hang() -> None:
    done = subprocess.run([sys.executable, "-c", _HANGS_AT_EXIT], capture_output=True, timeout=120)
    assert done.returncode == 130
