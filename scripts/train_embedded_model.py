"""Train the model that ships inside the package, on tasks of the repo's own generator, through spile's own decoder.

    PYTHONPATH=src python scripts/train_embedded_model.py FOLDER [--minutes 4.5]

Writes ``model.safetensors`` (bfloat16) and ``curve.json`` (loss and exact answers over time, then by
rule). A few minutes on one GPU; on a CPU ``--steps 3 --batch-tokens 1280 --workers 1 --tests 2`` shows that it runs. It
needs jax, jaxtyping, numpy, safetensors and tokenizers. The data are the same for the same seed; the sums of a GPU, and
so the last digits of the weights, are not.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import multiprocessing
import queue
import random
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).parent))

from make_embedded_model import CONFIG, tokenizer
from make_embedded_tasks import RULES, task

from spile.data.arc.encoders import parse_encoder
from spile.data.arc.grids import Task
from spile.data.arc.prompts import arc_messages, augment
from spile.data.rows import parse_task
from spile.spec.run import DEFAULT_ENCODER, PromptSpec

LENGTHS = (640, 1280)
"""Rows are padded to one of these; longer tasks are not trained on."""
SIZES = ("small", "small", "small", "medium")
"""What a task is drawn from."""
AUGMENTED = 0.25
"""The part of the tasks that are turned, mirrored and recoloured."""
HELD_OUT = {"small": 12, "medium": 6}
"""Tasks of each rule that the score is taken on; their seeds lie apart from those of training."""
CONTEXT, TARGET = 1, 20
"""Weights of a token in the loss: what only sets the scene, and what the rule decides."""


# -- data -----------------------------------------------------------------------------------------------------------


def training_text(puzzle: Task) -> str:
    """The default prompt in the model's chat template, and the right answer."""
    encoder = parse_encoder(DEFAULT_ENCODER)
    messages = arc_messages(puzzle, encoder, PromptSpec.version)
    answer = puzzle.answers[0]
    assert answer is not None  # noqa: S101 - the generator knows its answers
    messages = [*messages, {"role": "assistant", "content": encoder.to_text(answer)}]
    return "".join(f"<|im_start|>{one['role']}\n{one['content']}<|im_end|>\n" for one in messages)[:-1]


_OUTPUTS = re.compile(r"\nOutput\n(.*?)(?=\n\n)", re.DOTALL)
_ANSWER = re.compile(r"<\|im_start\|>assistant\n(.*)$", re.DOTALL)


@dataclass(frozen=True)
class Lesson:
    """One task as tokens, with each token's weight in the loss."""

    tokens: np.ndarray
    weights: np.ndarray
    answer: int
    """Where the answer begins."""


def lesson(puzzle: Task, words: Tokenizer) -> Lesson:
    """The answer counts in full, and so does every example's output but the first, which nothing could tell."""
    text = training_text(puzzle)
    encoded = words.encode(text, add_special_tokens=False)
    starts = np.array([start for start, _ in encoded.offsets])
    weights = np.full(len(starts), CONTEXT, np.uint8)
    answer = _ANSWER.search(text)
    assert answer is not None  # noqa: S101 - training_text put it there
    for part in [*_OUTPUTS.finditer(text)][1:]:
        weights[(starts >= part.start(1)) & (starts <= part.end(1))] = TARGET
    weights[starts >= answer.start(1)] = TARGET
    return Lesson(np.array(encoded.ids, np.uint16), weights, int(np.searchsorted(starts, answer.start(1))))


def puzzle(name: str, size: str, seed: int, variant: int = 0) -> Task:
    """A task of the generator, or a variant of it."""
    made = parse_task({**task(name, size, seed), "task_id": f"{name}-{seed}"}, f"{name}-{seed}")
    return augment(made, seed, variant)[0]


def lessons(seed: int, words: Tokenizer) -> Iterator[Lesson]:
    """Tasks for ever, each seen once. Seeds start above those of the embedded and the held-out tasks."""
    draw = random.Random(seed)
    names = [*RULES]
    while True:
        variant = 1 if draw.random() < AUGMENTED else 0
        yield lesson(puzzle(draw.choice(names), draw.choice(SIZES), draw.randrange(1 << 32, 1 << 62), variant), words)


