from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spile.data.manifest import MANIFEST, upload
from spile.data.samples import open_stream
from spile.data.split import make_streams
from spile.data.tokens import Tokenizer
from spile.errors import DataError
from spile.objects import open_folder
from spile.spec.ranges import Ranges
from spile.spec.run import DataSpec

Write = Callable[..., str]


@pytest.fixture
def local(jsonl: Write, tmp_path: Path) -> Path:
    make_streams(jsonl([{"text": f"text {n}"} for n in range(20)]), tmp_path / "s", 4)
    return tmp_path / "s"


def same(local: Path, remote: Path) -> bool:
    return {p.name: p.read_bytes() for p in local.iterdir()} == {p.name: p.read_bytes() for p in remote.iterdir()}


def test_up_once_and_skipped_afterwards(local: Path, tmp_path: Path) -> None:
    folder = open_folder(str(tmp_path / "b"))
    output: list[tuple[str, bool, int, int]] = []
    first = upload(local, folder, lambda *words: output.append(words))
    assert same(local, tmp_path / "b")
    assert len(first.uploaded) == 5
    assert first.bytes == sum(path.stat().st_size for path in local.iterdir())
    assert [(done, total) for _, _, done, total in output] == [(n, 5) for n in range(1, 6)]
    assert output[-1][0] == MANIFEST
    second = upload(local, folder)
    assert (second.uploaded, len(second.skipped), second.bytes) == ((), 5, 0)


def test_what_differs_goes_up_again(local: Path, tmp_path: Path) -> None:
    folder = open_folder(str(tmp_path / "b"))
    upload(local, folder)
    (tmp_path / "b" / "stream_001.jsonl").write_text("short")
    (tmp_path / "b" / "stream_002.jsonl").unlink()
    again = upload(local, folder)
    assert again.uploaded == ("stream_001.jsonl", "stream_002.jsonl", MANIFEST)
    assert same(local, tmp_path / "b")


def test_without_a_list_in_the_bucket_the_bytes_decide(local: Path, tmp_path: Path) -> None:
    folder = open_folder(str(tmp_path / "b"))
    upload(local, folder)
    (tmp_path / "b" / MANIFEST).unlink()
    file = tmp_path / "b" / "stream_003.jsonl"
    file.write_bytes(file.read_bytes().replace(b"text", b"TEXT"))
    again = upload(local, folder)
    assert again.uploaded == ("stream_003.jsonl", MANIFEST)
    assert same(local, tmp_path / "b")


def test_other_streams_replace_those_in_the_bucket(local: Path, tmp_path: Path, jsonl: Write) -> None:
    folder = open_folder(str(tmp_path / "b"))
    upload(local, folder)
    make_streams(jsonl([{"text": f"word {n}"} for n in range(20)]), tmp_path / "other", 4)
    upload(tmp_path / "other", folder)
    assert same(tmp_path / "other", tmp_path / "b")


def test_large_files_go_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, local: Path) -> None:
    monkeypatch.setattr("spile.data.manifest._CHUNK", 64)
    upload(local, open_folder(str(tmp_path / "b")))
    assert same(local, tmp_path / "b")


def test_a_failed_upload_is_an_error_and_leaves_no_list(local: Path, tmp_path: Path) -> None:
    class Failing:
        def __init__(self, inner: Any) -> None:
            self._inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inner, name)

        def put(self, key: str, data: bytes) -> None:
            if key == "stream_002.jsonl":
                raise DataError("no room")
            self._inner.put(key, data)

    with pytest.raises(DataError, match="no room"):
        upload(local, Failing(open_folder(str(tmp_path / "b"))))
    assert not (tmp_path / "b" / MANIFEST).exists()


def test_while_streams_are_replaced_no_list_vouches_for_them(local: Path, tmp_path: Path, jsonl: Write) -> None:
    folder = open_folder(str(tmp_path / "b"))
    upload(local, folder)
    make_streams(jsonl([{"text": f"word {n}"} for n in range(20)]), tmp_path / "other", 4)
    seen = []
    upload(tmp_path / "other", folder, lambda name, *_: seen.append((name, (tmp_path / "b" / MANIFEST).exists())))
    assert [there for name, there in seen] == [False] * 4 + [True]


def test_up_to_a_bucket_and_read_from_there(cloud_url: str, local: Path, chatml: Tokenizer) -> None:
    """Google's and Amazon's protocols, spoken to stand-ins on this machine."""
    url = f"{cloud_url}/datasets"
    assert len(upload(local, open_folder(url)).uploaded) == 5
    assert len(upload(local, open_folder(url)).skipped) == 5
    for worker in range(4):
        there = open_stream(DataSpec(dataset_dir=url, worker_id=worker), chatml)
        here = open_stream(DataSpec(dataset_dir=str(local), worker_id=worker), chatml)
        assert (there.identity.sha256, there.identity.lines) == (here.identity.sha256, here.identity.lines)
        pairs = zip(there.read(Ranges()), here.read(Ranges()), strict=True)
        assert all(a.task_id == b.task_id and a.tokens.tolist() == b.tokens.tolist() for a, b in pairs)
    open_folder(url).put("stream_001.jsonl", b'{"text": "another"}\n')
    with pytest.raises(DataError, match=r"stream_001.jsonl changed since streams.json was written"):
        open_stream(DataSpec(dataset_dir=url, worker_id=1), chatml)


def test_bad_folders(local: Path, tmp_path: Path) -> None:
    folder = open_folder(str(tmp_path / "b"))
    with pytest.raises(DataError, match=r"no such folder: .*nope\. Make streams first"):
        upload(tmp_path / "nope", folder)
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match=r"holds no streams: expected \*.jsonl, found none"):
        upload(tmp_path / "empty", folder)
    file = local / "stream_002.jsonl"
    whole = file.read_bytes()
    file.write_bytes(whole + b"\n")
    listed = json.loads((local / MANIFEST).read_text())["streams"][2]["sha256"]
    with pytest.raises(
        DataError, match=rf"stream_002.jsonl changed since streams.json was written: expected sha256 {listed}"
    ):
        upload(local, folder)
    file.unlink()
    with pytest.raises(
        DataError, match=r"does not contain stream_002.jsonl: expected the 4 streams of streams.json, found 3"
    ):
        upload(local, folder)
    assert not (tmp_path / "b").exists()


def test_only_streams_go_up_and_no_file_from_outside(local: Path, tmp_path: Path) -> None:
    (local / "service-account.json").write_text("secret")
    (local / ".env").write_text("secret")
    done = upload(local, open_folder(str(tmp_path / "b")))
    assert done.left_out == (".env", "service-account.json")
    assert {path.name for path in (tmp_path / "b").iterdir()} == {*done.uploaded}
    (tmp_path / "secret").write_text("{}")
    (local / "more.jsonl").symlink_to(tmp_path / "secret")
    with pytest.raises(DataError, match=r"more\.jsonl is a symbolic link out of .*: found .*secret\. Name that file"):
        upload(local, open_folder(str(tmp_path / "c")))
    assert not (tmp_path / "c").exists()
