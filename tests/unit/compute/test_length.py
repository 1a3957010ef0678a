"""``--max-seq-length auto``: the limit of the model, or what the memory of a device holds."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from spile.compute.length import Room, automatic_length, memory_needed, with_length
from spile.errors import SpecError
from spile.models.families import read_config
from spile.spec.run import DataSpec, GenerationSpec, RunSpec
from spile.spec.taps import Tap, row_bytes, tap_rows
from world import run_identity

QWEN = {
    "model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151_936, "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}  # fmt: skip
EMBEDDED = {
    "model_type": "qwen2", "hidden_size": 192, "intermediate_size": 512, "num_hidden_layers": 6,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 1024, "max_position_embeddings": 32_768,
    "tie_word_embeddings": True,
}  # fmt: skip
LAPTOP, LARGE = Room(8_000_000_000, host=True), Room(128_000_000_000, host=True)
V3_8, V5E_1, V5E_8 = Room(16 << 30, 8), Room(16 << 30, 1), Room(16 << 30, 8)


def chosen(raw: dict[str, Any], *rooms: Room, spec: RunSpec | None = None, **changes: Any) -> int:
    spec, config = spec or RunSpec(), replace(read_config(raw), **changes)
    taps = [Tap("residual", layer) for layer in range(config.n_layers)]
    row = row_bytes(tap_rows(tap, config.sizes(tap.layer), "bfloat16") for tap in taps)
    return automatic_length(spec, config, taps, row, rooms, config.learned_positions)


@pytest.mark.parametrize(
    ("raw", "rooms", "length"),
    [
        (EMBEDDED, [LAPTOP], 32_768),
        (EMBEDDED, [V3_8], 32_768),
        (QWEN, [V5E_1], 32_768),
        (QWEN, [V3_8], 32_768),
        (QWEN, [LARGE], 32_768),
        (QWEN, [LAPTOP], 8192),
        (QWEN, [LARGE, LAPTOP], 8192),
    ],
)
def test_the_limit_of_the_model_or_of_the_smallest_machine(raw: dict[str, Any], rooms: list[Room], length: int) -> None:
    assert chosen(raw, *rooms) == length


def test_models_without_a_limit_and_with_one_that_is_no_power_of_two() -> None:
    assert chosen(EMBEDDED, LARGE, positions=None) == 32_768
    assert chosen(EMBEDDED, LARGE, positions=3000) == 3000
    assert chosen(EMBEDDED, Room(200_000_000, host=True), positions=30_000) == 4096


def test_an_answer_has_room_below_the_limit() -> None:
    infer = RunSpec(generation=GenerationSpec(max_new_tokens=768))
    assert chosen(EMBEDDED, LARGE, spec=infer) == 32_000
    assert chosen(EMBEDDED, LARGE, spec=infer, positions=512) == 512, "rotations go on beyond it"
    with pytest.raises(SpecError, match="--max-new-tokens: expected fewer than 512"):
        chosen(EMBEDDED, LARGE, spec=infer, learned_positions=512)


def test_a_run_keeps_its_limit_and_a_machine_that_is_too_small_is_named() -> None:
    config, run = read_config(QWEN), run_identity(max_seq_length=16_384, long="truncate")
    found = with_length(RunSpec(output="out"), run, config, (), 40_000, lambda: LAPTOP)
    assert (found.data.longest, found.data.long_policy("arc")) == (16_384, "truncate")
    small = Room(3_000_000_000, host=True)
    with pytest.raises(SpecError, match=r"cannot hold samples of 16,384 tokens, the limit of the run in out.*3 GB"):
        with_length(RunSpec(output="out"), run, config, (), 40_000, lambda: small)
    explicit = RunSpec(data=DataSpec(max_seq_length=16_384))
    assert with_length(explicit, run, config, (), 40_000, lambda: small) is explicit


def test_gradients_need_what_every_layer_computed() -> None:
    config = read_config(QWEN)
    plain, gradient = ([Tap("residual", 3)], [Tap("residual", 3, gradient=True)])
    needed = [memory_needed(4096, RunSpec(), config, taps, 1792, LARGE) for taps in (plain, gradient)]
    assert needed[1] > 3 * needed[0]
