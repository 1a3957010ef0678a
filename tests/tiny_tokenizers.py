"""Small tokenizers, made in a moment, in the layouts that models have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

__all__ = ["CHATML", "SPECIALS", "save_tokenizer"]

CHATML = (
    "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' }}"
    "{{- '\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
SPECIALS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>"]
CORPUS = [
    "the quick brown fox jumps over the lazy dog",
    "0123456789",
    "user assistant system",
    "1 012\n2 345\n",
    "naïve café 漢字",
]


def save_tokenizer(
    folder: Path, config: dict[str, Any], *, bos_in_file: bool = False, trim_offsets: bool = False
) -> Path:
    """A byte-level BPE tokenizer with four special tokens, and the config beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        CORPUS * 4,
        trainers.BpeTrainer(vocab_size=340, special_tokens=SPECIALS, initial_alphabet=alphabet, show_progress=False),
    )
    if bos_in_file:
        backend.post_processor = processors.TemplateProcessing(single="<s>:0 $A:0", special_tokens=[("<s>", 0)])
    else:
        backend.post_processor = processors.ByteLevel(trim_offsets=trim_offsets)
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
