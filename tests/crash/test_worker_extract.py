"""``spile extract`` with a real model is killed and interrupted; the same command finishes it.

A row does not depend on what it was computed with beyond rounding. Another batch gives other shapes, and XLA sums a
product of another shape in another order: float32 rows differ in their last bits, and where such a value lies
between two bfloat16 numbers, the stored one is the neighbour.
"""

from __future__ import annotations

import io
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest

import spile
from holding import HeldCommits
from spile.data.lines import embedded_tasks
from spile.proof.verification import verify
from unit.cli.refusals import spile as spile_command

TASKS = 14
ROUNDING = 1e-4
"""Of a tap's RMS, in float32: what the contract on numbers allows."""


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few short tasks."""
    lines = sorted(embedded_tasks().read_text().splitlines(), key=len)[:TASKS]
    file = tmp_path_factory.mktemp("data") / "tasks.jsonl"
    file.write_text("\n".join(lines) + "\n")
    return file


class Command:
    """``spile extract`` on one output, with sizes that differ from call to call."""

    def __init__(self, tasks: Path, output: Path, store_dtype: str = "float32") -> None:
        self.output = output
        self._words = [
            "extract",
            "--model",
            "embedded",
            "--dataset",
            tasks,
            "--output",
            output,
            "--max-seq-length",
            "512",
        ]
        self._words += ["--store-dtype", store_dtype, "--layers", "0,2"]

    def start(self, *words: object, held: HeldCommits | None = None) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "spile.cli.main", *map(str, self._with_size(words))]
        environment = {**os.environ, "JAX_PLATFORMS": "cpu", **(held.environment if held is not None else {})}
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
        )

    def run(self, *words: object) -> str:
        """Run the command to its end in this process and return its output."""
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as errors:
            code = spile_command(*self._with_size(words))
        assert (code, errors.getvalue()) == (0, "")
        return " ".join(out.getvalue().split())

    def _with_size(self, words: Sequence[object]) -> list[object]:
        size = () if "--shard-size-gb" in words else ("--shard-size-gb", "0.001")
        return [*self._words, *size, *words]

    def until_committed(self, process: subprocess.Popen[str]) -> None:
        deadline = time.monotonic() + 200
        while not list(self.output.glob("stream_0/commits/*.json")):
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.005)


def until_said(word: str, process: subprocess.Popen[str]) -> str:
    """Return the output up to the line with this word."""
    assert process.stdout is not None
    message = ""
    while word not in message:
        line = process.stdout.readline()
        assert line, message
        message += line
    return message


def rows(root: Path) -> dict[tuple[int, str], np.ndarray]:
    """Every sample's rows at every tap."""
    dataset = spile.open(str(root))
    return {
        (sample.index, str(tap)): np.asarray(dataset.sample(0, sample.index).rows(str(tap)), np.float32)
        for sample in dataset.samples
        for tap in dataset.streams[0].taps
    }


def assert_equal(found: Path, wanted: Path, rounding: float = ROUNDING) -> None:
    """Check that the rows are equal up to rounding."""
    left, right = rows(found), rows(wanted)
    assert left.keys() == right.keys()
    for key in left:
        rms = float(np.sqrt(np.mean(right[key] ** 2)))
        assert np.abs(left[key] - right[key]).max() <= rounding * rms, key


