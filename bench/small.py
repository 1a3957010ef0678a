"""Compare whole commands on small jobs: ``python -m bench.small --model MODEL [--prompts 1,4,32] [--turns 2]``.

``spile infer``, with one layer stored, and a script that calls ``transformers.generate`` answer the same prompts, each
in a process of its own and in turns. Both generate greedily in float32, up to ``--new`` tokens. CPU seconds, wall
seconds and the largest memory of each process are printed, start included; ``rest`` is without the time of a process
that only imports its libraries and loads the model. Compiled programs come from spile's cache after the first turn.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

_TOPICS = ("a river", "the moon", "bread", "a violin", "glass", "the colour blue", "rain", "a lighthouse")
_SCRIPT = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, data, new = sys.argv[1], sys.argv[2], int(sys.argv[3])
torch.set_grad_enabled(False)
tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
chats = [json.loads(line)["messages"] for line in open(data)]
if new:
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
    model.generate(**batch, max_new_tokens=new, do_sample=False, pad_token_id=tokenizer.pad_token_id)
"""


class Cost(NamedTuple):
    """What one process used."""

    wall: float
    cpu: float
    memory: float
    """Megabytes at most."""


def run(command: list[str]) -> Cost:
    """Run a command and return what it used, with its children."""
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, env=environment, text=True)
    assert process.stderr is not None
    errors = process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{errors[-2000:]}")
    return Cost(time.perf_counter() - began, used.ru_utime + used.ru_stime, used.ru_maxrss / 1e3)


def _middle(costs: list[Cost]) -> Cost:
    return Cost(*(median(values) for values in zip(*costs, strict=True)))


def _line(name: str, costs: list[Cost]) -> str:
    cost = _middle(costs)
    return f"  {name:<22} {cost.cpu:6.1f} CPU s   {cost.wall:6.1f} s   {cost.memory:6.0f} MB"


def main() -> int:
    """Print a block for each number of prompts."""
    parser = argparse.ArgumentParser(prog="python -m bench.small", description=__doc__)
    parser.add_argument("--model", required=True, help="a folder with the real model, such as build/real/smollm2")
    parser.add_argument("--prompts", default="1,4,32")
    parser.add_argument("--new", type=int, default=64)
    parser.add_argument("--turns", type=int, default=2)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        data, output = Path(scratch) / "chats.jsonl", Path(scratch) / "out"
        for count in map(int, options.prompts.split(",")):
            questions = [f"Write {n + 2} sentences about {_TOPICS[n % len(_TOPICS)]}." for n in range(count)]
            chats = [{"messages": [{"role": "user", "content": question}]} for question in questions]
            data.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
            ours = [
                *(sys.executable, "-m", "spile.cli.main", "infer", "--model", options.model, "--dataset", str(data)),
                *("--output", str(output), "--layers", "15", "--max-new-tokens", str(options.new)),
            ]
            theirs = [sys.executable, "-c", _SCRIPT, options.model, str(data), str(options.new)]
            costs: dict[str, list[Cost]] = {"spile infer": [], "transformers.generate": []}
            first = run(ours)  # It fills the cache of compiled programs.
            for _ in range(options.turns):
                shutil.rmtree(output, ignore_errors=True)
                costs["spile infer"].append(run(ours))
                costs["transformers.generate"].append(run(theirs))
            shutil.rmtree(output, ignore_errors=True)
            print(f"{count} prompts, up to {options.new} new tokens each")
            print(_line("spile infer, first", [first]))
            for name, each in costs.items():
                print(_line(name, each), flush=True)
            a, b = (_middle(each) for each in costs.values())
            ratios = f"CPU {a.cpu / b.cpu:.2f}, wall {a.wall / b.wall:.2f}, memory {a.memory / b.memory:.2f}"
            print(f"  spile / transformers: {ratios}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
