"""What a worker writes besides the ledger: its heartbeat, the guides' checkpoint file and a local copy."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spile.compute.batches import Sizes
from spile.compute.progress import Progress, StatusFiles, write_checkpoint_file
from spile.errors import Failure, Fenced, StoreError
from spile.objects import open_folder
from spile.objects.folder import Folder
from spile.objects.mirror import MirrorFolder
from spile.run.pipeline import Sink, run_pipeline
from spile.spec.phase import Phase
from spile.spec.run import DataSpec, RunSpec
from spile.store.heartbeat import Beat, read_beat
from spile.store.run import join_run
from spile.store.writer import StreamWriter, join_stream
from unit.run.test_pipeline import FailsAt, Script
from world import NumpyProducer, lengths, run_identity, sample_of, stream_identity

COUNT = 40
ITEMS = [sample_of(i, length=n) for i, n in enumerate(lengths(COUNT))]


def joined(root: Folder) -> StreamWriter:
    join_run(root, run_identity(store_dtype="float32"))
    return join_stream(root, 0, stream_identity(COUNT), run_identity(store_dtype="float32"))


def visit(spec: RunSpec, root: Folder, producer: Any = None, *, writes: bool = True, **more: Any) -> StreamWriter:
    stream, progress = joined(root), more.pop("progress", Progress())
    left = [item for item in ITEMS if item.index not in stream.ledger.done]
    with StatusFiles(spec, stream, progress, writes=writes, expected=COUNT) as status:
        run_pipeline(
            left,
            producer or NumpyProducer(),
            Sink(stream, status.committed),
            Sizes(128, None, 64, 4000),
            progress=progress,
            control=more.pop("control", Script()),
        )
        progress.phase(Phase.DONE)
    return stream


def beat_of(root: Path) -> Beat:
    beat = read_beat(open_folder(str(root / "tpu_0")))
    assert beat is not None
    return beat


def test_the_heartbeat_says_how_far_it_came(tmp_path: Path) -> None:
    stream = visit(RunSpec(output=str(tmp_path)), open_folder(str(tmp_path)))
    beat = beat_of(tmp_path)
    assert (beat.phase, beat.samples, beat.samples_committed, beat.expected) == ("done", COUNT, COUNT, COUNT)
    assert beat.shards_written == beat.shards_committed == stream.ledger.shards
    assert beat.tokens == sum(map(len, ITEMS))
    assert (beat.attempt, beat.last_error) == (stream.attempt, None)


@pytest.mark.parametrize(
    ("error", "phase", "text"),
    [
        (StoreError("the bucket is gone"), "failed", "the bucket is gone"),
        (ValueError("a bug"), "failed", "ValueError: a bug"),
        (KeyboardInterrupt(), "stopped", "interrupted"),
    ],
)
def test_the_last_heartbeat_says_what_ended_it(tmp_path: Path, error: BaseException, phase: str, text: str) -> None:
    with pytest.raises(type(error)):
        visit(RunSpec(output=str(tmp_path)), open_folder(str(tmp_path)), FailsAt(3, error))
    beat = beat_of(tmp_path)
    assert (beat.phase, beat.last_error) == (phase, text)


def test_a_fenced_worker_leaves_the_heartbeat_to_the_other(tmp_path: Path) -> None:
    root = open_folder(str(tmp_path))
    with pytest.raises(Fenced):
        visit(RunSpec(output=str(tmp_path)), root, FailsAt(3, Fenced("another worker owns this stream")))
    beat = read_beat(root.child("tpu_0"))
    assert beat is None or beat.phase not in ("failed", "stopped")


def test_lines_for_the_user_are_in_the_heartbeat(tmp_path: Path) -> None:
    text: list[str] = []
    progress = Progress(log=text.append)
    visit(RunSpec(output=str(tmp_path)), open_folder(str(tmp_path)), NumpyProducer(fits=100), progress=progress)
    assert text[0].startswith("device memory ran out")
    kept = beat_of(tmp_path).log_tail
    assert kept[0] == text[0]
    assert any(line.startswith("committed: ") for line in kept), "each commit is a line, whoever looks later"
    progress.log("afterwards")
    assert "afterwards" not in beat_of(tmp_path).log_tail


def test_only_one_process_of_a_pod_has_a_pulse(tmp_path: Path) -> None:
    spec = RunSpec(output=str(tmp_path), checkpoint_dir=str(tmp_path / "notes"))
    visit(spec, open_folder(str(tmp_path)), writes=False)
    assert not (tmp_path / "tpu_0" / "progress.json").exists()
    assert not (tmp_path / "notes").exists()


def test_an_unwritable_checkpoint_folder_is_reported_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("in the way")
    spec = RunSpec(output=str(tmp_path), checkpoint_dir=str(tmp_path / "notes"))
    text: list[str] = []
    with pytest.raises(ValueError, match="a bug"):
        visit(spec, open_folder(str(tmp_path)), FailsAt(0, ValueError("a bug")), progress=Progress(log=text.append))
    assert any(line.startswith("could not write to --checkpoint-dir: cannot write") for line in text)


def test_the_checkpoint_file_of_the_guides(tmp_path: Path) -> None:
    spec = RunSpec(model="m", data=DataSpec(worker_id=0), output=str(tmp_path), checkpoint_dir=str(tmp_path / "notes"))
    root = open_folder(str(tmp_path))
    visit(spec, root, control=Script(*["go"] * 4, "stop"))
    file = tmp_path / "notes" / "checkpoint_worker_0.json"
    found, ledger = json.loads(file.read_text()), joined(root).ledger
    assert 0 < ledger.samples < COUNT
    assert found == {
        "worker_id": 0,
        "last_processed_sample_idx": len(ledger.done) - 1,
        "total_samples_processed": len(ledger.done),
        "total_shards": ledger.shards,
        "dataset_path": "data.jsonl",
        "model_path": "m",
        "status": "in_progress",
    }
    file.write_text("it is never read")
    stream = visit(spec, root)
    write_checkpoint_file(spec, stream, "completed")
    found = json.loads(file.read_text())
    assert (found["status"], found["last_processed_sample_idx"]) == ("completed", COUNT - 1)


def test_a_heartbeat_that_cannot_be_written_ends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from spile.objects.local import LocalFolder

    put = LocalFolder.put

    def refuses(self: LocalFolder, key: str, data: bytes) -> None:
        if key == "progress.json":
            raise StoreError("no room")
        put(self, key, data)

    monkeypatch.setattr(LocalFolder, "put", refuses)
    text: list[str] = []
    spec = RunSpec(output=str(tmp_path))
    stream = visit(spec, open_folder(str(tmp_path)), progress=Progress(log=text.append))
    assert stream.ledger.samples == COUNT
    assert text[0] == "heartbeat not written (1 so far): no room"


def test_local_copies_of_a_run_in_two_parts(tmp_path: Path) -> None:
    home, copy = tmp_path / "home", tmp_path / "copy"
    root = MirrorFolder(open_folder(str(home)), open_folder(str(copy)))
    spec = RunSpec(output=str(home), local_copy=str(copy))
    visit(spec, root, control=Script(*["go"] * 5, "stop"))
    stream = visit(spec, root)
    assert len(list(home.glob("tpu_0/shard_*"))) == stream.ledger.shards
    assert len(list(copy.glob("tpu_0/shard_*"))) == stream.ledger.shards
    assert len(list(copy.glob("tpu_0/commits/*"))) == stream.ledger.commits


def test_an_upload_that_fails_keeps_no_half_copy(tmp_path: Path) -> None:
    root = MirrorFolder(open_folder(str(tmp_path / "home")), open_folder(str(tmp_path / "copy")))
    spec = replace(RunSpec(output=str(tmp_path / "home")), local_copy=str(tmp_path / "copy"))
    with pytest.raises(Failure):
        visit(spec, root, FailsAt(5, StoreError("gone")))
    assert not list(tmp_path.rglob(".tmp-*"))
