from __future__ import annotations

from pathlib import Path

import pytest

from spile.objects import Folder, bucket_url, is_remote, open_folder
from spile.objects.mirror import MirrorFolder


@pytest.mark.parametrize(
    ("url", "remote"),
    [("gs://b/x", True), ("s3://b", True), ("file:///tmp/x", False), ("/tmp/x", False), ("x", False), ("", False)],
)
def test_what_is_in_a_bucket(url: str, remote: bool) -> None:
    assert is_remote(url) is remote


@pytest.mark.parametrize(
    ("text", "url"),
    [("name", "gs://name"), ("gs://name/", "gs://name"), ("s3://name/a", "s3://name/a"), ("./here", "./here")],
)
def test_a_bucket_as_users_name_it(text: str, url: str) -> None:
    assert bucket_url(text) == url


def test_a_folder_of_this_machine_has_a_path_and_a_bucket_has_none(folder: Folder, tmp_path: Path) -> None:
    below = folder.child("a")
    assert (folder.local_path is None) is is_remote(folder.url)
    assert folder.local_path is None or below.local_path == folder.local_path / "a"
    mirror = MirrorFolder(folder, open_folder(str(tmp_path / "copy")))
    assert mirror.local_path == folder.local_path
