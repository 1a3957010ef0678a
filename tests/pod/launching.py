"""Real processes for the tests of pods: each runs a script with its number, and all end with the test."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ports import free_port

__all__ = ["Ended", "Launch", "clean_environment", "launch", "started"]

PREAMBLE = """
import os, sys, time, signal
from spile.run.pod.identity import Identity
from spile.run.pod.pod import PodTimes, join
me, count, port = (int(word) for word in sys.argv[1:4])
identity = Identity(me, count, "127.0.0.1", port, source="test", name=f"host-{me}")
"""
_COMPILING = (
    "JAX_COMPILATION_CACHE_DIR",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS",
    "JAX_DISABLE_MOST_OPTIMIZATIONS",
)


@dataclass(frozen=True)
class Ended:
    """A process that has ended."""

    code: int
    out: str
    err: str

    @property
    def lines(self) -> list[str]:
        """What it said as spile."""
        return [line for line in self.err.splitlines() if line.startswith("spile: ")]


@dataclass
class Launch:
    """Processes that act together."""

    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def wait(self, seconds: float = 120) -> list[Ended]:
        """Wait for all of them; fail if one does not end."""
        until = time.monotonic() + seconds
        ended = []
        for process in self.processes:
            out, err = process.communicate(timeout=max(1.0, until - time.monotonic()))
            ended.append(Ended(process.returncode, out, err))
        return ended

    def kill(self, number: int, sign: int = signal.SIGKILL) -> None:
        """A signal to one of them."""
        self.processes[number].send_signal(sign)


def clean_environment(devices: int = 1, more: Mapping[str, str] | None = None) -> dict[str, str]:
    """This environment without what makes a pod, with CPU devices and the tests' compiled programs."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in _COMPILING or not name.startswith(("TPU_", "CLOUD_TPU", "MEGASCALE", "JAX_", "XLA_", "SPILE_"))
    }
    return {
        **kept,
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "PYTHONUNBUFFERED": "1",
        **(more or {}),
    }


@contextlib.contextmanager
def started(commands: Sequence[Sequence[str]], environments: Sequence[Mapping[str, str]]) -> Iterator[Launch]:
    """Start them all; kill what is left at the end."""
    group = Launch()
    try:
        for command, environment in zip(commands, environments, strict=True):
            group.processes.append(
                subprocess.Popen(
                    list(command), env=dict(environment), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
                )
            )
        yield group
    finally:
        for process in group.processes:
            if process.poll() is None:
                process.kill()
            with contextlib.suppress(ValueError):
                process.communicate()


def launch(
    folder: Path, body: str, count: int, *, devices: int = 1, started_only: Sequence[int] | None = None
) -> contextlib.AbstractContextManager[Launch]:
    """Run ``body`` in ``count`` processes (or only those named), each knowing its number."""
    script = folder / "script.py"
    script.write_text(PREAMBLE + textwrap.dedent(body))
    port = free_port()
    numbers = range(count) if started_only is None else started_only
    commands = [[sys.executable, str(script), str(number), str(count), str(port)] for number in numbers]
    return started(commands, [clean_environment(devices)] * len(commands))
