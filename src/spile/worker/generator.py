"""An answer in the making: what the generator fills and the shelf stores. No jax here."""

from __future__ import annotations

import math
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spile.errors import Failure, SpecError
from spile.models.architecture import ModelConfig
from spile.models.attention import choose
from spile.models.encoding import as_stored, finite_rows
from spile.models.experts import MIXTURES
from spile.models.generation import Choices, Chunk, Sampling, Slots, empty_slots, read_prompts, take_steps
from spile.models.params import Params
from spile.spec.amounts import size
from spile.spec.phase import Phase
from spile.spec.run import Capture, GenerationSpec
from spile.spec.sample import Sample, StopReason
from spile.spec.taps import Tap
from spile.worker.device import put, translated
from spile.worker.mesh import plan_mesh
from spile.worker.producer import OutOfDeviceMemory, check_tokens
from spile.worker.progress import Progress
from spile.worker.sizing import host_memory

__all__ = [
    "Answer",
    "AnswerRows",
    "GenerationPrograms",
    "Generator",
    "SlotPlan",
    "plan_slots",
    "tokens_kept",
]


def tokens_kept(capture: Capture, prompt: int, answer: int) -> int:
    """Of so many tokens, those whose activations are kept."""
    return prompt * (capture in ("prompt", "both")) + answer * (capture in ("answer", "both"))


class AnswerRows:
    """A sample's activations: one array per tap, as long as they may become. Untouched memory costs nothing.

    In one piece, because each piece would be a call of its own to the writer, and its threads wait for one another.
    """

    def __init__(self, taps: int, room: int) -> None:
        self._room, self._filled = room, 0
        self._taps: list[npt.NDArray[Any] | None] = [None] * taps

    @property
    def taps(self) -> int:
        """How many there are."""
        return len(self._taps)

    def __len__(self) -> int:
        return self._filled

    def extend(self, count: int) -> int:
        """Make ``count`` rows more part of it, at every tap; returns the number of the first."""
        self._filled += count
        return self._filled - count

    def put(self, tap: int, first: int, rows: npt.NDArray[Any]) -> None:
        """Copy rows to their place. Several taps may be filled at once."""
        own = self._taps[tap]
        if own is None:
            own = self._taps[tap] = np.empty((self._room, math.prod(rows.shape[1:])), rows.dtype)
        own[first : first + len(rows)] = rows.reshape(len(rows), own.shape[1])

    def taken(self, tap: int) -> npt.NDArray[Any] | None:
        """``[rows, width]``, not held any longer; None: nothing was kept."""
        own, self._taps[tap] = self._taps[tap], None
        return None if own is None else own[: self._filled]


@dataclass(eq=False)
class Answer:
    """A sample, what the model said to it, and the activations of its tokens where this process has them."""

    sample: Sample
    rows: AnswerRows
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: StopReason | None = None
    """None while it is being made."""
    owned: bool = True
    read: int = 0
    """Prompt tokens sent to the devices."""
    fed: int = 0
    """Tokens of the answer whose step has been looked at."""


@dataclass(frozen=True)
class SlotPlan:
    """How many answers at once, and in which pieces. No answer depends on it beyond rounding."""

    slots: int
    """Answers per data-parallel group."""
    capacity: int
    """Tokens of prompt and answer that a slot has room for."""
    chunk: int
    """Prompt tokens that one row of the reading program takes: of a prompt's last row half is padding."""
    rows: int
    """Such pieces that it reads at once."""
    stride: int
    """Tokens of an answer per call."""


_SLOTS = {"cpu": 16, "gpu": 256, "tpu": 128}
_CHUNK = {"cpu": 128, "gpu": 256, "tpu": 256}
_READ_TOKENS = {"cpu": 512, "gpu": 8192, "tpu": 4096}
_STRIDE = {"cpu": 8, "gpu": 16, "tpu": 16}
_ALIGNED = 64
"""Tokens of capacity come in so many: fused kernels want whole blocks."""
_CACHE_PART = 0.6
"""Of what the weights leave of a device's memory, the part that the cache may take; the rest is for a call's work."""


