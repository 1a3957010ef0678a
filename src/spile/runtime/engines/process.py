"""One worker as a process: the same on this machine and on a cluster's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path

__all__ = ["WorkerProcess"]

_TAIL = 40
_CHILD = str(Path(__file__).with_name("child.py"))


class WorkerProcess:
    """``spile extract`` in a process of its own: a crash of the model's runtime ends one stream's attempt, no more."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        without: Collection[str] = (),
        cores: Sequence[int] = (),
        hear: Callable[[str], None] = lambda _line: None,
    ) -> None:
        command = [sys.executable, "-m", "spile.cli.main", *words]
        place = ",".join(map(str, cores))
        inherited = {name: value for name, value in os.environ.items() if name not in without}
        self._hear = hear
        self._tail: deque[str] = deque(maxlen=_TAIL)
        self._process = subprocess.Popen(  # noqa: S603
            [sys.executable, _CHILD, str(os.getpid()), place, *command],
            env={**inherited, "PYTHONUNBUFFERED": "1", **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # the terminal's Ctrl+C is for the one who started it, who asks all to commit
        )
        self._reader = threading.Thread(target=self._read, name="worker-output", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """The process's number."""
        return self._process.pid

    @property
    def said(self) -> str:
        """Its last lines."""
        return "\n".join(self._tail)

    def poll(self) -> int | None:
        """Its exit code once it has ended; 128 + n for signal n."""
        code = self._process.poll()
        if code is None:
            return None
        self._reader.join(1.0)
        return code if code >= 0 else 128 - code

    def wait(self, seconds: float) -> int | None:
        """:meth:`poll`, after so long at most."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        return self.poll()

    def stop(self) -> None:
        """Ask it to commit what is done and end."""
        if self._process.poll() is None:
            self._process.terminate()

    def kill(self) -> None:
        """End it and what it started, at once."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def _read(self) -> None:
        with self._process.stdout or nullcontext(()) as lines:
            for line in lines:
                self._tail.append(line.rstrip("\n"))
                self._hear(line.rstrip("\n"))
