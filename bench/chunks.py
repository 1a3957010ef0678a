"""Measure the cost of shorter checksummed chunks for a writer: ``python -m bench.chunks DIR``.

Threads checksum and write pieces of about 4 MiB, each thread to its own file, as the writers of a worker do. The files
are overwritten repeatedly in a folder in memory, so only the interpreter limits the speed and the result is an upper
limit of the cost. With ``--busy`` another thread runs Python code all the time. The chunk lengths take turns; each
figure is the median of its turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from spile.objects.crc import ChunkedCrc

__all__ = ["main"]

LENGTHS = {"1 MiB": 1 << 20, "448 KiB (256 rows of 1,792 bytes)": 448 << 10, "224 KiB (128 rows)": 224 << 10}
_PIECE = 4 << 20
_FILE = 64 << 20


def _write(source: memoryview, handle: int, chunk: int, times: int) -> None:
    step = _PIECE // chunk * chunk
    for _ in range(times):
        crc = ChunkedCrc(chunk)
        for start in range(0, len(source), step):
            piece = source[start : start + step]
            crc.extend(piece)
            os.pwrite(handle, piece, start)


def _busy() -> None:
    while True:
        sum(range(1000))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a folder in memory, such as /dev/shm")
    parser.add_argument("--times", type=int, default=12, help="the number of times that each file is overwritten")
    parser.add_argument("--threads", default="1,2,4,8")
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--busy", action="store_true", help="run another thread of Python code all the time")
    args = parser.parse_args()
    counts = [int(word) for word in args.threads.split(",")]
    if args.busy:
        threading.Thread(target=_busy, daemon=True).start()
    with ExitStack() as stack:
        files = [stack.enter_context(tempfile.TemporaryFile(dir=args.folder)).fileno() for _ in range(max(counts))]
        sources = [np.random.default_rng(n).integers(0, 256, _FILE, np.uint8).data for n in range(len(files))]
        for source, handle in zip(sources, files, strict=True):
            os.pwrite(handle, source, 0)
        for threads in counts:
            times = max(1, args.times // threads)
            rates: dict[str, list[float]] = {name: [] for name in LENGTHS}
            pool = stack.enter_context(ThreadPoolExecutor(threads))
            for turn in range(args.turns):
                for name in list(LENGTHS)[:: 1 if turn % 2 else -1]:
                    began = time.perf_counter()
                    same = [LENGTHS[name]] * threads, [times] * threads
                    list(pool.map(_write, sources[:threads], files[:threads], *same))
                    rates[name].append(threads * times * _FILE / (time.perf_counter() - began))
            first = statistics.median(rates["1 MiB"])
            for name, found in rates.items():
                rate = statistics.median(found)
                print(f"{threads} threads, chunks of {name}: {rate / 1e9:.2f} GB/s ({rate / first:.3f})", flush=True)


if __name__ == "__main__":
    main()
