"""Steer a model with the difference of two groups of texts, and show how the next token changes.

    python examples/steer.py "The movie was" --more great,wonderful --less bad,terrible --tap residual.3 --scale 4

The vector is also stored, for ``spile infer --steer residual.3=steering.safetensors:4``.
"""

import argparse

import numpy as np
from safetensors.numpy import save_file

import spile

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("prompt")
parser.add_argument("--more", default="great,wonderful", help="texts whose direction is added")
parser.add_argument("--less", default="bad,terrible", help="texts whose direction is subtracted")
parser.add_argument("--model", default="embedded")
parser.add_argument("--tap", default="residual.3")
parser.add_argument("--scale", type=float, default=4.0)
args = parser.parse_args()

model = spile.load(args.model)
more, less = (model.tap(texts.split(","), taps=args.tap).numpy(args.tap).mean(0) for texts in (args.more, args.less))
vector = (more - less) / np.linalg.norm(more - less)
save_file({"vector": vector.astype(np.float32)}, "steering.safetensors")


def steer(rows):
    return rows + args.scale * vector


for name, edit in (("plain", {}), ("steered", {args.tap: steer})):
    (found,) = model.run([args.prompt], edit=edit, taps="logits", top_k=5)
    tokens = [model.decode([token]) for token in found["logits_ids.top5"][-1].astype(int)]
    print(f"{name}: " + ", ".join(map(repr, tokens)) + f" (logits {found['logits.top5'][-1].round(2).tolist()})")
