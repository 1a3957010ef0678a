"""Train a top-k sparse autoencoder on a tap, in plain JAX.

    spile extract                                   # the demo: ./activations
    python examples/train_sae.py ./activations --tap residual.1 --steps 500

Rows are shuffled and copied to the device ahead of time. A stopped run continues where it ended, because the reader's
state is saved with the parameters.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import spile


class Sae(NamedTuple):
    """``x ≈ topk((x - bias) @ encoder + threshold) @ decoder + bias``; the decoder's rows have length 1."""

    encoder: jax.Array  # [d, features]
    threshold: jax.Array  # [features]
    decoder: jax.Array  # [features, d]
    bias: jax.Array  # [d]


class Adam(NamedTuple):
    """The optimiser's state."""

    step: jax.Array
    first: Sae
    second: Sae


def initial(key: jax.Array, rows: jax.Array, features: int) -> Sae:
    """Return random decoder directions, the encoder as their transpose, and the bias as the mean of the rows."""
    directions = jax.random.normal(key, (features, rows.shape[1]))
    directions /= jnp.linalg.norm(directions, axis=1, keepdims=True)
    return Sae(directions.T, jnp.zeros(features), directions, rows.mean(0))


def encode(sae: Sae, rows: jax.Array, k: int) -> jax.Array:
    """Return ``[rows, features]`` with k values per row that are not zero."""
    values = (rows - sae.bias) @ sae.encoder + sae.threshold
    best, places = jax.lax.top_k(values, k)
    return jnp.zeros_like(values).at[jnp.arange(len(rows))[:, None], places].set(jax.nn.relu(best))


def reconstruct(sae: Sae, rows: jax.Array, k: int) -> jax.Array:
    """Reconstruct each row from its k features."""
    return encode(sae, rows, k) @ sae.decoder + sae.bias


def loss(sae: Sae, rows: jax.Array, k: int) -> jax.Array:
    """Return the squared error per row."""
    return jnp.mean(jnp.sum((reconstruct(sae, rows, k) - rows) ** 2, axis=1))


@partial(jax.jit, static_argnames=("k", "rate"), donate_argnums=(0, 1))
def train_step(sae: Sae, state: Adam, rows: jax.Array, k: int, rate: float) -> tuple[Sae, Adam, jax.Array]:
    """Take one step of Adam, then normalise the rows of the decoder to length 1."""
    value, slope = jax.value_and_grad(loss)(sae, rows, k)
    step = state.step + 1
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state.first, slope)
    second = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g * g, state.second, slope)

    def moved(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        return p - rate * (m / (1 - 0.9**step)) / (jnp.sqrt(v / (1 - 0.999**step)) + 1e-8)

    sae = Sae(*map(moved, sae, first, second))
    lengths = jnp.linalg.norm(sae.decoder, axis=1, keepdims=True)
    return sae._replace(decoder=sae.decoder / lengths), Adam(step, first, second), value


@partial(jax.jit, static_argnames="k")
def unexplained(sae: Sae, rows: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
    """Return the squared error and the squared distance from the mean; their ratio is the unexplained variance."""
    error = jnp.sum((reconstruct(sae, rows, k) - rows) ** 2)
    return error, jnp.sum((rows - rows.mean(0)) ** 2)


def fvu(sae: Sae, rows: jax.Array, k: int) -> float:
    """Return the fraction of variance that is unexplained."""
    error, total = unexplained(sae, rows, k)
    return float(error / total)


def scaled(batches: Iterator[Any], scale: float) -> Iterator[jax.Array]:
    """Return rows as float32 with length √d on average, so that one learning rate fits every layer."""
    return (jnp.asarray(rows, jnp.float32) * scale for rows in batches)


def train(
    batches: Iterator[jax.Array], *, features: int, k: int, steps: int, rate: float, seed: int, start: Any = None
) -> Iterator[tuple[int, Sae, Adam, jax.Array]]:
    """Train and yield after every step."""
    rows = next(batches)
    sae = initial(jax.random.key(seed), rows, features) if start is None else start[0]
    zeros = jax.tree.map(jnp.zeros_like, sae)
    state = Adam(jnp.zeros(()), zeros, jax.tree.map(jnp.copy, zeros)) if start is None else start[1]
    for step in range(int(state.step), steps):
        sae, state, value = train_step(sae, state, rows, k, rate)
        yield step + 1, sae, state, value
        rows = next(batches)


def save(path: Path, sae: Sae, state: Adam, reader: dict[str, Any]) -> None:
    """Save parameters, optimiser and the reader's state to one file."""
    arrays = {f"{part}.{name}": value for part, of in _parts(sae, state) for name, value in of._asdict().items()}
    with path.open("wb") as file:
        np.savez(file, step=np.asarray(state.step), reader=np.array(json.dumps(reader)), **arrays)


def restore(path: Path) -> tuple[tuple[Sae, Adam], dict[str, Any]]:
    """Return what :func:`save` wrote."""
    saved = np.load(path)
    parts = [
        Sae(*(jnp.asarray(saved[f"{part}.{name}"]) for name in Sae._fields)) for part in ("sae", "first", "second")
    ]
    return (parts[0], Adam(jnp.asarray(saved["step"]), parts[1], parts[2])), json.loads(str(saved["reader"]))


def _parts(sae: Sae, state: Adam) -> list[tuple[str, Sae]]:
    return [("sae", sae), ("first", state.first), ("second", state.second)]


def main() -> None:
    """Parse the command line and run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", help="a folder, gs://… or s3://…")
    parser.add_argument("--tap", default="residual.1")
    parser.add_argument("--features", type=int, default=512)
    parser.add_argument("--k", type=int, default=16)
    parser.add_argument("--batch-rows", type=int, default=1024)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--rate", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("sae.npz"))
    args = parser.parse_args()

    dataset = spile.open(args.root)
    how = {"seed": args.seed, "exclude": spile.Role.FIRST, "epochs": None}  # without the attention sink at position 0
    start, place = restore(args.output) if args.output.exists() else (None, None)
    sample = jnp.asarray(next(dataset.shuffled(args.tap, 4096, **{**how, "seed": args.seed + 1})), jnp.float32)
    scale = float(jnp.sqrt(sample.shape[1]) / jnp.linalg.norm(sample, axis=1).mean())
    reader = dataset.jax(args.tap, batch_rows=args.batch_rows, state=place, **how)
    steps = train(
        scaled(reader, scale),
        features=args.features,
        k=args.k,
        steps=args.steps,
        rate=args.rate,
        seed=args.seed,
        start=start,
    )
    for step, sae, state, _ in steps:
        if step % 100 == 0 or step == args.steps:
            save(args.output, sae, state, reader.state())
            print(f"step {step}: {fvu(sae, sample * scale, args.k):.4f} of the variance unexplained", flush=True)
    reader.close()


if __name__ == "__main__":
    main()
