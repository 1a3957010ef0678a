"""Write training data for an EAGLE-3 draft model: answers, hidden states of four layers, and a loss mask.

    python examples/eagle3.py chats.jsonl --model Qwen/Qwen2.5-0.5B --layers 2 12 20 23

The last of the layers is the last layer of the model. Then train with speculators: ``--data-path eagle3/draft``.
"""

import argparse

import spile

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("data")
parser.add_argument("--model", default="embedded")
parser.add_argument("--layers", type=int, nargs="+", default=[0, 2, 4, 5])
parser.add_argument("--max-new-tokens", type=int, default=256)
parser.add_argument("--output", default="./eagle3")
args = parser.parse_args()

taps = [f"residual.{layer}" for layer in args.layers]
spile.infer(args.model, args.data, f"{args.output}/activations", taps=taps, max_new_tokens=args.max_new_tokens)
done = spile.export(f"{args.output}/activations", f"{args.output}/draft", to="speculators", taps=taps)
print(f"{done.rows} samples in {args.output}/draft")
