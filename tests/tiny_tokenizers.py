"""Small tokenizers, made in a moment, in the layouts that models have."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

__all__ = ["CHATML", "SPECIALS", "save_sentencepiece_tokenizer", "save_tokenizer"]

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


def save_sentencepiece_tokenizer(folder: Path, config: dict[str, Any]) -> Path:
    """Save a tokenizer as the files of Llama 2 have it: BPE over marked spaces, with a normalizer that marks them."""
    folder.mkdir(parents=True, exist_ok=True)
    specials = ["<unk>", "<s>", "</s>"]
    bytes_ = [f"<0x{value:02X}>" for value in range(256)]
    backend = Backend(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=[*specials, *bytes_], show_progress=False)
    backend.train_from_iterator(CORPUS * 4, trainer)
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    backend.post_processor = processors.TemplateProcessing(single="<s>:0 $A:0", special_tokens=[("<s>", 1)])
    saved = json.loads(backend.to_str())
    saved["added_tokens"] = [token for token in saved["added_tokens"] if token["content"] in specials]
    (folder / "tokenizer.json").write_text(json.dumps(saved))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder
