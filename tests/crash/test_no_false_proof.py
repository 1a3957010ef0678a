"""Any sequence of edits, workers, kills, overwrites and stray objects ends in correct rows or in an error.

It never ends in a false proof: if ``verify`` accepts a dataset, each row is computed from the data of its identity.
"""

from __future__ import annotations

import hashlib
import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spile.data.samples import open_stream
from spile.data.tokens import Tokenizer, load_tokenizer
from spile.errors import SpileError
from spile.objects import open_folder
from spile.proof.verification import verify
from spile.reading.dataset import open as open_dataset
from spile.spec.run import DataSpec
from spile.spec.sample import Sample, Skip
from spile.store.cleanup import clear_stream
from spile.store.layout import commit_key
from spile.store.ledger import Commit, commit_numbers
from spile.store.run import join_run
from spile.store.writer import StreamWriter, join_stream, read_stream
from tiny_tokenizers import CHATML, save_tokenizer
from world import TAPS, rows_of, run_identity, write_shard

LINES = 7
STEPS = st.one_of(
    st.tuples(st.just("edit"), st.integers(0, LINES - 1)),
    st.tuples(st.just("put back"), st.just(0)),
    st.tuples(st.just("life"), st.integers(0, 4)),
    st.tuples(st.just("life with an edit in its middle"), st.integers(0, LINES - 1)),
    st.tuples(st.just("whole life"), st.just(0)),
    st.tuples(st.just("overwrite"), st.just(0)),
    st.tuples(st.just("zombie"), st.just(0)),
    st.tuples(st.just("sleepwalker"), st.integers(1, 3)),
    st.tuples(st.just("lose a commit"), st.integers(1, 4)),
    st.tuples(st.just("stray"), st.integers(0, 3)),
    st.tuples(st.just("repair"), st.just(0)),
    st.tuples(st.just("collect garbage"), st.just(0)),
)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder = tmp_path_factory.mktemp("chatml")
    return load_tokenizer(
        save_tokenizer(folder, {"bos_token": None, "eos_token": "<|im_end|>", "chat_template": CHATML})
    )


