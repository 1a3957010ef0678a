"""verify accepts a complete dataset and names every problem of any other one."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends import Clouds
from counting import Counting
from recomputing import Rows, recompute_with
from spile.errors import Fenced, UserError
from spile.objects import Folder, open_folder
from spile.objects.clouds import GoogleBucket
from spile.proof.verification import verify
from spile.reading.dataset import open as open_dataset
from spile.spec.phase import Phase
from spile.spec.ranges import Ranges
from spile.spec.sample import Sample, Skip
from spile.store.heartbeat import Beat
from spile.store.layout import commit_key
from spile.store.ledger import Commit, ShardRecord, iso_time
from spile.store.run import join_run
from spile.store.writer import StreamWriter, join_stream
from world import TAPS, D, items, produce, rows_of, run_identity, sample_of, stream_identity, write_shard

BY_TOKENS = {tuple(item.tokens.tolist()): item for item in items(45) if isinstance(item, Sample)}


def joined(folder: Folder, samples: int | None = 45, attempt: str | None = None) -> StreamWriter:
    join_run(folder, run_identity())
    return join_stream(folder, 0, stream_identity(samples), run_identity(), attempt)


def shard(store: StreamWriter, *indices: int) -> ShardRecord:
    samples = [sample_of(index) for index in indices]
    builder = store.begin(samples)
    write_shard(builder, samples)
    return builder.finish()


def lines(folder: Folder, **options: object) -> list[str]:
    report = verify(folder, **options)  # type: ignore[arg-type]
    assert report.ok == (not report.all_problems)
    return [problem.line().replace(folder.url, "ROOT") for problem in report.all_problems]


def test_a_whole_dataset_is_proven(folder: Folder) -> None:
    store = produce(folder, 45)
    produce(folder, 20, worker_id=7, cut=4)
    seen: list[tuple[int, int]] = []
    report = verify(folder, progress=lambda done, total: seen.append((done, total)))
    assert report.ok
    assert [stream.number for stream in report.streams] == [0, 7]
    first = report.streams[0]
    assert (first.samples, first.skipped, first.expected, first.shards) == (42, 3, 45, 5)
    assert (first.tokens, first.bytes) == (store.ledger.tokens, store.ledger.bytes)
    assert json.loads(json.dumps(report.to_json()))["ok"] is True
    assert seen[-1][1] == store.ledger.bytes + report.streams[1].bytes


def test_missing_samples_are_named(folder: Folder) -> None:
    store = joined(folder, 20)
    store.commit([shard(store, 0, 1, 4)], [Skip(2, "t", "empty")])
    store.commit([shard(store, 9)])
    assert lines(folder) == ["missing: ROOT/tpu_0: samples 3, 5-8, 10-19 (15 of 20)"]
    assert lines(folder, max_samples=3) == []
    assert lines(folder, max_samples=5) == ["missing: ROOT/tpu_0: samples 3 (1 of 5)"]
    assert verify(folder).streams[0].missing.pairs() == [(3, 4), (5, 9), (10, 20)]


def test_a_packed_stream_ends_where_its_commits_say(folder: Folder) -> None:
    store = joined(folder, None)
    store.commit([shard(store, 0, 1)])
    assert lines(folder) == ["missing: ROOT/tpu_0: its length is unknown until a worker has read it to the end"]
    assert lines(folder, max_samples=2) == []
    store.commit([shard(store, 2)], end=4)
    assert lines(folder) == ["missing: ROOT/tpu_0: samples 3 (1 of 4)"]
    store.commit([shard(store, 3)], end=4)
    assert lines(folder) == []
    store.commit([shard(store, 6)], end=5)
    assert lines(folder)[0].startswith("missing: ROOT/tpu_0: samples 4")
    assert "samples 6 are beyond the end of the stream, which has 5 samples" in lines(folder)[1]
    assert "its commits disagree about its end: [4, 5]" in lines(folder)[2]


def test_doubled_samples_are_named(folder: Folder) -> None:
    store = joined(folder, 4)
    record = shard(store, 0, 1, 2, 3)
    store.commit([record])
    other = shard(store, 1, 2)
    forged = Commit(2, "evil", store.record.id, (other,), (), None)
    store.folder.create(commit_key(2), forged.to_bytes())
    assert lines(folder) == ["doubled: ROOT/tpu_0: samples 1-2"]


def test_a_dataset_without_streams_or_run_is_not_proven(folder: Folder) -> None:
    with pytest.raises(UserError, match=r"no dataset at .*: expected a folder with run\.json"):
        verify(folder)
    join_run(folder, run_identity())
    assert lines(folder) == ["missing: ROOT: the dataset has no stream"]


def test_a_lost_stream_record_or_commit_is_damage(folder: Folder) -> None:
    produce(folder, 45)
    folder.delete("tpu_0/commits/0002.json")
    assert "the ledger of ROOT/tpu_0 has a gap: expected commits 1 to 5, found none numbered 2" in lines(folder)[0]
    folder.delete("tpu_0/stream.json")
    assert lines(folder) == ["damaged: ROOT/tpu_0: stream.json is gone"]


def test_losing_the_last_commits_shows_as_missing_samples(folder: Folder) -> None:
    produce(folder, 45)
    folder.delete("tpu_0/commits/0005.json")
    assert lines(folder)[0].startswith("missing: ROOT/tpu_0: samples 43-44 (2 of 45)")


def test_a_lost_or_short_shard_is_damage(folder: Folder) -> None:
    store = produce(folder, 45)
    names = [file.name for file in store.ledger.files]
    data = folder.get(f"tpu_0/{names[1]}")
    folder.delete(f"tpu_0/{names[0]}")
    folder.put(f"tpu_0/{names[1]}", data[:-1])
    found = lines(folder)
    assert found[0] == f"damaged: ROOT/tpu_0/{names[0]}: the shard is gone"
    assert f"{names[1]}: has the wrong size: expected {len(data)} bytes, found {len(data) - 1}" in found[1]


def test_any_changed_byte_is_found(tmp_path: Path) -> None:
    root = open_folder(str(tmp_path))
    store = produce(root, 9)
    name = store.ledger.files[0].name
    path = tmp_path / "tpu_0" / name
    data = path.read_bytes()
    for source in (root, Counting(root)):
        for at in [*range(0, len(data), 97), len(data) - 1]:
            changed = bytearray(data)
            changed[at] ^= 0x10
            path.write_bytes(changed)
            assert len(lines(source)) == 1, at
            assert name in lines(source)[0]
    path.write_bytes(data)
    assert lines(root) == []


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_nan_and_infinity_are_found(tmp_path: Path, bad: float, dtype: str) -> None:
    root = open_folder(str(tmp_path))
    run = run_identity(store_dtype=dtype)
    join_run(root, run)
    store = join_stream(root, 0, stream_identity(1), run)
    sample = Sample(0, "t", np.zeros(5, np.int32), np.zeros(5, np.uint8))
    builder = store.begin([sample])
    for tap in range(3):
        rows = np.full((5, D), 3.0e38 if dtype != "float16" else 65504.0).astype(dtype)
        if tap == 1:
            rows[4, 7] = bad
        builder.write(tap, 0, rows)
    store.commit([builder.finish()])
    assert lines(root)[0].endswith("attn.1 has 1 values that are NaN or infinite")


def test_a_shard_that_is_not_what_its_commit_says_is_damage(tmp_path: Path) -> None:
    """Correct checksums but invalid content: a bug of the writer, or a forgery."""
    root = open_folder(str(tmp_path))
    store = joined(root, 4)
    good = shard(store, 0, 1)
    wrong = {
        "sample_index is not the commit's samples": {"samples": Ranges([(1, 3)])},
        "offsets is I64 [3], expected I64 [4]": {"samples": Ranges([(0, 3)]), "count": 3},
        "residual.0 is BF16": {"tokens": good.tokens + 1},
        "the commit has checksums of other tensors": {"tensors": {**good.tensors, "extra": 5}},
        "expected crc32c 00000007": {"crc32c": 7},
        "its commit has no checksum of chunk_crc32c": {"tensors": {}},
        "its content is invalid: KeyError: 'residual.0'": {
            "tensors": {name: crc for name, crc in good.tensors.items() if name != "residual.0"}
        },
        "its header: expected crc32c 00000001": {"header": (good.header[0], 1)},
        "chunk_crc32c: expected crc32c 00000009": {"tensors": {**good.tensors, "chunk_crc32c": 9}},
        "tokens: expected crc32c 00000009": {"tensors": {**good.tensors, "tokens": 9}},
    }
    for text, changes in wrong.items():
        record = ShardRecord(**{**vars(good), **changes})
        folder = root.child("tpu_0")
        folder.put(commit_key(1), Commit(1, "a", store.record.id, (record,), (), None).to_bytes())
        assert any(text in line for line in lines(root)), (text, lines(root))


def test_a_shard_of_another_run_or_stream_is_damage(tmp_path: Path) -> None:
    root, other = open_folder(str(tmp_path / "a")), open_folder(str(tmp_path / "b"))
    store = joined(root, 2)
    join_run(other, run_identity(weights="other"))
    stranger = join_stream(other, 0, stream_identity(2), run_identity(weights="other"))
    record = shard(stranger, 0, 1)
    root.put(f"tpu_0/{record.name}", other.get(f"tpu_0/{record.name}"))
    store.commit([record])
    found = lines(root)
    assert len(found) == 2
    assert f"the header says fingerprint {run_identity(weights='other').fingerprint()}, expected" in found[0]
    assert "the header says stream" in found[1]


def by_tokens(tokens: np.ndarray, taps: tuple[str, ...]) -> list[np.ndarray]:
    sample = BY_TOKENS[tuple(tokens.tolist())]
    names = [str(tap) for tap in TAPS]
    return [rows_of(sample, names.index(tap)).astype(np.float32) for tap in taps]


def test_recomputed_rows_are_compared(folder: Folder) -> None:
    produce(folder, 45)
    report = verify(folder, recompute=recompute_with(by_tokens), k=6)
    assert report.ok
    assert report.recomputed is not None
    assert (report.recomputed.samples, set(report.recomputed.worst)) == (6, {str(tap) for tap in TAPS})
    assert max(report.recomputed.worst.values()) == 0.0
    seen: set[int] = set()

    def off(tokens: np.ndarray, taps: tuple[str, ...]) -> list[np.ndarray]:
        rows = by_tokens(tokens, taps)
        seen.add(BY_TOKENS[tuple(tokens.tolist())].index)
        rows[1] = rows[1] + 0.1
        return rows

    found = lines(folder, recompute=recompute_with(off), k=3, seed=4)
    assert len(found) == 3 == len(seen)
    assert f"wrong: ROOT/tpu_0: sample {min(seen)} at attn.1: the row of token" in "\n".join(found)
    nan = lines(folder, recompute=recompute_with(lambda t, taps: [r * np.nan for r in by_tokens(t, taps)]), k=1)
    assert len(nan) == 3


def noisy(seed: int, size: float = 2.0**-7) -> Rows:
    """The stored rows with the noise of a computation in bfloat16."""

    def rows(tokens: np.ndarray, taps: tuple[str, ...]) -> list[np.ndarray]:
        random = np.random.default_rng([seed, *tokens.tolist()])
        return [each * (1 + size * random.standard_normal(each.shape)) for each in by_tokens(tokens, taps)]

    return rows


def test_noise_is_measured_and_allowed_for(folder: Folder) -> None:
    produce(folder, 45)
    report = verify(folder, recompute=recompute_with(noisy(1), noisy(2)), k=45)
    assert not report.all_problems
    assert report.recomputed is not None
    noise = report.recomputed.taps["attn.1"]
    assert 2.0**-8 < noise.stored < noise.fresh < 2.0**-5
    assert noise.rows == sum(map(len, BY_TOKENS.values()))
    assert noise.unjudged == 0
    quiet = lines(folder, recompute=recompute_with(noisy(1, 2.0**-5)), k=45)
    assert len(quiet) == 3 * len(BY_TOKENS)  # the same stored rows, and a model that has no such noise


def test_a_row_that_is_noisy_only_sometimes_is_computed_again(folder: Folder) -> None:
    """The noise of a row has a heavy tail: one new computation may not show it."""
    produce(folder, 45)
    calls: list[int] = []

    def reference(tokens: np.ndarray, taps: tuple[str, ...]) -> list[np.ndarray]:
        return [np.concatenate([rows[:1] * 1.3, rows[1:]]) for rows in by_tokens(tokens, taps)]

    def recompute(samples, taps, variant=0):  # type: ignore[no-untyped-def]
        calls.append(variant)
        fresh = by_tokens if variant == 5 else reference
        return recompute_with(reference, fresh)(samples, taps, variant)

    assert lines(folder, recompute=recompute, k=3) == []
    assert calls == [0, 1, 2, 3, 4, 5]


# Garbage


def orphan(store: StreamWriter) -> str:
    return shard(store, 40).name


def garbage(folder: Folder, **options: object) -> list[tuple[str, str]]:
    report = verify(folder, gc=True, **{"older_than": -10.0, **options})  # type: ignore[arg-type]
    return [(item.key, item.state) for item in report.garbage]


def test_orphans_are_found_and_removed_only_on_request(folder: Folder) -> None:
    store = produce(folder, 45)
    name = f"tpu_0/{orphan(store)}"
    left = store.begin([sample_of(3)])
    left.write(0, 0, rows_of(sample_of(3), 0))
    found = garbage(folder)
    assert (name, "found") in found
    assert all(state == "found" for _, state in found)
    if "://" not in folder.url:
        assert [key for key, _ in found] == [name, f"tpu_0/{left.name}"]
    assert verify(folder).garbage == ()
    assert verify(folder).ok
    assert garbage(folder, older_than=1e6) == [(key, "too young") for key, _ in found]
    assert garbage(folder, older_than=1e6, remove=True) == [(key, "too young") for key, _ in found]
    assert garbage(folder, remove=True) == [(key, "removed") for key, _ in found]
    assert garbage(folder) == []
    assert verify(folder).ok
    assert len(open_dataset(folder).samples) == 42


def test_a_worker_that_slept_through_the_collection_is_fenced(folder: Folder) -> None:
    """The worker continues with a shard that was removed; its commit must fail."""
    store = joined(folder, 4)
    store.commit([shard(store, 0)])
    record = shard(store, 1, 2, 3)
    assert garbage(folder, remove=True) == [(f"tpu_0/{record.name}", "removed")]
    with pytest.raises(Fenced):
        store.commit([record])
    heir = joined(folder, 4)
    heir.commit([shard(heir, 1, 2, 3)])
    assert verify(folder).ok


def test_a_stream_with_a_heartbeat_is_left_alone(folder: Folder) -> None:
    store = joined(folder, 4)
    record = shard(store, 1)
    stamp = iso_time(time.time() - 60)
    beat = Beat(phase=Phase.RUNNING, attempt=store.attempt, host="h", started=stamp, updated=stamp, version="1")
    folder.put("tpu_0/progress.json", json.dumps(beat.to_json()).encode())
    assert garbage(folder, remove=True) == [(f"tpu_0/{record.name}", "a worker is alive")]
    folder.put("tpu_0/progress.json", b"garbled")
    assert garbage(folder, remove=True) == [(f"tpu_0/{record.name}", "a worker is alive")]
    store.commit([record])
    assert garbage(folder) == []


def test_a_commit_between_the_search_and_the_removal_holds_it_back(
    folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = joined(folder, 4)
    record = shard(store, 1)
    from spile.proof import verification as module

    real = module.fence

    def late(*args: object) -> bool:
        store.commit([record])
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "fence", late)
    assert garbage(folder, remove=True) == [(f"tpu_0/{record.name}", "a worker is alive")]
    assert open_dataset(folder).sample(0, 1).rows("attn.1").shape[1] == D


def test_the_shards_of_an_unreadable_ledger_are_no_garbage(folder: Folder) -> None:
    produce(folder, 45)
    folder.delete("tpu_0/commits/0002.json")
    assert garbage(folder, remove=True) == []
    assert sum(info.key.endswith(".safetensors") for info in folder.list()) == 5


@pytest.mark.parametrize("stranger", ["tpu_0/.tmp-report.docx", "tpu_0/.tmp-0123456789abcdef-thesis.tex", "other/x"])
def test_a_temporary_file_of_another_program_is_not_garbage(tmp_path: Path, stranger: str) -> None:
    """Only names of exactly our shape, in this dataset's own streams."""
    root = open_folder(str(tmp_path / "root"))
    produce(root, 4)
    name = stranger if "tmp" in stranger else "other/.tmp-0123456789abcdef-shard_0001-abcd.safetensors"
    theirs = tmp_path / "root" / name
    theirs.parent.mkdir(exist_ok=True)
    theirs.write_text("theirs")
    ours = tmp_path / "root" / "tpu_0" / ".tmp-0123456789abcdef-shard_0009-abcd.safetensors"
    ours.write_text("ours")
    assert garbage(root, remove=True) == [("tpu_0/shard_0009-abcd.safetensors", "removed")]
    assert theirs.read_text() == "theirs"
    assert not ours.exists()


