"""Small model folders to break."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from spile import weights

__all__ = ["EMBEDDED", "copy_model", "edit_tensors", "shard_model"]

EMBEDDED = Path(weights.__file__).parent / "embedded"


def copy_model(folder: Path) -> Path:
    """The embedded model, as a folder of one's own."""
    shutil.copytree(EMBEDDED, folder)
    return folder


def tensors(folder: Path) -> dict[str, np.ndarray]:
    """The weights by the file's names."""
    return load_file(folder / "model.safetensors")


def edit_tensors(folder: Path, **changes: np.ndarray | None) -> Path:
    """Replace, add or (None) remove tensors; ``__`` in a name stands for a dot."""
    found = tensors(folder)
    for name, value in changes.items():
        key = name.replace("__", ".")
        if value is None:
            del found[key]
        else:
            found[key] = value
    save_file(found, folder / "model.safetensors")
    return folder


def shard_model(folder: Path, parts: int = 3) -> Path:
    """Split the single file into an index of several."""
    found = tensors(folder)
    names = [f"model-{part + 1:05d}-of-{parts:05d}.safetensors" for part in range(parts)]
    where = {name: names[number % parts] for number, name in enumerate(sorted(found))}
    for file in names:
        save_file({name: found[name] for name in where if where[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (folder / "model.safetensors").unlink()
    return folder
