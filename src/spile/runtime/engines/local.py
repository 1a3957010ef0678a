"""N workers on this machine, with no cluster: each a process on its own share of cores and chips."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

from spile.errors import SpecError
from spile.objects import open_folder
from spile.objects.environment import this_machines_cores
from spile.objects.preflight import preflight
from spile.runtime.engines.engine import ClusterCheck, StreamTask, WorkerEnd
from spile.runtime.engines.process import WorkerProcess
from spile.runtime.engines.sharing import WorkerShare, shares, this_machines_chips

__all__ = ["LocalEngine"]

_POLL = 0.05


class LocalEngine:
    """The engine that needs nothing."""

    name = "local"
    elsewhere = False

    def __init__(self, workers: int, resources: Mapping[str, float] | None = None, log_dir: Path | None = None) -> None:
        if workers < 1:
            raise SpecError("--num-workers", expected="1 or more", found=str(workers))
        self.workers = self.room = workers
        self._log_dir = log_dir
        self._free = shares(workers, this_machines_cores(), this_machines_chips(os.environ), resources or {})
        self._running: dict[int, tuple[WorkerProcess, WorkerShare]] = {}

    def check(self, asked: ClusterCheck) -> None:
        """Whether the output can be written."""
        preflight(open_folder(asked.output))

    def start(self, task: StreamTask, avoid: Collection[str] = ()) -> None:  # noqa: ARG002  (there is but one machine)
        """A process on a free share."""
        share = self._free.pop(0)
        env = {**share.env, **task.env}
        process = WorkerProcess(
            task.alone, env=env, without=task.without, cores=share.cores, hear=self._log(task.stream)
        )
        self._running[task.stream] = process, share

    def wait(self, seconds: float) -> Sequence[WorkerEnd]:
        """Those that ended by now, or soon."""
        until = time.monotonic() + seconds
        while not (ends := self._ended()) and time.monotonic() < until:
            time.sleep(_POLL)
        return ends

    def _ended(self) -> list[WorkerEnd]:
        ends = []
        for stream, (process, share) in list(self._running.items()):
            code = process.poll()
            if code is not None:
                del self._running[stream]
                self._free.append(share)
                ends.append(WorkerEnd(stream, code, "", process.said))
        return ends

    def stop(self, stream: int) -> None:
        """SIGTERM: it commits."""
        if stream in self._running:
            self._running[stream][0].stop()

    def abandon(self, stream: int) -> None:
        """No worker here is out of reach: the same as a stop."""
        self.stop(stream)

    def kill(self) -> None:
        """SIGKILL."""
        for process, _ in self._running.values():
            process.kill()

    def close(self) -> None:
        """Nothing is left: whoever still runs was not waited for."""
        self.kill()
        for process, _ in self._running.values():
            process.wait(5.0)

    def _log(self, stream: int) -> _LogFile:
        return _LogFile(None if self._log_dir is None else self._log_dir / f"stream_{stream:03d}.log")


class _LogFile:
    """A stream's lines, all its attempts one after the other."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def __call__(self, line: str) -> None:
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
