"""Extraction on a pod: the same rows as one process, each sample once, over meshes, odd counts, deaths and resumes."""

from __future__ import annotations

import contextlib
import json
import random
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from holding import HeldCommits
from pod.launching import Ended, Launch, clean_environment, launch, started
from ports import free_port
from spile.errors import ExitCode
from spile.proof.verification import verify
from spile.reading.dataset import Dataset
from spile.reading.dataset import open as open_dataset
from spile.spec.run import DataSpec, PromptSpec, RunSpec

LENGTH = 64
SAMPLES = 25
"""A full batch on 8 devices of one row each, and 17 more."""
VARIANTS = 1
WHOLE = 48 * VARIANTS
"""All embedded tasks, each in so many variants: commits enough for a kill to land among them."""

MANY = """
import json
from spile.run.worker import run_stream
from spile.spec.run import DataSpec, RunSpec, PromptSpec
with join(identity, times=PodTimes(120, 120, 60)) as pod:
    hosts = pod
    for name, mesh, count in json.loads({cases!r}):
        data = DataSpec(max_seq_length={length}, max_samples=count, prompt=PromptSpec(predictions_per_task={variants}))
        spec = RunSpec(data=data, output={root!r} + "/" + name, store_dtype="float32", layers=(1, 3), batch_size=1,
                           mesh_shape=tuple(mesh), shard_size_gb=5e-5)
        summary = run_stream(spec, hosts=hosts)
        assert summary.complete, name
        with open({root!r} + f"/{{name}}-{{me}}.txt", "w") as file:
            file.write(f"{{summary.progress.samples}} {{summary.samples}}")
"""


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """One process, one device, one sample at a time."""
    return alone(tmp_path_factory.mktemp("reference"), VARIANTS)


def alone(root: Path, variants: int) -> Dataset:
    from spile.run.worker import run_stream

    data = DataSpec(max_seq_length=LENGTH, prompt=PromptSpec(predictions_per_task=variants))
    spec = RunSpec(data=data, output=str(root), store_dtype="float32", layers=(1, 3), batch_size=1, mesh_shape=(1, 1))
    run_stream(spec)
    return open_dataset(str(root))


def assert_same_rows(found: Dataset, reference: Dataset, count: int) -> None:
    assert [sample.index for sample in sorted(found.samples, key=lambda ref: ref.index)] == list(range(count))
    for index in range(count):
        ours, theirs = found.sample(0, index), reference.sample(0, index)
        assert ours.ref.task_id == theirs.ref.task_id
        np.testing.assert_array_equal(ours.tokens, theirs.tokens)
        for tap in found.taps:
            rows = theirs.rows(tap)
            scale = np.sqrt(np.mean(np.square(rows)))
            np.testing.assert_allclose(ours.rows(tap), rows, atol=1e-5 * scale, rtol=0)


def run_cases(
    folder: Path, cases: list[tuple[str, tuple[int, int], int]], reference: Dataset, processes: int = 4
) -> None:
    body = MANY.format(cases=json.dumps(cases), root=str(folder), length=LENGTH, variants=VARIANTS)
    with launch(folder, body, processes, devices=2) as group:
        ended = group.wait(1200)
    assert [end.code for end in ended] == [0] * processes, ended[0].err
    for name, _, count in cases:
        text = {(folder / f"{name}-{number}.txt").read_text() for number in range(processes)}
        assert text == {f"{count} {count}"}
        report = verify(str(folder / name), max_samples=count)
        assert report.ok, report.problems
        assert_same_rows(open_dataset(str(folder / name)), reference, count)


def hosts_of(root: Path) -> set[str]:
    """The hosts that stored rows, from the names of the shards."""
    return {shard.name[-16:-12] for shard in open_dataset(str(root)).stream(0).shards}


def test_rows_equal_one_process(tmp_path: Path, reference: Dataset) -> None:
    run_cases(tmp_path, [("both", (2, 2), 9)], reference, processes=2)
    assert hosts_of(tmp_path / "both") == {"-h00", "-h01"}


@pytest.mark.slow
def test_rows_equal_one_process_on_every_kind_of_mesh(tmp_path: Path, reference: Dataset) -> None:
    cases = [("data", (8, 1), 9), ("both", (4, 2), SAMPLES), ("model", (1, 8), 11)]
    run_cases(tmp_path, cases, reference)
    assert hosts_of(tmp_path / "both") == {"-h00", "-h01", "-h02", "-h03"}


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("mesh", [(8, 1), (4, 2), (2, 4), (1, 8)])
def test_every_remainder(tmp_path: Path, reference: Dataset, mesh: tuple[int, int]) -> None:
    run_cases(tmp_path, [(f"more-{more}", mesh, 8 + more) for more in range(1, 18)], reference)