def test_another_datasets_uploads_and_files_below_the_root_are_no_garbage(cloud_folder: Folder) -> None:
    produce(cloud_folder, 4)
    inner = cloud_folder.child("experiment")
    produce(inner, 4)
    shard_file = "shard_0009-abcd.safetensors"
    for place in (cloud_folder, inner, cloud_folder.child("tpu_7")):  # A stream that was never started has no garbage.
        place.child("tpu_0").put(shard_file, b"orphan")
    bucket = open_folder(cloud_folder.url)
    handles = [begin_upload(bucket, f"{key}{shard_file}") for key in ("tpu_0/", "experiment/tpu_0/", "")]
    assert garbage(cloud_folder, remove=True) == [(f"tpu_0/{shard_file}", "removed")] * 2
    assert {left.handle for left in cloud_folder.unfinished()} == set(handles[1:])
    assert inner.get(f"tpu_0/{shard_file}") == b"orphan"


def begin_upload(folder: Folder, key: str) -> str:
    """Start a multipart upload as a worker that is then killed does."""
    bucket, _, prefix = folder.url.partition("://")[2].partition("/")
    if folder.url.startswith("gs:"):
        reply = GoogleBucket(bucket).request("POST", f"{bucket}/{prefix}/{key}", {"uploads": ""})
        return re.findall(r"<UploadId>(.*)</UploadId>", reply.decode())[0]
    client = Clouds.s3_client(os.environ["AWS_ENDPOINT_URL"])
    return str(client.create_multipart_upload(Bucket=bucket, Key=f"{prefix}/{key}")["UploadId"])


