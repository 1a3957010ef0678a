"""What the order of rows does to a sparse autoencoder: ``python -m bench.sae [--steps 300] [--seeds 3]``.

The same top-k autoencoder (``examples/train_sae.py``) on the same rows, in the order they are stored, through the
two-level shuffle with windows of a quarter of the rows, and through a full permutation in memory. Rows are synthetic
documents: each speaks of a few topics of its own, and so uses a few of the features that rows are made of.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np

import spile
from bench.overlap import run_identity
from spile.objects import open_folder
from spile.reading.dataset import Dataset
from spile.spec.identity import StreamIdentity
from spile.spec.sample import Sample
from spile.spec.taps import Tap
from spile.store.run import join_run
from spile.store.stream import join_stream

D, TRUE, LENGTH, BATCH, K = 256, 512, 512, 2048, 16
MEMORY = 128 << 20


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
    """Documents of 512 rows, each of 24 features of its own choice."""
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

    return {
        "in order": in_order(),
        "two levels, windows of a quarter": dataset.shuffled(
            "residual.0", BATCH, seed=seed, epochs=None, memory=MEMORY
        ),
        "the reader as it is": dataset.shuffled("residual.0", BATCH, seed=seed, epochs=None),
        "a permutation in memory": in_memory(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=255)
    parser.add_argument("--seeds", type=int, default=3)
    words = parser.parse_args()
    sae = example()
    with tempfile.TemporaryDirectory() as root:
        make(root, words.steps * BATCH // LENGTH)
        dataset = spile.open(root)
        held = jnp.asarray(next(dataset.shuffled("residual.0", 8192, seed=10_000)), jnp.float32)
        print(
            f"{words.steps} steps of {BATCH} rows, d {D}, {2 * TRUE} features, k {K}: fraction of variance unexplained"
        )
        found: dict[str, list[float]] = {}
        for seed in range(words.seeds):
            for name, batches in orders(dataset, seed, words.steps).items():
                how = {"features": 2 * TRUE, "k": K, "steps": words.steps, "rate": 1e-3, "seed": seed}
                for _, trained, _, _ in sae.train(sae.scaled(batches, 1.0), **how):
                    last = trained
                found.setdefault(name, []).append(sae.fvu(last, held, K))
                print(f"    seed {seed}, {name}: {found[name][-1]:.4f}", flush=True)
        reference = np.mean(found["a permutation in memory"])
        for name, values in found.items():
            each = " ".join(f"{value:.4f}" for value in values)
            print(f"  {name:34} {np.mean(values):.4f}  ({each})  {np.mean(values) / reference:.3f} × the last")


if __name__ == "__main__":
    main()
