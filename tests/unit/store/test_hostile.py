"""A malicious dataset: readers report one line or correct data, quickly and without harm."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spile.errors import Damaged, SpileError
from spile.objects import open_folder
from spile.proof.verification import verify
from spile.reading.dataset import open as open_dataset
from spile.store.cleanup import clear_stream
from spile.store.layout import commit_number, stream_number
from spile.store.ledger import seal
from spile.store.snapshot import SnapshotReader, State
from spile.store.writer import join_stream
from world import items, produce, run_identity, stream_identity, write_shard

SAMPLES = 12


@pytest.fixture
def root(tmp_path: Path) -> Path:
    produce(open_folder(str(tmp_path / "run")), SAMPLES)
    return tmp_path / "run"


def use(root: Path) -> bool:
    """Run every reader over a dataset and return whether it was verified. Only our errors may be raised."""
    folder = open_folder(str(root))
    SnapshotReader(folder).take()  # never an error
    try:
        dataset = open_dataset(folder)
        for ref in dataset.samples:
            dataset.sample(ref.stream, ref.index).rows(dataset.taps[0])
    except SpileError as error:
        assert "\n" not in str(error)  # noqa: PT017 - it need not fail
    try:
        return verify(folder, gc=True).ok
    except SpileError:
        return False


def forge(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Return other content with a correct checksum."""
    record = json.loads(path.read_bytes())
    del record["crc32c"]
    change(record)
    path.write_bytes(seal(record))


def first_commit(root: Path) -> Path:
    return min(root.glob("tpu_0/commits/*.json"))


FORGED: dict[str, Callable[[dict[str, Any]], object]] = {
    "a shard outside of its stream": lambda commit: commit["shards"][0].update(
        name="../tpu_1/shard_0001-abcd.safetensors"
    ),
    "a shard that is the ledger": lambda commit: commit["shards"][0].update(name="commits/0001.json"),
    "answers outside of its stream": lambda commit: commit["shards"][0].update(
        predictions={"name": "../../../secret", "size": 1, "crc32c": "00000000", "count": 1}
    ),
    "a header without end": lambda commit: commit["shards"][0]["header"].update(size=1 << 60),
    "a shard and a header without end": lambda commit: (
        commit["shards"][0].update(size=1 << 52),
        commit["shards"][0]["header"].update(size=1 << 51),
    ),
    "a sample without end": lambda commit: commit["shards"][0].update(samples=[[0, 10**30]], count=10**30),
    "an end that never comes": lambda commit: commit.update(end=10**30),
    "a skipped sample far away": lambda commit: commit.update(
        skipped=[{"index": 10**30, "task_id": "t", "reason": "x", "detail": {}}]
    ),
    "a date that is none": lambda commit: commit.update(created="soon"),
    "statistics of something else": lambda commit: commit["shards"][0].update(statistics={"residual.0": "x"}),
    "tensors of something else": lambda commit: commit["shards"][0].update(tensors={}),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_forged_commit_is_no_proof_and_no_crash(root: Path, what: str) -> None:
    forge(first_commit(root), FORGED[what])
    if what == "statistics of something else":
        use(root)  # they prove nothing and are not proven
    else:
        assert not use(root)


def test_a_commit_numbered_beyond_all_others(root: Path) -> None:
    """It is reported as a gap at once, without a loop over all numbers."""
    data = json.loads(first_commit(root).read_bytes())
    for number in (99_999_999, 999_999_999_999):
        path = root / "tpu_0" / "commits" / f"{number}.json"
        path.write_bytes(seal({**{k: v for k, v in data.items() if k != "crc32c"}, "number": number}))
        assert not use(root)
        path.unlink()
    assert use(root)


@pytest.mark.parametrize("name", ["commits/9999999999999.json", "commits/٠٠٠١.json", "commits/0000.json"])
def test_names_that_are_no_commits(name: str) -> None:
    assert commit_number(name) is None


@pytest.mark.parametrize("name", ["tpu_٣", "tpu_9999999999", "tpu_01", "tpu_-1", "tpu_"])
def test_names_that_are_no_streams(name: str) -> None:
    assert stream_number(name) is None


def test_links_in_circles(root: Path) -> None:
    """Two of them would be 2 ** 40 folders."""
    for name in ("a", "b", "c"):
        (root / "tpu_0" / name).symlink_to(root)
        (root / name).symlink_to(root / "tpu_0")
    (root / "tpu_0" / "itself").symlink_to("itself")
    (root / "tpu_0" / "nowhere").symlink_to("/nowhere")
    (root / "tpu_7").symlink_to("tpu_7")
    assert use(root)


def test_a_stream_on_another_disk_behind_a_link_is_read(root: Path, tmp_path: Path) -> None:
    (root / "tpu_0").rename(tmp_path / "disk")
    (root / "tpu_0").symlink_to(tmp_path / "disk")
    assert use(root)


def test_one_stream_under_two_names_is_refused(root: Path) -> None:
    (root / "tpu_1").symlink_to("tpu_0")
    with pytest.raises(Damaged, match=r"tpu_1 does not belong to the dataset: .*expected stream 1, found stream 0"):
        open_dataset(open_folder(str(root)))
    assert not use(root)


@pytest.mark.parametrize("name", ["progress.json", "stream.json", "commits/0001.json", "commits/0002.json"])
def test_a_pipe_does_not_block_the_writer(root: Path, name: str) -> None:
    path = root / "tpu_0" / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    assert use(root) == (name == "progress.json")


def test_a_heartbeat_of_a_hundred_megabytes_is_none(root: Path) -> None:
    (root / "tpu_0" / "progress.json").write_bytes(b'{"log_tail": ["' + b"x" * (100 << 20) + b'"]}')
    (view,) = SnapshotReader(open_folder(str(root))).take().streams
    assert (view.state, view.host) == (State.DONE, "")


def _live(root: Path, ended: list[str]) -> None:
    """Run one worker with shards of two samples."""
    folder = open_folder(str(root))
    try:
        store = join_stream(folder, 0, stream_identity(SAMPLES), run_identity())
        waiting = [item for item in items(SAMPLES, store.ledger.done) if hasattr(item, "tokens")]
        for at in range(0, len(waiting), 2):
            builder = store.begin(waiting[at : at + 2])  # type: ignore[arg-type]
            write_shard(builder, waiting[at : at + 2])  # type: ignore[arg-type]
            store.commit([builder.finish()])
        ended.append("done")
    except SpileError as error:
        ended.append(str(error))


@pytest.mark.parametrize("what", ["overwrite", "collect garbage"])
def test_removal_while_a_stream_is_started_again_leaves_no_mix(root: Path, what: str) -> None:
    """Workers and removals race; then one worker completes the stream, and no committed file was removed."""
    folder, ended = open_folder(str(root)), []
    for _ in range(6):
        clear_stream(folder, 0)
        lives = [threading.Thread(target=_live, args=(root, ended)) for _ in range(2)]
        for life in lives:
            life.start()
        for _ in range(3):
            try:
                if what == "overwrite":
                    clear_stream(folder, 0)
                else:
                    verify(folder, gc=True, remove=True, older_than=-1.0)
            except SpileError as error:
                ended.append(str(error))
        for life in lives:
            life.join()
        report = verify(folder, repair=True)
        # A commit may come between the end of a stream and the search for garbage: the next worker removes it.
        output = ("stream.json is gone",) if what == "overwrite" else ()
        wrong = [p for p in report.all_problems if p.kind != "missing" and p.text not in output]
        assert not wrong, (wrong, ended)
        _live(root, ended)
        assert ended[-1] == "done", ended
