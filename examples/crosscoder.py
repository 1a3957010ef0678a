"""Train a crosscoder: one set of features that reconstructs several layers of the same tokens, in JAX.

spile extract --taps residual.1 residual.4      # ./activations
python examples/crosscoder.py ./activations residual.1 residual.4 --steps 300
"""

import argparse

import jax
import jax.numpy as jnp

import spile

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("root")
parser.add_argument("taps", nargs="+")
parser.add_argument("--steps", type=int, default=300)
args = parser.parse_args()
features, k, rate = 512, 16, 0.2
dataset = spile.open(args.root)
batches = dataset.jax(args.taps, batch_rows=1024, epochs=None, seed=0, exclude=spile.Role.FIRST, dtype="float32")
scale = jnp.array([dataset.stats(tap).norm_quantile(0.5) for tap in args.taps])[:, None, None]
rows = (jnp.stack([batch[tap] for tap in args.taps]) / scale for batch in batches)  # [taps, rows, d]
first = next(rows)
directions = jax.random.normal(jax.random.key(0), (len(args.taps), features, first.shape[-1]))
decoder = directions / jnp.linalg.norm(directions, axis=-1, keepdims=True)
coder = {"encoder": decoder, "decoder": decoder, "bias": first.mean(1, keepdims=True)}


def loss(coder, x):
    values, chosen = jax.lax.top_k(jnp.einsum("tnd,tfd->nf", x - coder["bias"], coder["encoder"]), k)
    made = jnp.einsum("nk,tnkd->tnd", jax.nn.relu(values), coder["decoder"][:, chosen]) + coder["bias"]
    return jnp.sum((made - x) ** 2) / jnp.sum((x - x.mean(1, keepdims=True)) ** 2)


step = jax.jit(lambda coder, x: jax.tree.map(lambda p, g: p - rate * g, coder, jax.grad(loss)(coder, x)))
for _ in range(args.steps):
    coder = step(coder, next(rows))
print(f"step {args.steps}: {loss(coder, next(rows)):.4f} of the variance unexplained")
