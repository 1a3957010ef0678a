"""The generator of ``infer``: continuous batching over slots, with the rows of each answer copied to the host.

A slot holds the key/value cache of one answer. Two programs run on the devices: one reads pieces of prompts into their
slots, the other generates a few tokens in every slot. When an answer ends, the next prompt gets its slot. The results
of a call are collected after the next call was started, so that the devices always have work.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spile.compute.answers import Answer, AnswerProducer
from spile.compute.device import compile_traced, compile_with_fallback, convert_error, place_steering, put
from spile.compute.mesh import MeshPlan, arrange_devices, describe_mesh, device_memory
from spile.compute.producer import OutOfDeviceMemory, check_tokens
from spile.compute.progress import Progress
from spile.compute.sizes import host_memory, remaining_lengths
from spile.data.samples import SampleReader
from spile.data.tokens import Tokenizer
from spile.errors import Failure, SpecError
from spile.models.architecture import ModelConfig
from spile.models.attention import choose
from spile.models.experts import MIXTURES
from spile.models.generation import (
    Choices,
    Chunk,
    Sampling,
    Slots,
    empty_slots,
    read_prompts,
    take_steps,
    token_bytes,
)
from spile.models.layers import as_stored, finite_rows
from spile.models.params import Params
from spile.models.weights import load
from spile.spec.amounts import size
from spile.spec.phase import Phase
from spile.spec.positions import ALL
from spile.spec.run import GenerationSpec
from spile.spec.sample import Sample
from spile.spec.taps import Tap
from spile.store.ledger import Ledger

if TYPE_CHECKING:
    from spile.compute.resolved import ResolvedRun


@dataclass(frozen=True)
class SlotPlan:
    """How many answers are generated at once, and in which pieces. No answer depends on it beyond rounding."""

    slots: int
    """Answers per data-parallel group."""
    capacity: int
    """Tokens of prompt and answer that a slot holds."""
    chunk: int
    """Prompt tokens per row of the reading program. The last row of a prompt is padded."""
    rows: int
    """Rows of the reading program."""
    stride: int
    """Tokens of an answer per call."""


_SLOTS = {"cpu": 32, "gpu": 256, "tpu": 128}
_CHUNK = {"cpu": 128, "gpu": 256, "tpu": 256}
_READ_TOKENS = {"cpu": 512, "gpu": 8192, "tpu": 4096}
_STRIDE = {"cpu": 8, "gpu": 16, "tpu": 16}
_LOOK_TOKENS = 1 << 16
"""Prompt tokens that are read in advance to find out whether a run is small."""
_ALIGNED = 64
"""The capacity of a slot is a multiple of this: fused kernels need whole blocks."""
_CACHE_PART = 0.6
"""The part of the device memory left by the weights that the cache may take; the rest is for temporary arrays."""


def plan_slots(
    longest: int,
    max_new: int,
    token_bytes: int,
    weight_bytes: int,
    memory: int | None,
    batch_size: int | None,
    answers: int | None = None,
) -> SlotPlan:
    """Choose how many answers are generated at once.

    Args:
        longest: The longest prompt, in tokens.
        max_new: The longest answer, in tokens.
        token_bytes: What the keys and values of one token take on a device.
        weight_bytes: What the weights take on a device.
        memory: The memory of a device; None means half of the host's.
        batch_size: ``--batch-size``, if given.
        answers: The number of prompts per group, if known: no more slots are made.

    """
    platform = jax.default_backend()
    chunk = min(_CHUNK[platform], -(-longest // 16) * 16)
    capacity = -(-(longest + max_new) // _ALIGNED) * _ALIGNED
    room = (host_memory() // 2 if memory is None else memory) - weight_bytes
    fitting = int(room * _CACHE_PART) // (token_bytes * capacity)
    wanted = batch_size or min(_SLOTS[platform], max(fitting, 1))
    wanted = wanted if answers is None else min(wanted, max(answers, 1))
    if wanted > fitting:
        fix = f"use --batch-size {fitting}" if fitting else "use a smaller --max-seq-length or --max-new-tokens"
        raise SpecError(
            f"a cache for {wanted} answers of {capacity:,} tokens takes {size(wanted * token_bytes * capacity)}",
            expected=f"at most {size(max(0, int(room * _CACHE_PART)))} next to {size(weight_bytes)} of weights",
            found=f"--batch-size {wanted}" if batch_size else "not room for one",
            fix=fix,
        )
    rows = max(1, min(wanted, _READ_TOKENS[platform] // chunk))
    return SlotPlan(wanted, capacity, chunk, rows, min(_STRIDE[platform], max_new))


class GenerationPrograms:
    """The two programs of the generator, compiled in parallel while the first prompts are tokenized."""

    def __init__(
        self,
        params: Params,
        config: ModelConfig,
        taps: tuple[Tap, ...],
        *,
        mesh: Mesh,
        plan: SlotPlan,
        generation: GenerationSpec,
        seed: int,
        dtype: str,
        store_dtype: str,
        log: Callable[[str], None] = lambda _line: None,
    ) -> None:
        self.params, self.config, self.mesh, self.plan = params, config, mesh, plan
        self.taps, self.capture, self.dtype, self._store_dtype = taps, generation.capture, dtype, store_dtype
        chosen = generation.stop_tokens, generation.max_new_tokens, generation.temperature, generation.top_p
        self.sampling = Sampling(*chosen, seed)
        self._prompt_taps = taps if self.capture in ("prompt", "both") else ()
        self._answer_taps = taps if self.capture in ("answer", "both") else ()
        platform = mesh.devices.flat[0].platform
        mixture = MeshPlan(config, *mesh.devices.shape).mixture(mesh)
        self._mixture = MIXTURES[mixture] if isinstance(mixture, str) else mixture
        # A kernel is not partitioned by the compiler, so several devices read with plain XLA. Splash takes no mask.
        kernel = mesh.size == 1 and choose(config, platform, mesh.devices.flat[0].device_kind, dtype) == "cudnn"
        self._attention, self._log = "cudnn" if kernel else "xla", log
        self.groups = int(mesh.shape["data"])
        """The data-parallel width over all hosts."""
        self.by_group = NamedSharding(mesh, PartitionSpec("data"))
        self._everywhere = NamedSharding(mesh, PartitionSpec())
        self._host = self.by_group if platform == "cpu" else self.by_group.with_memory_kind("pinned_host")
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
        self._compilers.shutdown(wait=False, cancel_futures=True)

    def empty(self) -> Slots:
        """Allocate the empty cache on the devices."""
        placed: Slots = jax.block_until_ready(jax.jit(self._make_empty, out_shardings=self._places)())
        return placed

    def _make_empty(self) -> Slots:
        return empty_slots(self.config, self.groups, self.plan.slots, self.plan.capacity, self.dtype)

    def _reader(self, params: Params, slots: Slots) -> Any:
        return compile_with_fallback(self._attention, lambda name: self._read_with(name, params, slots), self._log)

    def _read_with(self, attention: str, params: Params, slots: Slots) -> Any:
        def program(params: Params, slots: Slots, chunk: Chunk) -> Any:
            slots, chosen, kept = read_prompts(
                params, slots, chunk, config=self.config, taps=self._prompt_taps, sampling=self.sampling,
                mixture=self._mixture, attention=attention, keep=self._cast,
            )  # fmt: skip
            return slots, chosen, *self._send(kept)

        shape = (self.groups, self.plan.rows)
        one = jax.ShapeDtypeStruct(shape, jnp.int32, sharding=self.by_group)
        tokens = jax.ShapeDtypeStruct((*shape, self.plan.chunk), jnp.int32, sharding=self.by_group)
        flags = jax.ShapeDtypeStruct(shape, jnp.bool_, sharding=self.by_group)
        return self._compiled(program, len(self._prompt_taps), params, slots, Chunk(tokens, one, one, one, flags, one))

    def _stepper(self, params: Params, slots: Slots) -> Any:
        def program(params: Params, slots: Slots) -> Any:
            slots, chosen, kept = take_steps(
                params, slots, stride=self.plan.stride, config=self.config, taps=self._answer_taps,
                sampling=self.sampling, mixture=self._mixture, keep=self._cast,
            )  # fmt: skip
            # Put the rows of one slot next to each other: [groups × slots, stride, …].
            return slots, chosen, *self._send(tuple(jnp.swapaxes(x[:, :, 0], 0, 1) for x in kept))

        return self._compiled(program, len(self._answer_taps), params, slots)

    def _cast(self, tap: Tap, x: jax.Array) -> jax.Array:
        return as_stored(x, tap.stored_as(self._store_dtype, x.shape[-1]))

    def _send(self, kept: tuple[jax.Array, ...]) -> tuple[tuple[jax.Array, ...], jax.Array]:
        finite = jnp.stack([finite_rows(x).all() for x in kept]) if kept else jnp.ones((0,), bool)
        return tuple(jax.device_put(x, self._host) for x in kept), finite

    def _compiled(self, program: Callable[..., Any], taps: int, *given: Any) -> Any:
        chosen = Choices(self._everywhere, self._everywhere)
        out = (self._places, chosen, (self._host,) * taps, self._everywhere)
        return compile_traced(jax.jit(program, donate_argnums=1, out_shardings=out).trace(*given), self.mesh)


_CALLS_AHEAD = 1
"""Calls that are on the devices while the results of an earlier one are collected."""


class _Part(NamedTuple):
    """Rows of an answer in the arrays of a call."""

    answer: Answer
    row: int
    length: int
    last: bool = False
    """Whether these are the last tokens of the prompt, after which the call has chosen the first token."""


class _Call(NamedTuple):
    """A call whose results have not been collected."""

    parts: Sequence[_Part] | None
    """The pieces of prompts that it reads; None if the call generates tokens."""
    chosen: Choices
    kept: tuple[jax.Array, ...]
    finite: jax.Array


class Generator(AnswerProducer):
    """Answers samples in JAX, many at a time."""

    def __init__(
        self, programs: GenerationPrograms, tokenizer: Tokenizer, progress: Progress, positions: str = ALL
    ) -> None:
        super().__init__(tokenizer, programs.capture, progress, positions=positions, seed=programs.sampling.seed)
        self._programs, self._plan, self._sampling = programs, programs.plan, programs.sampling
        self.groups = programs.groups
        firsts: list[Any] = list(programs.mesh.devices[:, 0])
        self.owned = [g for g, device in enumerate(firsts) if device.process_index == jax.process_index()]
        """Groups whose rows this process stores: those whose first device belongs to it."""
        try:
            self._slots = programs.empty()
        except jax.errors.JaxRuntimeError as error:
            raise self._with_advice(convert_error(error)) from error
        self._in_slots: list[list[Answer | None]] = [[None] * self._plan.slots for _ in range(self.groups)]
        self._pending: deque[_Call] = deque()
        self._copiers = ThreadPoolExecutor(max(1, min(8, (os.cpu_count() or 2) // 2)), "spile-copy")

    def describe(self) -> str:
        at_once = self.groups * self._plan.slots
        return f"{describe_mesh(self._programs.mesh)}, {self._programs.dtype}, {at_once} answers at a time"

    def close(self) -> None:
        """Stop compiling and copying."""
        self._programs.close()
        self._copiers.shutdown(wait=False, cancel_futures=True)

    # -- the loop -----------------------------------------------------------------------------------------------------

    def answers(self, samples: Iterator[Sample]) -> Iterator[list[Answer]]:
        waiting = iter(samples)
        more = True
        while True:
            more = more and self._fill_slots(waiting)
            taken = self._slots_in_use()
            unread = [slot for slot in taken if slot[2].read < len(slot[2].sample)]
            if taken:
                self._pending.append(self._read(unread) if unread else self._step())
            elif not self._pending:
                return
            ended: list[Answer] = []
            while len(self._pending) > (_CALLS_AHEAD if taken else 0):
                ended += self._collect(self._pending.popleft())
            yield ended

    def _slots_in_use(self) -> list[tuple[int, int, Answer]]:
        """Return (group, slot, answer) of each slot in use."""
        return [
            (group, slot, answer)
            for group, slots in enumerate(self._in_slots)
            for slot, answer in enumerate(slots)
            if answer is not None
        ]

    def _fill_slots(self, waiting: Iterator[Sample]) -> bool:
        """Give samples to free slots, over the groups in turn. Return False if no sample is left."""
        for slot in range(self._plan.slots):
            for group, slots in enumerate(self._in_slots):
                if slots[slot] is None:
                    sample = next(waiting, None)
                    if sample is None:
                        return False
                    check_tokens([sample], self._programs.config.vocab_size)
                    slots[slot] = Answer(sample, [[] for _ in self._programs.taps], group=group)
        return True

    def _read(self, unread: Sequence[tuple[int, int, Answer]]) -> _Call:
        """Read as many pieces of prompts as the program takes: all that are left of one prompt before the next."""
        shape, plan = (self.groups, self._plan.rows), self._plan
        tokens = np.zeros((*shape, plan.chunk), np.int32)
        slot = np.full(shape, plan.slots, np.int32)
        start, length, sample = (np.zeros(shape, np.int32) for _ in range(3))
        last = np.zeros(shape, bool)
        filled = [0] * self.groups
        parts: list[_Part] = []
        for group, number, answer in unread:
            while filled[group] < plan.rows and answer.read < len(answer.sample):
                at = (group, filled[group])
                filled[group] += 1
                piece = answer.sample.tokens[answer.read : answer.read + plan.chunk]
                tokens[at][: len(piece)], slot[at], start[at], length[at] = piece, number, answer.read, len(piece)
                answer.read += len(piece)
                last[at], sample[at] = answer.read == len(answer.sample), answer.sample.number & 0x7FFFFFFF
                parts.append(_Part(answer, group * plan.rows + at[1], len(piece), bool(last[at])))
        chunk = Chunk(*(put(array, self._programs.by_group) for array in (tokens, slot, start, length, last, sample)))
        return self._call(self._wait_for(self._programs.reader, "reading prompts"), parts, chunk)

    def _step(self) -> _Call:
        return self._call(self._wait_for(self._programs.stepper, "generating tokens"), None)

    def _wait_for(self, program: Future[Any], what: str) -> Any:
        self.progress.start()
        if not program.done():
            self.progress.phase(Phase.COMPILING, f"for {what}")
            began = self.progress.clock()
            wait((program,))
            self.progress.compiled(self.progress.clock() - began)
            self.progress.phase(Phase.RUNNING)
        try:
            return program.result()
        except OutOfDeviceMemory as error:
            raise self._with_advice(error) from error

    def _call(self, program: Any, parts: Sequence[_Part] | None, *given: Chunk) -> _Call:
        try:
            self._slots, chosen, kept, finite = program(self._programs.params, self._slots, *given)
        except jax.errors.JaxRuntimeError as error:
            raise self._with_advice(convert_error(error)) from error
        return _Call(parts, chosen, kept, finite)

    def _with_advice(self, failure: Failure) -> Failure:
        slots = self._plan.slots
        if not isinstance(failure, OutOfDeviceMemory):
            return failure
        return Failure(
            f"a device's memory ran out with {slots} answers at a time",
            fix=f"use --batch-size {max(1, slots // 2)} or less, or more model parallelism with --mesh-shape",
        )

    # -- results ------------------------------------------------------------------------------------------------------

    def _collect(self, call: _Call) -> list[Answer]:
        with self.progress.busy("model"), self.progress.computing():
            try:
                tokens, logprobs = np.asarray(call.chosen.tokens), np.asarray(call.chosen.logprobs)
                finite = np.asarray(call.finite)
                kept = [_by_row(array) for array in call.kept]
            except jax.errors.JaxRuntimeError as error:
                raise self._with_advice(convert_error(error)) from error
        if not finite.all():
            raise Failure("NaN or infinity in the activations", expected="finite activations")
        with self.progress.busy("host copy"):
            if call.parts is not None:
                self._append_first(call.parts, tokens.ravel().tolist(), logprobs.ravel().tolist())
                self._copy_rows(call.parts, kept)
                return []
            self._copy_rows(self._append_step(tokens.tolist(), logprobs.tolist()), kept)
            return self._free_slots()

    def _append_first(self, parts: Sequence[_Part], tokens: list[int], logprobs: list[float]) -> None:
        """Append the first token of each answer whose prompt was read to its end."""
        complete = [part for part in parts if part.last]
        for part in complete:
            self._append_token(part.answer, tokens[part.row], logprobs[part.row])
        self.progress.add(
            tokens=sum(part.length for part in parts) + len(complete),
            generated_tokens=len(complete),
            computed_tokens=self.groups * self._plan.rows * self._plan.chunk,
        )

    def _append_step(self, tokens: Any, logprobs: Any) -> list[_Part]:
        parts, generated = [], 0
        for group, slot, answer in self._slots_in_use():
            if not answer.tokens:
                continue  # its prompt was still being read when this call began
            begun, known = answer.fed, len(answer.tokens)
            for step in range(self._plan.stride):
                answer.fed += 1
                if answer.reason is not None:
                    break  # that was its last token
                self._append_token(answer, tokens[step][group][slot], logprobs[step][group][slot])
            generated += len(answer.tokens) - known
            parts.append(_Part(answer, group * self._plan.slots + slot, answer.fed - begun))
        self.progress.add(
            tokens=generated,
            generated_tokens=generated,
            computed_tokens=self.groups * self._plan.slots * self._plan.stride,
        )
        return parts

    def _free_slots(self) -> list[Answer]:
        """Return the answers whose last token was fed, and free their slots."""
        ended = []
        for group, slot, answer in self._slots_in_use():
            if answer.reason is not None and answer.fed == len(answer.tokens):
                self._in_slots[group][slot] = None
                ended.append(answer)
        return ended

    def _copy_rows(self, parts: Sequence[_Part], kept: list[dict[int, npt.NDArray[np.generic]]]) -> None:
        """Copy the rows of the answers, several taps at once: the device reuses the memory that it wrote to."""
        own = [part for part in parts if part.answer.group in self.owned and kept]

        def copy(tap: int) -> None:
            for part in own:
                rows = np.array(kept[tap][part.row][: part.length])
                part.answer.rows[tap].append(rows.reshape(part.length, -1))

        for _ in self._copiers.map(copy, range(len(kept))):
            pass

    def _append_token(self, answer: Answer, token: int, logprob: float) -> None:  # bench/generation.py overrides it
        answer.append(token, logprob, self._sampling)


def _by_row(array: jax.Array) -> dict[int, npt.NDArray[np.generic]]:
    """Return what this process stores of an array, by index along the first axis."""
    found: dict[int, npt.NDArray[np.generic]] = {}
    for part in array.addressable_shards:
        if part.replica_id == 0:
            first, data = part.index[0].start or 0, np.asarray(part.data)
            found.update((first + n, data[n]) for n in range(len(data)))
    return found


def make_generator(run: ResolvedRun, generation: GenerationSpec, progress: Progress, reader: SampleReader) -> Generator:
    """Load the model onto all devices, with a cache whose memory is checked before it is allocated."""
    spec, config, dtype = run.spec, run.files.config, run.spec.dtype
    mesh, layout = arrange_devices(config, dtype, spec.mesh_shape, log=progress.log)
    split = layout.model if config.n_kv_heads % layout.model == 0 else 1
    longest, answers = _prompts(run, reader)
    plan = plan_slots(
        longest,
        generation.max_new_tokens,
        -(-token_bytes(config, dtype) // split),
        layout.weight_bytes(jnp.dtype(dtype).itemsize, head=True),
        device_memory(),
        spec.batch_size,
        None if answers is None else -(-answers // layout.data),
    )
    weights = load(run.files, dtype, None, layout.place(mesh), head=True)
    programs = GenerationPrograms(
        replace(weights, steering=place_steering(run.steering, mesh)),
        config,
        run.taps,
        mesh=mesh,
        plan=plan,
        generation=generation,
        seed=spec.data.seed,
        dtype=dtype,
        store_dtype=spec.store_dtype,
        log=progress.log,
    )
    return Generator(programs, run.tokenizer, progress, spec.positions)


def _prompts(run: ResolvedRun, reader: SampleReader) -> tuple[int, int | None]:
    """Return the longest prompt and the number of prompts of a short stream; otherwise the length limit and None.

    A pod always gets the longest possible prompt: its hosts must compile the same program, and they do this before they
    have agreed on what is done.
    """
    if jax.process_count() > 1:
        return run.spec.data.longest, run.expected_samples(Ledger())
    lengths = remaining_lengths(reader, _LOOK_TOKENS)
    if lengths is None:
        return run.spec.data.longest, None
    return max(lengths, default=1), len(lengths)
