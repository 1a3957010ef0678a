"""Measure the errors of the stored dtypes: ``python -m bench.stored [--model MODEL] [--dataset FILE]``.

A model's rows are compared in float32 and in each stored dtype: the bytes per token, the root mean square of the error
relative to that of the row, and the largest error relative to what ``docs/format.md`` allows.
"""

from __future__ import annotations

import argparse
import tempfile

import numpy as np

import spile
from spile.spec.run import DataSpec, RunSpec
from spile.spec.taps import SCALED, TapRows
from spile.store.shard import as_stored, decode, split

DTYPES = ("bfloat16", "float16", *SCALED)
RELATIVE = {"float32": 0.0, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def rounding(rows: np.ndarray, dtype: str) -> np.ndarray:
    """Return the largest rounding error of each stored number, as ``docs/format.md`` guarantees it."""
    if dtype not in SCALED:
        return np.asarray(RELATIVE[dtype] * np.abs(rows))
    largest = np.abs(rows).max(axis=-1, initial=0.0, keepdims=True)
    if dtype == "int8":  # Half a step, plus the float32 rounding of the quotient and the product.
        return np.broadcast_to(largest / 254 * (1 + 2.0**-15), rows.shape)
    # Half a unit in the last of four bits, largest just above a power of two; half of 2^-9 scales below 2^-6 scales.
    return np.asarray(np.maximum(np.abs(rows) / 17, largest / 224 / 1024) * (1 + 2.0**-40))


def stored(rows: np.ndarray, dtype: str) -> np.ndarray:
    kept = as_stored(rows, dtype)
    return decode(*split(kept, dtype)) if dtype in SCALED else kept.astype(np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--dataset", default="embedded")
    parser.add_argument("--samples", type=int, default=8)
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        data = DataSpec(dataset=words.dataset, max_samples=words.samples)
        spile.extract(RunSpec(model=words.model, data=data, output=folder, store_dtype="float32", dtype="float32"))
        dataset = spile.open(folder)
        print(f"{'tap':14}" + "".join(f"{dtype:>26}" for dtype in DTYPES))
        for tap in dataset.taps:
            rows = np.concatenate(list(dataset.rows(tap)))
            cells = []
            for dtype in DTYPES:
                error = stored(rows, dtype).astype(np.float64) - rows
                relative = np.sqrt((error**2).mean(1) / (rows.astype(np.float64) ** 2).mean(1)).mean()
                part = (np.abs(error) / np.maximum(rounding(rows.astype(np.float64), dtype), 1e-30)).max()
                size = TapRows(tap, (rows.shape[1],), dtype).bytes
                cells.append(f"{relative:9.4%} {part:6.3f} {size:5} B")
            print(f"{tap:14}" + "".join(f"{cell:>26}" for cell in cells))


if __name__ == "__main__":
    main()
