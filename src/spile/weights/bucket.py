"""A model in a bucket: its small files copied to a cache of this machine, its weights read by range where they lie."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path

from spile.errors import ModelError
from spile.objects import open_folder
from spile.spec.families import read_config
from spile.weights.files import SMALL_FILES, ModelFiles, ReadConfig, describe
from spile.weights.source import BucketSource

__all__ = ["cache_folder", "find_in_bucket"]


def cache_folder() -> Path:
    """``$XDG_CACHE_HOME/spile/models``, or ``~/.cache/spile/models``."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "spile" / "models"


def find_in_bucket(url: str, *, weights: bool = True, read: ReadConfig = read_config) -> ModelFiles:
    """The model in this folder of a bucket."""
    folder = open_folder(url)
    present = {found.key for found in folder.list() if "/" not in found.key}
    if "config.json" not in present:
        raise ModelError(f"no config.json in {url}", fix="give the folder of a whole Hugging Face model")
    content = {name: folder.get(name) for name in SMALL_FILES if name in present}
    return describe(url, _keep(url, content), BucketSource(folder), present, None, weights=weights, read=read)


def _keep(url: str, content: dict[str, bytes]) -> Path:
    """A folder named by what it holds, so that it is never stale; each file appears whole or not at all."""
    digest = hashlib.sha256(url.encode())
    for name, data in sorted(content.items()):
        digest.update(f"\n{name} {hashlib.sha256(data).hexdigest()}".encode())
    folder = cache_folder() / digest.hexdigest()[:32]
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in content.items():
        if not (folder / name).is_file():
            with tempfile.NamedTemporaryFile(dir=folder, prefix=".", delete=False) as file:
                file.write(data)
            Path(file.name).replace(folder / name)
    return folder
