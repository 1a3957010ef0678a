"""``spile verify --recompute``: run the model of a dataset again and measure the distances of the stored rows."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from spile.errors import DataError, ModelError
from spile.models.attention import choose
from spile.models.decoder import Steering, forward, head_needed, layers_needed
from spile.models.experts import choose_mixture
from spile.models.layers import as_stored, sample_means
from spile.models.model_files import ModelFiles
from spile.models.params import Params, choose_runs, tap_groups
from spile.models.weights import load
from spile.objects import open_folder
from spile.spec.identity import RunIdentity
from spile.spec.positions import ALL, MEAN
from spile.spec.run import ExtractSpec
from spile.spec.sample import Sample
from spile.spec.taps import SCALE_BYTES, Tap, TapRows
from spile.store.recomputation import Recompute, StoredRows, distances, gain_weights
from spile.store.stream import read_run
from spile.worker.batches import Batch, BatchPlan, batches
from spile.worker.device import configure_jax
from spile.worker.producer import check_tokens, pack
from spile.worker.resolve import find_model, steering_of_run
from spile.worker.torch_backend import load_model, place_replicas, torch_devices
from spile.worker.torch_producers import TorchProducer

_BATCH_TOKENS = {"cpu": 512, "gpu": 16384, "tpu": 8192}
_BATCH_BYTES = {"cpu": 256 << 20, "gpu": 4 << 30, "tpu": 1 << 30}
"""The largest size of a batch's float32 rows at all taps together."""
_GPU_OPTIONS: dict[str, str | bool] = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": "0"}
"""The search for the fastest float32 kernels takes 42 s on an H200; cuBLAS chooses well without it."""
_READERS = 4
"""Threads that read stored rows for the next batch."""
_CHANGE = {"float32": 2.0**-20, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""The largest relative change of the embeddings in a variant: one unit in the last place, for float32 16 of them."""
_BITS = {"bfloat16": (8, 7), "float16": (5, 10)}
"""Bits of the exponent and of the mantissa."""


def recomputer(root: str) -> Recompute:
    """Return a function that computes samples of the dataset at ``root`` again; the weights must be the same."""
    run = read_run(open_folder(root))
    if run is None:
        raise DataError(f"no run in {root}", expected="a run.json")
    if run.generation is not None and run.generation.capture == "answer" and run.positions == ALL:
        raise DataError(f"{root} cannot be recomputed", expected="prompts and answers", found="only answers")
    configure_jax()
    again = ExtractSpec(model=run.model, revision=run.revision, adapter=run.adapter)
    files, backend = find_model(again, run, root)
    found = files.weights_hash()
    if found != run.weights:
        raise ModelError(
            f"{run.model} is not the model of this run", expected=f"weights {run.weights}", found=f"weights {found}"
        )
    return _TorchRecomputer(files, run) if backend == "torch" else _Recomputer(files, run)


class _Recomputer:
    """Computes samples with the JAX decoder in the run's dtype and in float32, and their distances on the device.

    All batches have one shape, so that each program is compiled once.
    """

    def __init__(self, files: ModelFiles, run: RunIdentity) -> None:
        self._files, self._dtype, self._steering = files, run.dtype, steering_of_run(run, files.config)
        self._mean = run.positions == MEAN
        self._platform = jax.default_backend()
        self._model: _TappedModel | None = None
        self._plan: BatchPlan | None = None

    def __call__(
        self, samples: Sequence[Sample], taps: Sequence[TapRows], stored: StoredRows, variant: int = 0
    ) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
        """Yield the distances of each sample, as :class:`spile.store.recomputation.Recompute` describes."""
        if not samples:
            return
        check_tokens(samples, self._files.config.vocab_size)
        if self._model is None or self._model.taps != tuple(taps):
            self._model = _TappedModel(
                self._files, self._dtype, tuple(taps), self._platform, self._steering, mean=self._mean
            )
        self._plan = self._one_shape(samples, taps)
        length = self._plan.row_length(self._plan.longest)
        shape = self._plan.rows(length), length
        with ThreadPoolExecutor(_READERS, "recompute-read") as pool:
            waiting: tuple[Batch, Any] | None = None
            for batch in batches(samples, self._plan):
                rows = list(pool.map(stored, batch.samples))
                # The device works on the last batch while the rows of this one are read.
                if waiting is not None:
                    yield from _by_sample(*waiting)
                waiting = batch, self._model.measure(replace(batch, rows=shape[0], length=length), rows, variant)
            if waiting is not None:
                yield from _by_sample(*waiting)

    def _one_shape(self, samples: Sequence[Sample], taps: Sequence[TapRows]) -> BatchPlan:
        """Return a plan whose batches all have one shape: that of the previous call if it is long enough."""
        longest = max(map(len, samples))
        if self._plan is not None and self._plan.longest >= longest:
            return self._plan
        width = sum(tap.width for tap in taps)
        most = _BATCH_BYTES[self._platform] // (4 * max(1, width))
        row = BatchPlan(longest, None, longest).row_length(longest)
        tokens = max(row, min(_BATCH_TOKENS[self._platform], most))
        return BatchPlan(tokens, None, longest, shortest_row=row)


class _TappedModel:
    """A model's weights on the device and the programs that compute some taps with them."""

    def __init__(
        self,
        files: ModelFiles,
        dtype: str,
        taps: tuple[TapRows, ...],
        platform: str,
        steering: Steering | None,
        *,
        mean: bool = False,
    ) -> None:
        self.taps, self._dtype, self._platform, self._config = taps, dtype, platform, files.config
        self._mean = mean
        self._chosen = tuple(Tap.parse(tap.name) for tap in taps)
        layers = layers_needed(self._chosen, files.config.n_layers)
        self._runs = choose_runs(files.config, self._chosen, layers, 4)
        self._groups = tap_groups(self._chosen, self._runs)
        weights = load(files, dtype, layers, head=head_needed(self._chosen), runs=self._runs)
        self._params = replace(weights, steering=steering)
        self._wide = jax.jit(lambda params: jax.tree.map(lambda x: x.astype(jnp.float32), params))(self._params)
        self._programs: dict[str, Any] = {}
        self._distances = jax.jit(self._measure_all)

    def measure(self, batch: Batch, rows: Sequence[Sequence[npt.NDArray[Any]]], variant: int) -> jax.Array:
        """Start the computation of a batch whose stored rows are ``rows``; return ``[taps, 6, rows]``."""
        packed = pack(batch, batch.rows * batch.length)
        inputs = packed.rows, packed.places[0]
        twice = variant != 0 or self._dtype != "float32"
        self._compile(inputs, ["float32", self._dtype] if twice else ["float32"])
        reference = fresh = self._programs["float32"](self._wide, *inputs)
        if twice:
            params = self._params if variant == 0 else _changed(self._params, variant, _CHANGE[self._dtype])
            fresh = self._programs[self._dtype](params, *inputs)
        stored = [_block(rows, group, len(inputs[1])) for group in self._groups]
        measured: jax.Array = self._distances(reference, fresh, stored)
        return measured

    def _compile(self, inputs: Any, dtypes: Sequence[str]) -> None:
        """Compile the programs that are missing, at the same time."""
        missing = [dtype for dtype in dict.fromkeys(dtypes) if dtype not in self._programs]
        with ThreadPoolExecutor(2, "recompute-compile") as pool:
            params = [self._wide if dtype == "float32" else self._params for dtype in missing]
            options = _GPU_OPTIONS if self._platform == "gpu" else None
            found = pool.map(lambda dtype, given: self._lower(dtype, given, inputs).compile(options), missing, params)
            self._programs.update(zip(missing, found, strict=True))

    def _lower(self, dtype: str, params: Params, inputs: Any) -> jax.stages.Lowered:
        def rows_of(params: Params, batch: jax.Array, places: jax.Array) -> tuple[jax.Array, ...]:
            def keep(_: Tap, x: jax.Array) -> jax.Array:
                flat = x.reshape(-1, x.shape[-1])
                if not self._mean:
                    return flat[places]
                return sample_means(flat, batch[:, 1].reshape(-1), batch[:, 2].reshape(-1), places)

            return forward(
                params, *(batch[:, part] for part in range(3)), config=self._config, taps=self._chosen,
                attention=choose(self._config, self._platform, dtype, self._chosen),
                mixture=choose_mixture(self._platform),
                keep=keep, runs=self._runs,
            )  # fmt: skip

        return jax.jit(rows_of).lower(params, *inputs)

    def _measure_all(self, reference: Any, fresh: Any, stored: Any) -> jax.Array:
        by_tap: dict[int, jax.Array] = {}
        for group, *arrays in zip(self._groups, reference, fresh, stored, strict=True):
            right, again, kept = (array if array.ndim == 3 else array[None] for array in arrays)
            by_tap.update(zip(group, _distances(right, again, kept, self.taps[group[0]]), strict=True))
        return jnp.stack([by_tap[number] for number in range(len(self.taps))])


def _changed(params: Params, variant: int, size: float) -> Params:
    """Change the embeddings by at most ``size`` of each value."""
    noise = jax.random.uniform(jax.random.key(variant), params.embed.shape, jnp.float32, -1.0, 1.0)
    return replace(params, embed=(params.embed.astype(jnp.float32) * (1 + size * noise)).astype(params.embed.dtype))


def _block(rows: Sequence[Sequence[npt.NDArray[Any]]], taps: Sequence[int], length: int) -> npt.NDArray[Any]:
    """Return ``[taps, length, width]``: the stored rows of a batch's samples one after another, then zeros."""
    first = rows[0][taps[0]]
    block = np.zeros((len(taps), length, first.shape[1]), first.dtype)
    for place, tap in enumerate(taps):
        parts = [each[tap] for each in rows]
        np.concatenate(parts, out=block[place, : sum(map(len, parts))])
    return block


def _distances(reference: jax.Array, fresh: jax.Array, stored: jax.Array, kind: TapRows) -> jax.Array:
    """Compute :func:`spile.store.recomputation.distances` on the device for ``[taps, rows, width]``."""
    if kind.dtype == "int32":
        known = jnp.sort(reference.astype(jnp.int32), axis=-1)

        def missing(ids: jax.Array) -> jax.Array:
            at = jnp.minimum(jax.vmap(jax.vmap(jnp.searchsorted))(known, ids), known.shape[-1] - 1)
            return 1.0 - (jnp.take_along_axis(known, at, axis=-1) == ids).mean(axis=-1, dtype=jnp.float32)

        away, nothing = (missing(fresh.astype(jnp.int32)), missing(stored)), jnp.zeros(stored.shape[:2])
        return jnp.stack([nothing + 1, away[0], nothing, away[1], nothing, nothing], axis=1)
    fresh = fresh.astype(jnp.float32)
    again = _as_read(fresh, kind)
    norm = jnp.linalg.norm(reference, axis=-1)
    changes = fresh - reference, again - fresh, stored.astype(jnp.float32) - reference
    weights = gain_weights(reference, kind.dtype, jnp)
    total = jnp.maximum((weights * reference).sum(axis=-1), 1e-30)
    along = [norm * (x * weights).sum(axis=-1) / total for x in (again - reference, changes[2])]
    return jnp.stack([norm, *(jnp.linalg.norm(change, axis=-1) for change in changes), *along], axis=1)


def _as_read(rows: jax.Array, kind: TapRows) -> jax.Array:
    """Return float32 rows as they are read after they were stored.

    No value is cast to a narrower dtype and back, because the compiler may leave that out.
    """
    if kind.dtype in _BITS:
        return jax.lax.reduce_precision(rows, *_BITS[kind.dtype])
    if not kind.scaled:
        return rows
    stored = as_stored(rows, kind.dtype)
    scale = jax.lax.bitcast_convert_type(stored[..., -SCALE_BYTES:], jnp.float32)[..., None]
    if kind.dtype == "int8":
        return stored[..., :-SCALE_BYTES].astype(jnp.float32) * scale
    part = jnp.where(scale > 0, rows / scale, 0.0)
    # float8_e4m3 has three bits after the point, and steps of 2**-9 below its smallest normal number.
    small = jnp.round(part * 512) / 512
    return jnp.where(jnp.abs(part) < 2.0**-6, small, jax.lax.reduce_precision(part, 8, 3)) * scale


class _TorchRecomputer:
    """Computes samples with the PyTorch model in the run's dtype and in float32."""

    def __init__(self, files: ModelFiles, run: RunIdentity) -> None:
        self._dtype, self._positions = run.dtype, run.positions
        (self._model,) = place_replicas(load_model(files, run.dtype), torch_devices()[:1])
        self._wide = self._model if run.dtype == "float32" else copy.deepcopy(self._model).float()

    def __call__(
        self, samples: Sequence[Sample], taps: Sequence[TapRows], stored: StoredRows, variant: int = 0
    ) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
        """Yield the distances of each sample, as :class:`spile.store.recomputation.Recompute` describes."""
        chosen = [Tap.parse(tap.name) for tap in taps]
        tokens = max(_BATCH_TOKENS["cpu"], *map(len, samples)) if samples else 0
        same: dict[str, Any] = {"store_dtype": "float32", "most_tokens": tokens, "positions": self._positions}
        wide = TorchProducer([self._wide], chosen, dtype="float32", **same)
        own = TorchProducer([self._model], chosen, dtype=self._dtype, **same)
        for batch in wide.split(samples):
            reference = dict(wide.rows(batch))
            with _changed_embeddings(self._model, variant, _CHANGE[self._dtype]):
                fresh = dict(own.rows(batch)) if variant or self._dtype != "float32" else reference
            for sample in batch:
                both = zip(reference[sample.index], fresh[sample.index], stored(sample), taps, strict=True)
                yield sample.index, np.stack([distances(*each) for each in both])


@contextmanager
def _changed_embeddings(model: Any, variant: int, size: float) -> Iterator[None]:
    """Change the output of the embedding layer; its weights may be shared with the head, so they are not changed."""
    import torch

    if not variant:
        yield
        return
    generator = torch.Generator().manual_seed(variant)

    def change(_module: Any, _inputs: Any, output: Any) -> Any:
        noise = torch.rand(output.shape, generator=generator).to(output.device) * 2 - 1
        return (output.float() * (1 + size * noise)).to(output.dtype)

    hook = model.get_input_embeddings().register_forward_hook(change)
    try:
        yield
    finally:
        hook.remove()


def _by_sample(batch: Batch, measured: Any) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
    values, start = np.asarray(measured), 0
    for sample in batch.samples:
        yield sample.index, values[:, :, start : start + sample.rows]
        start += sample.rows
