"""A linear probe: predict a label of a sample from the activation of a token.

    spile extract --dataset reviews.jsonl --keep label
    python examples/probe.py ./activations --tap residual.1 --label label

Labels are a field of the dataset's rows that ``--keep`` stored with each sample. Train and test are different samples,
chosen by their own ids.
"""

from __future__ import annotations

import argparse
import hashlib
from typing import Any

import numpy as np

import spile
from spile.reading.rows import SampleRef
from spile.spec.sample import Role


def held_out(ref: SampleRef) -> bool:
    """Return whether a sample is held out: a quarter of all samples, the same in every run."""
    return hashlib.sha256(ref.task_id.encode()).digest()[0] < 64


def kept(ref: SampleRef) -> bool:
    """Return whether a sample is used for training."""
    return not held_out(ref)


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root")
    parser.add_argument("--tap", default="residual.1")
    parser.add_argument("--label", default="label")
    parser.add_argument("--rows", type=int, default=8192)
    args = parser.parse_args()

    dataset = spile.open(args.root)
    how: dict[str, Any] = {"exclude": Role.FIRST, "context": True, "dtype": "float32"}
    train = next(dataset.shuffled(args.tap, args.rows, samples=kept, **how))
    test = next(dataset.shuffled(args.tap, args.rows, samples=held_out, **how))
    names, wanted = np.unique(train.kept[args.label].astype(str), return_inverse=True)
    mean, spread = train.rows.mean(0), train.rows.std(0) + 1e-6

    def features(batch: Any) -> np.ndarray[Any, Any]:
        return np.column_stack([(batch.rows - mean) / spread, np.ones(len(batch.rows), np.float32)])

    x, targets = features(train), np.eye(len(names))[wanted]
    weights = np.linalg.solve(x.T @ x + 10.0 * np.eye(x.shape[1]), x.T @ targets)  # ridge regression
    labels = test.kept[args.label].astype(str)
    right = np.mean(names[np.argmax(features(test) @ weights, 1)] == labels)
    usual = np.mean(labels == names[np.argmax(np.bincount(wanted))])
    print(f"{len(train.rows):,} rows to train, {len(test.rows):,} to test: {right:.1%} right; usual guess: {usual:.1%}")


if __name__ == "__main__":
    main()
