"""Which tokens end an answer, as the model's files say it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from spile.data.tokens import load_tokenizer
from spile.errors import ModelError
from spile.models import model_files
from spile.run.resolve import add_stop_tokens
from spile.spec.run import GenerationSpec


def stops(folder: Path, config: str) -> tuple[int, ...]:
    files = model_files.find("embedded", weights=False)
    tokenizer = replace(load_tokenizer(files.tokenizer_folder), eos=7)
    (folder / "generation_config.json").write_text(config)
    return add_stop_tokens(GenerationSpec(), replace(files, tokenizer_folder=folder), tokenizer).stop_tokens


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ("{}", (7,)),
        ('{"eos_token_id": 5}', (5, 7)),
        ('{"eos_token_id": [5, 3]}', (3, 5, 7)),
        ('{"eos_token_id": true}', (7,)),
        ('{"eos_token_id": [1099511627776, -1099511627776, 3]}', (3, 7)),  # the device compares 32-bit numbers
    ],
)
def test_the_tokenizers_and_those_of_the_generation_config(
    tmp_path: Path, config: str, tokens: tuple[int, ...]
) -> None:
    assert stops(tmp_path, config) == tokens


@pytest.mark.parametrize("config", ["{", "[1]", "7"])
def test_a_generation_config_that_is_none_is_one_line(tmp_path: Path, config: str) -> None:
    with pytest.raises(
        ModelError, match=r"^generation_config.json of embedded cannot be read: found \w+: .*\. Download"
    ):
        stops(tmp_path, config)
