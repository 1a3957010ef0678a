"""A streamed dataset under any sequence of edits, lives, kills, overwrites and stray objects: no false proof.

Its identity does not cover all data, so what is proven is compared with the rows whose hashes the commits hold.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from crash.test_no_false_proof import LINES, STEPS, World
from spile.data import lines as lines_module
from spile.data import samples as stream_module
from spile.data.lines import Line, hash_lines
from spile.data.samples import open_stream
from spile.data.tokens import Tokenizer, load_tokenizer
from spile.errors import SpileError
from spile.objects import open_folder
from spile.proof.verification import verify
from spile.reading.dataset import open as open_dataset
from spile.spec.run import DataSpec
from spile.spec.sample import Sample
from spile.store.ledger import read_ledger
from spile.store.run import join_run
from spile.store.writer import StreamWriter, join_stream, read_stream
from tiny_tokenizers import CHATML, save_tokenizer
from world import TAPS, rows_of, run_identity


@pytest.fixture(scope="module")
def chatml(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("chatml")
    return load_tokenizer(
        save_tokenizer(folder, {"bos_token": None, "eos_token": "<|im_end|>", "chat_template": CHATML})
    )


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows are read before the run, and parts have two rows."""
    monkeypatch.setattr(stream_module, "HEAD_BYTES", 20)
    monkeypatch.setattr(lines_module, "_PART_ROWS", 2)


def _hash(texts: list[str], first: int) -> str:
    raw = [json.dumps({"text": text}).encode() for text in texts]
    return hash_lines(Line(first + n, first + n + 1, line) for n, line in enumerate(raw))


class StreamedWorld(World):
    """A dataset that is too large to be read before the run."""

    def __init__(self, place: Path, tokenizer: Tokenizer) -> None:
        self.read_by: dict[int, list[str]] = {}
        super().__init__(place, tokenizer)

    def sample(self, store: StreamWriter, index: int) -> Sample:
        text = self.read_by[id(store)][index]
        (encoded,) = self.tokenizer.encode([text], add_special=True)
        return Sample(index, f"line-{index + 1}", encoded.tokens, encoded.roles, text)

    def live(self, commits: int | None, edited: int | None) -> None:
        known = read_stream(self.root.child("tpu_0"))
        stored = None if known is None else known.identity
        stream = open_stream(DataSpec(dataset=str(self.file)), self.tokenizer, stored=stored)
        assert (stream.identity.lines, stream.identity.head) == (None, 2)
        join_run(self.root, run_identity())
        identity = replace(stream.identity, data=str(self.file), taps=TAPS)
        store = join_stream(self.root, 0, identity, run_identity())
        if edited is not None:
            self.do("edit", edited)  # after its first rows were hashed, before it is read
        reader = stream.read(store.ledger.done, store.ledger.parts, store.ledger.end)
        store.read_parts = lambda: reader.parts
        self.read_by[id(store)] = list(self.texts)
        self.workers.append(store)
        waiting: list[Sample] = []
        for item in reader:
            assert isinstance(item, Sample)
            waiting.append(item)
            if len(waiting) == 2:
                if commits == 0:
                    return  # killed
                self.commit(store, waiting)
                waiting, commits = [], None if commits is None else commits - 1
        if waiting:
            self.commit(store, waiting)
        if store.ledger.end is None:
            store.commit([], end=reader.total)
        store.finish()

    def judge(self) -> None:
        """What is proven is what the rows give whose hashes are in the ledger."""
        try:
            proven = verify(self.root).ok
        except SpileError:
            return
        if not proven:
            return
        record = read_stream(self.root.child("tpu_0"))
        assert record is not None
        ledger = read_ledger(self.root.child("tpu_0"), record.id)
        wanted: list[str] = []
        for part in ledger.parts:
            there = [texts[part.first : part.stop] for texts in self.contents.values()]
            (found,) = {tuple(texts) for texts in there if _hash(texts, part.first) == part.hash}
            wanted += found
        dataset = open_dataset(self.root)
        assert sorted(ref.index for ref in dataset.samples) == list(range(LINES))
        for index, text in enumerate(wanted):
            (encoded,) = self.tokenizer.encode([text], add_special=True)
            stored = dataset.sample(0, index)
            np.testing.assert_array_equal(stored.tokens, encoded.tokens)
            expected = Sample(index, "t", encoded.tokens, encoded.roles)
            for tap, name in enumerate(dataset.taps):
                np.testing.assert_array_equal(stored.rows(name), rows_of(expected, tap))


def _try(steps: list[tuple[str, int]], place: Path, tokenizer: Tokenizer) -> list[str]:
    """Return the errors of the steps; an error is a right answer, a traceback of anything else is not."""
    world, said = StreamedWorld(place, tokenizer), []
    for what, number in steps:
        try:
            world.do(what, number)
        except SpileError as error:
            said.append(str(error))
        world.judge()
    return said


@pytest.mark.parametrize(
    "examples",
    [
        15,
        pytest.param(40, marks=pytest.mark.slow),
        pytest.param(3000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
    ],
)
def test_no_sequence_of_events_ends_in_a_false_proof(
    tmp_path_factory: pytest.TempPathFactory, chatml: Tokenizer, examples: int
) -> None:
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(st.lists(STEPS, max_size=9))
    def one(steps: list[tuple[str, int]]) -> None:
        _try([*steps, ("whole life", 0)], tmp_path_factory.mktemp("world"), chatml)

    one()


@pytest.mark.parametrize("edited", range(LINES))
def test_an_edit_of_a_row_that_was_read_stops_the_next_life(tmp_path: Path, chatml: Tokenizer, edited: int) -> None:
    said = _try([("whole life", 0), ("edit", edited), ("whole life", 0)], tmp_path, chatml)
    assert len(said) == 1
    assert "changed since it was read" in said[0] or "but this command asks for" in said[0]
    (tmp_path / "again").mkdir()
    said = _try([("life", 1), ("put back", 0), ("whole life", 0)], tmp_path / "again", chatml)
    assert said == []
    assert verify(open_folder(str(tmp_path / "again" / "out"))).ok


def test_an_edit_of_the_first_rows_in_the_middle_of_a_life_commits_nothing(tmp_path: Path, chatml: Tokenizer) -> None:
    said = _try([("life with an edit in its middle", 1), ("put back", 0), ("whole life", 0)], tmp_path, chatml)
    assert ["changed since it was read" in line for line in said] == [True]
    assert verify(open_folder(str(tmp_path / "out"))).ok
