"""One row per sample: the last token of the content, the first rows, a function; and the same choices when storing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from test_joint import made

import spile
from spile.errors import UserError
from spile.spec.positions import choose_positions, last_content
from spile.spec.sample import Role

CHATS = [
    [{"role": "user", "content": "Is 4 even?"}, {"role": "assistant", "content": "Yes, it is."}],
    [{"role": "user", "content": "Name a colour."}],
]


@pytest.mark.parametrize(
    ("roles", "place"),
    [
        ([Role.USER, Role.SPECIAL | Role.ASSISTANT, 0, 0], 0),
        ([Role.USER, Role.ASSISTANT, Role.ASSISTANT | Role.SPECIAL, 0], 1),
        ([0, 0, Role.SPECIAL], 1),
        ([Role.SPECIAL, Role.SPECIAL], 1),
    ],
)
def test_the_last_content_is_before_what_the_template_adds(roles: list[int], place: int) -> None:
    found = np.array(roles, np.uint8)
    assert last_content(found).tolist() == [place]
    chosen = choose_positions("last-content", 0, 0, found)
    assert chosen is not None
    assert chosen.tolist() == [place]
    assert last_content(found[:0]).tolist() == []


def test_the_first_tokens_are_chosen_and_other_words_refused() -> None:
    chosen = choose_positions("first:3", 0, 0, np.zeros(9, np.uint8), 2, 8)
    assert chosen is not None
    assert chosen.tolist() == [2, 3, 4]


def test_pooling_of_stored_rows() -> None:
    dataset = spile.open(made(8, "float32", 7))
    rows = [sample["residual.0"] for sample in dataset]
    function = dataset.numpy("residual.0", positions=lambda each: each.max(axis=0))
    assert np.array_equal(function, np.stack([each.max(axis=0) for each in rows]))
    first = dataset.numpy("residual.0", positions="first:2")
    assert np.array_equal(first, np.concatenate([each[:2] for each in rows]))
    assert np.array_equal(dataset.numpy("residual.0", positions="last-content"), np.stack([each[-1] for each in rows]))
    with pytest.raises(UserError, match=r"one row \[d\]"):
        dataset.numpy("residual.0", positions=lambda each: each)
    with pytest.raises(UserError, match="last-content"):
        dataset.numpy("residual.0", positions="median")


def test_what_is_stored_for_a_choice_is_what_is_read_by_it(tmp_path: Path) -> None:
    data = [{"messages": chat, "label": number} for number, chat in enumerate(CHATS)]
    spile.extract("embedded", data, tmp_path / "all", taps=["residual.2"])
    everything = spile.open(tmp_path / "all")
    for choice in ("last-content", "first:3", "mean"):
        root = tmp_path / choice.replace(":", "")
        spile.extract("embedded", data, root, taps=["residual.2"], positions=choice)
        some = spile.open(root)
        wanted = everything.numpy("residual.2", positions=choice)
        assert np.allclose(some.numpy("residual.2", positions="all"), wanted, rtol=2**-6, atol=0.02)
        assert some.labels("label", positions="all").tolist() == everything.labels("label", positions=choice).tolist()
        assert spile.verify(root).ok
    last = [everything.decode(sample.tokens) for sample in spile.open(tmp_path / "last-content")]
    assert last == [".", "."]
