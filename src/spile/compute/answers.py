"""``infer``: answer every prompt of a stream, and store the answers and their activations.

Generators (:mod:`spile.compute.generator` in JAX, :mod:`spile.compute.torch_producers` in PyTorch) are producers of the
pipeline that compute ahead of it: how long an answer is, and therefore how a shard is laid out, is known only once the
answer has ended. So a batch of ``infer`` is one finished answer whose rows are in host memory; ``start`` and ``fetch``
only pass them on.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from spile.compute.batches import Batch, Sizes
from spile.compute.producer import Control, Decision, Producer, RowBlock
from spile.compute.progress import Progress
from spile.data.arc.answers import submission_bytes
from spile.data.tokens import Tokenizer
from spile.errors import SpecError
from spile.models.decoder import head_needed
from spile.models.generation import Sampling
from spile.objects import Folder, open_folder
from spile.spec.positions import ALL, choose_positions
from spile.spec.run import Capture, RunSpec
from spile.spec.sample import Prediction, Role, Sample, StopReason
from spile.spec.taps import MODULE, Tap, tap_kinds
from spile.store.layout import PREDICTIONS, SUBMISSION
from spile.store.ledger import Commit, read_commits
from spile.store.predictions import read_all_answers, read_answers
from spile.store.run import claim_answers
from spile.store.stored_stream import open_streams
from spile.store.writer import StreamWriter

if TYPE_CHECKING:
    from spile.compute.resolved import ResolvedRun

_TOKEN_BYTES = 8
"""About what a token of an answer takes in ``predictions.jsonl``."""


def check_generation(spec: RunSpec) -> None:
    """Refuse prompts and taps that are impossible while answers are generated."""
    if spec.generation is None:
        return
    if spec.data.prompt.pack:
        raise SpecError("--pack", expected="one prompt per sample", found="--pack, which joins documents")
    refused = [kind for kind in tap_kinds(spec.taps) if kind.startswith(MODULE) or head_needed((Tap(kind),))]
    if refused:
        raise SpecError(
            "--taps",
            expected="taps of layers or of the embedding, because answers are generated",
            found=", ".join(refused),
            fix="leave it out; predictions.jsonl has the log-probability of each token",
        )


@dataclass(eq=False)
class Answer:
    """A sample, the tokens of its answer so far, and its captured activations if this process stores them."""

    sample: Sample
    rows: list[list[npt.NDArray[Any]]]
    """The captured rows of each tap, ``[rows, width]``, one array per call of the device."""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: StopReason | None = None
    """Why it ended; None until it has."""
    group: int = 0
    """The data-parallel group that computes it."""
    read: int = 0
    """Tokens of the prompt that were sent to the devices."""
    fed: int = 0
    """Tokens of the answer that the model has read as input, as far as the results were collected."""

    def append(self, token: int, logprob: float, sampling: Sampling) -> None:
        """Append a token; the answer ends if it is a stop token or the last that is allowed."""
        self.tokens.append(token)
        self.logprobs.append(logprob)
        if token in sampling.stop:
            self.reason = "stop"
        elif len(self.tokens) >= sampling.max_new:
            self.reason = "length"

    def take_rows(self, tap: int) -> npt.NDArray[Any] | None:
        """Return the captured rows of a tap, ``[rows, width]``, and release them; None if there are none."""
        arrays, self.rows[tap] = self.rows[tap], []
        return np.concatenate(arrays) if arrays else None


@dataclass(frozen=True)
class AnswerBatch(Batch):
    """One finished answer."""

    answer: Answer
    prediction: Prediction
    first: int
    """The position of the first captured token."""

    def stored_bytes(self, bytes_per_token: int) -> int:
        """Return the bytes of the rows in a shard and of the answer in ``predictions.jsonl``."""
        return super().stored_bytes(bytes_per_token) + _TOKEN_BYTES * len(self.prediction.tokens)

    def counts(self) -> dict[str, int]:
        """Return nothing: tokens are counted as they are generated."""
        return {}

    def predictions(self) -> list[Prediction]:
        return [self.prediction]


class AnswerProducer(Producer):
    """The base class of generators, which compute while they make batches."""

    generates = True

    def __init__(
        self, tokenizer: Tokenizer, capture: Capture, progress: Progress, *, positions: str = ALL, seed: int = 0
    ) -> None:
        self._tokenizer, self.capture, self.progress = tokenizer, capture, progress
        self._positions, self._seed = positions, seed

    def answers(self, samples: Iterator[Sample]) -> Iterator[list[Answer]]:
        """Yield, after each step on the device, the answers that ended with it.

        Samples are read as they can be answered. Closing the iterator leaves unfinished answers unanswered.
        """
        raise NotImplementedError

    def batches(
        self,
        samples: Iterator[Sample],
        sizes: Sizes,  # noqa: ARG002 - a generator has its own plan
        control: Control,
    ) -> Iterator[Batch | Decision]:
        """Generate answers, and yield each as a batch when it ends, and the decision of the control after each step."""
        for ended in self.answers(samples):
            for answer in ended:
                yield self._batch(answer)
            decision = control.decide()
            if decision != "continue":
                yield decision
                control.committed()

    def start(self, batch: Batch) -> Batch:
        """Return the batch: its rows are computed already."""
        return batch

    def fetch(self, pending: object) -> Iterator[list[RowBlock]]:
        """Yield the stored rows of each tap, and release their memory tap after tap."""
        assert isinstance(pending, AnswerBatch)  # noqa: S101 - made below
        (sample,) = pending.samples
        for tap in range(len(pending.answer.rows)):
            rows = pending.answer.take_rows(tap)
            if rows is not None:
                rows = rows if sample.positions is None else rows[sample.positions - pending.first]
                yield [RowBlock(pending.answer.group, rows)]

    def _batch(self, answer: Answer) -> AnswerBatch:
        """Return an answer with its sample as it is stored: the tokens whose rows are stored, the answer's marked."""
        sample, generated = answer.sample, np.array(answer.tokens, np.int32)
        own = (self._tokenizer.roles(generated) & ~np.uint8(Role.FIRST)) | np.uint8(Role.ANSWER | Role.ASSISTANT)
        tokens: npt.NDArray[Any] = np.concatenate([sample.tokens, generated])
        roles: npt.NDArray[Any] = np.concatenate([sample.roles, own])
        first = 0 if self.capture in ("prompt", "both") else len(sample)
        stop = len(sample) + (len(generated) if self.capture in ("answer", "both") else 0)
        if self._positions == ALL:
            stored = replace(sample, tokens=tokens[first:stop], roles=roles[first:stop])
        else:
            chosen = choose_positions(self._positions, self._seed, sample.number, roles, first, stop)
            stored = replace(sample, tokens=tokens, roles=roles, positions=chosen)
        self.progress.add(samples=1)
        groups = tuple(((stored,),) if group == answer.group else () for group in range(self.groups))
        return AnswerBatch(groups, 1, len(stored), answer, self._prediction(answer), first)

    def _prediction(self, answer: Answer) -> Prediction:
        assert answer.reason is not None  # noqa: S101 - the answer has ended
        text = answer.tokens[:-1] if answer.reason == "stop" else answer.tokens
        return Prediction(
            sample=answer.sample.index,
            task_id=answer.sample.task_id,
            text=self._tokenizer.decode(text),
            tokens=tuple(answer.tokens),
            logprobs=tuple(answer.logprobs),
            stop_reason=answer.reason,
            augmentation=answer.sample.augmentation,
        )