def held_out(words: Tokenizer) -> list[tuple[str, str, Lesson]]:
    """(rule, size, task) of the tasks that are never trained on."""
    return [
        (name, size, lesson(puzzle(name, size, 1_000_000 + 1000 * place + number), words))
        for size, count in HELD_OUT.items()
        for place, name in enumerate(RULES)
        for number in range(count)
    ]


def padded(batch: list[Lesson], length: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows of tokens and of weights."""
    tokens, weights = (np.zeros((len(batch), length), kind) for kind in (np.uint16, np.uint8))
    for row, one in enumerate(batch):
        tokens[row, : len(one.tokens)], weights[row, : len(one.tokens)] = one.tokens, one.weights
    return tokens, weights


def feed(seed: int, batch_tokens: int, words: str, out: Any) -> None:
    """A process that makes batches until it is ended."""
    waiting: dict[int, list[Lesson]] = {length: [] for length in LENGTHS}
    for one in lessons(seed, Tokenizer.from_str(words)):
        length = next((length for length in LENGTHS if len(one.tokens) <= length), None)
        if length is None:
            continue
        waiting[length].append(one)
        if len(waiting[length]) == batch_tokens // length:
            out.put((length, *padded(waiting[length], length)))
            waiting[length] = []


# -- model ----------------------------------------------------------------------------------------------------------


class Trainer:
    """The model, its optimizer and its compiled programs."""

    def __init__(self, batch_tokens: int, seed: int, attention: str | None = None) -> None:
        import jax
        import jax.numpy as jnp
        from tests.fakes import random_weights

        from spile.models.attention import choose
        from spile.models.families import read_config
        from spile.spec.taps import Tap

        self.config = read_config(CONFIG)
        platform = jax.default_backend()
        self.dtype = jnp.float32 if platform == "cpu" else jnp.bfloat16
        self.attention = attention or choose(self.config, platform, self.dtype)
        self.last = (Tap("residual", self.config.n_layers - 1),)
        tree = random_weights.random(self.config, jax.random.key(seed))
        # Small at first: what a layer adds is a fraction of what passes it by; the head is the embedding.
        tree = jax.tree.map(lambda x: x * 0.5 if x.ndim > 1 else x, tree)
        tree = dataclasses.replace(tree, embed=tree.embed * 2 * self.config.d_model**-0.5)
        tree = {"decoder": tree, "norm": jnp.ones(self.config.d_model)}
        self.state = (tree, jax.tree.map(jnp.zeros_like, tree), jax.tree.map(jnp.zeros_like, tree))
        self._programs: dict[Any, Any] = {}
        shapes = [(batch_tokens // length, length) for length in LENGTHS]
        with ThreadPoolExecutor() as pool:
            for kind in (self._train, self._score):
                for shape in shapes:
                    self._programs[kind, shape] = pool.submit(self._compile, kind, shape)

    def wait(self) -> None:
        """Until every program is compiled."""
        for program in self._programs.values():
            program.result()

    def _compile(self, kind: Any, shape: tuple[int, int]) -> Any:
        import jax
        import jax.numpy as jnp

        tokens, weights = (jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.uint16, jnp.uint8))
        if kind == self._score:
            return jax.jit(kind).lower(self.state[0], tokens, weights).compile()
        number = jax.ShapeDtypeStruct((), jnp.float32)
        return jax.jit(kind, donate_argnums=0).lower(self.state, tokens, weights, number, number).compile()

    def _logits(self, tree: Any, tokens: Any) -> Any:
        import jax
        import jax.numpy as jnp

        from spile.models.decoder import forward

        cast = jax.tree.map(lambda x: x.astype(self.dtype), tree)
        (x,) = forward(
            cast["decoder"], tokens.astype(jnp.int32), config=self.config, taps=self.last, attention=self.attention
        )
        wide = x.astype(jnp.float32)
        scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.config.norm_eps)
        normed = (wide * scale * cast["norm"]).astype(self.dtype)
        return jnp.einsum("bsd,vd->bsv", normed, cast["decoder"].embed).astype(jnp.float32)

    def _train(self, state: Any, tokens: Any, weights: Any, rate: Any, step: Any) -> Any:
        """One step of AdamW, the gradient's norm clipped at 1."""
        import jax
        import jax.numpy as jnp

        tree, first, second = state

        def loss(tree: Any) -> Any:
            logits = self._logits(tree, tokens)[:, :-1]
            each = weights[:, 1:].astype(jnp.float32)
            right = jnp.take_along_axis(logits, tokens[:, 1:, None].astype(jnp.int32), axis=-1)[..., 0]
            lost = jax.nn.logsumexp(logits, axis=-1) - right
            target = each == TARGET
            return jnp.sum(lost * each) / jnp.sum(each), jnp.sum(lost * target) / jnp.sum(target)

        (_, shown), grads = jax.value_and_grad(loss, has_aux=True)(tree)
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
        grads = jax.tree.map(lambda g: g * jnp.minimum(1.0, 1.0 / (norm + 1e-9)), grads)
        b1, b2 = 0.9, 0.98
        first = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, first, grads)
        second = jax.tree.map(lambda v, g: b2 * v + (1 - b2) * g * g, second, grads)

        def moved(x: Any, m: Any, v: Any) -> Any:
            by = (m / (1 - b1**step)) / (jnp.sqrt(v / (1 - b2**step)) + 1e-9)
            return x - rate * (by + (0.05 * x if x.ndim > 1 else 0.0))

        return (jax.tree.map(moved, tree, first, second), first, second), shown

    def _score(self, tree: Any, tokens: Any, weights: Any) -> Any:
        """Rows whose every marked token is the model's first choice: as if it had been generated greedily."""
        import jax.numpy as jnp

        chosen = jnp.argmax(self._logits(tree, tokens)[:, :-1], axis=-1)
        return jnp.all((chosen == tokens[:, 1:].astype(chosen.dtype)) | (weights[:, 1:] == 0), axis=1)

    def train(self, tokens: np.ndarray, weights: np.ndarray, rate: float, step: int) -> Any:
        """The loss over what the rules decide, on its way from the device."""
        program = self._programs[self._train, tokens.shape].result()
        self.state, shown = program(self.state, tokens, weights, np.float32(rate), np.float32(step))
        return shown

    def exact(self, tests: list[Lesson], batch_tokens: int) -> list[bool]:
        """For each task whether its answer would be exactly right."""
        found: dict[int, bool] = {}
        for shortest, length in zip((0, *LENGTHS), LENGTHS, strict=False):
            places = [n for n, one in enumerate(tests) if shortest < len(one.tokens) <= length]
            rows = batch_tokens // length
            for start in range(0, len(places), rows):
                part = places[start : start + rows]
                tokens, weights = padded([tests[n] for n in part], length)
                for row, n in enumerate(part):
                    weights[row, : tests[n].answer] = 0
                more = ((0, rows - len(part)), (0, 0))
                program = self._programs[self._score, (rows, length)].result()
                right = program(self.state[0], np.pad(tokens, more), np.pad(weights, more))
                found.update(zip(part, np.asarray(right).tolist(), strict=False))
        return [found.get(n, False) for n in range(len(tests))]  # a task longer than all rows is not solved

    def tensors(self) -> dict[str, np.ndarray]:
        """The weights under the names that transformers gives them, in bfloat16."""
        import jax
        import jax.numpy as jnp

        tree = jax.tree.map(lambda x: np.asarray(x.astype(jnp.bfloat16)), self.state[0])
        made = {"model.embed_tokens.weight": tree["decoder"].embed, "model.norm.weight": tree["norm"]}
        for number, layer in enumerate(tree["decoder"].layers):
            for ours, theirs in NAMES.items():
                made[f"model.layers.{number}.{theirs}"] = getattr(layer, ours)
        return made


