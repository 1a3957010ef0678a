"""A model on a mesh of devices that answers prompts: seats for samples, two compiled programs, rows as they are made.

A sample takes a free slot, its prompt is read in pieces, its answer made token by token; when it ends, the next sample
takes the slot. A step takes as long for one slot as for all, so prompts that wait are read first. Results are looked at
one call late, so that the devices never wait for the host. Every process of a pod sees all tokens and so makes the same
decisions; rows stay with the process whose devices made them.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh

from spile.errors import Failure
from spile.model.generation import Choices, Chunk, Sampling
from spile.model.params import Params
from spile.runtime.answer import Answer, AnswerRows, tokens_kept
from spile.runtime.device import put, translated
from spile.runtime.generation_programs import GenerationPrograms
from spile.runtime.producer import OutOfDeviceMemory, check_tokens
from spile.runtime.progress import Progress
from spile.runtime.slots import SlotPlan
from spile.spec.architecture import ModelConfig
from spile.spec.phase import Phase
from spile.spec.run import GenerationSpec
from spile.spec.sample import Sample
from spile.spec.taps import Tap

__all__ = ["Generator"]

_LATE = 1
"""Calls on the devices while the one before is looked at."""


class _Piece(NamedTuple):
    answer: Answer
    group: int
    row: int
    length: int
    last: bool


class _Part(NamedTuple):
    """Rows of a call's arrays that are an answer's."""

    answer: Answer
    row: int
    length: int


class _Call(NamedTuple):
    """A call whose results are on their way."""

    pieces: tuple[_Piece, ...] | None
    """None: a stride of tokens."""
    chosen: Choices
    kept: tuple[jax.Array, ...]
    finite: jax.Array


class Generator:
    """Answers samples, many at a time."""

    def __init__(
        self,
        params: Params,
        config: ModelConfig,
        taps: tuple[Tap, ...],
        *,
        mesh: Mesh,
        plan: SlotPlan,
        stop: tuple[int, ...],
        generation: GenerationSpec,
        seed: int,
        dtype: str,
        store_dtype: str,
        progress: Progress | None = None,
    ) -> None:
        self._params, self._config, self._mesh, self._plan, self._dtype = params, config, mesh, plan, dtype
        self._sampling = Sampling(stop, generation.max_new_tokens, generation.temperature, generation.top_p, seed)
        self._n_taps, self._capture, self._progress = len(taps), generation.capture, progress or Progress()
        self._programs = GenerationPrograms(
            params, config, taps, mesh=mesh, plan=plan, sampling=self._sampling, capture=generation.capture,
            dtype=dtype, store_dtype=store_dtype,
        )  # fmt: skip
        firsts: list[Any] = list(mesh.devices[:, 0])
        self._owned = frozenset(g for g, device in enumerate(firsts) if device.process_index == jax.process_index())
        """Groups whose rows this process stores: of a model-parallel set the first device's."""
        try:
            self._slots = self._programs.empty()
        except jax.errors.JaxRuntimeError as error:
            raise self._no_room(error, plan.slots) from error
        self._seats: list[list[Answer | None]] = [[None] * plan.slots for _ in range(self.groups)]
        self._pending: deque[_Call] = deque()
        self._copiers = ThreadPoolExecutor(max(1, min(8, (os.cpu_count() or 2) // 2)), "spile-copy")

    @property
    def groups(self) -> int:
        """The data-parallel width."""
        return int(self._mesh.shape["data"])

    def describe(self) -> str:
        """``8 × NVIDIA H200, mesh 4 × 2, bfloat16, 256 answers at a time``."""
        devices = self._mesh.devices.flatten()
        data, model = self._mesh.devices.shape
        mesh = f"mesh {data} × {model}, " if model > 1 else ""
        at_once = self.groups * self._plan.slots
        return f"{len(devices)} × {devices[0].device_kind}, {mesh}{self._dtype}, {at_once} answers at a time"

    def close(self) -> None:
        """Compile and copy nothing more."""
        self._programs.close()
        self._copiers.shutdown(wait=False, cancel_futures=True)

    def prepare(self) -> None:
        """Wait until both programs are compiled."""
        self._ready(self._programs.reader, "reading prompts")
        self._ready(self._programs.stepper, "making tokens")

    # -- the loop -----------------------------------------------------------------------------------------------------

    def answers(self, samples: Iterator[Sample]) -> Iterator[list[Answer]]:
        """Answers as they end, in the order of their ends; an empty list at each turn that ends none.

        The samples are asked for as seats are free. Whoever stops asking leaves the unfinished ones unanswered.
        """
        waiting = iter(samples)
        more = True
        while True:
            more = more and self._seat(waiting)
            unread = [seat for seat in self._taken() if seat[2].read < len(seat[2].sample)]
            busy = bool(self._taken())
            if busy:
                self._pending.append(self._read(unread) if unread else self._step())
            elif not self._pending:
                return
            ended: list[Answer] = []
            while len(self._pending) > (_LATE if busy else 0):
                ended += self._look(self._pending.popleft())
            yield ended

    def _taken(self) -> list[tuple[int, int, Answer]]:
        return [(g, s, seat) for g, seats in enumerate(self._seats) for s, seat in enumerate(seats) if seat is not None]

    def _seat(self, waiting: Iterator[Sample]) -> bool:
        """Fill free slots, over the groups in turn. False: there is no sample left."""
        for slot in range(self._plan.slots):
            for group, seats in enumerate(self._seats):
                if seats[slot] is None:
                    sample = next(waiting, None)
                    if sample is None:
                        return False
                    check_tokens([sample], self._config.vocab_size)
                    room = tokens_kept(self._capture, len(sample), self._sampling.max_new)
                    seats[slot] = Answer(sample, AnswerRows(self._n_taps, room), owned=group in self._owned)
        return True

    def _read(self, unread: Sequence[tuple[int, int, Answer]]) -> _Call:
        """As many pieces of prompts as the program takes, of one prompt all that are left before the next one's."""
        shape, plan = (self.groups, self._plan.rows), self._plan
        tokens = np.zeros((*shape, plan.chunk), np.int32)
        slot = np.full(shape, plan.slots, np.int32)
        start, length, sample = (np.zeros(shape, np.int32) for _ in range(3))
        last = np.zeros(shape, bool)
        filled = [0] * self.groups
        pieces: list[_Piece] = []
        for group, seat, answer in unread:
            while filled[group] < plan.rows and answer.read < len(answer.sample):
                at = (group, filled[group])
                filled[group] += 1
                piece = answer.sample.tokens[answer.read : answer.read + plan.chunk]
                tokens[at][: len(piece)], slot[at], start[at], length[at] = piece, seat, answer.read, len(piece)
                answer.read += len(piece)
                last[at], sample[at] = answer.read == len(answer.sample), answer.sample.index & 0x7FFFFFFF
                pieces.append(_Piece(answer, *at, len(piece), bool(last[at])))
        chunk = Chunk(*(put(array, self._programs.by_group) for array in (tokens, slot, start, length, last, sample)))
        return self._called(self._ready(self._programs.reader, "reading prompts"), tuple(pieces), chunk)

    def _step(self) -> _Call:
        return self._called(self._ready(self._programs.stepper, "making tokens"), None)

    def _ready(self, program: Future[Any], what: str) -> Any:
        self._progress.start()
        if not program.done():
            self._progress.phase(Phase.COMPILING, f"for {what}")
            began = self._progress.clock()
            program.result()
            self._progress.compiled(self._progress.clock() - began)
            self._progress.phase(Phase.RUNNING)
        return program.result()

    def _called(self, program: Any, pieces: tuple[_Piece, ...] | None, *given: Chunk) -> _Call:
        try:
            self._slots, chosen, kept, finite = program(self._params, self._slots, *given)
        except jax.errors.JaxRuntimeError as error:
            raise self._no_room(error, self._plan.slots) from error
        return _Call(pieces, chosen, kept, finite)

    def _no_room(self, error: jax.errors.JaxRuntimeError, slots: int) -> Failure:
        failure = translated(error)
        if not isinstance(failure, OutOfDeviceMemory):
            return failure
        return Failure(
            f"a device's memory ran out with {slots} answers at a time",
            fix=f"use --batch-size {max(1, slots // 2)} or less, or more model parallelism with --mesh-shape",
        )

    # -- results ------------------------------------------------------------------------------------------------------

    def _look(self, call: _Call) -> list[Answer]:
        with self._progress.busy("model"):
            try:
                tokens, logprobs = np.asarray(call.chosen.tokens).tolist(), np.asarray(call.chosen.logprobs).tolist()
                finite = np.asarray(call.finite)
                kept = [_by_row(array) for array in call.kept]
            except jax.errors.JaxRuntimeError as error:
                raise self._no_room(error, self._plan.slots) from error
        if not finite.all():
            raise Failure("NaN or infinity in the activations", expected="finite activations")
        with self._progress.busy("host copy"):
            if call.pieces is not None:
                self._keep(self._pieces_read(call.pieces, tokens, logprobs), kept)
                return []
            self._keep(self._stepped(tokens, logprobs), kept)
            return self._leave()

    def _pieces_read(self, pieces: tuple[_Piece, ...], tokens: Any, logprobs: Any) -> list[_Part]:
        self._progress.add(computed_tokens=self._plan.chunk * len(pieces))
        for answer, group, row, _, last in pieces:
            if last:
                self._append_token(answer, tokens[group][row], logprobs[group][row])
        return [_Part(answer, group * self._plan.rows + row, length) for answer, group, row, length, _ in pieces]

    def _stepped(self, tokens: Any, logprobs: Any) -> list[_Part]:
        parts = []
        for group, slot, answer in self._taken():
            if not answer.tokens:
                continue  # its prompt was still being read when this call began
            begun = answer.fed
            for step in range(self._plan.stride):
                answer.fed += 1
                if answer.reason is not None:
                    break  # that was its last token
                self._append_token(answer, tokens[step][group][slot], logprobs[step][group][slot])
            parts.append(_Part(answer, group * self._plan.slots + slot, answer.fed - begun))
        self._progress.add(computed_tokens=self._plan.stride * len(parts))
        return parts

    def _leave(self) -> list[Answer]:
        """Those whose last token was fed; their slots are free."""
        ended = []
        for group, slot, answer in self._taken():
            if answer.reason is not None and answer.fed == len(answer.tokens):
                self._seats[group][slot] = None
                ended.append(answer)
        return ended

    def _keep(self, parts: list[_Part], kept: list[dict[int, npt.NDArray[np.generic]]]) -> None:
        """Copies of the answers' rows, several taps at once: what the device wrote to is used again."""
        own = [part for part in parts if part.answer.owned and kept]
        places = [(answer.rows, row, length, answer.rows.extend(length)) for answer, row, length in own]

        def copy(tap: int) -> None:
            for rows, row, length, first in places:
                rows.put(tap, first, kept[tap][row][:length])

        for _ in self._copiers.map(copy, range(len(kept))):
            pass

    def _append_token(self, answer: Answer, token: int, logprob: float) -> None:
        answer.tokens.append(token)
        answer.logprobs.append(logprob)
        if token in self._sampling.stop:
            answer.reason = "stop"
        elif len(answer.tokens) >= self._sampling.max_new:
            answer.reason = "length"


def _by_row(array: jax.Array) -> dict[int, npt.NDArray[np.generic]]:
    """What this process stores of an array, by its number along the first axis."""
    found: dict[int, npt.NDArray[np.generic]] = {}
    for part in array.addressable_shards:
        if part.replica_id == 0:
            first, data = part.index[0].start or 0, np.asarray(part.data)
            found.update((first + n, data[n]) for n in range(len(data)))
    return found
