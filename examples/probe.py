"""A linear probe: can a token's activation tell whether the user or the system wrote it?

    spile extract
    python examples/probe.py ./activations --tap residual.1

Labels are the stored roles. Train and test are different tasks, chosen by the samples' own task ids.
"""

from __future__ import annotations

import argparse
import hashlib
from typing import Any

import numpy as np

import spile
from spile.reading.selection import SampleRef
from spile.spec.sample import Role


def held_out(ref: SampleRef) -> bool:
    """A quarter of the tasks, the same ones in every run."""
    return hashlib.sha256(ref.task_id.encode()).digest()[0] < 64


def kept(ref: SampleRef) -> bool:
    """The others."""
    return not held_out(ref)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root")
    parser.add_argument("--tap", default="residual.1")
    parser.add_argument("--rows", type=int, default=8192)
    args = parser.parse_args()

    dataset = spile.open(args.root)
    how: dict[str, Any] = {"include": Role.USER | Role.SYSTEM, "context": True, "dtype": "float32"}
    train = next(dataset.shuffled(args.tap, args.rows, samples=kept, **how))
    test = next(dataset.shuffled(args.tap, args.rows, samples=held_out, **how))
    mean, spread = train.rows.mean(0), train.rows.std(0) + 1e-6

    def features(batch: Any) -> np.ndarray[Any, Any]:
        return np.column_stack([(batch.rows - mean) / spread, np.ones(len(batch.rows), np.float32)])

    labels = {name: np.where(batch.roles & Role.USER, 1.0, -1.0) for name, batch in (("train", train), ("test", test))}
    x = features(train)
    weights = np.linalg.solve(x.T @ x + 10.0 * np.eye(x.shape[1]), x.T @ labels["train"])  # ridge regression
    right = np.mean(np.sign(features(test) @ weights) == labels["test"])
    usual = max(np.mean(labels["test"] > 0), np.mean(labels["test"] < 0))
    print(f"{len(train.rows):,} rows to train, {len(test.rows):,} to test: {right:.1%} right; usual guess: {usual:.1%}")


if __name__ == "__main__":
    main()
