"""Measure the write speed with many threads per file and with one file per thread: ``python -m bench.files DIR``."""

from __future__ import annotations

import argparse
import mmap
import os
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from spile.objects.crc import crc32c

CHUNK = 1 << 20


def timed(task: Callable[[int], None], threads: int, repeat: int = 3) -> float:
    """Return the seconds of the fastest of several attempts with concurrent threads."""
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(task, range(threads)))
        times.append(time.perf_counter() - began)
    return min(times)


def one_file(folder: Path, source: memoryview, threads: int, mapped: bool) -> float:
    """Return the bytes/s of threads that checksum and write parts of one new file."""
    part = len(source) // threads
    with tempfile.NamedTemporaryFile(dir=folder) as file:

        def write(thread: int) -> None:
            for start in range(thread * part, (thread + 1) * part, CHUNK):
                piece = source[start : start + CHUNK]
                crc32c(piece)
                if mapped:
                    view[start : start + CHUNK] = piece
                else:
                    os.pwrite(file.fileno(), piece, start)

        os.ftruncate(file.fileno(), len(source))
        view = mmap.mmap(file.fileno(), len(source)) if mapped else bytearray()
        return len(source) / timed(write, threads, 1)


def many_files(folder: Path, source: memoryview, files: int, sync: bool) -> float:
    """Return the bytes/s of threads that each checksum and write a new file."""

    def write(_: int) -> None:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            for start in range(0, len(source), CHUNK):
                piece = source[start : start + CHUNK]
                crc32c(piece)
                os.pwrite(file.fileno(), piece, start)
            if sync:
                os.fsync(file.fileno())

    return files * len(source) / timed(write, files)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--sync", action="store_true", help="count the time until the data is durable on the disk")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    source = np.random.default_rng(0).integers(0, 256, args.megabytes * CHUNK, np.uint8).data
    for threads in (1, 4, 8):
        for mapped in (False, True):
            rate = one_file(args.folder, source, threads, mapped)
            print(f"one file, {threads} threads, {'mapped' if mapped else 'pwrite'}: {rate / 1e9:.2f} GB/s")
    for files in (1, 2, 4, 8):
        print(f"{files} files, a thread each: {many_files(args.folder, source, files, args.sync) / 1e9:.2f} GB/s")


if __name__ == "__main__":
    main()
