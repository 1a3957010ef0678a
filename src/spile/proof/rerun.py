"""``spile verify --recompute``: run the model of a dataset again."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from spile.compute.batches import Batch, Sizes, batches
from spile.compute.device import DeviceProducer, configure_jax, place_steering
from spile.compute.mesh import MeshPlan, make_mesh
from spile.compute.producer import rows_by_sample
from spile.compute.torch_backend import load_model, place_replicas, torch_devices
from spile.compute.torch_producers import TorchProducer
from spile.errors import DataError
from spile.models.decoder import head_needed, layers_needed
from spile.models.model_files import ModelFiles
from spile.models.params import Params, choose_runs
from spile.models.weights import load
from spile.objects import open_folder
from spile.objects.folder import iterate_ahead
from spile.proof.comparison import Recompute, RowsBySample
from spile.run.resolve import model_of_run, steering_of_run
from spile.spec.identity import RunIdentity
from spile.spec.positions import ALL, MEAN
from spile.spec.sample import Sample
from spile.spec.taps import Tap, TapRows
from spile.store.run import read_run

_BATCH_TOKENS = {"cpu": 512, "gpu": 16384, "tpu": 8192}
_BATCH_BYTES = {"cpu": 256 << 20, "gpu": 1 << 30, "tpu": 1 << 30}
"""The largest size of a batch's float32 rows at all taps together."""
_GPU_OPTIONS: dict[str, str | bool] = {"xla_gpu_enable_triton_gemm": False, "xla_gpu_autotune_level": "0"}
"""The search for the fastest float32 kernels takes 42 s on an H200; cuBLAS chooses well without it."""
_EMBEDDING_CHANGE = {"float32": 2.0**-20, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""The largest relative change of the embeddings in a variant: one unit in the last place, for float32 16 of them."""


def recomputer(root: str) -> Recompute:
    """Return a function that computes samples of the dataset at ``root`` again; the weights must be the same."""
    run = read_run(open_folder(root))
    if run is None:
        raise DataError(f"no run in {root}", expected="a run.json")
    if run.generation is not None and run.generation.capture == "answer" and run.positions == ALL:
        raise DataError(f"{root} cannot be recomputed", expected="prompts and answers", found="only answers")
    configure_jax()
    files, backend = model_of_run(run, root)
    return Recomputer(files, run, backend)


class Recomputer:
    """Computes samples in float32 (the reference rows) and in the run's dtype (the fresh rows).

    All batches have one shape, so that each program is compiled once.
    """

    def __init__(self, files: ModelFiles, run: RunIdentity, backend: str) -> None:
        self._files, self._run, self._backend = files, run, backend
        self._taps: tuple[Tap, ...] = ()
        self.reference_producer: Any = None
        """Computes in float32."""
        self.fresh_producer: Any = None
        """Computes in the run's dtype; the same one if that is float32."""
        self._model: Any = None
        """The model of the fresh producer, if it runs in PyTorch."""
        self._plan: Sizes | None = None

    def __call__(
        self, samples: Sequence[Sample], taps: Sequence[TapRows], variant: int = 0
    ) -> Iterator[tuple[RowsBySample, RowsBySample]]:
        """Yield the rows of each batch, as :class:`spile.proof.comparison.Recompute` describes."""
        if not samples:
            return
        self._load(tuple(Tap.parse(tap.name) for tap in taps))
        self._plan = self._plan_one_shape(samples, taps)
        yield from iterate_ahead(self._compute(samples, self._plan, variant), 1)

    def _compute(
        self, samples: Sequence[Sample], plan: Sizes, variant: int
    ) -> Iterator[tuple[RowsBySample, RowsBySample]]:
        def rows(producer: Any, batch: Batch) -> RowsBySample:
            return rows_by_sample(batch, producer.fetch(producer.start(batch)))

        same = self.fresh_producer is self.reference_producer and not variant
        for batch in batches(samples, plan):
            self.reference_producer.prepare(batch)
            self.fresh_producer.prepare(batch)  # compiles both programs at the same time
            reference = fresh = rows(self.reference_producer, batch)
            if not same:
                with self._with_changed_embeddings(variant):
                    fresh = rows(self.fresh_producer, batch)
            yield reference, fresh

    def _plan_one_shape(self, samples: Sequence[Sample], taps: Sequence[TapRows]) -> Sizes:
        """Return a plan whose batches all have one shape: that of the previous call if it is long enough."""
        longest = max(map(len, samples))
        if self._plan is not None and self._plan.longest >= longest:
            return self._plan
        width = sum(tap.width for tap in taps)
        most = _BATCH_BYTES[jax.default_backend()] // (4 * max(1, width))
        row = Sizes(longest, None, longest).row_length(longest)
        tokens = max(row, min(_BATCH_TOKENS[jax.default_backend()], most))
        return Sizes(tokens, None, longest, shortest_row=row)

    def _load(self, taps: tuple[Tap, ...]) -> None:
        if self.reference_producer is None or taps != self._taps:
            self._taps = taps
            make = self._torch_producers if self._backend == "torch" else self._device_producers
            self.reference_producer, self.fresh_producer = make()

    def _device_producers(self) -> tuple[DeviceProducer, DeviceProducer]:
        config, taps, mesh = self._files.config, self._taps, make_mesh((1, 1), jax.local_devices()[:1])
        layers = layers_needed(taps, config.n_layers)
        runs = choose_runs(config, taps, layers, 4)
        place, platform = MeshPlan(config, 1, 1).place(mesh), jax.default_backend()
        steering = place_steering(steering_of_run(self._run, config), mesh)
        weights = load(self._files, self._run.dtype, layers, place, head=head_needed(taps), runs=runs)

        def producer(params: Params, dtype: str) -> DeviceProducer:
            return DeviceProducer(
                replace(params, steering=steering),
                config,
                taps,
                store_dtype="float32",
                mesh=mesh,
                dtype=dtype,
                positions=MEAN if self._run.positions == MEAN else ALL,
                runs=runs,
                options=_GPU_OPTIONS if platform == "gpu" else None,
            )

        own = producer(weights, self._run.dtype)
        if self._run.dtype == "float32":
            return own, own
        return producer(jax.tree.map(lambda weight: weight.astype(jnp.float32), weights), "float32"), own

    def _torch_producers(self) -> tuple[TorchProducer, TorchProducer]:
        dtype = self._run.dtype
        same: dict[str, Any] = {
            "store_dtype": "float32",
            "most_tokens": _BATCH_TOKENS["cpu"],
            "positions": self._run.positions,
        }
        (self._model,) = place_replicas(load_model(self._files, dtype), torch_devices()[:1])
        own = TorchProducer([self._model], self._taps, dtype=dtype, **same)
        if dtype == "float32":
            return own, own
        return TorchProducer([copy.deepcopy(self._model).float()], self._taps, dtype="float32", **same), own

    @contextmanager
    def _with_changed_embeddings(self, variant: int) -> Iterator[None]:
        """Change the embeddings of the fresh producer inside the context; variant 0 changes nothing."""
        size, producer = _EMBEDDING_CHANGE[self._run.dtype], self.fresh_producer
        if not variant:
            yield
        elif self._backend == "torch":
            with _with_changed_output(self._model.get_input_embeddings(), variant, size):
                yield
        else:
            params = producer.params
            noise = jax.random.uniform(jax.random.key(variant), params.embed.shape, jnp.float32, -1.0, 1.0)
            embed = (params.embed.astype(jnp.float32) * (1 + size * noise)).astype(params.embed.dtype)
            producer.params = replace(params, embed=embed)
            try:
                yield
            finally:
                producer.params = params


@contextmanager
def _with_changed_output(module: Any, variant: int, size: float) -> Iterator[None]:
    """Change the output of a PyTorch module; the weights of an embedding may be shared with the head."""
    import torch

    generator = torch.Generator().manual_seed(variant)

    def change(_module: Any, _inputs: Any, output: Any) -> Any:
        noise = torch.rand(output.shape, generator=generator).to(output.device) * 2 - 1
        return (output.float() * (1 + size * noise)).to(output.dtype)

    hook = module.register_forward_hook(change)
    try:
        yield
    finally:
        hook.remove()
