"""Greedy answers are transformers' own; activations are those of one forward over prompt and answer."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from numerics import cases
from spile.cli.main import main
from spile.compute.answers import Answer
from spile.compute.generator import GenerationPrograms, Generator, SlotPlan
from spile.compute.mesh import make_mesh
from spile.compute.progress import Progress
from spile.data.tokens import load_tokenizer
from spile.errors import ModelError
from spile.models import model_files, weights
from spile.models.decoder import forward
from spile.spec.run import GenerationSpec
from spile.spec.sample import Sample
from spile.spec.taps import Tap

TOLERANCE = 1e-4
LENGTHS = (3, 17, 9, 30, 1, 12, 24)
"""Ragged, and more prompts than slots."""
PLAN = SlotPlan(slots=3, capacity=30 + 64, chunk=8, rows=2, stride=5)


QUICK = ("qwen2-layer-types", "gemma2", "gpt2", "gpt-neox", "mixtral")
"""Live in every run; the other cases, all variants of all families, in make soak."""
EVERY = [
    case if case in QUICK else pytest.param(case, marks=pytest.mark.slow)
    for case in cases.CASES
    if case != "phi3-longrope"  # its samples are longer than the original context, which infer refuses
]


def taps(case: str) -> tuple[Tap, ...]:
    return tuple(tap for tap in cases.taps(case) if tap.kind in ("residual", "attn", "mlp"))


def prompts(case: str) -> list[Sample]:
    draw = np.random.default_rng(5)
    vocabulary = cases.CASES[case]["vocab_size"]
    return [
        Sample(number, f"t{number}", draw.integers(3, vocabulary, length).astype(np.int32), np.zeros(length, np.uint8))
        for number, length in enumerate(LENGTHS)
    ]


def generated(folder: Path, case: str, plan: SlotPlan = PLAN, **more: Any) -> dict[int, Answer]:
    files = model_files.find(str(folder))
    about = GenerationSpec(**{"max_new_tokens": 64, "stop_tokens": more.pop("stop", ()), **more.pop("generation", {})})
    programs = GenerationPrograms(
        weights.load(files, head=True), files.config, taps(case), mesh=make_mesh((1, 1)), plan=plan,
        generation=about, seed=more.pop("seed", 0), dtype="float32", store_dtype="float32",
    )  # fmt: skip
    generator = Generator(programs, load_tokenizer(model_files.find("embedded").tokenizer_folder), Progress())
    found = [answer for turn in generator.answers(iter(prompts(case))) for answer in turn]
    generator.close()
    assert sorted(answer.sample.index for answer in found) == list(range(len(LENGTHS)))
    return {answer.sample.index: answer for answer in found}


def answer_tokens(answers: dict[int, Answer]) -> list[list[int]]:
    return [answers[number].tokens for number in sorted(answers)]


def test_longrope_beyond_its_original_context_is_refused(tmp_path: Path) -> None:
    folder = cases.write_model("phi3-longrope", tmp_path)
    with pytest.raises(ModelError, match=r"longrope.*at most 8 tokens.*--max-new-tokens"):
        generated(folder, "phi3-longrope")


@pytest.mark.torch
@pytest.mark.parametrize("case", EVERY)
def test_greedy_tokens_are_transformers_own(case: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    logging.getLogger("transformers").setLevel(logging.ERROR)
    folder = cases.write_model(case, tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    answers = generated(folder, case)
    for sample in prompts(case):
        ids = torch.from_numpy(sample.tokens).long()[None]
        settings = {"max_new_tokens": 64, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(sample) :]
        assert answers[sample.index].tokens == expected.tolist()


def first_cases() -> list[Any]:
    """Return one case of each family; all but two are marked slow."""
    first: dict[str, str] = {}
    for case, about in cases.CASES.items():
        if case != "phi3-longrope":
            first.setdefault(about["model_type"], case)
    return [
        case if case in ("qwen2-tied", "gpt2") else pytest.param(case, marks=pytest.mark.slow)
        for case in first.values()
    ]


@pytest.mark.torch
@pytest.mark.parametrize("case", first_cases())
def test_the_command_infer_gives_transformers_tokens(case: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    folder, words = cases.write_model(case, tmp_path / "model"), [f"w{number}" for number in range(97)]
    backend = Backend(WordLevel({word: number for number, word in enumerate(words)}, unk_token="w3"))
    backend.pre_tokenizer = Whitespace()
    backend.save(str(folder / "tokenizer.json"))
    texts = [" ".join(words[token] for token in sample.tokens) for sample in prompts(case)]
    data = tmp_path / "texts.jsonl"
    data.write_text("".join(json.dumps({"task_id": str(n), "text": text}) + "\n" for n, text in enumerate(texts)))
    command = ["infer", "--model", folder, "--dataset", data, "--output", tmp_path / "out", "--prompt", "text"]
    options = [
        "--max-new-tokens",
        "24",
        "--max-seq-length",
        "64",
        "--layers",
        "0",
        "--stop",
        "w2",
        "--dtype",
        "float32",
    ]
    with pytest.raises(SystemExit, match="0"):
        main([str(word) for word in [*command, *options]])
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    lines = (tmp_path / "out" / "stream_0" / "predictions.jsonl").read_text().splitlines()
    found = {answer["sample"]: answer["tokens"] for answer in map(json.loads, lines)}
    settings = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": 2, "pad_token_id": 0}
    for sample in prompts(case):
        ids = torch.from_numpy(sample.tokens).long()[None]
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)[0, len(sample) :]
        assert found[sample.index] == expected.tolist()


def check_rows(folder: Path, case: str, answers: dict[int, Answer]) -> None:
    files = model_files.find(str(folder))
    params = weights.load(files)
    step = jax.jit(lambda p, t: forward(p, t, config=files.config, taps=taps(case)))
    for answer in answers.values():
        tokens = np.concatenate([answer.sample.tokens, answer.tokens]).astype(np.int32)
        padded = np.zeros((1, PLAN.capacity), np.int32)
        padded[0, : len(tokens)] = tokens
        assert len(answer.rows) == len(taps(case))
        for tap, expected in enumerate(step(params, padded)):
            rows = answer.take_rows(tap)
            assert rows is not None
            assert rows.shape == (len(tokens), files.config.d_model)
            assert cases.error(rows, np.asarray(expected)[0, : len(tokens)]) <= TOLERANCE


FAMILIES = ["gemma", "gemma2", "gemma3", "phi3", "gpt2", "gpt-neox", "olmo2", "qwen3-moe-mixed", "mixtral"]


@pytest.mark.parametrize(
    "case",
    [
        "qwen2-layer-types",
        *(
            pytest.param(case, marks=pytest.mark.slow)
            for case in ("mistral-window", "qwen3-window-yarn", "llama-biases", *FAMILIES)
        ),
    ],
)  # fmt: skip
def test_activations_are_those_of_one_forward(case: str, tmp_path: Path) -> None:
    folder = cases.write_model(case, tmp_path)
    stop = answer_tokens(generated(folder, case))[3][20]
    answers = generated(folder, case, stop=(stop,))
    assert {answer.reason for answer in answers.values()} == {"stop", "length"}
    assert all((answer.tokens[-1] == stop) == (answer.reason == "stop") for answer in answers.values())
    check_rows(folder, case, answers)


def same(left: Sequence[Answer], right: Sequence[Answer]) -> None:
    for one, other in zip(left, right, strict=True):
        assert (one.tokens, one.reason) == (other.tokens, other.reason)
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)


@pytest.mark.slow
def test_a_seed_determines_the_answer_for_any_batch(tmp_path: Path) -> None:
    case = "qwen2-tied"
    folder = cases.write_model(case, tmp_path)
    drawing = {"generation": {"temperature": 0.9, "top_p": 0.8, "max_new_tokens": 24}}
    first = generated(folder, case, seed=3, **drawing)
    other = generated(folder, case, dataclasses.replace(PLAN, slots=7, chunk=16, rows=3, stride=1), seed=3, **drawing)
    assert answer_tokens(first) == answer_tokens(other)
    assert answer_tokens(first) != answer_tokens(generated(folder, case, seed=4, **drawing))
    greedy = generated(folder, case, generation={"max_new_tokens": 24})
    assert answer_tokens(first) != answer_tokens(greedy)
    narrow = {"generation": {"temperature": 0.9, "top_p": 1e-6, "max_new_tokens": 24}}
    assert answer_tokens(generated(folder, case, **narrow)) == answer_tokens(greedy)  # the likeliest alone is left


@pytest.mark.parametrize(
    ("capture", "prompt", "answer"),
    [pytest.param("prompt", 1, 0, marks=pytest.mark.slow), ("answer", 0, 1), ("none", 0, 0)],
)
def test_what_is_captured(capture: str, prompt: int, answer: int, tmp_path: Path) -> None:
    case = "llama-1"
    found = generated(cases.write_model(case, tmp_path), case, generation={"capture": capture, "max_new_tokens": 7})
    for one in found.values():
        expected = prompt * len(one.sample) + answer * len(one.tokens)
        rows = [one.take_rows(tap) for tap in range(len(one.rows))]
        assert [0 if each is None else len(each) for each in rows] == [expected] * len(taps(case))
