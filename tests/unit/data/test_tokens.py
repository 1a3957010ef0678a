from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import spile.models
from spile.data.chat import ChatTemplate
from spile.data.tokens import Span, Tokenizer, load_tokenizer
from spile.errors import ModelError
from spile.spec.sample import Role
from tiny_tokenizers import CHATML, save_sentencepiece_tokenizer, save_tokenizer

TEXTS = [
    "",
    "a",
    "  the quick\n\n\tfox ",
    "012\n345",
    "naïve 漢字 🎉",
    "<s>inside</s>",
    "x" * 3000,
    "<|im_start|>user\nhi<|im_end|>",
]
CONFIGS: dict[str, tuple[dict[str, Any], bool]] = {
    "qwen: no BOS, said aloud": ({"add_bos_token": False, "bos_token": None, "eos_token": "</s>"}, False),
    "llama 3: BOS by the file's post-processor": ({"bos_token": "<s>", "eos_token": "</s>"}, True),
    "the config's add_bos_token beside a file says nothing": (
        {"add_bos_token": True, "add_eos_token": False, "bos_token": {"__type": "AddedToken", "content": "<s>"}},
        False,
    ),
    "both ends": ({"add_bos_token": True, "add_eos_token": True, "bos_token": "<s>", "eos_token": "</s>"}, False),
    "nor does it take the file's BOS away": ({"add_bos_token": False, "bos_token": "<s>", "eos_token": "</s>"}, True),
    "a token that only the config knows": ({"pad_token": "<pad>", "eos_token": "</s>"}, False),
}


