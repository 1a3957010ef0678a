"""Workers on this machine: each has its own cores and, if the machine has accelerators, its own chips."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from spile.engines.registry import EngineOptions
from spile.engines.supervisor import ClusterCheck, StreamTask, WorkerEnd
from spile.errors import SpecError
from spile.objects import open_folder
from spile.objects.machine import local_cores
from spile.objects.preflight import preflight


@dataclass(frozen=True)
class WorkerShare:
    """The cores and variables of one worker."""

    cores: tuple[int, ...]
    env: Mapping[str, str] = field(default_factory=dict)


def local_chips(environment: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return the accelerators by kind, numbered as by their runtimes. JAX is not used: it would reserve them."""
    tpus = len([*Path("/dev").glob("accel[0-9]*"), *Path("/dev").glob("vfio/[0-9]*")])
    return {"GPU": _gpus(environment), "TPU": tuple(map(str, range(tpus)))}


def _gpus(environment: Mapping[str, str]) -> tuple[str, ...]:
    if "CUDA_VISIBLE_DEVICES" in environment:
        return tuple(word for word in environment["CUDA_VISIBLE_DEVICES"].split(",") if word)
    program = shutil.which("nvidia-smi")
    if program is None:
        return ()
    words = [program, "--query-gpu=index", "--format=csv,noheader"]
    listed = subprocess.run(words, capture_output=True, text=True, check=False)  # noqa: S603
    return tuple(listed.stdout.split()) if listed.returncode == 0 else ()


