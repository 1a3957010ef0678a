"""Tiny random models of families that spile's own decoder does not implement, made with transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import spile

__all__ = ["CAUSAL", "ENCODERS", "VOCABULARY", "reference", "save_model", "save_texts"]

_EMBEDDED = Path(spile.__file__).parent / "models" / "embedded"
VOCABULARY: int = json.loads((_EMBEDDED / "config.json").read_text())["vocab_size"]
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_ENCODER = {**_SIZES, "num_attention_heads": 4, "intermediate_size": 48, "max_position_embeddings": 128}
_DECODER = {**_ENCODER, "num_key_value_heads": 2}
_LINEAR = {
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}}
_VISION = {"num_hidden_layers": 3, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
_IMAGES = {
    "image_token_id": VOCABULARY - 1,
    "video_token_id": VOCABULARY - 2,
    "vision_start_token_id": VOCABULARY - 3,
    "vision_end_token_id": VOCABULARY - 4,
}


def _without(fields: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in names}


def _makers() -> dict[str, Callable[[], Any]]:
    import transformers as t

    gemma4 = {"head_dim": 8, "global_head_dim": 16, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0}
    mamba2 = {"num_heads": 8, "head_dim": 8, "state_size": 16, "n_groups": 2, "chunk_size": 16}
    t5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4}
    eyes = {"num_heads": 2, "depth": 3}
    more_eyes = {
        **eyes,
        "hidden_size": 16,
        "out_hidden_size": 32,
        "intermediate_size": 24,
        "fullatt_block_indexes": [1],
    }
    clip = {**_VISION, "model_type": "clip_vision_model", "image_size": 28, "patch_size": 14}
    return {
        "opt": lambda: t.OPTForCausalLM(t.OPTConfig(**_ENCODER, word_embed_proj_dim=32, ffn_dim=48)),
        "mamba": lambda: t.MambaForCausalLM(t.MambaConfig(**_SIZES, state_size=8)),
        "mamba2": lambda: t.Mamba2ForCausalLM(t.Mamba2Config(**_SIZES, **mamba2)),
        "rwkv": lambda: t.RwkvForCausalLM(t.RwkvConfig(**_SIZES, attention_hidden_size=32)),
        "qwen3_5": lambda: t.Qwen3_5ForCausalLM(t.Qwen3_5TextConfig(**{**_DECODER, "num_hidden_layers": 4}, **_LINEAR)),
        "gemma4": lambda: t.Gemma4ForCausalLM(
            t.Gemma4TextConfig(**_DECODER, **gemma4, vocab_size_per_layer_input=VOCABULARY, sliding_window=16)
        ),
        "qwen2_vl": lambda: t.Qwen2VLForConditionalGeneration(
            t.Qwen2VLConfig(
                text_config={**_DECODER, **_ROPE}, vision_config={**eyes, "embed_dim": 16, "hidden_size": 32}, **_IMAGES
            )
        ),
        "qwen2_5_vl": lambda: t.Qwen2_5_VLForConditionalGeneration(
            t.Qwen2_5_VLConfig(text_config={**_DECODER, **_ROPE}, vision_config=more_eyes, **_IMAGES)
        ),
        "llava": lambda: t.LlavaForConditionalGeneration(
            t.LlavaConfig(
                text_config={**_DECODER, "model_type": "llama"}, vision_config=clip, image_token_index=VOCABULARY - 1
            )
        ),
        "bloom": lambda: t.BloomForCausalLM(t.BloomConfig(**_SIZES, n_layer=3, n_head=4)),
        "falcon": lambda: t.FalconForCausalLM(t.FalconConfig(**_SIZES, num_attention_heads=4)),
        "granitemoe": lambda: t.GraniteMoeForCausalLM(
            t.GraniteMoeConfig(**_DECODER, num_local_experts=4, embedding_multiplier=3.0, residual_multiplier=0.22)
        ),
        "ctrl": lambda: t.CTRLLMHeadModel(
            t.CTRLConfig(vocab_size=VOCABULARY, n_embd=32, n_layer=3, n_head=4, dff=48, n_positions=128)
        ),
        "afmoe": lambda: t.AfmoeForCausalLM(
            t.AfmoeConfig(
                **_DECODER, mup_enabled=True, head_dim=8, moe_intermediate_size=16, num_experts=4, num_experts_per_tok=2
            )
        ),
        "recurrent_gemma": lambda: t.RecurrentGemmaForCausalLM(
            t.RecurrentGemmaConfig(**_without(_DECODER, "max_position_embeddings"), lru_width=32)
        ),
        "big_bird": lambda: t.BigBirdForMaskedLM(
            t.BigBirdConfig(**_ENCODER, rescale_embeddings=True, attention_type="original_full")
        ),
        "pegasus": lambda: t.PegasusForConditionalGeneration(
            t.PegasusConfig(
                vocab_size=VOCABULARY,
                d_model=32,
                encoder_layers=3,
                decoder_layers=2,
                encoder_attention_heads=4,
                decoder_attention_heads=4,
                encoder_ffn_dim=48,
                decoder_ffn_dim=48,
                max_position_embeddings=128,
                scale_embedding=True,
            )
        ),
        "bert": lambda: t.BertForMaskedLM(t.BertConfig(**_ENCODER)),
        "modernbert": lambda: t.ModernBertForMaskedLM(
            t.ModernBertConfig(**_ENCODER, cls_token_id=1, sep_token_id=2, local_attention=16)
        ),
        "esm": lambda: t.EsmForMaskedLM(t.EsmConfig(**_ENCODER, mask_token_id=3, position_embedding_type="rotary")),
        "t5": lambda: t.T5ForConditionalGeneration(
            t.T5Config(vocab_size=VOCABULARY, **t5, pad_token_id=0, eos_token_id=2, decoder_start_token_id=0)
        ),
        "fnet": lambda: t.FNetForMaskedLM(t.FNetConfig(**_without(_ENCODER, "num_attention_heads"))),
    }


ENCODERS = ("bert", "modernbert", "esm", "t5", "fnet")
"""FNet has no attention and therefore no mask."""
CAUSAL = ("opt", "mamba", "mamba2", "rwkv", "qwen3_5", "gemma4", "qwen2_vl", "qwen2_5_vl", "llava")


def save_model(name: str, folder: Path) -> Path:
    """Save a model with weights large enough that every part of it shows, and the embedded model's tokenizer."""
    import torch

    torch.manual_seed(0)
    model = _makers()[name]()
    for weight in model.parameters():
        if weight.dim() > 1:
            torch.nn.init.normal_(weight, std=0.3)
    model.save_pretrained(folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(_EMBEDDED / file, folder / file)
    return folder


def reference(name: str, folder: Path) -> Any:
    """Load a saved model with the class that a user of transformers would take."""
    import transformers as t

    if name == "t5":
        return t.T5EncoderModel.from_pretrained(folder).eval()
    if name in ENCODERS:
        return t.AutoModel.from_pretrained(folder).eval()
    (architecture,) = t.AutoConfig.from_pretrained(folder).architectures
    return getattr(t, architecture).from_pretrained(folder).eval()


def save_texts(file: Path) -> Path:
    """Save five texts of different lengths."""
    texts = ("hello world, this is a text", "0 1 2 3 4 5 6 7 8 9", "abc", "the quick brown fox jumps over a dog", "a b")
    file.write_text("".join(json.dumps({"task_id": str(n), "text": text}) + "\n" for n, text in enumerate(texts)))
    return file
