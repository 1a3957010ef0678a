"""The pipeline with a producer that computes while it makes batches, as ``infer`` does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import models

import spile
from spile.compute.answers import Answer, AnswerProducer
from spile.compute.batches import Sizes
from spile.compute.generator import plan_slots
from spile.compute.producer import Control, Decision
from spile.compute.progress import Progress
from spile.data.tokens import Tokenizer
from spile.objects import open_folder
from spile.run.pipeline import Sink, run_pipeline
from spile.spec.run import GenerationSpec
from spile.spec.sample import Sample
from spile.store.predictions import read_answers
from spile.store.run import join_run
from spile.store.stored_stream import open_streams
from spile.store.writer import StreamWriter, join_stream
from unit.run.test_pipeline import Script
from world import TAPS, D, items, rows_of, run_identity, stream_identity

RUN = run_identity(generation=GenerationSpec(stop_tokens=(2,)))


class OneTokenAnswers(AnswerProducer):
    """Answers one sample per step with one token, on several groups in turn."""

    def __init__(self, groups: int, tokenizer: Tokenizer, progress: Progress) -> None:
        super().__init__(tokenizer, "both", progress)
        self.groups, self.owned = groups, range(groups)

    def answers(self, samples: Iterator[Sample]) -> Iterator[list[Answer]]:
        for number, sample in enumerate(samples):
            rows = [[rows_of(sample, tap), np.zeros((1, D), "bfloat16")] for tap in range(len(TAPS))]
            yield [Answer(sample, rows, [2], [-0.5], "stop", group=number % self.groups)]


def run(root: Path, count: int, control: object, groups: int = 1, **sizes: object) -> tuple[bool, StreamWriter]:
    folder = open_folder(str(root))
    join_run(folder, RUN)
    stream = join_stream(folder, 0, stream_identity(count), RUN)
    words = models.WordLevel({f"w{n}": n for n in range(1000)}, unk_token="w0")
    tokenizer, progress = Tokenizer(Backend(words), None, 2, None, {}, frozenset({2})), Progress()
    finished = run_pipeline(
        items(count, stream.ledger.done),
        OneTokenAnswers(groups, tokenizer, progress),
        Sink(stream),
        Sizes(128, None, 64, **{"shard_bytes": 1e9, **sizes}),  # type: ignore[arg-type]
        progress=progress,
        control=control,  # type: ignore[arg-type]
    )
    return finished, stream


def check(root: Path, count: int) -> None:
    (stream,) = open_streams(open_folder(str(root)), RUN)
    wanted = [item for item in items(count) if isinstance(item, Sample)]
    assert [one.sample for one in read_answers(stream.folder, stream.commits)] == [sample.index for sample in wanted]
    dataset = spile.open(str(root))
    for sample in wanted:
        stored = dataset.sample(0, sample.index)
        assert stored.tokens.tolist() == [*sample.tokens.tolist(), 2]
        for tap, name in enumerate(TAPS):
            np.testing.assert_array_equal(stored.rows(str(name))[:-1], rows_of(sample, tap))


@pytest.mark.parametrize(("groups", "writers"), [(1, 1), (3, 1), (1, 3)])
def test_every_answer_is_stored_once_with_its_rows(tmp_path: Path, groups: int, writers: int) -> None:
    control = Control()
    finished, stream = run(tmp_path, 40, control, groups, shard_bytes=2000, writers=writers)
    assert finished
    assert stream.ledger.shards > 3
    assert len(stream.ledger.done) == 40
    check(tmp_path, 40)


def test_a_stop_commits_the_finished_answers_and_the_next_run_makes_the_others(tmp_path: Path) -> None:
    finished, stream = run(tmp_path, 30, Script(*["continue"] * 6, "stop"), shard_bytes=900)
    assert not finished
    assert stream.ledger.done.pairs() == [(0, 8)]  # seven answers, and sample 5, which is skipped
    assert run(tmp_path, 30, Script())[0]
    check(tmp_path, 30)


def test_commit_every_closes_the_shard_of_answers(tmp_path: Path) -> None:
    decisions: list[Decision] = ["continue", "continue", "commit", "continue", "commit"]
    finished, stream = run(tmp_path, 12, Script(*decisions))
    assert finished
    assert stream.ledger.shards == 3
    check(tmp_path, 12)


def test_there_are_no_more_slots_than_prompts() -> None:
    assert plan_slots(10, 24, 1000, 0, 10**9, None, answers=2).slots == 2
    assert plan_slots(10, 24, 1000, 0, 10**9, 8, answers=2).slots == 2
    assert plan_slots(10, 24, 1000, 0, 10**9, None).slots > 2


def test_a_small_run_gets_a_small_batch_and_a_large_one_keeps_its_own() -> None:
    sizes = Sizes(4096, None, 2048, 1e9, shortest_row=4096)
    small = sizes.for_samples([5, 2], 1)
    assert (small.rows(small.row_length(5)), small.row_length(5)) == (1, 64)
    assert sizes.for_samples([2000, 1000], 1) == sizes
    assert sizes.for_samples([400] * 8, 8).batch_tokens >= 800  # a group may get two samples


def test_the_rate_shown_is_that_of_the_last_seconds() -> None:
    now = 0.0
    progress = Progress(clock=lambda: now)
    progress.start()
    for second in range(1, 101):
        now = float(second)
        progress.add(tokens=10 if second <= 50 else 1000)
    shown = progress.snapshot()
    assert shown.tokens_per_second == pytest.approx(505)
    assert shown.recent_tokens_per_second == pytest.approx(1000, rel=0.1)
    now = 200.0
    assert progress.snapshot().recent_tokens_per_second == 0
