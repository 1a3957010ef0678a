"""spile runs a language model over a dataset and stores the activations of its layers, each sample exactly once.

Activations of a few texts, in memory::

    import spile

    acts = spile.tap("Qwen/Qwen2.5-0.5B", ["The cat sat on the mat"], taps=["residual.12"])
    acts[0]["residual.12"]                       # [tokens, d_model] float32
    acts[0].token_texts                          # ['The', ' cat', …]

A dataset of activations::

    spile.extract("Qwen/Qwen2.5-0.5B", "reviews.csv", "./activations", taps=["residual.12"], column="review")
    assert spile.verify("./activations").ok      # every sample once, every checksum

    dataset = spile.open("./activations")        # or gs://…, s3://…; needs neither jax nor torch
    x = dataset.numpy("residual.12", positions="last")    # one row per sample, in the order of the data
    y = dataset.labels("label")                  # aligned with x, if keep="label" was given
    for batch in dataset.shuffled("residual.12", batch_rows=4096, seed=0):
        ...                                      # rows of all tokens in random order, resumable, for training

What is here:

- ``tap``, ``load``: run a model on a few texts and keep it loaded.
- ``extract``, ``infer``, ``add_taps``: run a model over a dataset and store what its layers compute.
- ``stream``: run a model and give the rows of its layers to a training loop, without storing them.
- ``plan``: tokens, bytes, hours and dollars of a run before it starts.
- ``open``, ``verify``, ``inspect``, ``compare``, ``score``: read and examine what was stored.
- ``export``, ``push``: write it in other formats, or to the Hugging Face hub.
- ``RunSpec`` and its parts: everything that a run is asked for as one object, which ``extract`` accepts as well.
- ``Dataset``, ``JointDataset``, ``ActivationStream``, ``Activations``, ``Model``, ``Summary``, ``Report``,
  ``RowBatch``, ``Role``: what the functions return. ``ShuffledReaders`` are what the first three have in common.
- ``errors``: one exception tree. Every error is one line: what is wrong, what was expected, and how to fix it.

The command line is ``spile --help``; the guides and the format on disk are in ``docs/``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from spile import errors
from spile.version import __version__

if TYPE_CHECKING:
    from spile.api import compare, export, extract, infer, inspect, load, plan, push, score, stream, tap, verify
    from spile.compute.progress import Summary
    from spile.live.tapping import Activations, Model
    from spile.live.training_rows import ActivationStream
    from spile.proof.report import Report
    from spile.reading.dataset import Dataset, JointDataset, open  # noqa: A004
    from spile.reading.readers import ShuffledReaders
    from spile.reading.rows import RowBatch
    from spile.run.backfill import add_taps
    from spile.spec.run import BackfillSpec, DataSpec, GenerationSpec, PromptSpec, RunSpec
    from spile.spec.sample import Role

__all__ = [
    "ActivationStream",
    "Activations",
    "BackfillSpec",
    "DataSpec",
    "Dataset",
    "GenerationSpec",
    "JointDataset",
    "Model",
    "PromptSpec",
    "Report",
    "Role",
    "RowBatch",
    "RunSpec",
    "ShuffledReaders",
    "Summary",
    "__version__",
    "add_taps",
    "compare",
    "errors",
    "export",
    "extract",
    "infer",
    "inspect",
    "load",
    "open",
    "plan",
    "push",
    "score",
    "stream",
    "tap",
    "verify",
]

# Imported when first used, so that ``import spile`` and ``spile --help`` stay light.
_MODULES = {
    "spile.api": (
        *("compare", "export", "extract", "infer", "inspect", "load", "plan", "push", "score", "stream", "tap"),
        "verify",
    ),
    "spile.reading.dataset": ("Dataset", "JointDataset", "open"),
    "spile.reading.readers": ("ShuffledReaders",),
    "spile.reading.rows": ("RowBatch",),
    "spile.spec.run": ("BackfillSpec", "DataSpec", "GenerationSpec", "PromptSpec", "RunSpec"),
    "spile.spec.sample": ("Role",),
    "spile.proof.report": ("Report",),
    "spile.run.backfill": ("add_taps",),
    "spile.compute.progress": ("Summary",),
    "spile.live.training_rows": ("ActivationStream",),
    "spile.live.tapping": ("Activations", "Model"),
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        return getattr(import_module(_MODULE_OF[name]), name)
    raise AttributeError(f"module 'spile' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