def test_a_file_that_is_cut_while_it_is_open_is_damage(tmp_path: Path) -> None:
    produce(open_folder(str(tmp_path)), 45)
    script = f"""
import os
import spile
import spile.store.shard_reader
spile.store.shard_reader.SMALL_SHARD = 0  # a small one is held whole
dataset = spile.open({str(tmp_path)!r})
first = dataset.samples[0]
sample = dataset.sample(0, first.index)
sample.rows("residual.0")
for name in os.listdir({str(tmp_path / "tpu_0")!r}):
    if name.endswith("safetensors"):
        os.truncate(os.path.join({str(tmp_path / "tpu_0")!r}, name), 4096)
try:
    sample.rows("residual.1")
except spile.errors.Damaged as error:
    print(error)
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert "has the wrong size: expected" in ended.stdout


@pytest.mark.parametrize("call", ["open", "preadv"])
def test_a_block_that_the_disk_cannot_read_is_damage_of_that_shard_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    root = open_folder(str(tmp_path))
    names = [file.name for file in produce(root, 45).ledger.files]
    bad = (tmp_path / "tpu_0" / names[1]).stat().st_ino
    real_read, real_open = os.preadv, os.open

    def read(handle: int, buffers: list[memoryview], offset: int) -> int:
        if call == "preadv" and os.fstat(handle).st_ino == bad:
            raise OSError(errno.EIO, "Input/output error")
        return real_read(handle, buffers, offset)

    def opened(path: Any, *args: Any, **options: Any) -> Any:
        if call == "open" and Path(path).name == names[1]:
            raise OSError(errno.EIO, "Input/output error")
        return real_open(path, *args, **options)

    monkeypatch.setattr(os, "preadv", read)
    monkeypatch.setattr(os, "open", opened)
    (line,) = lines(root)
    assert line.startswith(f"damaged: ROOT/tpu_0/{names[1]}: ")
    assert "cannot be read: found a block that the disk cannot return" in line
