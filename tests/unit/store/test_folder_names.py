"""A stream's folder is ``stream_5`` in new datasets and ``tpu_5`` in those of the guides; readers accept both."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import spile as package
from spile.errors import Damaged, RunMismatch
from spile.objects import open_folder
from spile.proof.verification import verify
from spile.store.cleanup import clear_stream, stream_has_commits
from spile.store.layout import find_streams
from spile.store.run import join_run, read_run
from spile.store.snapshot import SnapshotReader
from unit.cli.refusals import SMALL, lines, spile
from world import produce, run_identity

DATA = [{"text": "one two"}, {"text": "three"}, {"text": "four"}]


@pytest.mark.parametrize("names", ["stream", "tpu"])
def test_every_reader_accepts_both_names(tmp_path: Path, names: str) -> None:
    root = open_folder(str(tmp_path))
    join_run(root, run_identity(folders=names))
    for number in (0, 1):
        produce(root, 12, worker_id=number, run=run_identity(folders=names))
    assert find_streams(root) == {0: f"{names}_0", 1: f"{names}_1"}
    assert [view.name for view in SnapshotReader(root).take().streams] == [f"{names}_0", f"{names}_1"]
    report = verify(root)
    assert report.ok
    assert [stream.name for stream in report.streams] == [f"{names}_0", f"{names}_1"]
    assert len(package.open(str(tmp_path))) == sum(stream.samples for stream in report.streams)
    assert stream_has_commits(root, 1)
    clear_stream(root, 1)
    assert not stream_has_commits(root, 1)
    assert find_streams(root) == {0: f"{names}_0"}


def test_two_folders_of_one_stream_are_refused(tmp_path: Path) -> None:
    root = open_folder(str(tmp_path))
    produce(root, 5)
    shutil.copytree(tmp_path / "tpu_0", tmp_path / "stream_0")
    for read in (find_streams, verify, lambda found: package.open(found.url)):
        with pytest.raises(Damaged, match=r"stream 0 of .* has two folders: stream_0 and tpu_0"):
            read(root)


def test_a_run_that_another_worker_has_just_begun_under_the_other_name(tmp_path: Path) -> None:
    root = open_folder(str(tmp_path))
    join_run(root, run_identity())
    with pytest.raises(RunMismatch, match=r"was created with folders named tpu_N: found stream_N. Run the same"):
        join_run(root, run_identity(folders="stream"))
    found = read_run(root)
    assert found is not None
    assert found.fingerprint() == run_identity(folders="stream").fingerprint()


@pytest.mark.parametrize(("flags", "folder"), [((), "stream_0"), (("--stream-names", "tpu"), "tpu_0")])
def test_a_run_keeps_the_name_that_it_was_begun_with(tmp_path: Path, flags: tuple[object, ...], folder: str) -> None:
    data, root = lines(tmp_path / "data.jsonl", *DATA), tmp_path / "out"
    words = ("extract", "--model", "embedded", "--dataset", data, "--output", root, *SMALL)
    assert spile(*words, *flags, "--max-samples", 1) == 0
    assert spile(*words) == 0
    assert spile(*words, "--worker-id", 0) == 0
    assert [path.name for path in root.iterdir() if path.is_dir()] == [folder]
    assert verify(open_folder(str(root))).ok
    assert spile("export", root, "--to", "npy", "--output", tmp_path / "npy") == 0
    assert spile(*words, "--no-checkpointing", "--overwrite") == 0
    assert [path.name for path in root.iterdir() if path.is_dir()] == [folder]
