"""Time a whole run in a process of its own, from its first import to its last commit.

``python -m spile.planning.timed_run SPEC`` is that process; SPEC is a file with a pickled run spec.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from spile.data.stream import open_stream
from spile.errors import Failure
from spile.models.model_files import find
from spile.reading.dataset import stored_tokens
from spile.spec.ranges import Ranges
from spile.spec.run import ExtractSpec
from spile.spec.sample import Sample
from spile.worker.progress import WallTime
from spile.worker.resolve import prompt_tokenizer


@dataclass(frozen=True)
class TimedRun:
    """How long one process took, and for what."""

    seconds: float
    """From the start of the process to its end, measured by the parent process."""
    tokens: int
    programs: int
    wall: WallTime

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def first_batch(self) -> float:
        """Seconds from the start of the process to the first batch on the device."""
        return self.wall.start + self.wall.compile


def cold_and_warm(spec: ExtractSpec, tokens: int, folder: Path) -> tuple[TimedRun, TimedRun]:
    """Time a run over the first ``tokens`` tokens twice: without cached programs, and with those of the first."""
    count = _samples(spec, tokens)
    limited = replace(spec, data=replace(spec.data, max_samples=count), commit_every=None)
    with tempfile.TemporaryDirectory(dir=folder, prefix="cache-") as cache:
        return _run(limited, folder, cache), _run(limited, folder, cache)


def _samples(spec: ExtractSpec, tokens: int) -> int:
    """Return how many samples hold that many tokens: at least one, and all if the dataset has fewer."""
    files = find(spec.model, spec.revision)
    data = stored_tokens(spec.data)
    stream = open_stream(data, prompt_tokenizer(files, data.prompt, optional=True), files.config.vocab_size)
    total = count = 0
    for item in stream.read(Ranges()):
        count = item.index + 1
        total += len(item) if isinstance(item, Sample) else 0
        if total >= tokens:
            break
    return max(1, count)


def _run(spec: ExtractSpec, folder: Path, cache: str) -> TimedRun:
    with tempfile.TemporaryDirectory(dir=folder, prefix="run-") as output:
        path = Path(output) / "spec"
        path.write_bytes(pickle.dumps(replace(spec, output=str(Path(output) / "run"))))
        began = time.perf_counter()
        done = subprocess.run(  # noqa: S603 - our own module
            [sys.executable, "-m", "spile.planning.timed_run", str(path)],
            check=False,
            capture_output=True,
            text=True,
            env={**os.environ, "JAX_COMPILATION_CACHE_DIR": cache},
        )
        seconds = time.perf_counter() - began
    if done.returncode:
        raise Failure("the timed run failed", found=(done.stderr.strip().splitlines() or ["no message"])[-1][:300])
    answer = json.loads(done.stdout.splitlines()[-1])
    return TimedRun(seconds, answer["tokens"], answer["programs"], WallTime(**answer["wall"]))


def _main() -> None:
    from spile.worker.extract import run_stream
    from spile.worker.progress import Progress, Timeline

    progress = Progress(timeline=Timeline.of_process())
    spec = pickle.loads(Path(sys.argv[1]).read_bytes())  # noqa: S301 - written by _run, a moment ago
    done = run_stream(spec, progress=progress).progress
    print(json.dumps({"tokens": done.tokens, "programs": done.shapes, "wall": asdict(done.wall)}))


if __name__ == "__main__":
    _main()
