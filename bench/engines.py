"""What an engine costs against the same workers started by hand: ``python -m bench.engines [--ray-address HOST:PORT]``.

The same streams of the embedded model, the same number of workers, one after the other on one machine: by hand (a loop
for each worker), with ``--engine local``, and with ``--engine ray`` where a cluster is named. Their turns alternate.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from spile.data.make.split import make_streams

SPILE = [sys.executable, "-m", "spile.cli.main", "extract", "--model", "embedded", "--shard-size-gb", "0.01"]


def by_hand(flags: list[str], streams: int, workers: int) -> None:
    """Each worker has every so-many-th stream, one process after the other."""

    def work(first: int) -> None:
        for stream in range(first, streams, workers):
            subprocess.run([*SPILE, *flags, "--worker-id", str(stream)], check=True, stdout=subprocess.DEVNULL)

    threads = [threading.Thread(target=work, args=(first,)) for first in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def with_engine(flags: list[str], *words: str) -> None:
    subprocess.run([*SPILE, *flags, *words], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--variants", type=int, default=8, help="of each of the 48 embedded tasks")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--ray-address", default=os.environ.get("RAY_ADDRESS"))
    options = parser.parse_args()
    workers = str(options.workers)
    kinds = ["by hand", "--engine local"] + (["--engine ray"] if options.ray_address else [])
    best = dict.fromkeys(kinds, float("inf"))
    with tempfile.TemporaryDirectory() as folder:
        make_streams("embedded", Path(folder) / "streams", options.streams)
        for turn in range(options.turns):
            for kind in kinds:
                flags = ["--dataset-dir", f"{folder}/streams", "--output", f"{folder}/{kind.replace(' ', '-')}-{turn}"]
                flags += ["--predictions-per-task", str(options.variants)]
                began = time.perf_counter()
                if kind == "by hand":
                    by_hand(flags, options.streams, options.workers)
                elif kind == "--engine local":
                    with_engine(flags, "--engine", "local", "--num-workers", workers)
                else:
                    with_engine(
                        flags, "--engine", "ray", "--num-workers", workers, "--ray-address", options.ray_address
                    )
                best[kind] = min(best[kind], time.perf_counter() - began)
    for kind, seconds in best.items():
        print(f"{kind:16} {seconds:6.1f} s  {seconds / best['by hand']:.2f} of by hand", flush=True)


if __name__ == "__main__":
    main()