def plan_slots(
    longest: int, max_new: int, token_bytes: int, weight_bytes: int, memory: int | None, asked: int | None
) -> SlotPlan:
    """As many answers at a time as asked for, or as are good for this device and its memory holds.

    ``token_bytes``: what one token's keys and values take on a device. ``memory`` is a device's; None: half the host's.
    """
    platform = jax.default_backend()
    chunk = min(_CHUNK[platform], -(-longest // 16) * 16)
    capacity = -(-(longest + max_new) // _ALIGNED) * _ALIGNED
    room = (host_memory() // 2 if memory is None else memory) - weight_bytes
    fitting = int(room * _CACHE_PART) // (token_bytes * capacity)
    wanted = asked or min(_SLOTS[platform], max(fitting, 1))
    if wanted > fitting:
        fix = f"use --batch-size {fitting}" if fitting else "use a smaller --max-seq-length or --max-new-tokens"
        raise SpecError(
            f"a cache for {wanted} answers of {capacity:,} tokens takes {size(wanted * token_bytes * capacity)}",
            expected=f"at most {size(max(0, int(room * _CACHE_PART)))} beside {size(weight_bytes)} of weights",
            found=f"--batch-size {wanted}" if asked else "not room for one",
            fix=fix,
        )
    rows = max(1, min(wanted, _READ_TOKENS[platform] // chunk))
    return SlotPlan(wanted, capacity, chunk, rows, min(_STRIDE[platform], max_new))


class GenerationPrograms:
    """Compiled beside each other while the first prompts are tokenized."""

    def __init__(
        self,
        params: Params,
        config: ModelConfig,
        taps: tuple[Tap, ...],
        *,
        mesh: Mesh,
        plan: SlotPlan,
        sampling: Sampling,
        capture: Capture,
        dtype: str,
        store_dtype: str,
    ) -> None:
        self._config, self._plan, self._sampling = config, plan, sampling
        self._dtype, self._store_dtype = dtype, store_dtype
        self._prompt_taps = taps if capture in ("prompt", "both") else ()
        self._answer_taps = taps if capture in ("answer", "both") else ()
        platform = mesh.devices.flat[0].platform
        mixture = plan_mesh(config, (mesh.shape["data"], mesh.shape["model"])).mixture(platform, mesh, config)
        self._mixture = MIXTURES[mixture] if isinstance(mixture, str) else mixture
        # A kernel is not partitioned by the compiler, so several devices read with plain XLA.
        self._attention = choose(config, platform, dtype) if mesh.size == 1 else "xla"
        self._groups = int(mesh.shape["data"])
        self.by_group = NamedSharding(mesh, PartitionSpec("data"))
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        self._away = self.by_group if platform == "cpu" else self.by_group.with_memory_kind("pinned_host")
        heads = "model" if config.n_kv_heads % mesh.shape["model"] == 0 else None
        cache = NamedSharding(mesh, PartitionSpec("data", heads))
        shapes = jax.eval_shape(self._make_empty)
        self._places = jax.tree.map(lambda x: cache if x.ndim == 5 else self.by_group, shapes)
        given = jax.tree.map(
            lambda x, place: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes, self._places
        )
        self._compilers = ThreadPoolExecutor(2, "spile-compile")
        self.reader: Future[Any] = self._compilers.submit(self._reader, params, given)
        self.stepper: Future[Any] = self._compilers.submit(self._stepper, params, given)

    def close(self) -> None:
        """Compile nothing more."""
        self._compilers.shutdown(wait=False, cancel_futures=True)

    def empty(self) -> Slots:
        """The cache, made where it will lie."""
        placed: Slots = jax.block_until_ready(jax.jit(self._make_empty, out_shardings=self._places)())
        return placed

    def _make_empty(self) -> Slots:
        return empty_slots(self._config, self._groups, self._plan.slots, self._plan.capacity, self._dtype)

    def _reader(self, params: Params, slots: Slots) -> Any:
        def program(params: Params, slots: Slots, chunk: Chunk) -> Any:
            slots, chosen, kept = read_prompts(
                params, slots, chunk, config=self._config, taps=self._prompt_taps, sampling=self._sampling,
                mixture=self._mixture, attention=self._attention, keep=self._cast,
            )  # fmt: skip
            return slots, chosen, *self._leaving(kept)

        shape = (self._groups, self._plan.rows)
        one = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.by_group)
        tokens = jax.ShapeDtypeStruct((*shape, self._plan.chunk), jnp.int32, sharding=self.by_group)
        flags = jax.ShapeDtypeStruct(shape, jnp.bool_, sharding=self.by_group)
        return self._compiled(program, len(self._prompt_taps), params, slots, Chunk(tokens, one, one, one, flags, one))

    def _stepper(self, params: Params, slots: Slots) -> Any:
        def program(params: Params, slots: Slots) -> Any:
            slots, chosen, kept = take_steps(
                params, slots, stride=self._plan.stride, config=self._config, taps=self._answer_taps,
                sampling=self._sampling, mixture=self._mixture, keep=self._cast,
            )  # fmt: skip
            # One slot's rows side by side: [groups × slots, stride, …].
            return slots, chosen, *self._leaving(tuple(jnp.swapaxes(x[:, :, 0], 0, 1) for x in kept))

        return self._compiled(program, len(self._answer_taps), params, slots)

    def _cast(self, tap: Tap, x: jax.Array) -> jax.Array:
        return as_stored(x, tap.stored_as(self._store_dtype, x.shape[-1]))

    def _leaving(self, kept: tuple[jax.Array, ...]) -> tuple[tuple[jax.Array, ...], jax.Array]:
        finite = jnp.stack([finite_rows(x).all() for x in kept]) if kept else jnp.ones((0,), bool)
        return tuple(jax.device_put(x, self._away) for x in kept), finite

    def _compiled(self, program: Callable[..., Any], taps: int, *given: Any) -> Any:
        chosen = Choices(self._everywhere, self._everywhere)
        out = (self._places, chosen, (self._away,) * taps, self._everywhere)
        return jax.jit(program, donate_argnums=1, out_shardings=out).lower(*given).compile()


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
