"""A model in a bucket: small files in a cache, tensors by range."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
import pytest

from backends import cloud_folder, cloud_url, clouds, shared_clouds  # noqa: F401
from spile.errors import ModelError
from spile.models import model_files, weights
from spile.objects import Folder
from unit.models.toy_models import EMBEDDED


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "spile" / "models"


def upload(folder: Folder) -> None:
    for path in EMBEDDED.iterdir():
        if path.is_file():
            folder.put(path.name, path.read_bytes())


def test_the_same_model_as_on_disk(cloud_folder: Folder, cloud_url: str, cache: Path) -> None:  # noqa: F811
    upload(cloud_folder)
    there, here = model_files.find(cloud_url), model_files.find("embedded")
    assert there.config == here.config
    assert there.weights_hash() == here.weights_hash()
    assert there.tokenizer_hash() == here.tokenizer_hash()
    jax.tree.map(np.testing.assert_array_equal, weights.load(there, n_layers=2), weights.load(here, n_layers=2))
    (kept,) = cache.iterdir()
    assert {path.name for path in kept.iterdir()} == {"config.json", "tokenizer.json", "tokenizer_config.json"}
    assert model_files.find(cloud_url).tokenizer_folder == kept


def test_a_changed_tokenizer_is_not_the_cached_one(cloud_folder: Folder, cloud_url: str, cache: Path) -> None:  # noqa: F811
    upload(cloud_folder)
    before = model_files.find(cloud_url).tokenizer_hash()
    cloud_folder.put("chat_template.jinja", b"{{ messages }}")
    assert model_files.find(cloud_url).tokenizer_hash() != before


def test_an_empty_folder(cloud_url: str, cache: Path) -> None:  # noqa: F811
    with pytest.raises(ModelError, match=r"no config\.json in"):
        model_files.find(cloud_url)


def test_a_truncated_object(cloud_folder: Folder, cloud_url: str, cache: Path) -> None:  # noqa: F811
    upload(cloud_folder)
    cloud_folder.put("model.safetensors", (EMBEDDED / "model.safetensors").read_bytes()[:-9])
    with pytest.raises(ModelError, match=r"model\.safetensors is not a complete safetensors file"):
        weights.load(model_files.find(cloud_url))
