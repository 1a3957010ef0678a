"""Activations in memory: a model that stays loaded, and the rows of a few samples at some taps. Nothing is written."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from spile.compute.batches import Sizes, batches
from spile.compute.device import DeviceProducer, configure_jax
from spile.compute.length import room_here, with_length
from spile.compute.mesh import arrange_devices
from spile.compute.producer import Producer, check_answer_positions, rows_by_sample, with_positions
from spile.compute.torch_backend import load_replicas
from spile.compute.torch_producers import TorchProducer
from spile.data.samples import open_stream
from spile.data.sources import default_keep, with_rows
from spile.data.tokens import Tokenizer, load_tokenizer
from spile.errors import SpecError, name_arguments
from spile.models.decoder import Edit, TokenInfo
from spile.models.model_files import ModelFiles
from spile.models.params import Params, choose_runs
from spile.models.weights import load
from spile.reading.rows import SampleRef, column
from spile.reading.samples import RowChoice, RowPositions, SampleRows, as_float32
from spile.run.resolve import (
    check_editable,
    compute_dtype_for,
    find_model,
    learned,
    prompt_tokenizer,
    use_device,
)
from spile.spec.amounts import counted
from spile.spec.positions import MEAN
from spile.spec.ranges import Ranges
from spile.spec.run import (
    EVERY_FIELD,
    Automatic,
    BadRows,
    Gradients,
    LongPolicy,
    PromptKind,
    PromptVersion,
    RunSpec,
    make_spec,
)
from spile.spec.sample import Sample, Skip
from spile.spec.taps import Tap, tap_rows

_ROWS_BYTES = 256 << 20
"""The largest size of a batch's rows at all computed taps together."""
_LEAST_TOKENS = 64
"""The smallest batch. Sizes are powers of two, so that calls with other texts use the same few programs."""
_MOST_TOKENS = 1 << 14

_Array = npt.NDArray[Any]

EditFunction = Callable[..., Any]
"""Changes a tap: ``edit(rows)`` or ``edit(rows, info)`` returns the new rows ``[tokens, width]``, in JAX."""
MakeProducer = Callable[[tuple[Tap, ...], Sequence[tuple[Tap, Edit]]], Producer]
"""Returns a producer with the weights of the model for some taps and edits."""


class TapOptions(TypedDict, total=False):
    """The options of :func:`spile.tap` for the texts: which tokens are returned, and how rows become prompts."""

    layers: Sequence[int] | str | int | None
    heads: Sequence[int] | str | int | None
    top_k: int
    attention_top: int
    gradients: Gradients
    positions: str
    prompt: PromptKind
    template_from: str | None
    column: str
    grid_encoder: str
    prompt_version: PromptVersion
    max_seq_length: int | Automatic
    long: LongPolicy
    seed: int
    max_samples: int | None
    bad_rows: BadRows
    split: str | None
    dataset_revision: str | None


class TappedSample(SampleRows):
    """A sample with its activation rows in memory."""

    def __init__(self, sample: Sample, rows: dict[str, _Array], tokenizer: Tokenizer) -> None:
        chosen = np.arange(len(sample)) if sample.positions is None else sample.positions
        self.context, self.positions = sample.tokens, chosen.astype(np.int64)
        self.tokens, self.roles = sample.of_rows(sample.tokens), sample.of_rows(sample.roles)
        self.taps, self._rows = tuple(rows), rows
        self._tokenizer = lambda: tokenizer
        self.ref = SampleRef(
            0, sample.index, sample.task_id, sample.rows, sample.preview, sample.augmentation, sample.truncated,
            sample.kept or {}, sample.number,
        )  # fmt: skip

    def rows(self, tap: str | Tap) -> _Array:
        """Return the rows ``[length, d]`` at one tap."""
        if str(tap) not in self._rows:
            raise SpecError("taps", expected=f"one of {', '.join(self.taps)}", found=str(tap))
        return self._rows[str(tap)]


