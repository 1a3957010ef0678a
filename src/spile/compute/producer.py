"""The producer interface: what turns samples into activation rows, seen from the pipeline.

There are three producers: ``extract`` on JAX devices (:mod:`spile.compute.device`), ``extract`` in PyTorch
(:mod:`spile.compute.torch_producers`) and ``infer`` (:mod:`spile.compute.answers`), whose generator runs on JAX
devices or in PyTorch. The pipeline never imports JAX, so the crash tests run the same pipeline with a producer of a
few lines of NumPy.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from spile.compute.batches import Batch, Sizes, batches
from spile.errors import Failure, ModelError, SpecError
from spile.spec.positions import ALL, ANSWER, choose_positions
from spile.spec.ranges import Ranges
from spile.spec.run import RunSpec
from spile.spec.sample import Sample, Skip
from spile.spec.taps import Tap

Decision = Literal["continue", "commit", "stop"]
"""Continue; commit the open shards and continue; or commit them and end."""


class OutOfDeviceMemory(Failure):
    """A batch does not fit on the device; a smaller one may."""


class DoesNotCompile(Failure):
    """A compiler refuses a program for the devices that are here."""


def not_finite(taps: Iterable[Tap], store_dtype: str) -> Failure:
    """Return the error for taps with NaN or infinity."""
    fix = "use --store-dtype bfloat16, which holds larger values" if store_dtype == "float16" else None
    return Failure(f"NaN or infinity at {', '.join(map(str, taps))}", expected="finite activations", fix=fix)


class Control:
    """Decides when shards end early: a signal stops the run, a clock asks for commits.

    On a pod, every host gets the same decision at the same step (:class:`spile.run.pod.pod.PodControl`).
    """

    def __init__(self, stop: threading.Event | None = None, commit_every: float | None = None) -> None:
        self._stop, self._every, self._since = stop or threading.Event(), commit_every, time.monotonic()

    def decide(self) -> Decision:
        """Return what to do next; called before each step on the device."""
        if self._stop.is_set():
            return "stop"
        return "commit" if self._every is not None and time.monotonic() - self._since >= self._every else "continue"

    def stopping(self) -> bool:
        """Return whether the run will probably stop, so that waits can end early. Only :meth:`decide` is binding."""
        return self._stop.is_set()

    def committed(self) -> None:
        """Restart the clock of ``--commit-every``: the open shards were closed."""
        self._since = time.monotonic()


class RowBlock(NamedTuple):
    """The activation rows of one group at one tap: those that are stored, in order, then padding."""

    group: int
    rows: npt.NDArray[np.generic]


class Producer:
    """Turns samples into batches, and batches into activation rows.

    By default, batches are planned from the lengths of the samples before anything is computed, and no program is
    compiled.
    """

    generates = False
    """Whether :meth:`batches` computes already, and calls :meth:`Control.decide`; otherwise the pipeline calls it."""
    groups: int
    """Groups per batch: the data-parallel width over all hosts."""
    owned: Sequence[int]
    """The groups whose rows this process stores, in order."""

    def batches(
        self,
        samples: Iterator[Sample],
        sizes: Sizes,
        control: Control,  # noqa: ARG002 - the pipeline uses it when it starts a batch
    ) -> Iterator[Batch | Decision]:
        """Yield batches that hold every sample once, and the decisions of the control if this producer generates."""
        return batches(samples, sizes)

    def prepare(self, batch: Batch) -> None:
        """Compile for batches like this one in the background. Never blocks."""

    def await_program(self, batch: Batch, cancelled: Callable[[], bool]) -> None:
        """Wait, possibly for minutes, until a batch of this shape can start at once or ``cancelled`` returns True."""

    def start(self, batch: Batch) -> Any:
        """Start computing and return at once.

        Raises:
            OutOfDeviceMemory: The batch does not fit; nothing was kept.

        """
        raise NotImplementedError

    def fetch(self, pending: Any) -> Iterable[Sequence[RowBlock]]:
        """Wait for a started batch; return, for each tap in order, a block for each owned group with samples."""
        raise NotImplementedError

    def describe(self) -> str:
        """Return one line for people: ``8 × NVIDIA H200, bfloat16, cudnn attention``."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop background work such as compilation."""


