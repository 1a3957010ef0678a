"""Train a crosscoder on two models: one set of features that reconstructs the rows of both at the same token, in JAX.

spile extract --model A --output a --taps residual.1
spile extract --model B --dataset spile:a --output b --taps residual.4    # the same tokens
python examples/crosscoder_models.py a:residual.1 b:residual.4 --steps 300
"""

import argparse

import jax
import jax.numpy as jnp

import spile

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("taps", nargs=2)
parser.add_argument("--steps", type=int, default=300)
args = parser.parse_args()
dataset, (features, k, rate) = spile.open([text.rpartition(":")[0] for text in args.taps]), (512, 16, 0.2)
taps = [f"{place}/{text.rpartition(':')[2]}" for place, text in enumerate(args.taps)]
batches = dataset.jax(taps, batch_rows=1024, epochs=None, seed=0, exclude=spile.Role.FIRST, dtype="float32")
scales = {tap: dataset.stats(tap).norm_quantile(0.5) for tap in taps}
rows = (jnp.concatenate([batch[tap] / scales[tap] for tap in taps], axis=1) for batch in batches)
first = next(rows)  # [rows, d of the first model + d of the second]: a feature has a direction in each
decoder = jax.random.normal(jax.random.key(0), (features, first.shape[1])) / first.shape[1] ** 0.5
coder = {"encoder": decoder.T, "decoder": decoder, "bias": first.mean(0)}


def loss(coder, x):
    values, chosen = jax.lax.top_k((x - coder["bias"]) @ coder["encoder"], k)
    made = jnp.einsum("nk,nkd->nd", jax.nn.relu(values), coder["decoder"][chosen]) + coder["bias"]
    return jnp.sum((made - x) ** 2) / jnp.sum((x - x.mean(0)) ** 2)


step = jax.jit(lambda coder, x: jax.tree.map(lambda p, g: p - rate * g, coder, jax.grad(loss)(coder, x)))
for _ in range(args.steps):
    coder = step(coder, next(rows))
print(f"step {args.steps}: {loss(coder, next(rows)):.4f} of the variance unexplained")
