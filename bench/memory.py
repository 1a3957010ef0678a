"""Check that memory is independent of the dataset: ``python -m bench.memory [FEW MANY]``, 10,000 and 1,000,000 samples.

A model with one layer and d_model 16 processes short samples. Each size runs in its own process, and the kernel reports
the peak. Both sizes must need the same memory.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from bench import SCRATCH
from bench.made_up import write_texts
from bench.shapes import make_model

__all__ = ["Peak", "main", "measure"]

MUST = 1.15
"""The largest accepted ratio of the two peaks. The smaller run does not fill all queues of the pipeline."""

_MEASURED = """
import sys
from spile.cli.main import main
from spile.compute.progress import peak_memory
try:
    main(sys.argv[1:])
finally:
    print(peak_memory())
"""


@dataclass(frozen=True)
class Peak:
    """The result of one run."""

    samples: int
    bytes: int
    """The peak host memory of the process in bytes."""
    seconds: float
    shards: int


def measure(samples: int, model: Path, folder: Path) -> Peak:
    """Run ``spile extract`` over this many samples in a separate process."""
    data, output = folder / f"{samples}.jsonl", Path(tempfile.mkdtemp(dir=folder))
    write_texts(data, samples)
    command = [sys.executable, "-c", _MEASURED, "extract", "--model", str(model), "--dataset", str(data)]
    began = time.perf_counter()
    done = subprocess.run([*command, "--output", str(output)], stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"spile extract over {samples} samples ended with {done.returncode}")
    shards = len(list(output.glob("stream_0/shard_*")))
    return Peak(samples, int(done.stdout.splitlines()[-1]), time.perf_counter() - began, shards)


def main(arguments: list[str] | None = None) -> int:
    """Print a line for each size and the ratio; return 1 if the larger size needs more memory."""
    given = arguments if arguments is not None else sys.argv[1:]
    few, many = (int(given[0]), int(given[1])) if given else (10_000, 1_000_000)
    console = Console()
    SCRATCH.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=SCRATCH) as name:
        model = make_model("speck", Path(name) / "speck")
        # The first run fills the cache of compiled programs, because the compiler's memory is not measured.
        measure(few, model, Path(name))
        peaks = [measure(count, model, Path(name)) for count in (few, many)]
    for peak in peaks:
        console.print(
            f"memory, {peak.samples:,} samples: {peak.bytes / 1e6:.0f} MB at most, {peak.shards} shards, "
            f"{peak.seconds:.0f} s",
            soft_wrap=True,
        )
    ratio = peaks[1].bytes / peaks[0].bytes
    console.print(f"must hold: at most {MUST} times as much: {ratio:.3f}, {'yes' if ratio <= MUST else 'NO'}")
    return 0 if ratio <= MUST else 1


if __name__ == "__main__":
    sys.exit(main())
