"""Train a top-k sparse autoencoder on one tap, in JAX.

    spile extract                                   # the demo: ./activations
    python examples/sae.py ./activations residual.1 --steps 300

``train_sae.py`` adds Adam, checkpoints and resuming.
"""

import argparse

import jax
import jax.numpy as jnp

import spile

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("root")
parser.add_argument("tap")
parser.add_argument("--steps", type=int, default=300)
args = parser.parse_args()
features, k, rate = 512, 16, 0.2
dataset = spile.open(args.root)
batches = dataset.jax(args.tap, batch_rows=1024, epochs=None, seed=0, exclude=spile.Role.FIRST, dtype="float32")
scale = dataset.stats(args.tap).norm_quantile(0.5)
directions = jax.random.normal(jax.random.key(0), (features, next(batches).shape[1]))
decoder = directions / jnp.linalg.norm(directions, axis=1, keepdims=True)
sae = {"encoder": decoder.T, "decoder": decoder, "bias": next(batches).mean(0) / scale}


def loss(sae, rows):
    values, chosen = jax.lax.top_k((rows - sae["bias"]) @ sae["encoder"], k)
    made = jnp.einsum("nk,nkd->nd", jax.nn.relu(values), sae["decoder"][chosen]) + sae["bias"]
    return jnp.sum((made - rows) ** 2) / jnp.sum((rows - rows.mean(0)) ** 2)


step = jax.jit(lambda sae, rows: jax.tree.map(lambda p, g: p - rate * g, sae, jax.grad(loss)(sae, rows)))
for _ in range(args.steps):
    sae = step(sae, next(batches) / scale)
print(f"step {args.steps}: {loss(sae, next(batches) / scale):.4f} of the variance unexplained")
