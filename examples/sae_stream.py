"""Train a top-k sparse autoencoder without storing activations, in JAX.

    python examples/sae_stream.py texts.jsonl residual.1 --model embedded --steps 300

With ``--store ROOT`` the activations are also stored.
"""

import argparse

import jax
import jax.numpy as jnp

import spile

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("data")
parser.add_argument("tap")
parser.add_argument("--model", default="embedded")
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--store")
args = parser.parse_args()
stream, (features, k, rate) = spile.stream(args.model, args.data, [args.tap], store=args.store), (512, 16, 0.2)
batches = stream.jax(args.tap, batch_rows=1024, epochs=None, seed=0, exclude=spile.Role.FIRST, dtype="float32")
scale = jnp.median(jnp.linalg.norm(rows := next(batches), axis=1))
directions = jax.random.normal(jax.random.key(0), (features, rows.shape[1]))
decoder = directions / jnp.linalg.norm(directions, axis=1, keepdims=True)
sae = {"encoder": decoder.T, "decoder": decoder, "bias": rows.mean(0) / scale}


def loss(sae, rows):
    values, chosen = jax.lax.top_k((rows - sae["bias"]) @ sae["encoder"], k)
    made = jnp.einsum("nk,nkd->nd", jax.nn.relu(values), sae["decoder"][chosen]) + sae["bias"]
    return jnp.sum((made - rows) ** 2) / jnp.sum((rows - rows.mean(0)) ** 2)


step = jax.jit(lambda sae, rows: jax.tree.map(lambda p, g: p - rate * g, sae, jax.grad(loss)(sae, rows)))
for _ in range(args.steps):
    sae = step(sae, next(batches) / scale)
print(f"step {args.steps}: {loss(sae, next(batches) / scale):.4f} of the variance unexplained")
