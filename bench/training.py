"""Compare streaming with extraction without a disk, and the autoencoders of both: ``python -m bench.training``.

The pipeline of ``extract`` computes the same samples twice: once its rows are dropped, once they pass through the
shuffle buffer to a reader that takes all batches. Then a top-k autoencoder is trained on the streamed rows, and on the
stored rows in the order of the data and in random order.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import spile
from spile.spec.ranges import Ranges

FEATURES, K, RATE = 512, 16, 0.2
WORDS = "time person year way day thing man world life hand part child eye woman place work week".split()  # noqa: SIM905


class Dropping:
    """A feed that takes everything and keeps nothing."""

    buffer_rows = 1 << 40

    def watch(self, items: Iterable[Any], first: int, done: Ranges) -> Iterator[Any]:  # noqa: ARG002
        return iter(items)

    def put(self, samples: object, rows: object) -> None:
        """Drop the rows."""


def texts(count: int) -> list[str]:
    source = np.random.default_rng(0)
    return [" ".join(source.choice(WORDS, source.integers(20, 120))) for _ in range(count)]


def seconds(work: Any) -> tuple[float, float]:
    """Return the elapsed seconds and the CPU seconds of this process."""
    began, used = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - began, time.process_time() - used


def unexplained(batches: Iterator[Any], held_out: Any, steps: int) -> float:
    """Train a top-k autoencoder and return the share of the variance that it does not explain."""
    scale = float(np.median(np.linalg.norm(held_out, axis=1)))
    drawn = jax.random.normal(jax.random.key(0), (FEATURES, held_out.shape[1]))
    decoder = drawn / jnp.linalg.norm(drawn, axis=1, keepdims=True)
    sae = {"encoder": decoder.T, "decoder": decoder, "bias": jnp.asarray(held_out.mean(0)) / scale}

    def loss(sae: Any, rows: Any) -> Any:
        values, chosen = jax.lax.top_k((rows - sae["bias"]) @ sae["encoder"], K)
        made = jnp.einsum("nk,nkd->nd", jax.nn.relu(values), sae["decoder"][chosen]) + sae["bias"]
        return jnp.sum((made - rows) ** 2) / jnp.sum((rows - rows.mean(0)) ** 2)

    step = jax.jit(lambda sae, rows: jax.tree.map(lambda p, g: p - RATE * g, sae, jax.grad(loss)(sae, rows)))
    for _ in range(steps):
        sae = step(sae, next(batches) / scale)
    return float(loss(sae, held_out / scale))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="embedded")
    parser.add_argument("--tap", default="residual.2")
    parser.add_argument("--samples", type=int, default=600)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    data = texts(args.samples)
    stream = spile.stream(args.model, data, [args.tap])
    how: dict[str, Any] = {"batch_rows": 1024, "memory": 8 << 20, "dtype": "float32"}

    def extract() -> None:
        stream._compute(Dropping(), 0, None, Ranges(), threading.Event())  # type: ignore[arg-type]

    tokens = sum(len(batch) for batch in stream.shuffled(args.tap, **how))  # compiles too
    extract()
    alone, streamed = [], []
    for _ in range(args.turns):
        alone.append(seconds(extract))
        streamed.append(seconds(lambda: sum(len(batch) for batch in stream.shuffled(args.tap, **how))))
    print(f"{args.model}, {tokens:,} tokens, best of {args.turns}")
    best = [[min(times) for times in zip(*each, strict=True)] for each in (alone, streamed)]
    for unit, one, other in zip(("s", "CPU second"), *best, strict=True):
        print(f"extraction without a disk  {tokens / one:10,.0f} tokens per {unit}")
        print(f"streaming                  {tokens / other:10,.0f} tokens per {unit}, {one / other:.1%}")
    with tempfile.TemporaryDirectory() as folder:
        root = str(Path(folder) / "stored")
        spile.extract(args.model, data, root, taps=[args.tap])
        dataset = spile.open(root)
        held_out = next(dataset.shuffled(args.tap, 8192, seed=9, dtype="float32"))
        readers = {
            "streamed": stream.shuffled(args.tap, epochs=None, **how),
            "stored, order of the data": dataset.shuffled(args.tap, epochs=None, order="data", **how),
            "stored, random order": dataset.shuffled(args.tap, epochs=None, **how),
        }
        for name, reader in readers.items():
            with reader:
                print(f"unexplained variance, {name:26} {unexplained(reader, held_out, args.steps):.4f}", flush=True)


if __name__ == "__main__":
    main()
