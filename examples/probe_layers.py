"""At which layer can a linear probe read a label? Each layer, and each way to make one row of a text, in one run.

python examples/probe_layers.py reviews.csv --column review --label label
"""

import argparse

import numpy as np

import spile

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("data")
parser.add_argument("--model", default="embedded")
parser.add_argument("--column", default="text")
parser.add_argument("--label", default="label")
parser.add_argument("--output", default="./probe-layers")
args = parser.parse_args()
spile.extract(args.model, args.data, args.output, taps=["residual"], column=args.column, keep=[args.label])
dataset = spile.open(args.output)
labels, y = np.unique(dataset.labels(args.label).astype(str), return_inverse=True)
train = np.random.default_rng(0).permutation(len(y)) % 4 > 0  # three quarters
pools = {"last-content": "last-content", "mean": "mean", "max": lambda rows: rows.max(axis=0)}


def accuracy(x):
    mean, spread = x[train].mean(0), x[train].std(0) + 1e-6
    x = np.column_stack([(x - mean) / spread, np.ones(len(x))])
    penalty = 10 * np.eye(x.shape[1])
    weights = np.linalg.solve(x[train].T @ x[train] + penalty, x[train].T @ np.eye(len(labels))[y[train]])
    return np.mean(np.argmax(x[~train] @ weights, axis=1) == y[~train])


for tap in dataset.taps:
    scores = {name: accuracy(dataset.numpy(tap, positions=pool)) for name, pool in pools.items()}
    print(f"{tap}: " + ", ".join(f"{name} {score:.1%}" for name, score in scores.items()))
