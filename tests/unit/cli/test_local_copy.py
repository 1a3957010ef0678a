"""``spile extract`` into a bucket with a copy on this machine: a copy that comes later says what it lacks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.gcs import FakeGcs

from spile.objects import open_folder
from unit.cli.refusals import SMALL, lines, spile


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with FakeGcs() as fake:
        fake.add_bucket("bucket")
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", fake.url)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("NO_GCE_CHECK", "true")
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        yield "gs://bucket/run"


def test_a_copy_that_comes_later(bucket: str, tmp_path: Path, texts: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ("extract", "--dataset", texts, "--model", "embedded", "--output", bucket, *SMALL)
    copy = tmp_path / "copy"
    assert spile(*words, "--max-samples", 1) == 0
    assert "the local copy" not in capfd.readouterr().out
    assert spile(*words, "--output-dir", copy) == 0
    output = capfd.readouterr().out.splitlines()[-1]
    assert output.startswith(f"the local copy {copy}/stream_0 has 1 of 2 shards: 1 (")
    assert output.endswith(f"gcloud storage rsync --recursive {bucket}/stream_0 {copy}/stream_0 brings them")
    home, local = open_folder(bucket), open_folder(str(copy))
    absent = {info.key for info in home.list()} - {info.key for info in local.list()}
    assert sorted(Path(key).suffix for key in absent) == [".safetensors", ".z"]  # a shard, and the index of the bucket
    assert spile("verify", copy) == 1
    assert "the shard is gone" in capfd.readouterr().out
    assert spile(*words, "--output-dir", copy) == 0  # nothing is left to do; the copy still lacks it
    assert "has 1 of 2 shards" in capfd.readouterr().out
    for key in absent:
        local.put(key, home.get(key))
    assert spile(*words, "--output-dir", copy) == 0
    assert "the local copy" not in capfd.readouterr().out
    assert spile("verify", copy) == 0
    assert spile("verify", bucket) == 0


def test_a_local_run_that_goes_on_in_a_bucket_says_what_is_not_continued(
    bucket: str, tmp_path: Path, texts: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It computed everything again without a word; with the folder as its copy it failed after the first shard."""
    monkeypatch.chdir(tmp_path)
    words = ("extract", "--dataset", texts, "--model", "embedded", *SMALL)
    assert spile(*words, "--max-samples", 1) == 0
    capfd.readouterr()
    assert spile(*words, "--output", bucket, "--output-dir", "activations") == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "--output-dir activations already holds stream 0 of a run that was stored only there" in line
    command = f"gcloud storage rsync --recursive activations {bucket}"
    assert f"copy it there first: {command}; to begin again, choose another --output-dir" in line
    assert not list(open_folder(bucket).list())
    assert spile(*words, "--output", bucket) == 0
    said = capfd.readouterr().out
    assert f"./activations has stream 0 of a run of this model, which {bucket} does not continue; to continue" in said
    assert spile(*words, "--output", bucket) == 0, "the bucket's own stream is continued"
    assert "does not continue" not in capfd.readouterr().out


def test_a_local_run_that_was_copied_to_a_bucket_goes_on_there(
    bucket: str, tmp_path: Path, texts: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    words = ("extract", "--dataset", texts, "--model", "embedded", *SMALL)
    assert spile(*words, "--max-samples", 1) == 0
    local, home = open_folder("activations"), open_folder(bucket)
    for info in local.list():
        home.put(info.key, local.get(info.key))
    assert spile(*words, "--output", bucket, "--output-dir", "activations") == 0
    assert "1 of them now" in capfd.readouterr().out
    assert spile("verify", bucket) == 0


def test_no_copy_is_made_where_it_would_be_deleted(
    bucket: str, tmp_path: Path, texts: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = (
        "extract",
        "--dataset",
        texts,
        "--model",
        "embedded",
        "--output",
        bucket,
        "--output-dir",
        tmp_path / "copy",
        *SMALL,
    )
    assert spile(*words, "--delete-local-after-upload") == 0
    assert "the local copy" not in capfd.readouterr().out
    assert not (tmp_path / "copy").exists()


def test_a_copy_of_another_run_is_refused(
    bucket: str, tmp_path: Path, texts: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    other = lines(tmp_path / "other.jsonl", {"text": "x y z"})
    assert spile("extract", "--dataset", other, "--output", tmp_path / "copy", *SMALL, "--seed", 7) == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    capfd.readouterr()
    words = (
        "extract",
        "--dataset",
        texts,
        "--model",
        "embedded",
        "--output",
        bucket,
        "--output-dir",
        tmp_path / "copy",
        *SMALL,
    )
    assert spile(*words) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(f"spile: {tmp_path}/copy is not a copy of {bucket}: expected an empty folder, or one with")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert not [info.key for info in open_folder(bucket).list() if "_0/" in info.key]
