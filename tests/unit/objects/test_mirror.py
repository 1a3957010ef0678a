"""A folder with a copy: the home is the truth, the copy follows it, and neither is left with half of anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from producing import produce
from spile.errors import Fenced, StoreError
from spile.objects import Folder, open_folder
from spile.objects.local import LocalFolder, LocalWriter
from spile.objects.mirror import MirrorFolder
from spile.store.proof import verify


def keys(folder: Folder) -> set[str]:
    return {info.key for info in folder.list()}


@pytest.fixture
def mirror(folder: Folder, tmp_path: Path) -> MirrorFolder:
    """A home on each backend, with a copy on the disk."""
    return MirrorFolder(folder, open_folder(str(tmp_path / "copy")))


def test_a_whole_stream_is_in_both(mirror: MirrorFolder) -> None:
    produce(mirror, 30)
    for place in (mirror, mirror.home, mirror.copy):
        assert verify(place).ok
    assert keys(mirror.home) == keys(mirror.copy) == keys(mirror)
    for key in keys(mirror.home):
        assert mirror.home.get(key) == mirror.copy.get(key)


def test_the_copy_is_never_read(mirror: MirrorFolder) -> None:
    produce(mirror, 30)
    for key in keys(mirror.copy):
        mirror.copy.delete(key)
    assert verify(mirror).ok
    produce(mirror, 30)  # nothing is left to do, and nothing is missed
    assert keys(mirror.copy) == {"tpu_0/metadata.json"}


def test_a_copy_alone_is_no_truth(mirror: MirrorFolder) -> None:
    produce(mirror.copy, 30)
    assert produce(mirror, 30).ledger.samples == 28
    assert verify(mirror.home).ok


@pytest.fixture
def both(tmp_path: Path) -> MirrorFolder:
    return MirrorFolder(open_folder(str(tmp_path / "home")), open_folder(str(tmp_path / "copy")))


def test_an_upload_that_fails_leaves_no_copy(both: MirrorFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = LocalWriter.finish

    def fails(self: LocalWriter, size: int) -> None:
        if "/home/" in str(self._path):
            raise StoreError("the bucket is gone")
        finish(self, size)

    monkeypatch.setattr(LocalWriter, "finish", fails)
    with pytest.raises(StoreError, match="the bucket is gone"):
        produce(both, 30)
    for place in (both.home, both.copy):
        assert keys(place) == {"run.json", "tpu_0/stream.json"}
        assert not list(place.unfinished())


def test_no_room_for_the_copy_leaves_nothing_at_home(both: MirrorFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = LocalFolder.writer

    def full(self: LocalFolder, key: str, size: int) -> LocalWriter:
        if self.url.startswith(both.copy.url):
            raise StoreError("no room")
        return writer(self, key, size)

    monkeypatch.setattr(LocalFolder, "writer", full)
    with pytest.raises(StoreError, match="no room"):
        produce(both, 30)
    assert not list(both.home.unfinished())


def test_a_commit_whose_reply_was_lost_is_copied(both: MirrorFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    create = LocalFolder.create

    def lost(self: LocalFolder, key: str, data: bytes) -> bool:
        created = create(self, key, data)
        return created and "commits" not in key

    monkeypatch.setattr(LocalFolder, "create", lost)
    produce(both, 30)
    assert verify(both.home).ok
    assert verify(both.copy).ok


def test_a_commit_of_another_worker_is_not_copied_as_ours(both: MirrorFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    create = LocalFolder.create

    def late(self: LocalFolder, key: str, data: bytes) -> bool:
        if "commits" in key:
            monkeypatch.setattr(LocalFolder, "create", create)
            produce(both.home, 30)
        return create(self, key, data)

    monkeypatch.setattr(LocalFolder, "create", late)
    with pytest.raises(Fenced):
        produce(both, 30)
    assert not [key for key in keys(both.copy) if "commits" in key]
    assert verify(both.home).ok
