"""The names of a dataset's files: all that spile gives, no others, and what is never deleted over a symbolic link."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import spile
from spile.objects import Folder, Unwritable, open_folder
from spile.objects.mirror import MirrorFolder
from spile.proof.verification import verify
from spile.spec.run import BackfillSpec, stream_file
from spile.spec.taps import parse_taps
from spile.store.claims import ClaimBook
from spile.store.cleanup import clear_stream, empty_commit
from spile.store.index import group_key
from spile.store.layout import SPLIT, DatasetFile, FileKind, access_check_name, commit_key, parse_key, stale_commit_key
from spile.store.ledger import commit_numbers
from world import produce


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("run.json", DatasetFile(FileKind.RECORD, "", "run.json")),
        ("spec.json", DatasetFile(FileKind.DERIVED, "", "spec.json")),
        ("answers.json", DatasetFile(FileKind.LOCAL, "", "answers.json")),
        ("streams/streams.json", DatasetFile(FileKind.LOCAL, "", "streams/streams.json")),
        (f"{SPLIT}/{stream_file(1234)}", DatasetFile(FileKind.LOCAL, "", "streams/stream_1234.jsonl")),
        ("stream_5/stream.json", DatasetFile(FileKind.RECORD, "stream_5", "stream.json")),
        ("tpu_5/commits/0001.json", DatasetFile(FileKind.RECORD, "tpu_5", "commits/0001.json")),
        ("stream_5/commits/10000.json", DatasetFile(FileKind.RECORD, "stream_5", "commits/10000.json")),
        ("stream_5/progress.json", DatasetFile(FileKind.LOCAL, "stream_5", "progress.json")),
        (
            "stream_5/added_1f3a90c2/shard_0001-ab12-h03.safetensors",
            DatasetFile(FileKind.DATA, "stream_5/added_1f3a90c2", "shard_0001-ab12-h03.safetensors"),
        ),
    ],
)
def test_names_of_spile_are_known(key: str, expected: DatasetFile) -> None:
    assert parse_key(key) == expected


@pytest.mark.parametrize(
    "key",
    [
        ".env", "id_rsa", "notes.txt", "README.md", "stream.json", "commits/0001.json", "shard_0001-ab12.safetensors",
        "stream_0/.env", "stream_0/run.json", "stream_0/spec.json", "stream_0/x/stream.json", "stream_05/stream.json",
        "stream_0/commits/1.json", "stream_0/commits/0000.json", "stream_0/commits/00010.json", "stream_x/stream.json",
        "stream_0/commits/0001.json.bak", "stream_0/added_1f3a90c2/added_1f3a90c2/stream.json", "stream_0//stream.json",
        "stream_0/added_zz/stream.json", "stream_0/shard_0001-AB12.safetensors", "stream_0/shard_٠٠٠١-ab.safetensors",
        "streams/notes.jsonl", "claims/0001/notes.txt", "index/x.json.z", "stream_0", "stream_0/", "",
    ],
)  # fmt: skip
def test_other_names_are_not(key: str) -> None:
    assert parse_key(key) is None


def test_every_name_that_is_written_is_known(tmp_path: Path) -> None:
    root = open_folder(str(tmp_path))
    texts = [{"text": "The cat sat"}, {"text": "on the mat"}]
    spile.infer("embedded", texts, tmp_path, taps=["residual.0"], max_new_tokens=2, answers_dir=str(tmp_path))
    spile.add_taps(BackfillSpec(str(tmp_path), parse_taps(["attn.0"])))
    (stream,) = spile.open(root.url).streams
    claim = ClaimBook(root, "a").take([0])
    assert claim is not None
    claim.release()
    stray = empty_commit(len(commit_numbers(stream.folder)) + 1, "other", "test")
    stream.folder.create(commit_key(stray.number), stray.to_bytes())
    verify(root, repair=True)
    names = {info.key for info in root.list()}
    assert {"answers.json", "spec.json", "predictions.jsonl"} <= names
    assert f"{stream.folder.url}/{stale_commit_key(stray.number, 'other')}".removeprefix(f"{root.url}/") in names
    assert any("/added_" in name for name in names)
    assert any(name.startswith("claims/") for name in names)
    unknown = {name for name in (*names, group_key(300), access_check_name()) if parse_key(name) is None}
    assert not unknown


def test_a_file_that_is_not_of_spile_survives_clearing(tmp_path: Path) -> None:
    root = open_folder(str(tmp_path))
    produce(root, 12)
    (tmp_path / "tpu_0" / "notes.txt").write_text("mine")
    clear_stream(root, 0)
    assert {info.key for info in root.list()} == {"run.json", "tpu_0/notes.txt"}


def _snapshot(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("linked", ["the stream", "its commits", "a shard", "added taps"])
def test_a_linked_folder_is_not_emptied(tmp_path: Path, linked: str) -> None:
    root = open_folder(str(tmp_path / "root"))
    produce(root, 12)
    stream, other = tmp_path / "root" / "tpu_0", tmp_path / "elsewhere"
    shard = next(stream.glob("shard_*")).name
    names = {"the stream": "", "its commits": "commits", "a shard": shard, "added taps": "added_1f3a90c2"}
    place = stream / names[linked]
    if linked == "added taps":
        place.mkdir()
        (place / "stream.json").write_text("{}")
    place.rename(other)
    place.symlink_to(other)
    before = _snapshot(tmp_path)
    with pytest.raises(Unwritable, match=r"tpu_0 cannot be started again: found a symbolic link that leads to .*"):
        clear_stream(root, 0)
    assert _snapshot(tmp_path) == before


def test_the_root_itself_may_be_a_link(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "root").symlink_to(tmp_path / "disk")
    root = open_folder(str(tmp_path / "root"))
    produce(root, 12)
    clear_stream(root, 0)
    assert {info.key for info in root.list()} == {"run.json"}


def _delete_through_child(root: Folder) -> None:
    root.child("tpu_0").child("commits").delete("0001.json")


def _delete_copy(root: Folder) -> None:
    home = open_folder(f"{root.url}-home")
    produce(home, 12)
    MirrorFolder(home, root).child("tpu_0/commits").delete("0001.json")


@pytest.mark.parametrize("delete", [_delete_through_child, _delete_copy, lambda root: root.delete("tpu_0/stream.json")])
def test_nothing_is_deleted_in_a_linked_folder(tmp_path: Path, delete: Callable[[Folder], None]) -> None:
    produce(open_folder(str(tmp_path / "other")), 12)
    (tmp_path / "root").mkdir()
    (tmp_path / "root" / "tpu_0").symlink_to(tmp_path / "other" / "tpu_0")
    before = _snapshot(tmp_path / "other")
    with pytest.raises(Unwritable, match=r"refused to delete .* a symbolic link that leads to .*Remove the link"):
        delete(open_folder(str(tmp_path / "root")))
    assert _snapshot(tmp_path / "other") == before


def test_garbage_behind_a_link_is_left_alone(tmp_path: Path) -> None:
    produce(open_folder(str(tmp_path / "other")), 12)
    stray = tmp_path / "other" / "tpu_0" / "shard_0009-dead.safetensors"
    unfinished = tmp_path / "other" / "tpu_0" / ".tmp-0123456789abcdef-shard_0009-beef.safetensors"
    for path in (stray, unfinished):
        path.write_bytes(b"x")
    root = tmp_path / "root"
    root.mkdir()
    (root / "run.json").write_bytes((tmp_path / "other" / "run.json").read_bytes())
    (root / "tpu_0").symlink_to(tmp_path / "other" / "tpu_0")
    (root / "tpu_0" / "progress.json").unlink(missing_ok=True)
    report = verify(str(root), remove=True, older_than=0.0)
    assert not report.garbage
    assert stray.exists()
    assert unfinished.exists()
    assert verify(str(tmp_path / "other"), remove=True, older_than=0.0).garbage
    assert not stray.exists()
