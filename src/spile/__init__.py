"""spile taps language models: it runs one over a dataset and stores the activations of its layers, each sample once.

Extract, prove, read::

    import spile

    spec = spile.ExtractSpec(model="Qwen/Qwen2.5-0.5B", data=spile.DataSpec("tasks.jsonl"), output="./activations")
    summary = spile.extract(spec)                # resumes where an earlier run was interrupted
    report = spile.verify("./activations")       # every sample once, every checksum
    assert report.ok, report.all_problems

    dataset = spile.open("./activations")        # or gs://…, s3://…; needs neither jax nor torch
    for rows in dataset.rows("residual.12", batch_rows=4096):
        ...                                      # [rows, d_model] NumPy arrays, bfloat16
    for batch in dataset.shuffled("residual.12", batch_rows=4096, seed=0):
        ...                                      # the same rows in random order, resumable, for training

What is here:

- ``extract(spec)``, ``ExtractSpec``, ``DataSpec``, ``PromptSpec``: run a model and store what its layers compute.
- ``RunSpec``: the same class as ``ExtractSpec``; ``spec.to_json()`` is the content of ``spec.json``.
- ``add_taps(spec)``, ``BackfillSpec``: more taps of a finished dataset, row for row beside what is there.
- ``infer(spec)``, ``GenerationSpec``: the same with answers, which ``spec.generation`` asks for.
- ``plan(spec)``: tokens, bytes, hours and dollars of a run before it starts.
- ``verify(root)``: proves a dataset complete, or says what is missing, doubled or damaged.
- ``open(root)`` gives a ``Dataset``: samples, rows by tap, shuffled batches, statistics.
- ``Role``: whose words a token is; rows are filtered by it.
- ``errors``: one exception tree. Every error is one line: what is wrong, what was expected, what was found, what to do.

The command line is ``spile --help``; the guides and the format on disk are in ``docs/``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from spile import errors
from spile.version import __version__

if TYPE_CHECKING:
    from spile.planning.forecast import plan
    from spile.reading.dataset import Dataset, open  # noqa: A004
    from spile.spec.run import BackfillSpec, DataSpec, ExtractSpec, GenerationSpec, PromptSpec, RunSpec
    from spile.spec.sample import Role
    from spile.store.verification import verify
    from spile.worker.backfill import add_taps
    from spile.worker.extract import extract
    from spile.worker.infer import infer

__all__ = [
    "BackfillSpec",
    "DataSpec",
    "Dataset",
    "ExtractSpec",
    "GenerationSpec",
    "PromptSpec",
    "Role",
    "RunSpec",
    "__version__",
    "add_taps",
    "errors",
    "extract",
    "infer",
    "open",
    "plan",
    "verify",
]

# Imported when first used, so that ``import spile`` and ``spile --help`` stay light.
_LAZY = {
    "BackfillSpec": "spile.spec.run",
    "DataSpec": "spile.spec.run",
    "Dataset": "spile.reading.dataset",
    "ExtractSpec": "spile.spec.run",
    "GenerationSpec": "spile.spec.run",
    "PromptSpec": "spile.spec.run",
    "Role": "spile.spec.sample",
    "RunSpec": "spile.spec.run",
    "add_taps": "spile.worker.backfill",
    "extract": "spile.worker.extract",
    "infer": "spile.worker.infer",
    "open": "spile.reading.dataset",
    "plan": "spile.planning.forecast",
    "verify": "spile.store.verification",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'spile' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
