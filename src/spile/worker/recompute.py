"""``spile verify --recompute``: run a dataset's own model again and measure how far the stored rows are from it."""

from __future__ import annotations

import copy
import functools
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
from spile.models.decoder import forward, head_needed, layers_needed
from spile.models.encoding import as_stored
from spile.models.experts import choose_mixture
from spile.models.model_files import ModelFiles
from spile.models.params import Params, choose_runs, tap_groups
from spile.models.weights import load
from spile.objects import open_folder
from spile.spec.identity import RunIdentity
from spile.spec.positions import ALL
from spile.spec.run import ExtractSpec
from spile.spec.sample import Sample
from spile.spec.taps import SCALE_BYTES, Tap, TapRows
from spile.store.recomputation import Recompute, StoredRows, distances
from spile.store.stream import read_run
from spile.worker.batches import Batch, BatchPlan, batches
from spile.worker.device import configure_jax
from spile.worker.parts import find_model
from spile.worker.producer import check_tokens, pack
from spile.worker.torch_backend import TorchProducer, alike, load_model

__all__ = ["recomputer"]

_BATCH_TOKENS = {"cpu": 1024, "gpu": 16384, "tpu": 8192}
_BATCH_BYTES = {"cpu": 256 << 20, "gpu": 4 << 30, "tpu": 1 << 30}
"""What the rows of a batch may take at all taps, as float32."""
_READERS = 4
"""Threads that read stored rows for the next batch."""
_CHANGE = {"float32": 2.0**-20, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""The largest relative change of the embeddings in a variant: one unit in the last place, for float32 16 of them."""
_BITS = {"bfloat16": (8, 7), "float16": (5, 10)}
"""Bits of the exponent and of the mantissa."""


def recomputer(root: str) -> Recompute:
    """Return what computes samples of the dataset at ``root`` again, after a check that the weights are the same."""
    run = read_run(open_folder(root))
    if run is None:
        raise DataError(f"no run in {root}", expected="a run.json")
    if run.generation is not None and run.generation.capture == "answer" and run.positions == ALL:
        raise DataError(f"{root} cannot be recomputed", expected="prompts beside their answers", found="answers alone")
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
    """The JAX decoder in the run's dtype and in float32. Distances are computed on the device."""

    def __init__(self, files: ModelFiles, run: RunIdentity) -> None:
        self._files, self._dtype = files, run.dtype
        self._platform = jax.default_backend()
        self._params = functools.lru_cache(maxsize=1)(self._load)
        self._program = functools.lru_cache(maxsize=64)(self._make_program)

    def _load(self, taps: tuple[Tap, ...]) -> Params:
        return load(self._files, self._dtype, self._layers(taps), head=head_needed(taps), runs=self._runs(taps))

    def _layers(self, taps: tuple[Tap, ...]) -> int:
        return layers_needed(taps, self._files.config.n_layers)

    def _runs(self, taps: tuple[Tap, ...]) -> Any:
        return choose_runs(self._files.config, taps, self._layers(taps), 4)

    def __call__(
        self, samples: Sequence[Sample], taps: Sequence[TapRows], stored: StoredRows, variant: int = 0
    ) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
        """Yield the distances of each sample, as :class:`spile.store.recomputation.Recompute` describes."""
        if not samples:
            return
        check_tokens(samples, self._files.config.vocab_size)
        chosen = tuple(Tap.parse(tap.name) for tap in taps)
        params = self._params(chosen)
        embed = params.embed if variant == 0 else _changed(params.embed, variant, _CHANGE[self._dtype])
        twice = variant != 0 or self._dtype != "float32"
        with ThreadPoolExecutor(_READERS, "recompute-read") as pool:
            waiting: tuple[Batch, Any] | None = None
            for batch in batches(samples, self._plan(samples, taps)):
                rows = list(pool.map(stored, batch.samples))
                packed = pack(batch, batch.rows * batch.length)
                blocks = tuple(_block(rows, tap, packed.places.shape[1]) for tap in range(len(taps)))
                program = self._program(tuple(taps), twice)
                measured = program(params, embed, packed.rows, packed.places[0], blocks)
                # The device works on this batch while the rows of the next one are read.
                if waiting is not None:
                    yield from _by_sample(*waiting)
                waiting = batch, measured
            if waiting is not None:
                yield from _by_sample(*waiting)

    def _plan(self, samples: Sequence[Sample], taps: Sequence[TapRows]) -> BatchPlan:
        platform = "cpu" if self._platform == "cpu" else "tpu" if self._platform == "tpu" else "gpu"
        width = sum(tap.width for tap in taps)
        longest = max(map(len, samples))
        tokens = max(longest, min(_BATCH_TOKENS[platform], _BATCH_BYTES[platform] // (4 * max(1, width))))
        return BatchPlan(tokens, None, longest, short_tail=True)

    def _make_program(self, taps: tuple[TapRows, ...], twice: bool) -> Any:
        chosen = tuple(Tap.parse(tap.name) for tap in taps)
        runs, config = self._runs(chosen), self._files.config
        order = [number for group in tap_groups(chosen, runs) for number in group]

        def rows_of(params: Params, dtype: str, batch: jax.Array, places: jax.Array) -> dict[int, jax.Array]:
            kept = forward(
                params, *(batch[:, part] for part in range(3)), config=config, taps=chosen,
                attention=choose(config, self._platform, dtype), mixture=choose_mixture(self._platform),
                keep=lambda _, x: x.reshape(-1, x.shape[-1])[places], runs=runs,
            )  # fmt: skip
            arrays = [one for group in kept for one in (group if group.ndim == 3 else [group])]
            return dict(zip(order, arrays, strict=True))

        def step(params: Params, embed: jax.Array, batch: Any, places: Any, stored: Any) -> jax.Array:
            wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
            reference = rows_of(wide, "float32", batch, places)
            fresh = rows_of(replace(params, embed=embed), self._dtype, batch, places) if twice else reference
            return jnp.stack([_distances(reference[n], fresh[n], stored[n], kind) for n, kind in enumerate(taps)])

        return jax.jit(step)


def _changed(embed: jax.Array, variant: int, size: float) -> jax.Array:
    noise = jax.random.uniform(jax.random.key(variant), embed.shape, jnp.float32, -1.0, 1.0)
    return (embed.astype(jnp.float32) * (1 + size * noise)).astype(embed.dtype)


def _block(rows: Sequence[Sequence[npt.NDArray[Any]]], tap: int, length: int) -> npt.NDArray[Any]:
    """Concatenate the stored rows of a batch's samples at one tap, padded to the length of the batch."""
    parts = [each[tap] for each in rows]
    block = np.zeros((length, parts[0].shape[1]), parts[0].dtype)
    np.concatenate(parts, out=block[: sum(map(len, parts))])
    return block


def _distances(reference: jax.Array, fresh: jax.Array, stored: jax.Array, kind: TapRows) -> jax.Array:
    """The same as :func:`spile.store.recomputation.distances`, on the device."""
    if kind.dtype == "int32":
        known = jnp.sort(reference.astype(jnp.int32), axis=1)

        def missing(ids: jax.Array) -> jax.Array:
            at = jax.vmap(jnp.searchsorted)(known, ids)
            found = jnp.take_along_axis(known, jnp.minimum(at, known.shape[1] - 1), axis=1) == ids
            return 1.0 - found.mean(axis=1, dtype=jnp.float32)

        return jnp.stack([jnp.ones(len(reference)), missing(fresh.astype(jnp.int32)), missing(stored)])
    if kind.dtype in _BITS:
        # No cast there and back: the compiler may leave it out.
        again = jax.lax.reduce_precision(fresh.astype(jnp.float32), *_BITS[kind.dtype])
    elif kind.scaled:
        again = as_stored(fresh, kind.dtype)
        scale = jax.lax.bitcast_convert_type(again[:, -SCALE_BYTES:], jnp.float32)[:, None]
        numbers = again[:, :-SCALE_BYTES]
        numbers = numbers if kind.dtype == "int8" else jax.lax.bitcast_convert_type(numbers, jnp.float8_e4m3fn)
        again = numbers.astype(jnp.float32) * scale
    else:
        again = fresh
    away = [jnp.linalg.norm(x.astype(jnp.float32) - reference, axis=1) for x in (again, stored)]
    return jnp.stack([jnp.linalg.norm(reference, axis=1), *away])


class _TorchRecomputer:
    """The model in PyTorch, in the run's dtype and with the same weights in float32."""

    def __init__(self, files: ModelFiles, run: RunIdentity) -> None:
        self._dtype = run.dtype
        self._model = load_model(files, run.dtype)
        self._wide = self._model if run.dtype == "float32" else copy.deepcopy(self._model).float()

    def __call__(
        self, samples: Sequence[Sample], taps: Sequence[TapRows], stored: StoredRows, variant: int = 0
    ) -> Iterator[tuple[int, npt.NDArray[np.float32]]]:
        """Yield the distances of each sample, as :class:`spile.store.recomputation.Recompute` describes."""
        chosen = [Tap.parse(tap.name) for tap in taps]
        tokens = max(_BATCH_TOKENS["cpu"], *map(len, samples)) if samples else 0
        wide = TorchProducer(self._wide, chosen, store_dtype="float32", dtype="float32", most_tokens=tokens)
        own = TorchProducer(self._model, chosen, store_dtype="float32", dtype=self._dtype, most_tokens=tokens)
        for batch in alike(samples, tokens):
            reference = dict(wide.rows(batch))
            with _changed_embeddings(self._model, variant, _CHANGE[self._dtype]):
                fresh = dict(own.rows(batch)) if variant or self._dtype != "float32" else reference
            for sample in batch:
                both = zip(reference[sample.index], fresh[sample.index], stored(sample), taps, strict=True)
                yield sample.index, np.stack([distances(*each) for each in both])


@contextmanager
def _changed_embeddings(model: Any, variant: int, size: float) -> Iterator[None]:
    """Change the output of the embedding layer, and not its weights, which may be those of the head too."""
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
