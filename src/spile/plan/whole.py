"""A run as people start it: a process of its own, from its first import to its last commit.

``python -m spile.plan.whole SPEC`` is that process; SPEC is a pickled :class:`ExtractSpec`.
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
from spile.data.tokens import load_tokenizer
from spile.errors import Failure
from spile.models.model_files import find
from spile.spec.ranges import Ranges
from spile.spec.run import ExtractSpec
from spile.spec.sample import Sample
from spile.worker.progress import WallTime

__all__ = ["WholeRun", "cold_and_warm"]


@dataclass(frozen=True)
class WholeRun:
    """One process: how long it took, and where that went."""

    seconds: float
    """From the command to its end, by the watch of who started it."""
    tokens: int
    programs: int
    wall: WallTime

    @property
    def tokens_per_second(self) -> float:
        """Of the whole."""
        return self.tokens / self.seconds

    @property
    def first_batch(self) -> float:
        """Seconds from the command to the first batch on the device."""
        return self.wall.start + self.wall.compile


def cold_and_warm(spec: ExtractSpec, tokens: int, folder: Path) -> tuple[WholeRun, WholeRun]:
    """The same run twice over the dataset's first ``tokens``: with no program cached, and with those of the first."""
    count = _samples(spec, tokens)
    limited = replace(spec, data=replace(spec.data, max_samples=count), commit_every=None)
    with tempfile.TemporaryDirectory(dir=folder, prefix="cache-") as cache:
        return _run(limited, folder, cache), _run(limited, folder, cache)


def _samples(spec: ExtractSpec, tokens: int) -> int:
    """How many samples hold that many tokens, at least one; all where the dataset has fewer."""
    files = find(spec.model, spec.revision)
    stream = open_stream(spec.data, load_tokenizer(files.tokenizer_folder, optional=True), files.config.vocab_size)
    total = count = 0
    for item in stream.read(Ranges()):
        count = item.index + 1
        total += len(item) if isinstance(item, Sample) else 0
        if total >= tokens:
            break
    return max(1, count)


def _run(spec: ExtractSpec, folder: Path, cache: str) -> WholeRun:
    with tempfile.TemporaryDirectory(dir=folder, prefix="whole-") as output:
        path = Path(output) / "spec"
        path.write_bytes(pickle.dumps(replace(spec, output=str(Path(output) / "run"))))
        began = time.perf_counter()
        done = subprocess.run(  # noqa: S603 - our own module
            [sys.executable, "-m", "spile.plan.whole", str(path)],
            check=False,
            capture_output=True,
            text=True,
            env={**os.environ, "JAX_COMPILATION_CACHE_DIR": cache},
        )
        seconds = time.perf_counter() - began
    if done.returncode:
        raise Failure("the whole run failed", found=(done.stderr.strip().splitlines() or ["no word"])[-1][:300])
    answer = json.loads(done.stdout.splitlines()[-1])
    return WholeRun(seconds, answer["tokens"], answer["programs"], WallTime(**answer["wall"]))


def _main() -> None:
    from spile.worker.extract import extract
    from spile.worker.progress import Progress, Timeline

    progress = Progress(timeline=Timeline.of_process())
    spec = pickle.loads(Path(sys.argv[1]).read_bytes())  # noqa: S301 - written by _run, a moment ago
    visit = extract(spec, progress=progress).visit
    print(json.dumps({"tokens": visit.tokens, "programs": visit.shapes, "wall": asdict(visit.wall)}))


if __name__ == "__main__":
    _main()
