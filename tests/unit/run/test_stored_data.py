"""The tokens of a stored dataset as the data of another model, and the chat template of another model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

import spile
from spile.errors import ModelError, SpecError
from spile.models import model_files

CHATS = [
    {
        "id": f"chat {number}",
        "label": number,
        "messages": [
            {"role": "user", "content": f"Is {number} even?"},
            {"role": "assistant", "content": "Yes." if number % 2 == 0 else "No."},
        ],
    }
    for number in range(4)
]


def without_template(folder: Path) -> str:
    """Return a copy of the embedded model that has no chat template."""
    shutil.copytree(model_files.find("embedded", None).tokenizer_folder, folder)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.slow
def test_a_base_model_reads_the_tokens_of_a_chat_model(tmp_path: Path) -> None:
    first, second, third = (str(tmp_path / name) for name in "abc")
    base = without_template(tmp_path / "base")
    spile.extract("embedded", CHATS, first, taps=["residual.1"])
    spile.extract(base, f"spile:{first}", second, taps=["residual.2"], store_dtype="float32")
    joint = spile.open([first, second])
    for one, other in zip(*joint.datasets.values(), strict=True):
        assert one.ref.task_id == other.ref.task_id
        assert one.ref.kept == other.ref.kept == {"label": int(one.ref.task_id[-1])}
        assert np.array_equal(one.tokens, other.tokens)
        assert np.array_equal(one.roles, other.roles)
        assert (one.roles & spile.Role.ASSISTANT).any()
    batch = next(joint.shuffled(["0/residual.1", "1/residual.2"]))
    assert {name: rows.dtype.name for name, rows in batch.items()} == {
        "0/residual.1": "bfloat16",
        "1/residual.2": "float32",
    }
    again = spile.extract(base, f"spile:{first}", second, taps=["residual.2"], store_dtype="float32")
    assert again.samples == len(CHATS)  # the same command finds that nothing is left

    with pytest.raises(ModelError, match="template_from"):
        spile.extract(base, CHATS, third, taps=["residual.2"])
    spile.extract(base, CHATS, third, taps=["residual.2"], template_from="embedded")
    assert len(spile.open([first, third])) == len(CHATS)
    assert spile.open(third).run.prompt.template_from == "embedded"
    tapped = spile.tap(base, CHATS[:1], taps=["residual.2"], template_from="embedded")
    assert np.array_equal(tapped[0].tokens, spile.open(third)[0].tokens)


def test_tokens_without_rows_and_long_samples_are_kept(tmp_path: Path) -> None:
    first, second = str(tmp_path / "a"), str(tmp_path / "b")
    texts = [" ".join(f"word {number}" for number in range(12)), "one two three four"]
    spile.extract("embedded", texts, first, taps=["residual.1"], positions="last", max_seq_length=2500)
    spile.extract("embedded", f"spile:{first}", second, taps=["residual.1"])
    for one, other in zip(spile.open(first), spile.open(second), strict=True):
        assert len(one.tokens) == 1 < len(other.tokens)
        assert np.array_equal(one.context, other.tokens)
        assert other.roles[0] & spile.Role.FIRST
    assert spile.open(second).run.max_seq_length == 2500
    assert spile.plan("embedded", f"spile:{first}", taps=["residual.1"]).lengths.mean > 2


def test_options_that_contradict_stored_tokens_are_refused(tmp_path: Path) -> None:
    first = str(tmp_path / "a")
    spile.extract("embedded", ["one"], first, taps=["residual.1"])
    with pytest.raises(SpecError, match=r"prompt=.chat"):
        spile.extract("embedded", f"spile:{first}", str(tmp_path / "b"), taps=["residual.1"], prompt="chat")
    with pytest.raises(SpecError, match="template_from"):
        spile.extract("embedded", ["one"], str(tmp_path / "b"), taps=["residual.1"], template_from="embedded")
