"""One model of each family that people use, by the sizes in its config: for tables that work something out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["EXAMPLES", "ExampleModel"]


@dataclass(frozen=True)
class ExampleModel:
    """A model on the hub."""

    name: str
    config: Mapping[str, Any]
    """Of its config.json, what is not its family's default."""


def _sizes(
    d_model: int, layers: int, heads: int, kv_heads: int, d_ff: int, vocabulary: int, **more: Any
) -> dict[str, Any]:
    return {
        "hidden_size": d_model,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "intermediate_size": d_ff,
        "vocab_size": vocabulary,
        **more,
    }


_GEMMA3 = ExampleModel("google/gemma-3-1b-pt", _sizes(1152, 26, 4, 1, 6912, 262_144, sliding_window=512))
_NEOX = {name: value for name, value in _sizes(2048, 24, 16, 16, 8192, 50_304).items() if name != "num_key_value_heads"}

EXAMPLES: Mapping[str, ExampleModel] = {
    "qwen2": ExampleModel("Qwen/Qwen2.5-0.5B", _sizes(896, 24, 14, 2, 4864, 151_936, tie_word_embeddings=True)),
    "qwen3": ExampleModel("Qwen/Qwen3-8B", _sizes(4096, 36, 32, 8, 12_288, 151_936)),
    "llama": ExampleModel("meta-llama/Llama-3.1-8B", _sizes(4096, 32, 32, 8, 14_336, 128_256)),
    "mistral": ExampleModel("mistralai/Mistral-7B-v0.1", _sizes(4096, 32, 32, 8, 14_336, 32_000)),
    "gemma": ExampleModel("google/gemma-2b", _sizes(2048, 18, 8, 1, 16_384, 256_000)),
    "gemma2": ExampleModel("google/gemma-2-2b", _sizes(2304, 26, 8, 4, 9216, 256_000)),
    "gemma3_text": _GEMMA3,
    "gemma3": _GEMMA3,
    "phi3": ExampleModel("microsoft/Phi-3-mini-4k-instruct", _sizes(3072, 32, 32, 32, 8192, 32_064)),
    "gpt2": ExampleModel("openai-community/gpt2", {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50_257}),
    "gpt_neox": ExampleModel("EleutherAI/pythia-1.4b", _NEOX),
    "olmo2": ExampleModel("allenai/OLMo-2-1124-7B", _sizes(4096, 32, 32, 32, 11_008, 100_352)),
    "qwen3_moe": ExampleModel("Qwen/Qwen3-30B-A3B", _sizes(2048, 48, 32, 4, 6144, 151_936, head_dim=128)),
    "mixtral": ExampleModel("mistralai/Mixtral-8x7B-v0.1", _sizes(4096, 32, 32, 8, 14_336, 32_000)),
}
"""By family."""
