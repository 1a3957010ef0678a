"""A folder with a copy: the copy follows the home, and neither is left with partial files."""

from __future__ import annotations

from pathlib import Path

import pytest

from spile.errors import Fenced, StoreError
from spile.objects import Folder, open_folder
from spile.objects.folder import Unwritable
from spile.objects.local import LocalFolder, LocalWriter
from spile.objects.mirror import MirrorFolder
from spile.proof.verification import verify
from spile.spec.amounts import size
from spile.store.cleanup import clear_stream
from spile.store.run import join_run
from spile.store.stored_stream import missing_from_copy
from spile.store.writer import StreamWriter, join_stream
from world import produce, run_identity, sample_of, stream_identity, write_shard


def keys(folder: Folder) -> set[str]:
    return {info.key for info in folder.list()}


@pytest.fixture
def mirror(folder: Folder, tmp_path: Path) -> MirrorFolder:
    """A home on each backend, with a copy on the disk."""
    return MirrorFolder(folder, open_folder(str(tmp_path / "copy")))


def test_a_whole_stream_is_in_both(mirror: MirrorFolder) -> None:
    produce(mirror, 30)
    for place in (mirror, mirror.primary, mirror.copy):
        assert verify(place).ok
    assert keys(mirror.primary) == keys(mirror.copy) == keys(mirror)
    for key in keys(mirror.primary):
        assert mirror.primary.get(key) == mirror.copy.get(key)


def records(folder: Folder) -> set[str]:
    return {key for key in keys(folder) if key.endswith(".json")}


def test_the_copy_is_never_believed(mirror: MirrorFolder) -> None:
    produce(mirror, 30)
    for key in keys(mirror.copy):
        mirror.copy.delete(key)
    assert verify(mirror).ok
    produce(mirror, 30)  # nothing is left to do, and nothing is missed
    assert keys(mirror.copy) == records(mirror.primary)


def test_a_copy_of_another_dataset_is_refused_and_left_alone(mirror: MirrorFolder) -> None:
    produce(mirror.primary, 12)
    mirror.copy.put("run.json", mirror.primary.get("run.json"))  # one run, made in one second or in two
    produce(mirror.copy, 30)
    before = {key: mirror.copy.get(key) for key in keys(mirror.copy)}
    for _ in range(2):
        with pytest.raises(Unwritable) as refused:
            produce(mirror, 30)
        assert str(refused.value) == (
            f"{mirror.copy.url}/tpu_0 is not a copy of {mirror.url}/tpu_0: expected an empty folder, or one with the "
            "same stream.json, found a different stream.json. Choose another --output-dir, or remove what is there; "
            "the dataset itself is complete."
        )
        assert refused.value.exit_code == 2
    assert {key: mirror.copy.get(key) for key in keys(mirror.copy)} == before
    assert verify(mirror.primary, max_samples=12).ok


def begun(root: Folder) -> StreamWriter:
    """The first five samples of 30."""
    join_run(root, run_identity())
    store = join_stream(root, 0, stream_identity(30), run_identity())
    samples = [sample_of(number) for number in range(5)]
    builder = store.begin(samples)
    write_shard(builder, samples)
    store.commit([builder.finish()])
    return store


def test_a_local_copy_added_later_gets_every_record_and_lists_missing_shards(mirror: MirrorFolder) -> None:
    first = begun(mirror.primary)
    assert produce(mirror, 30).ledger.samples == 28
    assert verify(mirror.primary).ok
    assert records(mirror.copy) == records(mirror.primary)
    found = missing_from_copy(mirror.copy, "gs://b/run/tpu_0", 0)
    assert found is not None
    absent, every = first.ledger.shards, sum("/shard_" in info.key for info in mirror.primary.list())
    assert found.startswith(
        f"the local copy {mirror.copy.url}/tpu_0 has {every - absent} of {every} shards: "
        f"{absent} ({size(first.ledger.bytes)}) "
    )
    assert found.endswith(f"gcloud storage rsync --recursive gs://b/run/tpu_0 {mirror.copy.url}/tpu_0 brings them")
    assert [problem.text for problem in verify(mirror.copy).all_problems] == ["the shard is gone"] * absent
    for name in (file.name for file in first.ledger.files):  # as that command would
        mirror.copy.put(f"tpu_0/{name}", mirror.primary.get(f"tpu_0/{name}"))
    assert missing_from_copy(mirror.copy, "gs://b/run/tpu_0", 0) is None
    assert verify(mirror.copy).ok


def test_a_copy_follows_a_stream_that_starts_over(mirror: MirrorFolder) -> None:
    produce(mirror, 30)
    clear_stream(mirror, 0)
    assert keys(mirror.copy) == keys(mirror.primary) == {"run.json"}
    produce(mirror, 30)
    assert verify(mirror.copy).ok


def test_a_copy_of_a_cleared_stream_is_not_mixed_with_the_next(mirror: MirrorFolder) -> None:
    produce(mirror, 30)
    clear_stream(mirror.primary, 0)  # from another machine, which has no such copy
    produce(mirror.primary, 12)
    with pytest.raises(Unwritable, match=r"is not a copy of .*the same stream.json, found a different"):
        produce(mirror, 30)


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
    for place in (both.primary, both.copy):
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
    assert not list(both.primary.unfinished())


def test_a_commit_whose_reply_was_lost_is_copied(both: MirrorFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    create = LocalFolder.create

    def lost(self: LocalFolder, key: str, data: bytes) -> bool:
        created = create(self, key, data)
        return created and "commits" not in key

    monkeypatch.setattr(LocalFolder, "create", lost)
    produce(both, 30)
    assert verify(both.primary).ok
    assert verify(both.copy).ok


def test_a_commit_of_another_worker_is_copied_unchanged(both: MirrorFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    create = LocalFolder.create

    def late(self: LocalFolder, key: str, data: bytes) -> bool:
        if "commits" in key:
            monkeypatch.setattr(LocalFolder, "create", create)
            produce(both.primary, 30)
        return create(self, key, data)

    monkeypatch.setattr(LocalFolder, "create", late)
    with pytest.raises(Fenced):
        produce(both, 30)
    assert [key for key in keys(both.copy) if "commits" in key] == ["tpu_0/commits/0001.json"]
    assert both.copy.get("tpu_0/commits/0001.json") == both.primary.get("tpu_0/commits/0001.json")
    assert missing_from_copy(both.copy, "gs://b/run/tpu_0", 0) is not None
    assert verify(both.primary).ok
