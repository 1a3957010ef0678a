"""Ctrl+C while a command starts: real signals to real processes, whatever is being loaded then. One line, exit 130."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

PROGRAM = """
import gc, os, signal, sys

kind, moment, *words = sys.argv[1:]

def interrupt():
    os.kill(os.getpid(), signal.SIGINT)

class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name != moment:
            return
        sys.meta_path.remove(self)
        if kind == "collected":
            gc.callbacks.append(collected)
            gc.collect()
        elif kind == "import":
            interrupt()
        else:
            try:
                interrupt()
            except BaseException:
                if kind == "broken":
                    raise ImportError("an extension module that failed to import")

def collected(*_):
    gc.callbacks.remove(collected)
    interrupt()

sys.meta_path.insert(0, Interrupting())

from spile.cli.main import main
main(words)
"""
"""Interrupted where a module is looked for: as it is, in a callback of the collector that throws exceptions away, by
an import that makes another error of it (``broken``), by one that swallows it."""
JAX_USERS = ["infer", "plan", "pod check"]


def slow(kind: str, *moments: str) -> list[Any]:
    return [pytest.param(kind, moment, marks=pytest.mark.slow) for moment in moments]


def interrupted(folder: Path, kind: str, moment: str, *words: str) -> tuple[int, str, str]:
    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, kind, moment, *words],
        cwd=folder,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return ran.returncode, ran.stdout, ran.stderr


@pytest.mark.parametrize(
    ("kind", "moment"),
    [
        ("import", "cyclopts"),
        ("broken", "jax.numpy"),
        *slow("import", "spile.cli.extract", "spile.run.worker", "jax._src.core"),
        *slow("collected", "spile.cli.extract", "spile.run.worker"),
        *slow("broken", "rich.console", "spile.run.worker"),
        *slow("swallowed", "jax._src.dtypes"),
    ],
)
def test_ctrl_c_is_one_line_during_any_import(tmp_path: Path, kind: str, moment: str) -> None:
    assert interrupted(tmp_path, kind, moment, "extract") == (130, "", "spile: interrupted\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_ctrl_c_that_is_lost_just_before_the_run_ends_the_start_or_the_run(tmp_path: Path) -> None:
    """A second signal a moment later, when the run may have started, is reported as usual."""
    code, output, errors = interrupted(tmp_path, "collected", "spile.view.worker", "extract")
    assert code == 130, (output, errors)
    assert errors == "spile: interrupted\n" or (not errors and "the same command again resumes" in output), (
        output,
        errors,
    )
    assert "Traceback" not in output


@pytest.mark.slow
@pytest.mark.parametrize("command", JAX_USERS)
def test_every_command_that_loads_jax_ends_alike(tmp_path: Path, command: str) -> None:
    assert interrupted(tmp_path, "broken", "jax._src.core", *command.split()) == (130, "", "spile: interrupted\n")


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(24))
def test_ctrl_c_at_any_moment_of_the_start(tmp_path: Path, seed: int) -> None:
    """Signals at fixed times. The start of the interpreter is not tested; the samples take longer than the signal."""
    words = [sys.executable, "-m", "spile.cli.main", "extract", "--layers", "1", "--predictions-per-task", "64"]
    run = subprocess.Popen(
        words, cwd=tmp_path, env={**os.environ, "JAX_PLATFORMS": "cpu"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    time.sleep(random.Random(seed).uniform(0.15, 2.5))
    for _ in range(1 + seed % 2):
        run.send_signal(signal.SIGINT)
        time.sleep(0.02)
    output, errors = run.communicate(timeout=120)
    # An interrupt inside exec() is remembered by Python, which ends by the signal then. A shell says 130 of both.
    assert run.returncode in (130, -signal.SIGINT), (output, errors)
    assert errors.decode() in ("spile: interrupted\n", ""), output


@pytest.mark.slow
@pytest.mark.parametrize(("words", "code"), [("--version", 0), ("verify nowhere", 2)])
def test_a_thread_inside_a_library_does_not_abort_the_end(tmp_path: Path, words: str, code: int) -> None:
    """The interpreter ends daemon threads; one that is inside JAX's C++ code would end the process with SIGABRT."""
    program = """
import sys, threading, time
import jax, jax.numpy as jnp

def compile_forever():
    while True:
        jax.jit(lambda x: jnp.sin(x) @ x.T)(jnp.ones((64, 64))).block_until_ready()

for _ in range(6):
    threading.Thread(target=compile_forever, daemon=True).start()
time.sleep(1)
from spile.cli.main import run_process
run_process()
"""
    ran = subprocess.run(
        [sys.executable, "-c", program, *words.split()], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (ran.returncode, len((ran.stdout + ran.stderr).splitlines())) == (code, 1)
