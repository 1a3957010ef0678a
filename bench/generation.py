"""Compare generation with all layers captured with ``transformers.generate``: ``python -m bench.generation TASKS``.

    python -m bench.generation TASKS.jsonl            0.5B shape, 256 prompts of real ARC lengths, 256 new tokens
    python -m bench.generation embedded --model embedded --prompts 16 --new 64 --longest 1300           on a CPU

Random weights never generate a stop token, so the lengths of the answers are given. ``static``: every answer has
``--new`` tokens. ``continuous``: lengths are drawn between 16 and ``--new``; in spile the next prompt takes the slot of
a finished answer, while a batch of transformers waits for its longest answer. Both count only the tokens of requested
answers. spile also stores every layer of every token, including the prompts, in ``--output``, a RAM disk; transformers
stores nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from bench.shapes import make_model
from spile.compute.answers import Answer
from spile.compute.batches import Sizes
from spile.compute.device import configure_jax
from spile.compute.generator import GenerationPrograms, Generator, plan_slots
from spile.compute.mesh import device_memory, make_mesh
from spile.compute.producer import Control
from spile.compute.progress import Progress
from spile.data.samples import open_stream
from spile.data.tokens import load_tokenizer
from spile.models import model_files
from spile.models.generation import token_bytes
from spile.models.weights import load
from spile.objects import open_folder
from spile.run.pipeline import Sink, run_pipeline
from spile.run.resolve import compute_dtype_for
from spile.spec.identity import RunIdentity, StreamIdentity
from spile.spec.ranges import Ranges
from spile.spec.run import DataSpec, GenerationSpec
from spile.spec.sample import Sample
from spile.spec.taps import select_taps
from spile.store.run import join_run
from spile.store.writer import join_stream


def prompts_of(model: Path, tasks: str, count: int, longest: int) -> list[Sample]:
    stream = open_stream(DataSpec(dataset=tasks, max_seq_length=longest), load_tokenizer(model))
    found = [item for item in stream.read(Ranges()) if isinstance(item, Sample)]
    return [
        Sample(n, found[n % len(found)].task_id, found[n % len(found)].tokens, found[n % len(found)].roles)
        for n in range(count)
    ]


class _Limited(Generator):
    """Ends each answer at a given length, because random weights generate no stop token."""

    limits: Sequence[int] = ()

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.calls: Counter[str] = Counter()

    def _call(self, program: Any, parts: Any, *given: Any) -> Any:
        self.calls["steps" if parts is None else "read"] += 1
        return super()._call(program, parts, *given)

    def _append_token(self, answer: Answer, token: int, logprob: float) -> None:
        super()._append_token(answer, token, logprob)
        if answer.reason is None and len(answer.tokens) >= self.limits[answer.sample.index]:
            answer.reason = "length"


def spile_seconds(
    args: argparse.Namespace, model: Path, samples: list[Sample], limits: Sequence[int]
) -> dict[str, Any]:
    files, dtype = model_files.find(str(model)), compute_dtype_for(jax.default_backend())
    config, taps = files.config, select_taps(("residual",), None, files.config.n_layers)
    params = load(files, dtype, head=True)
    generation = GenerationSpec(max_new_tokens=args.new, stop_tokens=())
    longest = max(map(len, samples))
    weight_bytes = sum(x.nbytes for x in jax.tree.leaves(params))
    plan = plan_slots(longest, args.new, token_bytes(config, dtype), weight_bytes, device_memory(), args.batch)
    run = RunIdentity(
        model=str(model), revision=None, architecture=config.architecture, d_model=config.d_model,
        n_layers=config.n_layers, weights="random", tokenizer="-", prompt=DataSpec().prompt, seed=0,
        max_seq_length=longest, long="skip", dtype=dtype, store_dtype="bfloat16", generation=generation,
    )  # fmt: skip
    seconds, calls = [], {}
    for visit in range(2):  # The first run compiles and warms up.
        home = Path(args.output) / f"visit-{visit}"
        shutil.rmtree(home, ignore_errors=True)
        programs = GenerationPrograms(
            params, config, taps, mesh=make_mesh((1, 1), jax.devices()[:1]), plan=plan, generation=generation,
            seed=0, dtype=dtype, store_dtype="bfloat16",
        )  # fmt: skip
        generator = _Limited(programs, load_tokenizer(model), progress := Progress())
        generator.limits = limits
        root = open_folder(str(home))
        join_run(root, run)
        stream = join_stream(root, 0, StreamIdentity("-", "-", len(samples), len(samples), taps), run)
        sizes = Sizes(4096, None, args.longest, 1e9, max(1, min(8, (os.cpu_count() or 2) // 2)))
        calls = call_milliseconds(generator)
        began = time.perf_counter()
        control = Control()
        run_pipeline(samples, generator, Sink(stream), sizes, progress=progress, control=control)
        seconds.append(time.perf_counter() - began)
        generator.close()
        shutil.rmtree(home, ignore_errors=True)
    busy = {stage: round(spent, 2) for stage, spent in progress.snapshot().busy.items()}
    return {
        "seconds": round(seconds[-1], 2), "first_visit": round(seconds[0], 2), "slots": plan.slots, "dtype": dtype,
        "busy": busy, "calls": generator.calls, "call_ms": calls,
    }  # fmt: skip


def call_milliseconds(generator: _Limited, times: int = 4) -> dict[str, float]:
    """Return the milliseconds of each program, with rows copied to the host. A call takes as long without work."""
    found = {}
    programs: dict[str, Callable[[], Any]] = {"read": lambda: generator._read([]), "steps": generator._step}
    for name, call in programs.items():
        jax.block_until_ready(call().kept)
        began = time.perf_counter()
        for _ in range(times):
            last = call()
        jax.block_until_ready(last.kept)
        found[name] = round((time.perf_counter() - began) / times * 1e3, 1)
    generator.calls.clear()
    return found


def transformers_seconds(model: Path, samples: list[Sample], limits: Sequence[int], batch: int, dtype: str) -> float:
    """Return the seconds of plain transformers batches: left-padded, each as long as its longest answer."""
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    judge = AutoModelForCausalLM.from_pretrained(model, dtype=getattr(torch, dtype)).eval().to(device)
    began = 0.0
    for first in (None, *range(0, len(samples), batch)):  # A short first batch warms up.
        part = samples[:batch] if first is None else samples[first : first + batch]
        new = 4 if first is None else max(limits[sample.index] for sample in part)
        longest = max(map(len, part))
        ids = np.zeros((len(part), longest), np.int64)
        mask = np.zeros_like(ids)
        for row, sample in enumerate(part):
            ids[row, longest - len(sample) :], mask[row, longest - len(sample) :] = sample.tokens, 1
        if first == 0:
            began = time.perf_counter()
        with torch.no_grad():
            judge.generate(
                torch.from_numpy(ids).to(device), attention_mask=torch.from_numpy(mask).to(device),
                max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0,
            )  # fmt: skip
        if device == "cuda":
            torch.cuda.synchronize()
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tasks")
    parser.add_argument("--model", default="qwen2.5-0.5b", help="a shape of bench.shapes, or embedded")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--new", type=int, default=256)
    parser.add_argument("--batch", type=int, help="answers at a time, for both [default: 128 on a GPU, 8 on a CPU]")
    parser.add_argument("--longest", type=int, default=2048)
    parser.add_argument("--output", default="/dev/shm/spile-bench-generation")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    configure_jax()
    args.batch = args.batch or (8 if jax.default_backend() == "cpu" else 128)
    embedded = model_files.find("embedded").tokenizer_folder
    model = embedded if args.model == "embedded" else make_model(args.model, Path(args.output) / "model")
    samples = prompts_of(model, args.tasks, args.prompts, args.longest)
    draw = np.random.default_rng(0)
    kinds = {
        "static": [args.new] * len(samples),
        "continuous": draw.integers(min(16, args.new), args.new + 1, len(samples)).tolist(),
    }
    results: dict[str, Any] = {"prompts": len(samples), "prompt_tokens": sum(map(len, samples)), "batch": args.batch}
    for kind, limits in kinds.items():
        ours = spile_seconds(args, model, samples, limits)
        results[kind] = {"answer_tokens": sum(limits), "spile": ours}
        print(json.dumps({kind: results[kind]}), flush=True)
        theirs = transformers_seconds(model, samples, limits, args.batch, ours["dtype"])
        results[kind] |= {"transformers": round(theirs, 2), "ratio": round(theirs / ours["seconds"], 2)}
        print(json.dumps({kind: results[kind]}), flush=True)
        if args.json is not None:
            args.json.write_text(json.dumps(results, indent=1) + "\n")
    shutil.rmtree(args.output, ignore_errors=True)


if __name__ == "__main__":
    main()
