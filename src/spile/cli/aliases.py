"""The guides' spellings: one table from every old flag and variable to ours.

A user of the old scripts can paste a guide's command after ``spile extract`` and it means the same thing here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

__all__ = ["FLAGS", "VARIABLES", "Variable", "modern"]

FLAGS: dict[str, str | None] = {
    # guide 002, extract_activations.py
    "--model-path": "--model",
    "--dataset-path": "--dataset",
    "--dataset-stream": "--dataset",
    "--layers-to-extract": "--layers",
    "--activation-type": "--taps",
    "--enable-checkpointing": None,
    # guide 000, the pod's inference script
    "--tasks-file": "--dataset",
    "--activations-dir": "--output-dir",
    "--upload-to-cloud": "--upload-to-gcs",
    # guide 004, barriers: always on here
    "--enable-barrier-sync": None,
    "--is-barrier-server": None,
    "--barrier-controller-host": "--coordinator-address",
    "--host-id": "--process-id",
    # guide 001, deploy
    "--monitor-interval": "--interval",
    # guide 003, the multi-host runner
    "--tpu-prefix": "--tpu-prefix",
    "--internal-ip": "--internal-ip",
}
"""Old flag (after underscores became dashes and capitals small) → ours; None: it is always so, and is dropped."""

_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off", ""}


class Variable(NamedTuple):
    """A variable of the guides."""

    flag: str
    commands: tuple[str, ...]
    value: Callable[[str], str | None] = lambda text: text
    """Its value as ours; None: as if it were not set."""


def _switch(text: str) -> str | None:
    return "" if text.strip().lower() in _TRUE else None


_EXTRACT = ("extract", "infer")

VARIABLES: dict[str, Variable] = {
    "MODEL_PATH": Variable("--model", _EXTRACT),
    "DATASET_DIR": Variable("--dataset-dir", _EXTRACT),
    "OUTPUT_DIR": Variable("--output-dir", _EXTRACT),
    "CHECKPOINT_DIR": Variable("--checkpoint-dir", _EXTRACT),
    "BATCH_SIZE": Variable("--batch-size", _EXTRACT),
    "SHARD_SIZE_GB": Variable("--shard-size-gb", _EXTRACT),
    "MAX_SEQ_LENGTH": Variable("--max-seq-length", _EXTRACT),
    "MESH_SHAPE": Variable("--mesh-shape", _EXTRACT),
    "GCS_BUCKET": Variable("--gcs-bucket", (*_EXTRACT, "deploy")),
    "UPLOAD_TO_GCS": Variable("--upload-to-gcs", _EXTRACT, _switch),
}
"""A variable of the guides counts where the flag is not given."""


def modern(words: list[str], environment: Mapping[str, str]) -> list[str]:
    """The command line as we spell it: old flags renamed, the guides' variables added where no flag says otherwise."""
    command = next((word for word in words if not word.startswith("-")), "")
    renamed = _renamed(words)
    given = {word.partition("=")[0] for word in renamed}
    for name, variable in VARIABLES.items():
        value = variable.value(environment[name]) if name in environment else None
        if value is None or command not in variable.commands or variable.flag in given:
            continue
        renamed += [variable.flag] if value == "" else [f"{variable.flag}={value}"]
    return renamed


def _renamed(words: list[str]) -> list[str]:
    """Old flags by their new names, up to ``--``: what follows is another program's."""
    renamed: list[str] = []
    for place, word in enumerate(words):
        if word == "--":
            return renamed + words[place:]
        if not word.startswith("--"):
            renamed.append(word)
            continue
        name, equals, value = word.partition("=")
        name = name.replace("_", "-")
        name = name if name.islower() else name.lower()
        modern_name = FLAGS.get(name, name)
        if modern_name is not None:
            renamed.append(modern_name + equals + value)
    return renamed
