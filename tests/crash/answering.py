"""Answers without a model, through the real pipeline and store, in a process that may be killed at any step."""

from __future__ import annotations

import multiprocessing
import os
import traceback
from collections.abc import Iterator
from itertools import islice
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from threading import Event

import numpy as np
from killing import Switch, _paths
from tokenizers import Tokenizer as Backend
from tokenizers import models

from spile.compute.answers import Answer, AnswerProducer
from spile.compute.batches import Sizes
from spile.compute.producer import Control
from spile.compute.progress import Progress
from spile.data.tokens import Tokenizer
from spile.objects import open_folder
from spile.run.pipeline import Sink, run_pipeline
from spile.spec.run import GenerationSpec
from spile.spec.sample import Prediction, Role, Sample
from spile.store.run import join_run
from spile.store.writer import StreamWriter, join_stream
from world import TAPS, items, rows_of, run_identity, stream_identity

__all__ = ["answer", "expected", "start", "stored"]

RUN = run_identity(generation=GenerationSpec(stop_tokens=(2,)))
VOCABULARY = 1000


def tokenizer() -> Tokenizer:
    words = models.WordLevel({f"w{n}": n for n in range(VOCABULARY)}, unk_token="w0")
    return Tokenizer(Backend(words), None, 2, None, {}, frozenset({2}))


def stored(sample: Sample) -> Sample:
    """The sample with its answer, as its rows must be found."""
    draw = np.random.default_rng(10_000 + sample.index)
    tokens = [*draw.integers(3, VOCABULARY, int(draw.integers(0, 9))).tolist(), 2]
    roles = np.full(len(tokens), Role.ANSWER | Role.ASSISTANT, np.uint8)
    roles[-1] |= Role.SPECIAL
    return Sample(
        sample.index, sample.task_id, np.append(sample.tokens, tokens).astype(np.int32), np.append(sample.roles, roles),
        sample.preview, sample.augmentation, sample.truncated,
    )  # fmt: skip


def expected(sample: Sample) -> Prediction:
    tokens = tuple(stored(sample).tokens[len(sample) :].tolist())
    text = tokenizer().decode(tokens[:-1])
    logprobs = tuple(-0.25 * n for n in range(len(tokens)))
    return Prediction(sample.index, sample.task_id, text, tokens, logprobs, "stop", sample.augmentation)


def _made(sample: Sample) -> Answer:
    output, whole = expected(sample), stored(sample)
    parts = np.array_split(np.arange(len(whole)), 3)  # in pieces, as chunks and strides come
    rows = [[rows_of(whole, tap)[places] for places in parts] for tap in range(len(TAPS))]
    return Answer(sample, rows, list(output.tokens), list(output.logprobs), "stop")


class ReversedAnswers(AnswerProducer):
    """Answers several samples at once; they end in a different order than they started."""

    groups, owned = 1, (0,)

    def __init__(self, shard: int, progress: Progress) -> None:
        super().__init__(tokenizer(), "both", progress)
        self._shard = shard

    def answers(self, samples: Iterator[Sample]) -> Iterator[list[Answer]]:
        while some := [_made(sample) for sample in islice(samples, self._shard)]:
            yield some[::-1]


class CommitAlways(Control):
    """Commits after each step."""

    def __init__(self) -> None:
        super().__init__(Event(), 0.0)


def answer(
    url: str, count: int, shard: int, attempt: str | None = None, *, shard_bytes: float = 1e9, writers: int = 1
) -> StreamWriter:
    """Run one worker: answer the remaining samples, ``shard`` at a time, with a commit after each group."""
    root = open_folder(url)
    join_run(root, RUN)
    stream = join_stream(root, 0, stream_identity(count), RUN, attempt)
    progress = Progress()
    assert run_pipeline(
        items(count, stream.ledger.done),
        ReversedAnswers(shard, progress),
        Sink(stream),
        Sizes(128, None, 64, shard_bytes, writers),
        progress=progress,
        control=CommitAlways(),
    )
    stream.finish()
    return stream


def _life(url: str, count: int, shard: int, switch: Switch) -> None:
    if switch.at is not None:
        switch.patch_system()
    try:
        answer(url, count, shard)
    except BaseException:  # noqa: BLE001  the parent sees the code
        traceback.print_exc()
        os._exit(70)
    os._exit(0)


def start(url: str, count: int, shard: int, switch: Switch) -> ForkServerProcess:
    context = multiprocessing.get_context("forkserver")
    here = Path(__file__).parent
    with _paths(str(here), str(here.parent)):
        context.set_forkserver_preload(["answering"])
        process = context.Process(target=_life, args=(url, count, shard, switch))
        process.start()
    return process
