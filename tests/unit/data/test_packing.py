from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spile.data.prompts import pack
from spile.data.samples import open_stream
from spile.data.tokens import Tokenizer, load_tokenizer
from spile.spec.ranges import Ranges
from spile.spec.run import DataSpec, PromptSpec
from spile.spec.sample import Role, Sample
from tiny_tokenizers import save_tokenizer

Write = Callable[..., str]


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Neither BOS nor EOS."""
    return load_tokenizer(save_tokenizer(tmp_path_factory.mktemp("bare"), {}))


@given(sizes=st.lists(st.integers(0, 12), max_size=12), length=st.integers(1, 9))
@pytest.mark.parametrize("kind", ["with_bos", "chatml", "bare"])
def test_windows_are_the_documents_one_after_another(
    kind: str, sizes: list[int], length: int, with_bos: Tokenizer, chatml: Tokenizer, bare: Tokenizer
) -> None:
    tokenizer = {"with_bos": with_bos, "chatml": chatml, "bare": bare}[kind]
    documents = [(f"d{n}", np.arange(100 * n + 5, 100 * n + 5 + size, dtype=np.int32)) for n, size in enumerate(sizes)]
    expected: list[int] = []
    for _, content in documents:
        if len(content):
            before = [tokenizer.bos] if tokenizer.bos is not None else []
            after = [tokenizer.eos] if tokenizer.bos is None and tokenizer.eos is not None else []
            expected += [*before, *content.tolist(), *after]
    windows = [tokens for _, tokens in pack(documents, length, tokenizer)]
    assert [token for window in windows for token in window.tolist()] == expected
    assert all(len(window) == length for window in windows[:-1])
    assert all(1 <= len(window) <= length for window in windows)


def test_a_packed_stream(jsonl: Write, with_bos: Tokenizer) -> None:
    texts = ["the quick fox", "", "dog", "over the lazy dog " * 5]
    place = jsonl([{"text": text, "id": f"d{n}"} for n, text in enumerate(texts)])
    spec = DataSpec(dataset=place, prompt=PromptSpec(pack=True), max_seq_length=7)
    stream = open_stream(spec, with_bos)
    assert (stream.identity.lines, stream.identity.samples, stream.prompt.kind) == (4, None, "text")
    reader = stream.read(Ranges())
    assert next(reader).index == 0
    assert reader.total is None, "whoever stops before the end does not know it"
    reader = stream.read(Ranges())
    found = [item for item in reader if isinstance(item, Sample)]
    assert reader.total == len(found)
    again = stream.read(Ranges([(0, len(found))]))
    assert (list(again), again.total) == ([], len(found))
    assert stream.identity.samples is None, "reading changes no stream"
    tokens = [token for sample in found for token in sample.tokens.tolist()]
    assert tokens == [t for text in texts if text for t in with_bos.backend.encode(text).ids]
    assert found[0].task_id == "d0@0"
    assert found[-1].task_id.startswith("d3@")
    starts = np.concatenate([sample.roles for sample in found]) & Role.BOS
    assert (starts > 0).sum() == 3
    assert all(sample.roles[0] & Role.FIRST for sample in found)
    assert not any((sample.roles[1:] & Role.FIRST).any() for sample in found)
    again = [item for item in stream.read(Ranges([(0, 2), (3, 4)])) if isinstance(item, Sample)]
    assert [s.index for s in again] == [2, *range(4, len(found))]
    assert all(
        s.tokens.tolist() == found[s.index].tokens.tolist() and s.task_id == found[s.index].task_id for s in again
    )
    first = DataSpec(dataset=place, prompt=PromptSpec(pack=True), max_seq_length=7, max_samples=2)
    assert [item.index for item in open_stream(first, with_bos).read(Ranges())] == [0, 1]


def test_eos_stands_between_documents_where_there_is_no_bos(jsonl: Write, chatml: Tokenizer, tmp_path: Path) -> None:
    place = jsonl([{"text": "fox"}, {"text": "dog"}])
    spec = DataSpec(dataset=place, prompt=PromptSpec(kind="text", pack=True))
    (sample,) = open_stream(spec, chatml).read(Ranges())
    assert isinstance(sample, Sample)
    assert chatml.decode(sample.tokens.tolist()) == "fox<|im_end|>dog<|im_end|>"
    assert sample.preview == "fox<|im_end|>dog<|im_end|>"
