"""Train a linear probe: can the label of a text be read from the activation of its last token?

    python examples/probe.py reviews.csv --column review --label label --tap residual.3

The data is a CSV, JSONL or Parquet file with a text and a label in each row. ``--model`` names another model.
"""

import argparse

import numpy as np

import spile

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("data")
parser.add_argument("--model", default="embedded")
parser.add_argument("--column", default="text")
parser.add_argument("--label", default="label")
parser.add_argument("--tap", default="residual.3")
parser.add_argument("--output", default="./probe")
args = parser.parse_args()

how = {"column": args.column, "keep": [args.label], "positions": "last"}
spile.extract(args.model, args.data, args.output, taps=[args.tap], **how)
dataset = spile.open(args.output)
x = dataset.numpy(args.tap)  # [samples, d], in the order of the data
labels, y = np.unique(dataset.labels(args.label).astype(str), return_inverse=True)

train = np.random.default_rng(0).permutation(len(x)) % 4 > 0  # three quarters
mean, spread = x[train].mean(0), x[train].std(0) + 1e-6
x = np.column_stack([(x - mean) / spread, np.ones(len(x))])
weights = np.linalg.solve(x[train].T @ x[train] + 10 * np.eye(x.shape[1]), x[train].T @ np.eye(len(labels))[y[train]])
correct = np.mean(np.argmax(x[~train] @ weights, axis=1) == y[~train])
guess = np.mean(y[~train] == np.bincount(y[train]).argmax())
print(
    f"{train.sum()} samples to train, {(~train).sum()} to test: {correct:.1%} correct; most frequent label: {guess:.1%}"
)