def divide_machine(
    workers: int, cores: Sequence[int], chips: Mapping[str, Sequence[str]], asked: Mapping[str, float]
) -> list[WorkerShare]:
    """Return a share for each worker: separate cores if there are enough, and whole chips that no other worker has."""
    kind, each = _chips_per_worker(workers, chips, asked)
    threads = max(1, len(cores) // workers)
    found = []
    for worker in range(workers):
        own = tuple(cores[(worker * threads + place) % len(cores)] for place in range(threads))
        env = thread_limits(threads)
        if kind:
            env |= _visible_chips(kind, chips[kind][worker * each : (worker + 1) * each])
        found.append(WorkerShare(own, env))
    return found


def thread_limits(threads: int) -> dict[str, str]:
    """Return the variables that limit the threads of NumPy, the tokenizer and XLA."""
    return dict.fromkeys(("OMP_NUM_THREADS", "RAYON_NUM_THREADS", "NPROC"), str(threads))


def _chips_per_worker(workers: int, chips: Mapping[str, Sequence[str]], asked: Mapping[str, float]) -> tuple[str, int]:
    """Return the kind of accelerator to share and the number for each worker; an empty kind if there is none."""
    unknown = sorted(set(asked) - {"GPU", "TPU"})
    if unknown:
        raise SpecError("--resources", expected="GPU=N or TPU=N with --engine local", found=", ".join(unknown))
    kind = next(iter(asked), "") or next((name for name in ("TPU", "GPU") if chips.get(name)), "")
    if not kind:
        return "", 0
    there = len(chips.get(kind, ()))
    if not there:
        raise SpecError(f"--resources {kind}", expected=f"a machine with {kind}s", found="none here")
    each = int(asked.get(kind, there // workers))
    if each < 1 or each * workers > there:
        raise SpecError(
            f"--num-workers {workers} with {each or 1} {kind} each",
            expected=f"at most {there} {kind} in all",
            found=str((each or 1) * workers),
            fix=f"use --num-workers {max(1, there // max(1, each))}",
        )
    return kind, each


def _visible_chips(kind: str, chips: Sequence[str]) -> dict[str, str]:
    if kind == "GPU":
        return {"CUDA_VISIBLE_DEVICES": ",".join(chips)}
    # From JAX's guide for several processes on one TPU host: libtpu needs the bounds of the visible chips.
    bounds = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}.get(len(chips))
    if bounds is None:
        raise SpecError("--resources TPU", expected="1, 2, 4 or 8 chips for each worker", found=str(len(chips)))
    return {
        "TPU_VISIBLE_CHIPS": ",".join(chips),
        "TPU_CHIPS_PER_PROCESS_BOUNDS": bounds,
        "TPU_PROCESS_BOUNDS": "1,1,1",
    }


_TAIL = 40
_CHILD = str(Path(__file__).with_name("child.py"))


class WorkerProcess:
    """A worker in a separate process, so that a crash of the model's runtime ends only one attempt."""

    def __init__(
        self,
        words: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cores: Sequence[int] = (),
        on_line: Callable[[str], None] = lambda _line: None,
    ) -> None:
        command = [sys.executable, "-m", "spile.cli.main", *words]
        place = ",".join(map(str, cores))
        self._on_line = on_line
        self._tail: deque[str] = deque(maxlen=_TAIL)
        self._process = subprocess.Popen(  # noqa: S603
            [sys.executable, _CHILD, str(os.getpid()), place, *command],
            env={**os.environ, "PYTHONUNBUFFERED": "1", **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # Ctrl+C goes to the supervisor, which asks all workers to commit.
        )
        self._reader = threading.Thread(target=self._read, name="worker-output", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def last_lines(self) -> str:
        return "\n".join(self._tail)

    def poll(self) -> int | None:
        """Return its exit code if it has ended, 128 + n for signal n; otherwise None."""
        code = self._process.poll()
        if code is None:
            return None
        self._reader.join(5.0)  # its last lines may be the result
        return code if code >= 0 else 128 - code

    def wait(self, seconds: float) -> int | None:
        """Wait at most ``seconds`` for its end, then :meth:`poll`."""
        try:
            self._process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        return self.poll()

    def stop(self) -> None:
        """Ask it to commit and end."""
        if self._process.poll() is None:
            self._process.terminate()

    def kill(self) -> None:
        """End it and its children at once."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)

    def _read(self) -> None:
        with self._process.stdout or nullcontext(()) as lines:
            for line in lines:
                self._tail.append(line.rstrip("\n"))
                self._on_line(line.rstrip("\n"))


_POLL = 0.05


class LocalEngine:
    """Runs workers as processes of this machine."""

    name = "local"
    elsewhere = False

    def __init__(self, options: EngineOptions, output: str) -> None:  # noqa: ARG002  (every folder is fine)
        refused = {"--ray-address": options.ray_address, "--hosts-per-worker": options.hosts_per_worker > 1}
        for flag, given in refused.items():
            if given:
                raise SpecError(flag, expected="--engine ray", found="--engine local")
        cores = local_cores()
        workers = options.num_workers or len(cores)
        self.workers = self.room = workers
        self._log_dir = options.log_dir
        if self._log_dir is not None:
            self._log_dir.mkdir(parents=True, exist_ok=True)
        self._free = divide_machine(workers, cores, local_chips(os.environ), options.needs)
        self._running: dict[int, tuple[WorkerProcess, WorkerShare]] = {}

    def check(self, asked: ClusterCheck) -> None:
        preflight(open_folder(asked.output))

    def start(self, task: StreamTask, avoid: Collection[str] = ()) -> None:  # noqa: ARG002  (there is only one machine)
        share = self._free.pop(0)
        env = {**share.env, **task.env}
        process = WorkerProcess(task.single_process_words, env=env, cores=share.cores, on_line=self._log(task.stream))
        self._running[task.stream] = process, share

    def _log(self, stream: int) -> Callable[[str], None]:
        if self._log_dir is None:
            return lambda _line: None
        return partial(_append, self._log_dir / f"stream_{stream:03d}.log")

    def wait(self, seconds: float) -> Sequence[WorkerEnd]:
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
                ends.append(WorkerEnd(stream, code, "", process.last_lines))
        return ends

    def stop(self, stream: int) -> None:
        if stream in self._running:
            self._running[stream][0].stop()

    def abandon(self, stream: int) -> None:
        """Stop it: no worker on this machine is out of reach."""
        self.stop(stream)

    def kill(self) -> None:
        for process, _ in self._running.values():
            process.kill()

    def close(self) -> None:
        self.kill()
        for process, _ in self._running.values():
            process.wait(5.0)


def _append(path: Path, line: str) -> None:
    """Append a line of output to a file, which all attempts of a stream share."""
    with path.open("a", encoding="utf-8") as file:
        file.write(line + "\n")
