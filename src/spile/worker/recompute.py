"""``spile verify --recompute``: a run's own model again, one sample at a time."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from spile.errors import DataError, ModelError
from spile.models.attention import choose
from spile.models.decoder import forward, head_needed
from spile.models.experts import choose_mixture
from spile.models.params import Params
from spile.models.weights import load
from spile.objects import open_folder
from spile.spec.positions import ALL
from spile.spec.run import ExtractSpec
from spile.spec.taps import Tap
from spile.store.recomputation import Recompute
from spile.store.run import read_run
from spile.worker.batches import single_row
from spile.worker.device import configure_jax
from spile.worker.parts import find_model, torch_recompute

__all__ = ["recomputer"]


def recomputer(root: str) -> Recompute:
    """From tokens and taps to rows, by the model that ``run.json`` names, proven to be the same weights."""
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
    if backend == "torch":
        return torch_recompute(files, run.dtype)

    @cache
    def params(head: bool) -> Params:
        return load(files, run.dtype, head=head)

    attention = choose(files.config, jax.default_backend(), run.dtype)

    @lru_cache(maxsize=64)
    def program(taps: tuple[str, ...], _length: int) -> Callable[..., Any]:
        chosen = tuple(Tap.parse(tap) for tap in taps)

        def step(params: Any, tokens: jax.Array, segments: jax.Array) -> tuple[jax.Array, ...]:
            return forward(
                params, tokens, None, segments, config=files.config, taps=chosen, attention=attention,
                mixture=choose_mixture(jax.default_backend()),
                keep=lambda _, x: x[0].astype(jnp.float32),
            )  # fmt: skip

        return functools.partial(jax.jit(step), params(head_needed(chosen)))

    def recompute(tokens: npt.NDArray[np.int32], taps: tuple[str, ...]) -> Sequence[npt.NDArray[np.float32]]:
        length = single_row(len(tokens))
        padded = np.zeros((1, length), np.int32)
        padded[0, : len(tokens)] = tokens
        own = (np.arange(length) < len(tokens)).astype(np.int32)[None]
        return [np.asarray(rows)[: len(tokens)] for rows in program(taps, length)(padded, own)]

    return recompute