def pack(batch: Batch, block: int | None = None) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Lay a batch out as a rectangle, and list where its stored tokens are so that a device can drop padding.

    Returns:
        ``[groups × rows, 3, length]``: tokens, positions within the sample, segment numbers from 1; zeros for padding.
        One array, because sending one costs less than sending three. And ``[groups, block]``: the places, in a group's
        flattened batch rows, of the tokens that are stored; then zeros.

    """
    groups, rows, length = len(batch.groups), batch.rows, batch.length
    packed = np.zeros((groups, rows, 3, length), np.int32)
    places = np.zeros((groups, block or rows * length), np.int32)
    counting = np.arange(length, dtype=np.int32)
    for g, group in enumerate(batch.groups):
        filled = 0
        for r, row in enumerate(group):
            start = 0
            for number, sample in enumerate(row, 1):
                stop = start + len(sample)
                packed[g, r, 0, start:stop] = sample.tokens
                packed[g, r, 1, start:stop] = counting[: len(sample)]
                packed[g, r, 2, start:stop] = number
                kept = sample.of_rows(counting[: len(sample)])
                places[g, filled : filled + len(kept)] = kept + np.int32(r * length + start)
                filled += len(kept)
                start = stop
    return packed.reshape(groups * rows, 3, length), places


def rows_by_sample(batch: Batch, fetched: Iterable[Sequence[RowBlock]]) -> dict[int, list[npt.NDArray[Any]]]:
    """Return the rows of each sample of a batch, by its index, at each tap. ``fetched`` comes from a producer."""
    found: dict[int, list[npt.NDArray[Any]]] = {sample.index: [] for sample in batch.samples}
    for of_tap in fetched:
        for group, rows in of_tap:
            start = 0
            for sample in batch.samples_of(group):
                found[sample.index].append(rows[start : start + sample.rows])
                start += sample.rows
    return found


def check_tokens(samples: Iterable[Sample], vocabulary: int) -> None:
    """Refuse token ids beyond the model's vocabulary: a device would silently use another embedding."""
    for sample in samples:
        highest = int(sample.tokens.max(initial=0))
        if highest >= vocabulary:
            raise ModelError(
                f"the tokenizer is not this model's: sample {sample.index} ({sample.task_id})",
                expected=f"tokens below the model's vocabulary of {vocabulary:,}",
                found=highest,
                fix="give the model its own tokenizer files",
            )


def with_positions(items: Iterable[Sample | Skip], spec: RunSpec) -> Iterator[Sample | Skip]:
    """Set the stored positions of each sample if ``--positions`` selects some."""
    for item in items:
        if isinstance(item, Sample) and spec.positions != ALL:
            chosen = choose_positions(spec.positions, spec.data.seed, item.number, item.roles)
            item = replace(item, positions=chosen)
        yield item


class TokenLimit:
    """Ends a stream once it holds a number of tokens (``--max-tokens``, ``--max-bytes``).

    The samples of a limited stream are the first ones of the data: samples that an earlier run left out between
    committed ones are always done. Every process of a pod therefore ends at the same sample.
    """

    def __init__(self, most: int, stored: int, done: Ranges) -> None:
        """``stored``: the tokens that the ledger holds for the samples ``done``."""
        self._most, self._tokens = most, stored
        self._gaps = len(Ranges([(0, max(done.bounds(), default=0))]) - done)

    def add(self, tokens: int) -> None:
        """Count stored tokens."""
        self._tokens += tokens

    def cut(self, items: Iterable[Sample | Skip], *, count: bool) -> Iterator[Sample | Skip]:
        """Yield items until the limit is reached. ``count``: count their tokens here, before they are computed."""
        iterator = iter(items)
        while self._tokens < self._most or self._gaps > 0:
            item = next(iterator, None)
            if item is None:
                return
            self._gaps -= 1
            if count and isinstance(item, Sample):
                self._tokens += item.rows
            yield item


def check_answer_positions(spec: RunSpec, kind: str) -> None:
    """Refuse ``--positions answer`` for data without answers; in a chat, the messages of the assistant are answers."""
    if spec.positions == ANSWER and spec.generation is None and kind != "chat":
        raise SpecError(
            "--positions answer",
            expected="chats, which contain answers of an assistant",
            found=f"--prompt {kind}",
            fix="use spile infer, which makes answers, or --positions last",
        )