def write_answers(run: ResolvedRun, stream: StreamWriter) -> None:
    """Write ``predictions.jsonl`` and, for ARC tasks, ``submission.json``, from the commits: each answer once.

    The folder of a stream gets the answers of the stream. ``--output-dir`` gets those of all streams of the run,
    because several workers may share it.
    """
    if run.spec.answers_dir is None:
        predictions = read_answers(stream.folder, read_commits(stream.folder, stream.record.id))
        _put_answers(run, stream.folder, predictions, b"".join(prediction.line() for prediction in predictions))
        return
    folder = open_folder(run.spec.answers_dir)
    claim_answers(folder, run.root)
    written: dict[int, tuple[Commit, ...]] = {}
    # Another worker may have committed after this one read the ledgers and written its view before this one did. So the
    # view is written again until no ledger has changed: whichever worker writes last has then seen every commit.
    while True:
        streams = open_streams(run.root, run.identity)
        commits = {stream.number: stream.commits for stream in streams}
        if commits == written:
            break
        answers = read_all_answers(streams)
        lines = b"".join(prediction.line(number) for number, prediction in answers)
        _put_answers(run, folder, [prediction for _, prediction in answers], lines)
        written = commits


def _put_answers(run: ResolvedRun, folder: Folder, predictions: list[Prediction], lines: bytes) -> None:
    folder.put(PREDICTIONS, lines)
    if run.identity.answers_are_grids:
        folder.put(SUBMISSION, submission_bytes(predictions, run.identity.prompt.encoder))
