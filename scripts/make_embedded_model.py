"""Make all but the weights of the model that ships inside the package: its config, tokenizer and chat template.

    python scripts/make_embedded_model.py [FOLDER]

The same seed gives the same bytes. ``scripts/train_embedded_model.py`` makes the weights.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

SEED = 20_240_601
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCABULARY = 1024

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "hidden_act": "silu",
    "hidden_size": 192,
    "initializer_range": 0.02,
    "intermediate_size": 512,
    "max_position_embeddings": 32768,
    "max_window_layers": 6,
    "model_type": "qwen2",
    "num_attention_heads": 4,
    "num_hidden_layers": 6,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": VOCABULARY,
}

CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

TOKENIZER_CONFIG = {
    "added_tokens_decoder": {
        str(number): {
            "content": token,
            "lstrip": False,
            "normalized": False,
            "rstrip": False,
            "single_word": False,
            "special": True,
        }
        for number, token in enumerate(SPECIAL)
    },
    "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
    "bos_token": None,
    "chat_template": CHAT_TEMPLATE,
    "clean_up_tokenization_spaces": False,
    "eos_token": "<|im_end|>",
    "model_max_length": 32768,
    "pad_token": "<|endoftext|>",
    "tokenizer_class": "PreTrainedTokenizerFast",
    "unk_token": None,
}

SUBJECTS = """the model|a small network|the worker|each layer|the first token|a grid of colours|the teacher
an old sailor|the river|my neighbour|a careful reader|the pattern|our experiment|the second example|the largest object
a blue square|the child
the machine|every shard|the background|a diagonal line|the people|the company|the city|science|the government
his friend|her answer|the winter|this rule|the question|a question|the question about language|the house|music"""

VERBS = """moves|turns|reads|writes|keeps|copies|draws|fills|follows|describes|explains|repeats|mirrors|rotates|learns
remembers|answers|changes|shows|finds|makes|takes|gives|becomes|contains|needs|starts|ends|grows|carries|counts|opens"""

OBJECTS = """the output|the input|a row of cells|the missing part|its shape|the same colour|two columns|the next word
a hidden feature|the residual stream|the activations|an answer|the story|a letter|the whole sentence|the smallest number
the border|a rectangle|the corner|nothing at all|something new|the way home|a long journey|the test|the training pairs
the result|water and light|the door|many different things|the problem|a simple idea|the history of the world|the law"""

ENDINGS = """from left to right|in the middle|without a mistake|again and again|before the next step|after a while
slowly|for the first time
because it must|when the sun is low|until everything is done|with great care|as expected|at night
in order to see what happens|while the others wait|between the two lines|at the end of the day|if there is time|today
according to the rule|which was not obvious|that nobody had seen|where it belongs|however small it may be|together"""

CHAT = """You are a helpful assistant.|Please explain your reasoning step by step, then give the final answer.
Here are some examples of inputs and outputs.|What is the output for the following input?|Sure, I can help with that.
You are given a puzzle: find the transformation that turns each input grid into its output grid.
The grids contain numbers from 0 to 9, and each number stands for a colour.|Think about what changes and what does not.
I don't know, but I'll try; it's what we've always done, and they're sure you'd agree.|Thank you! That was very useful.
def main(arguments: list[str]) -> int:\\n    for name in arguments:\\n        print(name)\\n    return 0
{"train": [{"input": [[0, 1], [1, 0]], "output": [[1, 0], [0, 1]]}], "test": [{"input": [[2, 0]]}]}"""


def words(text: str) -> list[str]:
    """The phrases of a list written with bars and line ends."""
    return [phrase for line in text.splitlines() for phrase in line.split("|")]


def sentence(draw: np.random.Generator) -> str:
    """One sentence of our own English."""
    parts = [str(draw.choice(words(kind))) for kind in (SUBJECTS, VERBS, OBJECTS, ENDINGS)]
    text = " ".join(parts)
    return text[0].upper() + text[1:] + str(draw.choice([".", ".", ".", "?", "!", ",", ";", ":"]))


def grid(draw: np.random.Generator) -> str:
    """A grid as ARC prompts write it, in one of several ways."""
    rows, columns = (int(size) for size in draw.integers(1, 12, 2))
    cells = draw.integers(0, 10, (rows, columns))
    between = str(draw.choice(["", " ", ","]))
    numbered = bool(draw.integers(0, 2))
    lines = [(f"{number} " if numbered else "") + between.join(map(str, row)) for number, row in enumerate(cells, 1)]
    return f"```grid shape: {rows}x{columns}\n" + "\n".join(lines) + "\n```"


def corpus() -> Iterator[str]:
    """What the tokenizer learns its merges from."""
    draw = np.random.default_rng(SEED)
    for number in range(3000):
        yield " ".join(sentence(draw) for _ in range(3)) + "\n"
        if number % 5 == 0:
            yield f"# Example {number}\n## Input\n{grid(draw)}\n\n## Output\n{grid(draw)}\n\n"
        yield f"{draw.choice(['system', 'user', 'assistant'])}\n{draw.choice(words(CHAT))}\n"


def tokenizer() -> bytes:
    """A byte-level BPE whose digits stand alone, so that a grid's cell is a token."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    made = Tokenizer(models.BPE())
    made.normalizer = normalizers.NFC()
    made.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        min_frequency=2,
        show_progress=False,
        special_tokens=list(SPECIAL),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    )
    made.train_from_iterator(corpus(), trainer)
    return (json.dumps(json.loads(made.to_str()), ensure_ascii=False, indent=1) + "\n").encode()


def pretty(value: object) -> bytes:
    """JSON for people."""
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()


def main(folder: Path) -> None:
    """Write the model's three small files."""
    folder.mkdir(parents=True, exist_ok=True)
    files = {
        "config.json": pretty(CONFIG),
        "tokenizer.json": tokenizer(),
        "tokenizer_config.json": pretty(TOKENIZER_CONFIG),
    }
    for name, content in files.items():
        (folder / name).write_bytes(content)
        print(f"{folder / name}: {len(content):,} bytes")


if __name__ == "__main__":
    package = Path(__file__).parent.parent / "src" / "spile" / "models" / "embedded"
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else package)