class Activations(Sequence[TappedSample]):
    """The activations of some samples in memory, in the order of the data."""

    def __init__(self, samples: Sequence[TappedSample], taps: Sequence[str], skipped: Sequence[Skip]) -> None:
        self._samples, self.taps = tuple(samples), tuple(taps)
        self.skipped = tuple(skipped)
        """Rows without a sample: empty texts, or texts that are too long for ``long="skip"``."""

    def __len__(self) -> int:
        return len(self._samples)

    @overload
    def __getitem__(self, which: int | str) -> TappedSample: ...
    @overload
    def __getitem__(self, which: slice) -> Activations: ...
    def __getitem__(self, which: int | str | slice) -> TappedSample | Activations:
        """Return the sample with this number or task id, or a slice of the samples."""
        if isinstance(which, slice):
            return Activations(self._samples[which], self.taps, ())
        if isinstance(which, str):
            found = next((sample for sample in self._samples if sample.task_id == which), None)
            if found is None:
                raise KeyError(which)
            return found
        return self._samples[which]

    def numpy(
        self, tap: str, *, positions: RowPositions = "last", include: int | None = None, exclude: int | None = None
    ) -> _Array:
        """Return one row per sample ``[samples, d]``; see :meth:`spile.Dataset.numpy`."""
        choice = RowChoice(positions, include, exclude)
        rows = [choice.reduce(each[tap][choice.pick(each.roles, each.task_id)]) for each in self._samples]
        return np.concatenate(rows) if rows else np.zeros((0, 0), np.float32)

    def labels(self, name: str) -> _Array:
        """Return a field of the data, one value per sample."""
        return column([sample.ref.kept.get(name) for sample in self._samples])

    def __repr__(self) -> str:
        tokens = sum(len(sample) for sample in self._samples)
        taps = ", ".join(self.taps[:3]) + (f" and {len(self.taps) - 3} more" if len(self.taps) > 3 else "")
        skipped = f", {len(self.skipped)} skipped" if self.skipped else ""
        return f"<activations of {counted(len(self), 'sample')}{skipped}, {counted(tokens, 'token')}: {taps}>"

    def _repr_html_(self) -> str:
        return "".join(sample._repr_html_() for sample in self._samples[:5]) + (
            f"<div>… and {counted(len(self) - 5, 'more sample')}</div>" if len(self) > 5 else ""
        )


