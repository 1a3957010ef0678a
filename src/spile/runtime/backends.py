"""Whose code runs the model: spile's own decoder in JAX, or the model's own in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.util import find_spec
from typing import Literal

import jax
import numpy as np
import numpy.typing as npt

from spile import weights
from spile.errors import RunMismatch, SpecError
from spile.runtime.progress import Progress
from spile.runtime.torch.producer import TorchProducer, installed, load_model, torch_device, torch_rows
from spile.spec.families import ARCHITECTURES
from spile.spec.identity import RunIdentity
from spile.spec.run import ExtractSpec
from spile.spec.sample import Sample
from spile.spec.taps import Tap, TapRows, tap_rows
from spile.weights.adapters import find_adapter

__all__ = [
    "compute_dtype_for",
    "compute_platform",
    "find_model",
    "rows_of",
    "torch_producer",
    "torch_recompute",
    "wants_statistics",
]


def find_model(
    spec: ExtractSpec, known: RunIdentity | None, url: str
) -> tuple[weights.ModelFiles, Literal["jax", "torch"]]:
    """The model's files and the backend that runs it.

    A run that is there keeps its backend unless the user declares the other one's numbers equal.
    """
    began = None if known is None else known.backend
    backend = spec.backend if spec.backend != "auto" else began
    if began is not None and backend != began and not spec.same_numbers:
        raise RunMismatch(
            f"{url} was begun with --backend {began}",
            expected=f"--backend {began}",
            found=f"--backend {backend}",
            fix="leave --backend out, or declare both's numbers equal with --same-numbers, or give another --output",
        )
    adapter = None if spec.adapter is None else find_adapter(spec.adapter)
    if backend != "jax":
        files = weights.find(spec.model, spec.revision, any_family=True)
        others = backend is None and find_spec("torch") is not None  # without it the refusal names the families
        if backend == "torch" or (others and files.config.architecture not in ARCHITECTURES):
            if spec.generation is not None:
                said = "a family that spile computes itself (spile models)"
                raise SpecError("spile infer", expected=said, found=files.config.architecture)
            if jax.process_count() > 1:
                raise SpecError("--backend torch", expected="one process", found=f"a pod of {jax.process_count()}")
            installed()
            return replace(files, adapter=adapter), "torch"
    files = weights.find(spec.model, spec.revision)
    return files if adapter is None else files.adapted(adapter), "jax"


def rows_of(files: weights.ModelFiles, taps: Sequence[Tap], store_dtype: str, backend: str) -> tuple[TapRows, ...]:
    """What the taps' rows are on disk."""
    if backend == "torch":
        return torch_rows(files, taps, store_dtype)
    return tuple(tap_rows(tap, files.config.sizes(tap.layer), store_dtype) for tap in taps)


def compute_platform(backend: str, default: str) -> str:
    """``cpu``, ``gpu`` or ``tpu``: where this backend computes; ``default`` is where JAX does."""
    if backend == "jax":
        return default
    return "gpu" if torch_device() == "cuda" else "cpu"


def torch_producer(
    files: weights.ModelFiles, taps: Sequence[Tap], spec: ExtractSpec, batch_tokens: int, progress: Progress
) -> TorchProducer:
    """The model in PyTorch, said to be the slower way."""
    if spec.mesh_shape is not None:
        raise SpecError("--mesh-shape", expected="--backend jax, which has a mesh", found="--backend torch")
    name = files.config.architecture
    progress.log(f"{name} runs in PyTorch with forward hooks: slower than what spile computes itself (spile models)")
    model = load_model(files, spec.dtype)
    return TorchProducer(model, taps, store_dtype=spec.store_dtype, dtype=spec.dtype, most_tokens=batch_tokens)


def torch_recompute(files: weights.ModelFiles, dtype: str) -> Callable[..., Sequence[npt.NDArray[np.float32]]]:
    """For ``verify --recompute``: one sample at a time."""
    model = load_model(files, dtype)

    def recompute(tokens: npt.NDArray[np.int32], taps: tuple[str, ...]) -> Sequence[npt.NDArray[np.float32]]:
        chosen = [Tap.parse(tap) for tap in taps]
        producer = TorchProducer(model, chosen, store_dtype="float32", dtype=dtype, most_tokens=len(tokens))
        sample = Sample(0, "again", tokens, np.zeros(len(tokens), np.uint8))
        ((_, rows),) = producer.rows([sample])
        return [array.astype(np.float32) for array in rows]

    return recompute


def wants_statistics(asked: bool | None) -> bool:
    """Whether rows are added up as they are stored; an accelerator makes them faster than a host's cores can."""
    return jax.default_backend() == "cpu" if asked is None else asked


def compute_dtype_for(platform: str) -> str:
    """float32 on a CPU, where bf16 has no units and is slower; bfloat16 elsewhere."""
    return "float32" if platform == "cpu" else "bfloat16"