class World:
    """A dataset's file, an output, and the workers that ever joined it."""

    def __init__(self, place: Path, tokenizer: Tokenizer) -> None:
        self.file, self.root, self.tokenizer = place / "data.jsonl", open_folder(str(place / "out")), tokenizer
        self.texts = [f"fox {n}" for n in range(LINES)]
        self.contents: dict[str, list[str]] = {}
        self.workers: list[StreamWriter] = []
        self.waiting: list[Sample] = []
        self.write()

    def write(self) -> None:
        data = "".join(json.dumps({"text": text}) + "\n" for text in self.texts).encode()
        self.contents[hashlib.sha256(data).hexdigest()] = list(self.texts)
        self.file.write_bytes(data)

    def do(self, what: str, number: int) -> None:
        if what == "edit":
            self.texts[number] = f"dog {number} {len(self.contents)}"
            self.write()
        elif what == "put back":
            self.texts = [f"fox {n}" for n in range(LINES)]
            self.write()
        elif what == "life":
            self.live(number, None)
        elif what == "whole life":
            self.live(None, None)
        elif what == "life with an edit in its middle":
            self.live(None, number)
        elif what == "overwrite":
            clear_stream(self.root, 0)
        elif what == "zombie" and self.workers:
            store = self.workers[0]
            self.commit(store, [self.sample(store, index) for index in range(2)])
        elif (
            what == "sleepwalker" and self.workers
        ):  # It was suspended between its check of stream.json and its commit.
            store = self.workers[0]
            taken = max(commit_numbers(store.folder), default=0) + number
            commit = Commit(taken, "sleep", store.record.id, (), (Skip(number, "t", "empty"),), None)
            if read_stream(store.folder) is not None and read_stream(store.folder).id != store.record.id:  # type: ignore[union-attr]
                store.folder.create(commit_key(taken), commit.to_bytes())
        elif what == "lose a commit":
            self.root.delete(f"tpu_0/{commit_key(number)}")
        elif what == "stray":
            name = ("notes.txt", "shard_0009-abcd.safetensors", "commits/notes.json", ".tmp-0123456789abcdef-x")[number]
            (Path(self.root.url) / "tpu_0" / "commits").mkdir(parents=True, exist_ok=True)
            (Path(self.root.url) / "tpu_0" / name).write_text("somebody's")
        elif what == "repair":
            verify(self.root, repair=True)
        elif what == "collect garbage":
            verify(self.root, gc=True, remove=True, older_than=-1.0)

    def sample(self, store: StreamWriter, index: int) -> Sample:
        text = self.contents[store.record.identity.sha256][index]
        (encoded,) = self.tokenizer.encode([text], add_special=True)
        return Sample(index, f"line-{index + 1}", encoded.tokens, encoded.roles, text)

    def live(self, commits: int | None, edited: int | None) -> None:
        stream = open_stream(DataSpec(dataset=str(self.file)), self.tokenizer)
        join_run(self.root, run_identity())
        identity = replace(stream.identity, data=str(self.file), taps=TAPS)
        store = join_stream(self.root, 0, identity, run_identity())
        self.workers.append(store)
        if edited is not None:
            self.do("edit", edited)  # after it was hashed, before it is read
        waiting: list[Sample] = []
        for item in stream.read(store.ledger.done):
            assert isinstance(item, Sample)
            waiting.append(item)
            if len(waiting) == 2:
                if commits == 0:
                    return  # killed
                self.commit(store, waiting)
                waiting, commits = [], None if commits is None else commits - 1
        if waiting:
            self.commit(store, waiting)
        store.finish()

    @staticmethod
    def commit(store: StreamWriter, samples: list[Sample]) -> None:
        builder = store.begin(samples)
        write_shard(builder, samples)
        store.commit([builder.finish()])

    def judge(self) -> None:
        """Check that a verified dataset is correct."""
        try:
            proven = verify(self.root).ok
        except SpileError:
            return
        if not proven:
            return
        record = read_stream(self.root.child("tpu_0"))
        assert record is not None
        wanted = self.contents[record.identity.sha256]
        dataset = open_dataset(self.root)
        assert sorted(ref.index for ref in dataset.samples) == list(range(LINES))
        for index, text in enumerate(wanted):
            (encoded,) = self.tokenizer.encode([text], add_special=True)
            stored = dataset.sample(0, index)
            np.testing.assert_array_equal(stored.tokens, encoded.tokens)
            expected = Sample(index, "t", encoded.tokens, encoded.roles)
            for tap, name in enumerate(dataset.taps):
                np.testing.assert_array_equal(stored.rows(name), rows_of(expected, tap))


def _try(steps: list[tuple[str, int]], place: Path, tokenizer: Tokenizer) -> None:
    world = World(place, tokenizer)
    for what, number in steps:
        with suppress(SpileError):  # An error of ours is accepted; any other exception is not.
            world.do(what, number)
        world.judge()


@pytest.mark.parametrize(
    "examples",
    [
        15,
        pytest.param(60, marks=pytest.mark.slow),
        pytest.param(3000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)]),
    ],
)
def test_no_sequence_of_events_ends_in_a_false_proof(
    tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer, examples: int
) -> None:
    @settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None)
    @given(st.lists(STEPS, max_size=9))
    def one(steps: list[tuple[str, int]]) -> None:
        _try([*steps, ("whole life", 0)], tmp_path_factory.mktemp("world"), tokenizer)

    one()


def test_a_worker_whose_data_is_edited_commits_nothing_of_the_edit(tmp_path: Path, tokenizer: Tokenizer) -> None:
    _try([("life with an edit in its middle", 3), ("put back", 0), ("whole life", 0)], tmp_path, tokenizer)
    assert verify(open_folder(str(tmp_path / "out"))).ok


def test_zombies_overwrites_and_repairs_end_in_a_proof(tmp_path: Path, tokenizer: Tokenizer) -> None:
    steps = [("life", 2), ("overwrite", 0), ("life", 1), ("sleepwalker", 1), ("zombie", 0), ("sleepwalker", 2)]
    _try([*steps, ("whole life", 0), ("repair", 0), ("whole life", 0)], tmp_path, tokenizer)
    assert verify(open_folder(str(tmp_path / "out"))).ok