@pytest.fixture(scope="module")
def whole(tasks: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run."""
    command = Command(tasks, tmp_path_factory.mktemp("whole") / "out")
    message = command.run()
    assert f"{TASKS} stored" in message
    return command.output


def finish(command: Command, whole: Path, *words: object) -> None:
    """Run it again to resume and a third time with nothing left; the rows equal those of an uninterrupted run."""
    before = {path: path.stat().st_mtime_ns for path in command.output.glob("stream_0/commits/*.json")}
    message = command.run(*words)
    assert f"{TASKS} stored" in message
    assert "of them now" in message or not before
    assert "nothing was left to do" in command.run(*words)
    assert all(path.stat().st_mtime_ns == when for path, when in before.items())
    proof = verify(str(command.output))
    assert proof.ok, proof.all_problems
    assert_equal(command.output, whole)


def test_sigterm_in_the_middle(tasks: Path, whole: Path, tmp_path: Path) -> None:
    command, held = Command(tasks, tmp_path / "out"), HeldCommits(tmp_path / "held", after=1)
    process = command.start("--batch-size", "1", held=held)
    command.until_committed(process)
    process.send_signal(signal.SIGTERM)
    out = until_said("SIGTERM", process)
    held.release()
    rest, errors = process.communicate(timeout=200)
    out += rest
    assert (process.returncode, errors) == (130, "")
    assert "SIGTERM: finishing the batches in flight and committing them (again: end at once)" in out
    assert "the same command again resumes" in out
    assert not list(tmp_path.rglob(".tmp-*"))
    assert 0 < len(spile.open(str(command.output)).samples) < TASKS
    finish(command, whole, "--batch-tokens", "2048", "--shard-size-gb", "0.0005")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_kills_in_the_middle(tasks: Path, whole: Path, tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    command = Command(tasks, tmp_path / "out")
    for _ in range(2):
        process = command.start("--batch-size", dice.choice([1, 2, 4]))
        if seed:
            command.until_committed(process)
        time.sleep(dice.uniform(0, 1.5))
        process.kill()
        process.communicate(timeout=60)
    finish(command, whole, "--batch-tokens", dice.choice([512, 1024, 4096]))


@pytest.mark.slow
def test_ctrl_c_in_the_middle(tasks: Path, whole: Path, tmp_path: Path) -> None:
    """To the whole foreground group, as a terminal sends it."""
    command, held = Command(tasks, tmp_path / "out"), HeldCommits(tmp_path / "held", after=1)
    process = command.start("--batch-size", "1", held=held)
    command.until_committed(process)
    os.killpg(process.pid, signal.SIGINT)
    out = until_said("SIGINT", process)
    held.release()
    rest, errors = process.communicate(timeout=200)
    out += rest
    assert (process.returncode, errors) == (130, "")
    assert "SIGINT: finishing the batches in flight" in out
    finish(command, whole, "--batch-size", "3")


@pytest.mark.slow
def test_ctrl_c_twice(tasks: Path, whole: Path, tmp_path: Path) -> None:
    command, held = Command(tasks, tmp_path / "out"), HeldCommits(tmp_path / "held", after=1)
    process = command.start("--batch-size", "1", held=held)
    command.until_committed(process)
    os.killpg(process.pid, signal.SIGINT)
    until_said("SIGINT", process)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=200)
    assert (process.returncode, errors) in ((130, "spile: interrupted\n"), (130, ""))
    finish(command, whole, "--batch-size", "2", "--batch-tokens", "600")


@pytest.mark.slow
def test_what_another_batch_changes_in_bfloat16(tasks: Path, tmp_path: Path) -> None:
    """A value is the stored one or its neighbour in bfloat16, and nearly always the stored one."""
    commands = [Command(tasks, tmp_path / name, "bfloat16") for name in ("a", "b")]
    commands[0].run()
    commands[1].run("--batch-size", "1")
    left, right = (rows(command.output) for command in commands)
    same = total = 0
    for key, values in left.items():
        apart = np.abs(values - right[key])
        rms = float(np.sqrt(np.mean(values**2)))
        assert (apart <= 2.0**-7 * np.abs(values) + ROUNDING * rms).all(), key
        same, total = same + int((apart == 0).sum()), total + apart.size
    assert same / total > 0.99


@pytest.mark.slow
def test_four_devices_of_one_process(tasks: Path, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Data parallelism over local devices gives the same rows as one device."""
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    command = Command(tasks, tmp_path / "out")
    process = command.start("--batch-tokens", "1024")
    message, errors = process.communicate(timeout=200)
    assert (process.returncode, errors) == (0, "")
    assert "device 4 × cpu" in " ".join(message.split())
    assert_equal(command.output, whole)
