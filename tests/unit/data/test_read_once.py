"""A dataset in a bucket goes over the network once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from spile.data import lines
from spile.data.lines import LineSource

PIECES = [b'{"text": "a"}\n{"te', b'xt": "b"}\n', b'{"text": "c"}']


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the requested keys, with repetitions."""
    keys: list[str] = []

    def read(_folder: Any, key: str) -> Iterator[bytes]:
        keys.append(key)
        yield from PIECES

    monkeypatch.setattr(lines, "read_chunks", read)
    monkeypatch.setattr(lines, "open_folder", lambda url: url)
    return keys


def test_the_second_pass_reads_the_copy_of_the_first(fetched: list[str]) -> None:
    file = LineSource("gs://bucket/rows.jsonl")
    first = [line.raw for line in file.lines()]
    again, beside = file.lines(), file.lines()
    assert next(beside).raw == first[0]  # two at once do not disturb each other
    assert [line.raw for line in again] == first == [b'{"text": "a"}', b'{"text": "b"}', b'{"text": "c"}']
    assert [line.raw for line in beside] == first[1:]
    assert fetched == ["rows.jsonl"]


def test_a_pass_that_ended_early_left_no_copy(fetched: list[str]) -> None:
    file = LineSource("gs://bucket/rows.jsonl")
    next(file.lines())
    assert len(list(file.lines())) == 3
    assert fetched == ["rows.jsonl"] * 2


def test_what_is_too_large_is_fetched_again(fetched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "_MAX_COPY_BYTES", 20)
    file = LineSource("gs://bucket/rows.jsonl")
    assert len(list(file.lines())) == len(list(file.lines())) == 3
    assert fetched == ["rows.jsonl"] * 2