@pytest.mark.slow
def test_a_mesh_of_256(tmp_path: Path, reference: Dataset) -> None:
    words = f"""extract --model embedded --dataset embedded
    --max-samples 5 --max-seq-length {LENGTH} --layers 1,3 --store-dtype float32 --batch-size 1
                --mesh-shape 16,16 --predictions-per-task {VARIANTS} --output {tmp_path / "out"}""".split()
    command = [sys.executable, "-m", "spile.cli.main", *words]
    with started([command], [clean_environment(256)]) as group:
        (ended,) = group.wait(280)
    assert ended.code == 0, ended.err
    assert "4 heads do not divide over 16 devices (model axis): replicated on each" in ended.out
    assert_same_rows(open_dataset(str(tmp_path / "out")), reference, 5)


class Slice:
    """The same command on every host of a slice that keeps losing one."""

    def __init__(self, root: Path, variants: int = VARIANTS) -> None:
        self.root = root
        self.words = f"""extract --model embedded --dataset embedded
        --predictions-per-task {variants} --max-seq-length {LENGTH} --layers 1,3
            --store-dtype float32 --batch-size 1 --shard-size-gb 1e-5 --output {root}
            --heartbeat-timeout 12 --barrier-timeout 150""".split()

    def commits(self) -> int:
        return len(list(self.root.glob("*_0/commits/*.json")))

    def run(self, hosts: int, devices: int) -> list[Ended]:
        """To the end."""
        with self._started(hosts, devices) as group:
            return group.wait(280)

    def lose(self, hosts: int, devices: int, victim: int, *, after: int, pause: float = 0.0) -> None:
        """Kill one host among its slice's commits: once there are so many more of them, and a moment later.

        It was at work and so were the others, which all say that it died.
        """
        until, wanted = time.monotonic() + 120, self.commits() + after
        held = HeldCommits(self.root.parent / f"held-{wanted}", after=wanted)
        with self._started(hosts, devices, held.environment) as group:
            while self.commits() < wanted:
                assert time.monotonic() < until, "no commit"
                assert all(process.poll() is None for process in group.processes), group.wait(60)
                time.sleep(0.005)
            time.sleep(pause)
            group.kill(victim)
            held.release()
            ended = group.wait(280)
        assert ended[victim].code == -signal.SIGKILL, "it was at work"
        for number, end in enumerate(ended):
            if number != victim:
                assert end.code == ExitCode.HOST_LOST, (number, end.code, end.err)
                assert any(f"worker {victim}" in line for line in end.lines), (number, end.err)

    def lose_early(self, hosts: int, devices: int, victim: int, seconds: float) -> None:
        """Kill one after a while, wherever it is: finding the others, loading, compiling, or at work."""
        with self._started(hosts, devices) as group:
            time.sleep(seconds)
            group.kill(victim)
            ended = group.wait(280)
        for number, end in enumerate(ended):
            if number != victim and end.code != 0:
                assert end.code == ExitCode.HOST_LOST, (number, end.code, end.err)
                assert any(f"worker {victim}" in line for line in end.lines), (number, end.err)

    def _started(
        self, hosts: int, devices: int, more: Mapping[str, str] | None = None
    ) -> contextlib.AbstractContextManager[Launch]:
        place = f"127.0.0.1:{free_port()}"
        commands = [
            [sys.executable, "-m", "spile.cli.main", *self.words, *self.place(place, number, hosts)]
            for number in range(hosts)
        ]
        return started(commands, [clean_environment(devices, more)] * hosts)

    @staticmethod
    def place(address: str, number: int, hosts: int) -> list[str]:
        return [
            *("--coordinator-address", address),
            *("--process-id", str(number)),
            *("--num-processes", str(hosts)),
        ]

    def finish(self, reference: Dataset, count: int = WHOLE) -> None:
        """Whole, each sample once, the right rows."""
        report = verify(str(self.root))
        assert report.ok, report.problems
        assert_same_rows(open_dataset(str(self.root)), reference, count)


