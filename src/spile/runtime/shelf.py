"""Finished answers until they are a shard's worth; written and committed beside the loop, one shard at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from spile.data.tokens import Tokenizer
from spile.objects.folder import Folder
from spile.planning.positions import choose_positions
from spile.runtime.answer import Answer, tokens_kept
from spile.runtime.flow import Sink
from spile.runtime.progress import Progress
from spile.spec.positions import ALL
from spile.spec.prediction import Prediction
from spile.spec.run import Capture
from spile.spec.sample import Role, Sample, Skip
from spile.store.predictions import put_predictions
from spile.store.record import ShardRecord

__all__ = ["Shelf"]

_MOST = 16_384
"""Samples of a shard, and skipped ones that are held, at most."""


class Shelf:
    """What was answered and is not committed yet. On a pod every process holds the same answers, and its own rows."""

    def __init__(
        self,
        folder: Folder,
        sink: Sink,
        tokenizer: Tokenizer,
        progress: Progress,
        *,
        capture: Capture,
        positions: str = ALL,
        seed: int = 0,
        bytes_per_token: int,
        shard_bytes: float,
        lanes: int = 1,
    ) -> None:
        self._folder, self._sink, self._tokenizer, self._progress = folder, sink, tokenizer, progress
        self._capture, self._positions, self._seed = capture, positions, seed
        self._bytes_per_token, self._shard_bytes = bytes_per_token, shard_bytes
        self._answers: list[Answer] = []
        self._skipped: list[Skip] = []
        self._bytes = 0
        self._writer, self._lanes = ThreadPoolExecutor(lanes, "spile-writer"), lanes
        self._handed: deque[Future[None]] = deque()

    def add(self, answers: Sequence[Answer]) -> None:
        """They have ended."""
        for answer in answers:
            self._bytes += self._bytes_of(answer)
            self._answers.append(answer)
            self._progress.add(samples=1, tokens=len(answer.sample) + len(answer.tokens))

    def skip(self, skip: Skip) -> None:
        """A sample that is done without an answer."""
        self._skipped.append(skip)

    @property
    def empty(self) -> bool:
        """Nothing waits for a commit."""
        return not self._answers and not self._skipped

    @property
    def full(self) -> bool:
        """A shard's worth is here."""
        return self._bytes >= self._shard_bytes or max(len(self._answers), len(self._skipped)) >= _MOST

    def commit(self, end: int | None = None) -> None:
        """Write and commit what is here, behind the caller's back. Waits while every lane is at work.

        There are several where a device is faster than one file, and one on a pod, whose hosts commit together. Very
        many answers may have ended at once: they are several shards, and several lanes' work.
        """
        *first, last = self._shards()
        skipped = tuple(self._skipped)
        self._answers, self._skipped, self._bytes = [], [], 0
        for answers in first:
            self._hand_over(answers, (), None)
        if end is not None:
            self.wait()  # the end is the last word
        self._hand_over(last, skipped, end)

    def _shards(self) -> list[list[Answer]]:
        """What is here by its number, in parts of about a shard's bytes; at least one, which may be empty."""
        answers = sorted(self._answers, key=lambda answer: answer.sample.index)
        count = max(1, round(self._bytes / self._shard_bytes), -(-len(answers) // _MOST))
        parts: list[list[Answer]] = [[] for _ in range(count)]
        sofar = 0
        for answer in answers:
            parts[min(count - 1, sofar * count // max(1, self._bytes))].append(answer)
            sofar += self._bytes_of(answer)
        return [part for part in parts if part] or [[]]

    def _hand_over(self, answers: Sequence[Answer], skipped: tuple[Skip, ...], end: int | None) -> None:
        while len(self._handed) >= self._lanes:
            self._handed.popleft().result()
        self._handed.append(self._writer.submit(self._store, answers, skipped, end))

    def wait(self) -> None:
        """Until what was handed over is committed, or its error."""
        while self._handed:
            self._handed.popleft().result()

    def close(self) -> None:
        """No more comes."""
        self._writer.shutdown(wait=True)

    def _bytes_of(self, answer: Answer) -> int:
        tokens = tokens_kept(self._capture, len(answer.sample), len(answer.tokens))
        return tokens * self._bytes_per_token + 8 * len(answer.tokens)

    def _store(self, answers: Sequence[Answer], skipped: tuple[Skip, ...], end: int | None) -> None:
        with self._progress.busy("sink"):
            own = [answer for answer in answers if answer.owned]
            record = self._shard(own) if own else None
            self._sink.commit(record, skipped, end)
        self._progress.add(shards_committed=int(record is not None), samples_committed=len(answers) + len(skipped))
        for skip in skipped:
            self._progress.skip(skip.reason)

    def _shard(self, answers: Sequence[Answer]) -> ShardRecord:
        samples = [self._sample(answer) for answer in answers]
        builder = self._sink.begin(samples)
        try:
            for tap in range(answers[0].rows.taps):
                row = 0
                for answer, sample in zip(answers, samples, strict=True):
                    rows = self._wanted(answer, sample, answer.rows.taken(tap))
                    if rows is not None:
                        builder.write(tap, row, rows)
                        row += len(rows)
            record = builder.finish()
        except BaseException:
            builder.abort()
            raise
        record = put_predictions(self._folder, record, [self._prediction(answer) for answer in answers])
        self._progress.add(shards_written=1, bytes=record.size)
        return record

    def _sample(self, answer: Answer) -> Sample:
        """The sample as it is stored: the tokens whose rows are kept, the answer's marked."""
        sample = answer.sample
        tokens = np.array(answer.tokens, np.int32)
        roles = (self._tokenizer.roles(tokens) & ~np.uint8(Role.FIRST)) | np.uint8(Role.ANSWER | Role.ASSISTANT)
        if self._positions != ALL:
            return self._with_positions(sample, tokens, roles)
        parts = {"prompt": (sample.tokens, sample.roles), "answer": (tokens, roles)}
        kept = [part for name, part in parts.items() if self._capture in (name, "both")]
        if not kept:
            return replace(sample, tokens=sample.tokens[:0], roles=sample.roles[:0])
        return replace(
            sample, tokens=np.concatenate([part[0] for part in kept]), roles=np.concatenate([part[1] for part in kept])
        )

    def _with_positions(self, sample: Sample, tokens: npt.NDArray[Any], roles: npt.NDArray[Any]) -> Sample:
        """All tokens, and which of those whose rows were captured are stored."""
        first, stop = self._captured(len(sample), len(tokens))
        roles = np.concatenate([sample.roles, roles])
        positions = choose_positions(self._positions, self._seed, sample.index, roles, first, stop)
        return replace(sample, tokens=np.concatenate([sample.tokens, tokens]), roles=roles, positions=positions)

    def _captured(self, prompt: int, answer: int) -> tuple[int, int]:
        first = 0 if self._capture in ("prompt", "both") else prompt
        return first, prompt + (answer if self._capture in ("answer", "both") else 0)

    def _wanted(self, answer: Answer, sample: Sample, rows: npt.NDArray[Any] | None) -> npt.NDArray[Any] | None:
        """Of the rows that were captured, those that are stored."""
        if rows is None or sample.positions is None:
            return rows
        first, _ = self._captured(len(answer.sample), len(answer.tokens))
        return rows[sample.positions - first]

    def _prediction(self, answer: Answer) -> Prediction:
        assert answer.reason is not None  # noqa: S101 - it has ended
        said = answer.tokens[:-1] if answer.reason == "stop" else answer.tokens
        return Prediction(
            sample=answer.sample.index,
            task_id=answer.sample.task_id,
            text=self._tokenizer.decode(said),
            tokens=tuple(answer.tokens),
            logprobs=tuple(answer.logprobs),
            stop_reason=answer.reason,
            augmentation=answer.sample.augmentation,
        )
