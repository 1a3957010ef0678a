"""Train a temporal sparse autoencoder: features that stay similar from one token to the next, in JAX.

spile extract                                   # the demo: ./activations
python examples/temporal_sae.py ./activations residual.1 --steps 300
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
dataset, (features, k, rate, smooth) = spile.open(args.root), (512, 16, 0.2, 0.1)
batches = dataset.jax(args.tap, batch_rows=512, context=2, epochs=None, exclude=spile.Role.FIRST, dtype="float32")
scale = dataset.stats(args.tap).norm_quantile(0.5)
pairs = next(batches) / scale  # [rows, 2, d]: the token before, and the token
directions = jax.random.normal(jax.random.key(0), (features, pairs.shape[-1]))
decoder = directions / jnp.linalg.norm(directions, axis=1, keepdims=True)
sae = {"encoder": decoder.T, "decoder": decoder, "bias": pairs.mean((0, 1))}


def losses(sae, pairs):
    values, chosen = jax.lax.top_k((pairs - sae["bias"]) @ sae["encoder"], k)
    made = jnp.einsum("npk,npkd->npd", jax.nn.relu(values), sae["decoder"][chosen])
    spread, change = jnp.sum((pairs - pairs.mean((0, 1))) ** 2), jnp.sum((made[:, 1] - made[:, 0]) ** 2)
    return jnp.sum((made + sae["bias"] - pairs) ** 2) / spread, change / spread


train = jax.grad(lambda sae, pairs: jnp.dot(jnp.array([1.0, smooth]), jnp.array(losses(sae, pairs))))
step = jax.jit(lambda sae, pairs: jax.tree.map(lambda p, g: p - rate * g, sae, train(sae, pairs)))
for _ in range(args.steps):
    sae = step(sae, next(batches) / scale)
print(f"step {args.steps}: {losses(sae, next(batches) / scale)[0]:.4f} of the variance unexplained")
