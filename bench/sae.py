"""Measure how the order of rows affects a sparse autoencoder: ``python -m bench.sae [--steps 255] [--seeds 3]``.

The same top-k autoencoder (``examples/train_sae.py``) is trained on the same rows in several orders: as stored, with
the two-level shuffle and memory for a quarter and for half of the rows, with blocks of four whole documents, and with a
full permutation. The rows are synthetic documents. Each document has a few topics and therefore uses a few of the
features that rows are composed of. ``--figure PATH`` plots the unexplained variance during training. ``--parts
1024,4096`` instead measures the two-level shuffle with memory for a quarter and for an eighth of the rows, with a
buffer of that many blocks.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax.numpy as jnp
import ml_dtypes
import numpy as np

import spile
from bench.overlap import run_identity
from spile.objects import open_folder
from spile.reading import shuffle
from spile.reading.dataset import Dataset
from spile.spec.identity import StreamIdentity
from spile.spec.sample import Sample
from spile.spec.taps import Tap
from spile.store.run import join_run
from spile.store.writer import join_stream

D, TRUE, LENGTH, BATCH, K = 256, 512, 512, 2048, 16
EVERY = 17
"""Steps between two measurements."""
REFERENCE = "a permutation in memory, by hand"


def example() -> Any:
    path = Path(__file__).parents[1] / "examples" / "train_sae.py"
    found = importlib.util.spec_from_file_location("train_sae", path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules["train_sae"] = module
    found.loader.exec_module(module)
    return module


def make(root: str, documents: int) -> None:
    """Create documents of 512 rows, each with its own 24 features."""
    source = np.random.default_rng(7)
    features = source.standard_normal((TRUE, D)).astype(np.float32)
    features /= np.linalg.norm(features, axis=1, keepdims=True)
    run = replace(run_identity(), d_model=D)
    folder = open_folder(root)
    join_run(folder, run)
    store = join_stream(folder, 0, StreamIdentity("none", "0", documents, documents, (Tap("residual", 0),)), run)
    per = 64
    for first in range(0, documents, per):
        made, rows = [], []
        for index in range(first, min(first + per, documents)):
            topics = source.integers(0, TRUE, 24)
            active = topics[source.integers(0, len(topics), (LENGTH, K))]
            weights = source.exponential(1.0, (LENGTH, K)).astype(np.float32)
            rows.append(np.einsum("rk,rkd->rd", weights, features[active]) + 0.02 * source.standard_normal((LENGTH, D)))
            tokens = np.zeros(LENGTH, np.int32)
            made.append(Sample(index, f"document {index}", tokens, np.zeros(LENGTH, np.uint8)))
        builder = store.begin(made)
        builder.write(0, 0, np.concatenate(rows).astype(ml_dtypes.bfloat16))
        store.commit([builder.finish()])
    store.finish()


def with_blocks(dataset: Dataset, blocks: int, **how: Any) -> Iterator[Any]:
    """Return the two-level shuffle with this number of blocks in the buffer instead of the default."""
    with patch.multiple(shuffle, _BLOCKS=blocks, _MIN_PART_ROWS=1):
        reader = dataset.shuffled("residual.0", BATCH, **how)
        print(f"    {reader.quality}")  # computes the size of the blocks
    return reader


def orders(dataset: Dataset, seed: int, steps: int) -> dict[str, Iterator[Any]]:
    everything = np.concatenate(list(dataset.rows("residual.0")))
    permuted = np.random.default_rng(seed).permutation(len(everything))

    def in_memory() -> Iterator[Any]:
        for step in range(steps + 1):
            places = permuted[np.arange(step * BATCH, (step + 1) * BATCH) % len(permuted)]
            yield everything[places]

    def in_order() -> Iterator[Any]:
        while True:
            yield from (rows for rows in dataset.rows("residual.0", BATCH) if len(rows) == BATCH)

    size = everything.nbytes
    how: dict[str, Any] = {"seed": seed, "epochs": None}
    return {
        "in the order they are stored": in_order(),
        "shuffled, memory for a quarter": dataset.shuffled("residual.0", BATCH, memory=size // 4, **how),
        "shuffled, memory for half": dataset.shuffled("residual.0", BATCH, memory=size // 2, **how),
        "the same, blocks of a MiB": with_blocks(dataset, size // 2 >> 20, memory=size // 2, **how),
        "shuffled as it is (all fits)": dataset.shuffled("residual.0", BATCH, **how),
        REFERENCE: in_memory(),
    }


def in_parts(dataset: Dataset, seed: int, steps: int, parts: list[int]) -> dict[str, Iterator[Any]]:
    """Return the two-level shuffle with different numbers of blocks in the buffer, and the reference."""
    size = sum(record.tokens for stream in dataset.streams for record in stream.shards) * D * 2
    how: dict[str, Any] = {"seed": seed, "epochs": None}
    return {
        REFERENCE: orders(dataset, seed, steps)[REFERENCE],
        **{
            f"{words} in memory, {count} blocks": with_blocks(dataset, count, memory=size // share, **how)
            for count in parts
            for words, share in (("a quarter", 4), ("an eighth", 8))
        },
    }


def curve(sae: Any, batches: Iterator[Any], held: Any, steps: int, seed: int) -> list[float]:
    """Return the unexplained variance of held-out rows, every few steps and at the end."""
    how = {"features": 2 * TRUE, "k": K, "steps": steps, "rate": 1e-3, "seed": seed}
    found = []
    for step, trained, _, _ in sae.train(sae.scaled(batches, 1.0), **how):
        if step % EVERY == 0 or step == steps:
            found.append(sae.fvu(trained, held, K))
    return found


def draw(path: str, curves: dict[str, list[list[float]]], steps: int) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "spile"  # the same numbers, the same file
    import matplotlib.pyplot as plt

    at = [*range(EVERY, steps, EVERY), steps]
    figure, axes = plt.subplots(figsize=(7, 3.6))
    for name, each in curves.items():
        axes.plot(at, np.mean(each, axis=0), "k:" if name == REFERENCE else "-", label=name)
    axes.set(xlabel="step", ylabel="fraction of variance unexplained", yscale="log")
    axes.grid(alpha=0.3, which="both")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=255)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--figure", help="an .svg or .png to draw; needs matplotlib")
    parser.add_argument("--parts", help="numbers of blocks in the buffer to compare, such as 1024,4096")
    words = parser.parse_args()
    parts = [int(each) for each in words.parts.split(",")] if words.parts else None
    sae = example()
    with tempfile.TemporaryDirectory() as root:
        make(root, words.steps * BATCH // LENGTH)
        dataset = spile.open(root)
        held = jnp.asarray(next(dataset.shuffled("residual.0", 8192, seed=10_000)), jnp.float32)
        print(
            f"{words.steps} steps of {BATCH} rows, d {D}, {2 * TRUE} features, k {K}: fraction of variance unexplained"
        )
        curves: dict[str, list[list[float]]] = {}
        for seed in range(words.seeds):
            chosen = orders if parts is None else partial(in_parts, parts=parts)
            for name, batches in chosen(dataset, seed, words.steps).items():
                curves.setdefault(name, []).append(curve(sae, batches, held, words.steps, seed))
                print(f"    seed {seed}, {name}: {curves[name][-1][-1]:.4f}", flush=True)
        reference = np.mean([each[-1] for each in curves[REFERENCE]])
        for name, each in curves.items():
            last = [values[-1] for values in each]
            shown = " ".join(f"{value:.4f}" for value in last)
            print(f"  {name:34} {np.mean(last):.4f}  ({shown})  {np.mean(last) / reference:.3f} × a permutation")
        if words.figure:
            draw(words.figure, curves, words.steps)


if __name__ == "__main__":
    main()
