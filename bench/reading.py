"""Compare reading for training with other readers: ``python -m bench.reading [--gigabytes 4] [--peers PYTHON]``.

One tap of bfloat16 rows is read with a cold and with a warm page cache: the files from start to end, spile's shuffled
reader, plain ``torch.load``, Hugging Face datasets, and SAELens' cached activations (``--peers`` is the interpreter of
an environment with sae-lens). The readers take turns and read twice in each turn. Figures are medians of the first
reads, and of the second reads, which reuse memory. (The host of a virtual machine may reclaim free memory, and getting
it back can cost more than anything that is measured here.) On a machine that is otherwise busy, only the processor time
per gigabyte is meaningful. Then follow the first batch of a dataset of 1,000 shards, and buckets (the fake GCS and
moto's S3, each in its own process) compared with parallel range reads of obstore.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import spile
from bench.buckets import BUCKETS, read_bucket
from bench.rates import BATCH, SHARD_ROWS, D, Read, in_turns, make, rate, show
from spile.objects import open_folder
from spile.reading import shuffle


def forget(folder: Path) -> None:
    """Drop the files of a folder from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            os.fsync(handle)
            os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(handle)


def sequential(folder: Path) -> Iterator[int]:
    """Read every file from start to end in calls of 8 MiB into the same memory."""
    buffer = bytearray(8 << 20)
    for path in sorted(folder.rglob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                yield count // (2 * D)


def shuffled(folder: Path, block: int | None = None, **how: Any) -> Iterator[int]:
    """Read with spile; ``block``: bytes of a block, instead of the size that the buffer implies."""
    reader = spile.open(str(folder)).shuffled("residual.0", BATCH, **how)
    sizes = {} if block is None else {"_BLOCKS": max(1, how["memory"] // block), "_MIN_PART_ROWS": 1}
    with patch.multiple(shuffle, **sizes) if sizes else nullcontext():
        _ = reader.quality  # computes the size of the blocks
    for rows in reader:
        yield len(rows)


def torch_files(folder: Path) -> Iterator[int]:
    """``torch.load`` of a file at a time, its rows permuted, in batches."""
    import torch

    for path in sorted(folder.glob("*.pt")):
        rows = torch.load(path)
        order = torch.randperm(len(rows))
        for start in range(0, len(rows), BATCH):
            yield len(rows[order[start : start + BATCH]])


def hf(folder: Path) -> Iterator[int]:
    """Hugging Face datasets, in order, as NumPy arrays."""
    import datasets

    found = datasets.load_from_disk(str(folder)).select_columns(["residual.0"]).with_format("numpy")
    for batch in found.iter(batch_size=BATCH):
        yield len(batch["residual.0"])


_SAELENS = """
import sys, time, warnings
warnings.simplefilter("ignore")
from types import SimpleNamespace
import torch
from sae_lens.training.activations_store import ActivationsStore
store = ActivationsStore(
    model=SimpleNamespace(tokenizer=None, cfg=SimpleNamespace(device="cpu")), dataset=None, streaming=False,
    hook_name="blocks.0.hook_resid_post", hook_head_index=None, context_size=128, d_in=int(sys.argv[2]),
    n_batches_in_buffer=512, total_training_tokens=10**9, store_batch_size_prompts=32, train_batch_size_tokens=4096,
    prepend_bos=False, normalize_activations="none", device=torch.device("cpu"), dtype="float32",
    cached_activations_path=sys.argv[1])
store.cached_activation_dataset = store.load_cached_activation_dataset()
total, rows, began = int(sys.argv[3]), 0, time.perf_counter()
while rows < total:
    rows += len(store.next_batch())
print(rows / (time.perf_counter() - began))
"""


def local(rows: int, peers: str | None, turns: int, *, cold: bool) -> None:
    with tempfile.TemporaryDirectory() as name:
        home, size = Path(name), rows * D * 2
        root = home / "root"
        make(open_folder(str(root)), rows)
        print(f"{rows:,} rows of {D} in bfloat16, {size / 1e9:.2f} GB, batches of {BATCH}, medians of {turns} turns")
        others = {**_torch(home), **_hf(home)}
        modes: dict[str, dict[str, int]] = {
            "spile, full permutation": {"memory": 2 * size},
            "spile, as it is (two levels, 2 GiB)": {},
            "spile, two levels, a quarter in memory": {"memory": size // 4},
            "the same, blocks of 64 KiB": {"memory": size // 4, "block": 64 << 10},
            "the same, blocks of 4 MiB": {"memory": size // 4, "block": 4 << 20},
        }
        if size <= shuffle.MEMORY:
            del modes["spile, as it is (two levels, 2 GiB)"]  # This is a full permutation.
        files = "the files, from end to end"
        reads: dict[str, Read] = {files: partial(sequential, root)}
        reads |= {label: partial(shuffled, root, **how) for label, how in modes.items()}
        reads |= {label: read for label, (_, read) in others.items()}
        folders = {label: folder for label, (folder, _) in others.items()}
        if cold:
            print("page cache dropped:")
            dropped = in_turns(reads, turns, lambda label: forget(folders.get(label, root)))
            show(dropped, dropped[files], list(modes))
        print("page cache warm:")
        sum(rate(read).rows for read in reads.values())
        warm = in_turns(reads, turns)
        show(warm, warm[files], list(modes))
        if peers is not None:
            _saelens(home, rows, peers)


def _torch(home: Path) -> dict[str, tuple[Path, Read]]:
    try:
        import torch
    except ImportError:
        return {}
    from spile.reading.torch_rows import tensor_of

    (home / "pt").mkdir()
    for number, rows in enumerate(spile.open(str(home / "root")).rows("residual.0", SHARD_ROWS)):
        torch.save(tensor_of(rows.copy()), home / "pt" / f"{number:04d}.pt")
    return {"torch.load, shuffled within a file": (home / "pt", partial(torch_files, home / "pt"))}


def _hf(home: Path) -> dict[str, tuple[Path, Read]]:
    try:
        import datasets  # noqa: F401
    except ImportError:
        return {}
    from spile.reading.export import export_dataset

    export_dataset(spile.open(str(home / "root")), str(home / "hf"), to="hf", taps=["residual.0"])
    return {"datasets, in order, float32": (home / "hf", partial(hf, home / "hf"))}


def _saelens(home: Path, rows: int, peers: str) -> None:
    from spile.reading.export import export_dataset

    export_dataset(spile.open(str(home / "root")), str(home / "sae"), to="saelens", taps=["residual.0"])
    command = [peers, "-c", _SAELENS, str(home / "sae"), str(D), str(rows // 2)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        print(f"  SAELens: {done.stderr.strip().splitlines()[-1]}")
        return
    found = float(done.stdout.split()[-1])
    ours = rate(lambda: shuffled(home / "root", memory=rows * D)).rows
    print(f"  SAELens' cached activations, mixing buffer: {found / 1e6:.3f} M rows/s; spile {ours / found:.1f} ×")


def first_batch(shards: int = 1000) -> None:
    """Measure the time to the first batch."""
    with tempfile.TemporaryDirectory() as name:
        make(open_folder(name), shards * 256, shard_rows=256, d=256)
        code = (
            "import time; began = time.perf_counter(); import spile; "
            f"next(spile.open({name!r}).shuffled('residual.0', {BATCH}, memory=MEMORY)); "
            "print(time.perf_counter() - began)"
        )
        for label, memory in (("full permutation", 1 << 30), ("two levels", 16 << 20)):
            ended = subprocess.run(
                [sys.executable, "-c", code.replace("MEMORY", str(memory))], capture_output=True, text=True, check=True
            )
            print(
                f"{shards:,} shards, {label}: the first batch after {float(ended.stdout):.2f} s, imports included",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=4.0)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--only", choices=["local", "first", "buckets"])
    parser.add_argument("--warm", action="store_true", help="measure with a warm page cache only")
    parser.add_argument("--peers", help="the interpreter of an environment with sae-lens")
    words = parser.parse_args()
    rows = int(words.gigabytes * 1e9) // (2 * D) // SHARD_ROWS * SHARD_ROWS
    parts = [words.only] if words.only else ["local", "first", "buckets"]
    if "local" in parts:
        local(max(rows, 2 * SHARD_ROWS), words.peers, words.turns, cold=not words.warm)
    if "first" in parts:
        first_batch()
    if "buckets" in parts:
        for case in BUCKETS:
            read_bucket(case, words.turns)


if __name__ == "__main__":
    main()
