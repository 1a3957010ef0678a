"""SIGTERM and Ctrl+C in every phase that can take minutes: nothing is computed yet, so the process ends at once."""

from __future__ import annotations

import signal
import socket
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from pod.launching import Ended, Launch, clean_environment, started
from ports import free_port

PREAMBLE = """
import ctypes, pathlib, sys, threading
from spile.cli.main import main
from spile.compute import device
here = pathlib.Path({folder!r})
number = sys.argv[1]

def hang(*_, **__):
    '''Outside Python, where no handler runs, for ever.'''
    (here / f"hangs-{{number}}").touch()
    lock = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(lock)
"""
WORDS = "['extract', '--max-samples', '4', '--max-seq-length', '64', '--output', str(here / 'out')"


def start(folder: Path, body: str, count: int = 1, more: dict[str, str] | None = None):  # type: ignore[no-untyped-def]
    script = folder / "script.py"
    script.write_text(PREAMBLE.format(folder=str(folder)) + textwrap.dedent(body))
    environments = [clean_environment(1, more)] * count
    return started([[sys.executable, str(script), str(number)] for number in range(count)], environments)


def appears(path: Path, group: Launch) -> None:
    until = time.monotonic() + 120
    while not path.exists():
        assert all(process.poll() is None for process in group.processes), group.wait(5)
        assert time.monotonic() < until, path
        time.sleep(0.01)


def ended_at_once(ended: Sequence[Ended]) -> None:
    for end in ended:
        assert end.code == 130, (end.code, end.out, end.err)
        assert "Traceback" not in end.err


@pytest.mark.parametrize("kind", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_while_the_model_is_loaded(tmp_path: Path, kind: int) -> None:
    """The main thread is blocked in a library."""
    with start(tmp_path, f"device.load = hang; main({WORDS}])") as group:
        appears(tmp_path / "hangs-0", group)
        group.kill(0, kind)
        ended_at_once(group.wait(120))
    assert not list((tmp_path / "out").rglob("commits/*"))


@pytest.mark.slow
def test_while_a_program_is_compiled(tmp_path: Path) -> None:
    """The compiler's thread hangs, and the interpreter would wait for it."""
    with start(tmp_path, f"device.DeviceProducer.compile = hang; main({WORDS}])") as group:
        appears(tmp_path / "hangs-0", group)
        group.kill(0, signal.SIGTERM)
        (end,) = group.wait(120)
    ended_at_once([end])
    assert "SIGTERM: nothing is computed yet, so this ends at once" in end.out
    assert end.lines == ["spile: interrupted"]
    assert not list((tmp_path / "out").rglob("commits/*"))


@pytest.mark.slow
def test_while_the_model_is_downloaded(tmp_path: Path) -> None:
    """A hub that accepts the connection and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as hub:
        more = {"HF_ENDPOINT": f"http://127.0.0.1:{hub.getsockname()[1]}", "HF_HOME": str(tmp_path / "hf")}
        body = f"main({WORDS}, '--model', 'some/model'])"
        with start(tmp_path, body, more=more) as group:
            hub.settimeout(120)
            call, _ = hub.accept()
            with call:
                call.recv(1)
                group.kill(0, signal.SIGTERM)
                ended_at_once(group.wait(120))


@pytest.mark.parametrize("asked", [pytest.param(0, marks=pytest.mark.slow), 1])
def test_while_a_pod_waits_at_a_barrier(tmp_path: Path, asked: int) -> None:
    """Worker 1 hangs while loading and worker 0 waits for it: a signal to either ends both."""
    words = f"""{WORDS}, '--model', 'embedded', '--dataset', 'embedded',
                '--coordinator-address', '127.0.0.1:{free_port()}', '--process-id', number,
                '--num-processes', '2', '--barrier-timeout', '100'])"""
    body = f"""
from spile.run.pod.pod import Pod
if number == "1":
    device.load = hang
before = Pod.report
def report(self, text):
    before(self, text)
    if "model_loaded" in text:
        (here / "waits").touch()
Pod.report = report
main({words}
"""
    with start(tmp_path, body, 2) as group:
        appears(tmp_path / "hangs-1", group)
        appears(tmp_path / "waits", group)
        group.kill(asked, signal.SIGTERM)
        ended = group.wait(120)
    ended_at_once(ended)
    other = 1 - asked
    assert ended[other].lines[0].startswith(f"spile: worker {asked} (")
    assert ended[other].lines[0].endswith("ended: interrupted")


@pytest.mark.slow
@pytest.mark.parametrize("present", [0, 1])
def test_in_the_roll_call(tmp_path: Path, present: int) -> None:
    port = free_port()
    words = [
        *(sys.executable, "-m", "spile.cli.main", "pod", "check"),
        *("--coordinator-address", f"127.0.0.1:{port}", "--num-processes", "2", "--process-id", str(present)),
    ]
    with started([words], [clean_environment(1)]) as group:
        out = group.processes[0].stdout
        assert out is not None
        while "Waiting at 'pre_jax_init'" not in out.readline():
            assert group.processes[0].poll() is None
        group.kill(0, signal.SIGTERM)
        (end,) = group.wait(120)
    ended_at_once([end])
    assert end.lines == ["spile: interrupted"]


SECOND_HANGS = """
import json, time
from spile.compute import batches
from spile.compute import sizes as sizing
sizing._ROWS = {"cpu": (512, False)}
batches._CHUNK_TOKENS, batches._FIRST_CHUNK = 2000, 1  # the long ones come in a later chunk
texts = ["1 2 " * 20] * 120 + ["1 2 " * 350] * 6
(here / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + chr(10) for text in texts))
real, shapes = device.DeviceProducer.compile, set()
def compile(self, shape):
    shapes.add(shape)
    if len(shapes) > 1:
        while True:  # the first program's rows are there, and the worker waits for this one
            now = self._progress.snapshot()
            if now.samples and now.phase == "compiling":
                break
            time.sleep(0.01)
        hang()
    return real(self, shape)
device.DeviceProducer.compile = compile
main(['extract', '--dataset', str(here / "texts.jsonl"), '--max-seq-length', '1024', '--output', str(here / 'out'),
      '--batch-size', '1', '--batch-tokens', '512', %s])
"""
"""Rows of another length need another program, and its compiler never comes back."""


@pytest.mark.slow
def test_while_a_later_program_is_compiled(tmp_path: Path) -> None:
    """What was computed with the first is committed."""
    with start(tmp_path, SECOND_HANGS % "") as group:
        appears(tmp_path / "hangs-0", group)
        group.kill(0, signal.SIGTERM)
        (end,) = group.wait(120)
    ended_at_once([end])
    assert "finishing the batches in flight and committing them" in end.out
    assert list((tmp_path / "out").rglob("commits/0001.json"))


@pytest.mark.slow  # minutes where three processes share two cores
@pytest.mark.parametrize("asked", [0, 1])
def test_while_a_pod_compiles_a_later_program(tmp_path: Path, asked: int) -> None:
    """All stop at the same batch, and commit what they computed before it."""
    address = f"127.0.0.1:{free_port()}"
    words = (
        f"'--model', 'embedded', '--coordinator-address', '{address}', '--process-id', number, '--num-processes', '3'"
    )
    with start(tmp_path, SECOND_HANGS % words, 3) as group:
        for number in range(3):
            appears(tmp_path / f"hangs-{number}", group)
        group.kill(asked, signal.SIGTERM)
        ended = group.wait(120)
    ended_at_once(ended)
    assert list((tmp_path / "out").rglob("commits/0001.json"))