@dataclass(eq=False)
class Model:
    """A model in memory. ``model.tap(texts, taps=[…])`` returns activations; the weights stay loaded."""

    spec: RunSpec
    """With backend and dtype chosen."""
    files: ModelFiles
    tokenizer: Tokenizer
    weights: Any
    """The parameters in JAX, or a replica of the module per device in PyTorch."""
    _make_producer: MakeProducer
    _producers: dict[tuple[Tap, ...], Producer] = field(default_factory=dict)
    _edited: tuple[object, Producer] | None = None
    """The edits and taps of the last call of :meth:`run` with edits, and its program."""
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def name(self) -> str:
        """The name of the model."""
        return self.files.name

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of token ids, including special tokens."""
        return self.tokenizer.decode([*map(int, tokens)])

    def tap(self, data: Any, *, taps: Sequence[str] | str = "residual", **options: Unpack[TapOptions]) -> Activations:
        """Return the activations of some texts in memory, in the order of the data.

        Args:
            data: A list of strings, dicts, chats or lists of token ids, a frame, or the name of a dataset.
            taps: What to compute, such as ``["residual.12", "mlp.3-5"]``.
            options: As for :func:`spile.tap`: ``layers``, ``positions``, ``prompt``, ``column``, ``max_seq_length``, ….
        """
        with name_arguments("spile.tap"):
            return self._run(taps, data, {}, options)

    def run(
        self,
        data: Any,
        *,
        edit: Mapping[str, EditFunction] | None = None,
        taps: Sequence[str] | str = "residual",
        **options: Unpack[TapOptions],
    ) -> Activations:
        """Run some texts with changed activations, and return the activations as :meth:`tap` does.

        Args:
            data: A list of strings, dicts, chats or lists of token ids, a frame, or the name of a dataset.
            edit: For each tap, such as ``residual.12`` or ``z.3.0-1``, a function of its rows. ``edit(rows)`` gets an
                array ``[tokens, width]`` with the tokens of several samples and returns one of the same shape.
                ``edit(rows, info)`` also gets ``info.ids``, ``info.positions`` and ``info.last``: the token id of each
                row, its position in its sample, and whether it is the last of its sample. The function is compiled with
                ``jax.jit``; the program is reused if the next call passes the same functions.
            taps: What to return, such as ``["residual.12", "logits"]``. An edited tap has the edited value.
            options: As for :func:`spile.tap`.
        """
        with name_arguments("model.run"):
            return self._run(taps, data, edit or {}, options)

    def _run(
        self, taps: Sequence[str] | str, data: Any, edit: Mapping[str, EditFunction], options: Mapping[str, Any]
    ) -> Activations:
        if not isinstance(taps, str | Sequence):
            raise SpecError("taps", expected='names such as ["residual.12"]', found=repr(taps))
        spec = self._spec([taps] if isinstance(taps, str) else list(taps), options)
        edits = self._edits(edit)
        wanted = spec.selected_taps(self.files.config.n_layers)
        items = self._samples(data, spec)
        samples = [item for item in items if isinstance(item, Sample)]
        with self._lock:  # one call at a time: two would hold the device's memory of both
            found = self._compute(samples, wanted, edits)
        tapped = [TappedSample(sample, found[sample.index], self.tokenizer) for sample in samples]
        return Activations(tapped, [str(tap) for tap in wanted], [item for item in items if isinstance(item, Skip)])

    def _spec(self, taps: Sequence[str], options: Mapping[str, Any]) -> RunSpec:
        spec = make_spec({**options, "taps": list(taps), "model": self.spec.model}, source="spile.tap()")
        if without_effect := sorted(set(options) - set(TapOptions.__annotations__)):
            raise SpecError(
                without_effect[0],
                expected=f"one of {', '.join(TapOptions.__annotations__)}",
                found="an option of spile.load or spile.extract, which has no effect here",
            )
        if spec.positions == MEAN:
            fix = 'use acts.numpy(tap, positions="mean") on the result'
            raise SpecError("positions", expected="a choice of tokens", found="'mean'", fix=fix)
        backend, config = self.spec.backend, self.files.config
        chosen = spec.selected_taps(config.n_layers)
        row = len(chosen) * config.d_model * 4
        known = learned(self.files, replace(spec, backend=backend))
        return with_length(spec, None, config, chosen, row, lambda: room_here(backend), known)

    def _samples(self, data: Any, spec: RunSpec) -> list[Sample | Skip]:
        """Tokenize the data, and choose the positions whose rows are returned."""
        if not isinstance(data, str):
            source = replace(with_rows(spec.data, data, once=True), keep=(EVERY_FIELD,))
        elif " " in data and not Path(data).exists():
            found = repr(data if len(data) < 40 else f"{data[:40]}…")
            raise SpecError("data", expected="a list of texts, or a dataset", found=found, fix="pass a list: [text]")
        else:
            source = replace(spec.data, dataset=data, keep=default_keep(data))
        tokenizer = self.tokenizer
        if spec.data.prompt.template_from is not None:
            tokenizer = prompt_tokenizer(self.files, spec.data.prompt, optional=True)
        stream = open_stream(source, tokenizer, self.files.config.vocab_size, read_all=True)
        check_answer_positions(spec, stream.prompt.kind)
        return list(with_positions(stream.read(Ranges()), spec))

    # -- computing ------------------------------------------------------------------------------------------------

    def _edits(self, edit: Mapping[str, EditFunction]) -> tuple[tuple[Tap, EditFunction], ...]:
        """Return the taps of the edits; refuse those that the model does not have or that nothing follows."""
        if edit and self.spec.backend == "torch":
            raise SpecError("edit", expected="a model that runs in JAX", found=f"{self.name}, which runs in PyTorch")
        found = tuple((Tap.parse(name), function) for name, function in edit.items())
        for tap, _ in found:
            check_editable(tap, self.files.config, "edit")
        return found

    def _compute(
        self, samples: Sequence[Sample], wanted: Sequence[Tap], edits: tuple[tuple[Tap, EditFunction], ...]
    ) -> dict[int, dict[str, _Array]]:
        """Return the rows of each sample, by its index, at the wanted taps."""
        taps = self._computed_taps(wanted)
        producer = self._edited_producer(taps, edits) if edits else self._producers.get(taps)
        if producer is None:
            producer = self._producers[taps] = self._make_producer(taps, ())
        found: dict[int, dict[str, _Array]] = {}
        for batch in batches(samples, self._plan(samples, taps, producer.groups)):
            for index, rows in rows_by_sample(batch, producer.fetch(producer.start(batch))).items():
                by_tap = dict(zip(taps, rows, strict=True))
                # A copy: the memory of the rows is used again.
                found[index] = {str(tap): np.array(as_float32(by_tap[tap])) for tap in wanted}
        return found

    def _edited_producer(self, taps: tuple[Tap, ...], edits: tuple[tuple[Tap, EditFunction], ...]) -> Producer:
        """Return the producer of the last call if it had the same edits: new functions are a new program."""
        if self._edited is None or self._edited[0] != (taps, edits):
            bound = [(tap, _checked_edit(tap, function)) for tap, function in edits]
            self._edited = (taps, edits), self._make_producer(taps, bound)
        return self._edited[1]

    def _computed_taps(self, wanted: Sequence[Tap]) -> tuple[Tap, ...]:
        """Return the taps that one program computes.

        In JAX these are all layers of the wanted kinds: layers are computed as a scan, and a call for another layer
        uses the same program and the same weights.
        """
        if self.spec.backend == "torch":
            return tuple(wanted)
        config = self.files.config
        found: dict[Tap, None] = {}
        for tap in wanted:
            tap_rows(tap, config.sizes(tap.layer), "float32")  # raises an error for a tap that the model does not have
            for layer in (None,) if tap.layer is None else range(config.n_layers):
                with suppress(SpecError):  # in some models only some layers have experts
                    tap_rows(tap, config.sizes(layer), "float32")
                    found[replace(tap, layer=layer)] = None
        return tuple(found)

    def _plan(self, samples: Sequence[Sample], taps: Sequence[Tap], groups: int) -> Sizes:
        """Return a plan whose batches hold all samples in few shapes."""
        row_bytes = 4 * self.files.config.d_model * max(1, len(taps))
        most = min(_MOST_TOKENS, _ROWS_BYTES // row_bytes, -(-sum(map(len, samples)) // groups))
        tokens = 1 << (max(_LEAST_TOKENS, most) - 1).bit_length()
        longest = max(map(len, samples), default=1)
        return Sizes(tokens, None, longest, groups=groups, shortest_row=_LEAST_TOKENS)

    def __repr__(self) -> str:
        config = self.files.config
        return f"<model {self.name}: {config.n_layers} layers of {config.d_model}, {self.spec.dtype}>"


def load_tapped(spec: RunSpec) -> Model:
    """Load all layers of the model that a spec names, on all devices of this process."""
    configure_jax(spec.device)
    files, backend = find_model(spec, None, "")
    tokenizer = load_tokenizer(files.tokenizer_folder, optional=True)
    platform = use_device(spec.device, backend)
    dtype = spec.dtype
    if dtype == "auto":
        dtype = compute_dtype_for(platform)  # type: ignore[assignment]
    spec = replace(spec, backend=backend, dtype=dtype)
    weights, make_producer = _load_torch(files, spec) if backend == "torch" else _load_jax(files, spec)
    return Model(spec, files, tokenizer, weights, make_producer)


def _load_jax(files: ModelFiles, spec: RunSpec) -> tuple[Params, MakeProducer]:
    config = files.config
    mesh, plan = arrange_devices(config, spec.dtype, spec.mesh_shape, head=True)
    runs = choose_runs(config, (), config.n_layers, jnp.dtype(spec.dtype).itemsize)
    params = load(files, spec.dtype, config.n_layers, plan.place(mesh), head=True, runs=runs)

    def make_producer(taps: tuple[Tap, ...], edits: Sequence[tuple[Tap, Edit]]) -> Producer:
        return DeviceProducer(
            params, config, taps, store_dtype="float32", mesh=mesh, dtype=spec.dtype, runs=runs, edits=edits
        )

    return params, make_producer


def _load_torch(files: ModelFiles, spec: RunSpec) -> tuple[list[Any], MakeProducer]:
    replicas = load_replicas(files, spec.dtype, spec.device)

    def make_producer(taps: tuple[Tap, ...], _edits: Sequence[tuple[Tap, Edit]]) -> Producer:
        return TorchProducer(replicas, taps, store_dtype="float32", dtype=spec.dtype, most_tokens=_MOST_TOKENS)

    return replicas, make_producer


def _checked_edit(tap: Tap, function: EditFunction) -> Edit:
    """Return a user's function with two parameters, whose result is checked."""
    parameters = inspect.signature(function).parameters.values()
    needed = [each for each in parameters if each.default is each.empty and each.kind is not each.VAR_KEYWORD]

    def edit(rows: jax.Array, info: TokenInfo) -> jax.Array:
        new = jnp.asarray(function(rows, info) if len(needed) > 1 else function(rows))
        if new.shape != rows.shape:
            raise SpecError(f"edit of {tap}", expected=f"rows of the shape {rows.shape}", found=f"{new.shape}")
        return new.astype(rows.dtype)

    return edit
