"""A raw ``config.json``: typed reads whose complaints name the field, and the rule that no field is ignored."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from spile.errors import ModelError

__all__ = ["ConfigFields"]

# fmt: off
_HARMLESS = frozenset({
    "_name_or_path", "_attn_implementation", "_attn_implementation_autoset", "architectures", "auto_map",
    "model_type", "model_name", "torch_dtype", "dtype", "transformers_version", "unsloth_version", "unsloth_fixed",
    "use_cache", "cache_implementation", "initializer_range", "attention_dropout", "hidden_dropout",
    "hidden_dropout_prob", "classifier_dropout", "resid_pdrop", "embd_pdrop", "attn_pdrop",
    "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "mask_token_id",
    "decoder_start_token_id", "max_position_embeddings", "n_ctx", "n_positions", "max_sequence_length",
    "model_max_length", "id2label", "label2id", "num_labels", "problem_type", "task_specific_params",
    "finetuning_task", "tokenizer_class", "prefix", "summary_type", "summary_use_proj", "summary_activation",
    "summary_proj_to_labels", "summary_first_dropout", "output_hidden_states", "output_attentions",
    "output_router_logits", "output_scores", "return_dict", "return_dict_in_generate", "router_aux_loss_coef",
    "router_jitter_noise", "pretraining_tp", "chunk_size_feed_forward", "gradient_checkpointing",
    "reorder_and_upcast_attn", "torchscript", "use_bfloat16", "tf_legacy_loss", "keys_to_ignore_at_inference",
    "is_decoder", "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups",
    "diversity_penalty", "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "num_return_sequences",
    "exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens", "forced_bos_token_id",
    "forced_eos_token_id", "remove_invalid_values", "vocab_size_padded", "make_vocab_size_divisible_by",
    "use_flash_attn", "use_flash_attention_2", "flash_attn", "_flash_attn_2_enabled", "vision_config",
    "mm_tokens_per_image", "boi_token_index", "eoi_token_index", "image_token_index", "boi_token_id", "eoi_token_id",
    "image_token_id", "original_max_position_embeddings",
})
# fmt: on
"""Fields that no row of a text-only forward depends on: training, generation, bookkeeping, a vision tower beside it."""


class ConfigFields:
    """Typed reads of a raw config. What was never read and is not known to be harmless is refused at the end."""

    def __init__(self, raw: Mapping[str, Any], names: Mapping[str, str] | None = None) -> None:
        self.raw = raw
        self._names = names or {}
        self._read: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        """As it stands there, under the family's own name for it; an explicit null is None."""
        own = self._names.get(name, name)
        self._read |= {own, name}
        return self.raw.get(own, self.raw.get(name, default))

    def has(self, name: str) -> bool:
        """Whether the config says anything about it, null included."""
        return self._names.get(name, name) in self.raw or name in self.raw

    def integer(self, name: str, default: int | None = None, *, most: int = 1 << 31) -> int:
        """A whole number of a model's size; an absent or null one is the default, if there is one."""
        value = self.get(name)
        value = default if value is None else value
        if value is None:
            own = self._names.get(name, name)
            raise ModelError(f"config.json has no {own}", fix="check that the folder holds a whole model")
        if isinstance(value, bool) or not isinstance(value, int):
            raise ModelError(f"config.json's {name}", expected="a whole number", found=repr(value)[:80])
        if value > most:
            raise ModelError(f"config.json's {name}", expected=f"at most {most:,}", found=repr(value)[:80])
        return value

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number."""
        value = self.get(name)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelError(f"config.json's {name}", expected="a number", found=repr(value))
        return float(value)

    def optional(self, name: str, default: float | None = None) -> float | None:
        """A number that an explicit null switches off."""
        return None if self.has(name) and self.get(name) is None else self._or_none(name, default)

    def _or_none(self, name: str, default: float | None) -> float | None:
        return None if default is None and not self.has(name) else self.number(name, default)

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise ModelError(f"config.json's {name}", expected="true or false", found=repr(value))
        return value

    def refuse_unread(self, family: str) -> None:
        """Every field that says something and that nobody read: it would be ignored, and the numbers be others."""
        unknown = sorted(name for name, value in self.raw.items() if value and name not in self._read | _HARMLESS)
        if unknown:
            raise ModelError(
                f"config.json's {unknown[0]}",
                expected=f"only fields that spile honours for {family}",
                found=repr(self.raw[unknown[0]])[:80],
                fix="use --backend torch, which runs the model's own code, or remove the field if it changes nothing",
            )
