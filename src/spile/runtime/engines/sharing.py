"""One machine among N workers: each gets its own cores, and its own chips where there are some."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from spile.errors import SpecError

__all__ = ["WorkerShare", "shares", "this_machines_chips", "thread_limits"]


@dataclass(frozen=True)
class WorkerShare:
    """What one worker may use."""

    cores: tuple[int, ...]
    env: Mapping[str, str] = field(default_factory=dict)


def this_machines_chips(environment: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """The accelerators by kind, as their runtimes number them. JAX is not asked: it would take them."""
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


def shares(
    workers: int, cores: Sequence[int], chips: Mapping[str, Sequence[str]], asked: Mapping[str, float]
) -> list[WorkerShare]:
    """A share for each worker: cores apart while there are enough; whole chips, never one chip for two."""
    kind, each = _chips_each(workers, chips, asked)
    threads = max(1, len(cores) // workers)
    found = []
    for worker in range(workers):
        own = tuple(cores[(worker * threads + place) % len(cores)] for place in range(threads))
        env = thread_limits(threads)
        if kind:
            env |= _visible(kind, chips[kind][worker * each : (worker + 1) * each])
        found.append(WorkerShare(own, env))
    return found


def thread_limits(threads: int) -> dict[str, str]:
    """What keeps a worker to so many threads: NumPy's, the tokenizer's, XLA's."""
    return dict.fromkeys(("OMP_NUM_THREADS", "RAYON_NUM_THREADS", "NPROC"), str(threads))


def _chips_each(workers: int, chips: Mapping[str, Sequence[str]], asked: Mapping[str, float]) -> tuple[str, int]:
    """The kind of accelerator that is shared out, and how many each worker gets; no kind where there is none."""
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
            fix=f"--num-workers {max(1, there // max(1, each))}",
        )
    return kind, each


def _visible(kind: str, chips: Sequence[str]) -> dict[str, str]:
    if kind == "GPU":
        return {"CUDA_VISIBLE_DEVICES": ",".join(chips)}
    # As JAX's guide for several processes on one TPU host; libtpu takes the bounds of what it may see.
    bounds = {1: "1,1,1", 2: "1,2,1", 4: "2,2,1", 8: "2,4,1"}.get(len(chips))
    if bounds is None:
        raise SpecError("--resources TPU", expected="1, 2, 4 or 8 chips for each worker", found=str(len(chips)))
    return {
        "TPU_VISIBLE_CHIPS": ",".join(chips),
        "TPU_CHIPS_PER_PROCESS_BOUNDS": bounds,
        "TPU_PROCESS_BOUNDS": "1,1,1",
    }