def reference(folder: Path) -> Any:
    """Transformers' own fast tokenizer over the same files."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(str(folder))


@pytest.mark.parametrize("name", CONFIGS)
def test_tokens_equal_transformers(name: str, tmp_path: Path) -> None:
    config, bos_in_file = CONFIGS[name]
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": CHATML, **config}
    save_tokenizer(tmp_path, config, bos_in_file=bos_in_file)
    ours, theirs = load_tokenizer(tmp_path), reference(tmp_path)
    for special in (True, False):
        found = ours.encode(TEXTS, add_special=special)
        for text, encoded in zip(TEXTS, found, strict=True):
            assert encoded.tokens.tolist() == theirs(text, add_special_tokens=special)["input_ids"], text
            assert encoded.tokens.dtype == np.int32
    assert ours.bos == theirs.bos_token_id
    assert ours.eos == theirs.eos_token_id
    assert ours.specials == set(theirs.all_special_ids) | {
        number for number, token in theirs.added_tokens_decoder.items() if token.special
    }
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": " hello <s>\n"}]
    rendered = ChatTemplate.of(ours)
    assert rendered is not None
    text = rendered.render(messages).text
    assert text == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    theirs_ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
    assert ours.encode([text], add_special=False)[0].tokens.tolist() == theirs_ids


LLAMA_TEXTS = (
    *TEXTS,
    " a",
    "  two words",
    "a </s> b",
    "<s>[INST] hi [/INST] there </s><s>[INST] more",
    "▁already marked",
    "\n\nlines",
)


@pytest.mark.parametrize("legacy", [True, False])
@pytest.mark.parametrize("model_type", [None, "llama", "mistral", "phi3"])
def test_llama_2_style_tokens_equal_those_of_auto_tokenizer(
    model_type: str | None, legacy: bool, tmp_path: Path
) -> None:
    from transformers import AutoTokenizer

    config = {"tokenizer_class": "LlamaTokenizer", "legacy": legacy, "bos_token": "<s>", "eos_token": "</s>"}
    save_sentencepiece_tokenizer(tmp_path, {**config, "unk_token": "<unk>"})
    if model_type is not None:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    ours, theirs = load_tokenizer(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for special in (True, False):
        for text, encoded in zip(LLAMA_TEXTS, ours.encode(LLAMA_TEXTS, add_special=special), strict=True):
            assert encoded.tokens.tolist() == theirs(text, add_special_tokens=special)["input_ids"], text


@pytest.mark.parametrize(
    ("template", "output"),
    [
        ("{{ m['content'] }}<|im_end|>\n", "yes<|im_end|>"),
        ("{{ m['content'] }} </s><s>", "yes </s>"),
        ("{{ m['content'] }}\n", "yes"),
        ("{{ m['content'] }}<s>", "yes"),
        ("{{ m['content'] }} and</s>", "yes"),
    ],
)
def test_the_token_that_ends_an_assistants_turn_is_the_assistants(
    template: str, output: str, chatml: Tokenizer
) -> None:
    source = "{% for m in messages %}" + template + "{% endfor %}"
    messages = [{"role": "user", "content": "the fox"}, {"role": "assistant", "content": "yes"}]
    rendered = ChatTemplate(source, chatml.named).render(messages)
    assert rendered.spans is not None
    tokenizer = replace(chatml, bos=chatml.backend.token_to_id("<s>"))
    encoded = tokenizer.encode([rendered.text], add_special=False, spans=[rendered.spans])[0]
    assert chatml.decode(encoded.tokens[(encoded.roles & Role.ASSISTANT) > 0].tolist()) == output
    assert chatml.decode(encoded.tokens[(encoded.roles & Role.USER) > 0].tolist()) == "the fox"


def test_the_embedded_tokenizer_equals_transformers() -> None:
    folder = Path(spile.models.__file__).parent / "embedded"
    ours, theirs = load_tokenizer(folder), reference(folder)
    for text, encoded in zip(TEXTS, ours.encode(TEXTS, add_special=True), strict=True):
        assert encoded.tokens.tolist() == theirs(text)["input_ids"]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(text=st.text(max_size=40))
def test_with_and_without_spans_the_tokens_are_the_same(with_bos: Tokenizer, text: str) -> None:
    plain = with_bos.encode([text], add_special=True)[0]
    parts = with_bos.encode([text], add_special=True, spans=[[Span(0, len(text), Role.USER)]])[0]
    assert plain.tokens.tolist() == parts.tokens.tolist()
    # Every token but the BOS is the user's, because the whole text is.
    assert (parts.roles[1:] & Role.USER).all()
    assert parts.roles[0] == Role.BOS | Role.SPECIAL | Role.FIRST


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.text(max_size=60), st.lists(st.tuples(st.integers(0, 62), st.integers(0, 62)), min_size=1, max_size=4))
@pytest.mark.parametrize("special", [True, False])
def test_a_token_belongs_to_the_part_in_which_it_begins(
    with_bos: Tokenizer, special: bool, text: str, parts: list[tuple[int, int]]
) -> None:
    spans = [Span(min(part), max(part), Role.USER) for part in parts]
    (found,) = with_bos.encode([text], add_special=special, spans=[spans])
    (offsets,) = [item.offsets for item in with_bos.backend.encode_batch([text], add_special_tokens=special)]
    expected = [begin < end and any(span.start <= begin < span.stop for span in spans) for begin, end in offsets]
    assert [bool(role & Role.USER) for role in found.roles] == expected


def test_roles_of_plain_text(with_bos: Tokenizer) -> None:
    encoded = with_bos.encode(["fox </s> dog"], add_special=True)[0]
    end = with_bos.eos
    assert encoded.roles[0] == Role.SPECIAL | Role.BOS | Role.FIRST
    specials = encoded.tokens == end
    assert specials.sum() == 1
    assert (encoded.roles[specials] == Role.SPECIAL).all()
    assert (encoded.roles[1:][~specials[1:]] == 0).all()


def test_decode_gives_the_text_back(chatml: Tokenizer) -> None:
    encoded = chatml.encode(["<|im_start|>naïve 漢字"], add_special=False)[0]
    assert chatml.decode(encoded.tokens.tolist()) == "<|im_start|>naïve 漢字"


def test_a_length_limit_in_the_file_does_not_cut(tmp_path: Path, chatml: Tokenizer) -> None:
    save_tokenizer(tmp_path, {})
    file = tmp_path / "tokenizer.json"
    saved = json.loads(file.read_text())
    saved["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    file.write_text(json.dumps(saved))
    assert len(load_tokenizer(tmp_path).encode(["the quick brown fox jumps"], add_special=True)[0].tokens) > 4


def test_where_a_template_may_stand(tmp_path: Path) -> None:
    save_tokenizer(
        tmp_path, {"chat_template": [{"name": "tool", "template": "T"}, {"name": "default", "template": "D"}]}
    )
    assert load_tokenizer(tmp_path).template == "D"
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "J"}))
    assert load_tokenizer(tmp_path).template == "J"
    (tmp_path / "chat_template.jinja").write_text("F")
    assert load_tokenizer(tmp_path).template == "F"


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no tokenizer in .*: expected tokenizer.json, found none\. Download"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ModelError, match=r"tokenizer.json is not a tokenizer: found "):
        load_tokenizer(tmp_path)
    shutil.rmtree(tmp_path)
    save_tokenizer(tmp_path, {})
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ModelError, match=r"tokenizer_config.json is not JSON"):
        load_tokenizer(tmp_path)


BOMBS = {
    "normalizer": {"normalizer": {"type": "Sequence", "normalizers": [
        {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"} for _ in range(40)]}},
    "nested normalizer": {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Sequence", "normalizers": [
        {"type": "Replace", "pattern": {"Regex": ""}, "content": "a" * 99} for _ in range(9)]}]}},
    "decoder": {"decoder": {"type": "Sequence", "decoders": [
        {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"} for _ in range(40)]}},
    "special tokens of each text": {"post_processor": {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "a", "type_id": 0}}] * 1000 + [{"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [], "special_tokens": {"a": {"id": "a", "ids": [0] * 1000, "tokens": ["a"] * 1000}}}},
    "ids": {"model": {"type": "WordLevel", "vocab": {"a": 4_000_000_000}, "unk_token": "a"}},
    "regex": {"pre_tokenizer": {
        "type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}},
}  # fmt: skip
"""Tokenizers of a few kilobytes that would fill the memory, hang or panic."""


@pytest.mark.parametrize("name", BOMBS)
def test_a_bomb_ends_in_one_line(tmp_path: Path, name: str) -> None:
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model, **BOMBS[name]}))
    with pytest.raises(ModelError, match="the tokenizer"):
        load_tokenizer(tmp_path).encode(["a" * 30 + "!"], add_special=True)


def test_many_tokens_that_only_the_config_knows_are_added_at_once(tmp_path: Path) -> None:
    """One call per token took a second for a thousand, and 16 times as long for four thousand."""
    model = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": model}))
    listed = {str(number): {"content": f"<x{number}>", "special": number % 3 == 0} for number in range(1, 20_001)}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": listed}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.backend.token_to_id("<x19999>") == 19_999
    assert tokenizer.specials == frozenset(range(3, 20_001, 3))
    assert tokenizer.encode(["<x7><x9>"], add_special=False)[0].tokens.tolist() == [7, 9]