def test_a_killed_host_and_a_slice_of_another_size(tmp_path: Path, reference: Dataset) -> None:
    tpu = Slice(tmp_path / "out")
    tpu.lose(2, 2, 1, after=3)
    assert 3 <= tpu.commits() < WHOLE // 4, "there is work left"
    ended = tpu.run(1, 4)
    assert ended[0].code == 0, ended[0].err
    tpu.finish(reference)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_twenty_deaths_then_two_hosts_then_eight(tmp_path: Path) -> None:
    """One dataset: a slice of four loses a host twenty times, one of two goes on and loses one, eight end it.

    Each of the twenty dies at work, between this slice's first commits and its last, from the run's begin to its end.
    """
    variants, chance = 24, random.Random(6)
    reference = alone(tmp_path / "alone", variants)
    tpu = Slice(tmp_path / "out", variants)
    died_at = []
    for number in range(20):
        tpu.lose(4, 2, chance.randrange(4), after=chance.randint(1, 4), pause=chance.uniform(0.0, 0.2))
        died_at.append(tpu.commits())
        if number % 7 == 0:
            tpu.lose_early(4, 2, chance.randrange(4), chance.uniform(0.2, 2.5))
    whole = 48 * variants // 8
    assert died_at[0] < whole / 5
    assert whole / 3 < died_at[-1] < whole
    tpu.lose(2, 4, 0, after=2)
    ended = tpu.run(8, 1)
    assert [end.code for end in ended] == [0] * 8, [end.err for end in ended]
    tpu.finish(reference, 48 * variants)


@pytest.mark.slow
def test_a_signal_on_one_host_stops_all_at_the_same_batch(tmp_path: Path, reference: Dataset) -> None:
    """The other host has no signal; both commit what they have, say so by exit code 130, and the run goes on alone."""
    body = """
import threading
from spile.run.worker import run_stream
from spile.compute.progress import Progress
from spile.spec.run import DataSpec, RunSpec, PromptSpec
stop, progress = threading.Event(), Progress()
if me == 1:  # as a signal's handler does, once the second batch has come home
    whole = progress.add
    progress.add = lambda **counts: (whole(**counts), progress.snapshot().samples >= 8 and stop.set())
with join(identity, times=PodTimes(120, 120, 60)) as pod:
    data = DataSpec(max_seq_length=64, prompt=PromptSpec(predictions_per_task={variants}))
    spec = RunSpec(data=data, output={root!r}, store_dtype="float32", layers=(1, 3), batch_size=1)
    summary = run_stream(spec, stop=stop, progress=progress, hosts=pod)
    with open({root!r} + f"/../ended-{{me}}", "w") as file:
        file.write(f"{{summary.exit_code}} {{summary.samples}}")
"""
    with launch(tmp_path, body.format(root=str(tmp_path / "out"), variants=VARIANTS), 2, devices=2) as group:
        ended = group.wait(280)
    assert [end.code for end in ended] == [0, 0], ended[0].err + ended[1].err
    text = {(tmp_path / f"ended-{number}").read_text() for number in range(2)}
    assert len(text) == 1
    code, committed = map(int, text.pop().split())
    assert code == 130
    assert 8 <= committed < WHOLE
    tpu = Slice(tmp_path / "out")
    assert tpu.run(1, 1)[0].code == 0
    tpu.finish(reference)


@pytest.mark.slow
def test_a_zombie_slice_is_fenced_as_a_whole(tmp_path: Path) -> None:
    body = """
from spile.objects import open_folder
from spile.run import worker as module
from spile.spec.run import DataSpec, RunSpec
with join(identity, times=PodTimes(120, 120, 60)) as pod:
    data = DataSpec(max_seq_length=64, max_samples=16)
    spec = RunSpec(data=data, output={root!r}, store_dtype="float32", layers=(1,), batch_size=1, mesh_shape=(2, 1))
    real = module._agree_on_stream
    def agreed(run, stream, hosts):
        found = real(run, stream, hosts)
        if me == 0:  # another worker takes the stream between our plan and our first commit
            from spile.spec.sample import Skip
            from spile.store.writer import join_stream
            other = join_stream(run.root, 0, run.stream_identity, run.identity)
            other.commit([], [Skip(0, "x", "taken by another")])
        return found
    module._agree_on_stream = agreed
    module.run_stream(spec, hosts=pod)
"""
    with launch(tmp_path, body.format(root=str(tmp_path / "out")), 2) as group:
        ended = group.wait(280)
    assert [end.code for end in ended] == [3, 3], ended[0].err + ended[1].err
    assert "another worker owns this stream" in ended[0].lines[0]
    assert "worker 0 (host-0) ended: another worker owns this stream" in ended[1].lines[0]


@pytest.mark.slow
def test_another_command_on_one_host_is_refused_by_name(tmp_path: Path) -> None:
    place = f"127.0.0.1:{free_port()}"
    tpu = Slice(tmp_path / "out")
    commands = [
        [sys.executable, "-m", "spile.cli.main", *tpu.words, *tpu.place(place, number, 2), "--seed", str(number)]
        for number in range(2)
    ]
    with started(commands, [clean_environment(1)] * 2) as group:
        ended = group.wait(120)
    assert [end.code for end in ended] == [2, 2], ended[0].err
    assert ended[1].lines[0].startswith("spile: worker 1 of 2 was started with a different command than worker 0: data")
    assert "ended: worker 1 of 2 was started with a different command" in ended[0].lines[0]