NAMES = {
    "attn_norm": "input_layernorm.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    **{f"{part}": f"self_attn.{part}_proj.weight" for part in "qkvo"},
    **{f"{part}_bias": f"self_attn.{part}_proj.bias" for part in "qkv"},
    **{part: f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")},
}


# -- the run --------------------------------------------------------------------------------------------------------


def rate_at(done: float, step: int, peak: float) -> float:
    """Up over the first steps, then down along a cosine to a twentieth."""
    return peak * min(1.0, step / 300) * (0.05 + 0.95 * (1 + math.cos(math.pi * min(done, 1.0))) / 2)


def ready_trainer(batch_tokens: int, seed: int) -> Trainer:
    """With the fused kernel where its gradient compiles, else with plain attention."""
    from jax.errors import JaxRuntimeError

    trainer = Trainer(batch_tokens, seed)
    try:
        trainer.wait()
    except (JaxRuntimeError, NotImplementedError, RuntimeError, ValueError) as error:
        print(f"{trainer.attention} attention: {str(error)[:300]}; going on with xla", flush=True)
        trainer = Trainer(batch_tokens, seed, "xla")
        trainer.wait()
    return trainer


def summary(tests: list[tuple[str, str, Lesson]], right: list[bool]) -> dict[str, float]:
    """The part of the held-out tasks that are solved, by size."""
    by_size: dict[str, list[bool]] = {}
    for (_, size, _), solved in zip(tests, right, strict=True):
        by_size.setdefault(size, []).append(solved)
    return {size: round(sum(each) / len(each), 4) for size, each in by_size.items()}


def main() -> None:
    """Train for the given minutes or steps; write the weights and the curve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--minutes", type=float, default=4.5)
    parser.add_argument("--steps", type=int, default=1 << 40)
    parser.add_argument("--batch-tokens", type=int, default=64 * 1280)
    parser.add_argument("--rate", type=float, default=1.5e-3)
    parser.add_argument("--workers", type=int, default=max(1, (multiprocessing.cpu_count() or 2) - 2))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--tests", type=int, help="Use only this many of the held-out tasks.")
    args = parser.parse_args()
    words = tokenizer().decode()
    spawning = multiprocessing.get_context("spawn")
    batches: Any = spawning.Queue(maxsize=64)
    feeders = [
        spawning.Process(target=feed, args=(args.seed * 1000 + n, args.batch_tokens, words, batches), daemon=True)
        for n in range(args.workers)
    ]
    for feeder in feeders:
        feeder.start()
    trainer = ready_trainer(args.batch_tokens, args.seed)
    tests = held_out(Tokenizer.from_str(words))[: args.tests]
    curve: list[dict[str, Any]] = []
    began, step, tokens, waited = time.monotonic(), 0, 0, 0.0
    shown: Any = None
    noted = 0.0
    while step < args.steps and (elapsed := time.monotonic() - began) < 60 * args.minutes:
        asked = time.monotonic()
        try:
            _, rows, weights = batches.get(timeout=120)
        except queue.Empty:
            sys.exit("the processes that make tasks have stopped")
        waited += time.monotonic() - asked
        step, tokens = step + 1, tokens + int((weights > 0).sum())
        done = max(elapsed / 60 / args.minutes, step / args.steps)
        shown = trainer.train(rows, weights, rate_at(done, step, args.rate), step)
        if step % 20 == 0:
            shown.block_until_ready()  # the clock is the schedule: nothing runs far ahead of it
        if time.monotonic() - noted > 15:
            noted = time.monotonic()
            right = trainer.exact([one for _, _, one in tests], args.batch_tokens)
            seconds = round(time.monotonic() - began, 1)
            entry = {"step": step, "tokens": tokens, "seconds": seconds, "waited": round(waited, 1)}
            curve.append({**entry, "loss": round(float(shown), 4), **summary(tests, right)})
            print(json.dumps(curve[-1]), flush=True)
    for feeder in feeders:
        feeder.terminate()
    finish(args.folder, trainer, tests, curve, args.batch_tokens)


def finish(folder: Path, trainer: Trainer, tests: list[tuple[str, str, Lesson]], curve: list[Any], room: int) -> None:
    """Score once more, rule by rule, and write both files."""
    from safetensors.numpy import save_file

    right = trainer.exact([one for _, _, one in tests], room)
    rules: dict[str, list[bool]] = {}
    for (name, size, _), solved in zip(tests, right, strict=True):
        rules.setdefault(f"{name}-{size}", []).append(solved)
    folder.mkdir(parents=True, exist_ok=True)
    save_file(trainer.tensors(), folder / "model.safetensors", metadata={"format": "pt"})
    score = {"score": summary(tests, right), "rules": {name: sum(each) / len(each) for name, each in rules.items()}}
    (folder / "curve.json").write_text(json.dumps({**score, "curve": curve}, indent=1) + "\n")
    print(json.dumps(score, indent=1), flush=True)


if __name__ == "__main__":
    main()
