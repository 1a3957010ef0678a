"""The reader returns the correct rows, reads nothing else, and detects damage."""

from __future__ import annotations

import pickle
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import spile
from counting import Counting
from spile.errors import Damaged, StoreError, UserError
from spile.objects import Folder, ObjectInfo, open_folder
from spile.reading.dataset import open as open_dataset
from spile.spec.sample import Role, Sample
from spile.store.run import join_run
from spile.store.stored_stream import Stream
from spile.store.writer import join_stream
from world import TAPS, items, produce, rows_of, run_identity, sample_of, stream_identity

WANTED = [item for item in items(45) if isinstance(item, Sample)]


def all_rows(tap: int, keep: int | None = None, drop: int = 0) -> np.ndarray:
    rows = [
        rows_of(sample, tap)[((sample.roles & (keep or 255)) != 0) & ((sample.roles & drop) == 0)] for sample in WANTED
    ]
    return np.concatenate(rows)


def big(root: Folder, tokens: int = 100_000, shards: int = 2) -> list[Sample]:
    """Taps of several chunks each: 1.6 MB per sample and tap."""
    run = run_identity()
    join_run(root, run)
    store = join_stream(root, 0, stream_identity(100), run)
    made = []
    for shard in range(shards):
        roles = np.zeros(tokens, np.uint8)
        samples = [Sample(2 * shard + n, f"big{n}", np.full(tokens, n, np.int32), roles) for n in range(2)]
        builder = store.begin(samples)
        for tap in range(len(TAPS)):
            builder.write(tap, 0, np.concatenate([rows_of(sample, tap) for sample in samples]))
        store.commit([builder.finish()], [])
        made += samples
    return made


def test_everything_reads_back(folder: Folder) -> None:
    produce(folder, 45)
    dataset = open_dataset(folder.url if "://" not in folder.url else folder)
    assert dataset.taps == tuple(str(tap) for tap in TAPS)
    assert [stream.number for stream in dataset.streams] == [0]
    assert len(dataset.samples) == len(WANTED) == dataset.streams[0].samples
    for ref, sample in zip(dataset.samples, WANTED, strict=True):
        assert (ref.stream, ref.index, ref.task_id, ref.length) == (0, sample.index, sample.task_id, len(sample))
        assert (ref.preview, ref.augmentation, ref.truncated) == (
            sample.preview,
            sample.augmentation,
            sample.truncated,
        )
    assert dataset.samples[-1] == dataset.samples[len(WANTED) - 1]
    assert [ref.index for ref in dataset.samples[3:6]] == [sample.index for sample in WANTED[3:6]]
    with pytest.raises(IndexError):
        dataset.samples[len(WANTED)]
    stored = dataset.sample(0, 12)
    assert np.array_equal(stored.tokens, sample_of(12).tokens)
    assert np.array_equal(stored.roles, sample_of(12).roles)
    assert stored.ref.task_id == "task-6"
    rows = stored.all_rows()
    assert rows["residual.0"].dtype.name == "bfloat16"
    assert all(np.array_equal(rows[str(tap)], rows_of(sample_of(12), place)) for place, tap in enumerate(TAPS))
    assert np.array_equal(stored.rows(TAPS[1]), rows["attn.1"])
    assert list(stored.all_rows(["attn.1"])) == ["attn.1"]


@given(
    st.integers(1, 2000),
    st.sampled_from([None, Role.USER, Role.FIRST, Role.ASSISTANT]),
    st.sampled_from([None, Role.FIRST, Role.BOS]),
)
def test_batches_of_any_size_are_the_rows_in_order(batch: int, include: int | None, exclude: int | None) -> None:
    dataset = open_dataset(_made_once())
    wanted = all_rows(1, include, exclude or 0)
    found = list(dataset.rows("attn.1", batch, include=include, exclude=exclude))
    assert all(len(part) == batch for part in found[:-1])
    assert np.array_equal(np.concatenate(found) if found else wanted[:0], wanted)
    for part in dataset.batches("attn.1", batch, include=include, exclude=exclude):
        assert part.samples is not None
        assert part.positions is not None
        assert part.tokens is not None
        for row in range(0, len(part), 97):
            sample, position = sample_of(int(part.samples[row])), int(part.positions[row])
            assert part.tokens[row] == sample.tokens[position]
            assert np.array_equal(part.rows[row], rows_of(sample, 1)[position])


@pytest.mark.parametrize("readers", [1, 2, 3, 40])
def test_of_several_readers_each_row_goes_to_one(tmp_path: Path, readers: int) -> None:
    produce(open_folder(str(tmp_path)), 45)
    produce(open_folder(str(tmp_path)), 45, worker_id=3, cut=4)
    dataset = open_dataset(str(tmp_path))
    whole = [row.tobytes() for rows in dataset.rows("attn.1", 100) for row in rows]
    parts = [[row for rows in dataset.rows("attn.1", 100, part=(k, readers)) for row in rows] for k in range(readers)]
    assert [row.tobytes() for part in parts for row in part] == whole, "parts follow one another"
    assert all(parts)
    for wrong in ((-1, 2), (2, 2), (0, 0)):
        with pytest.raises(UserError, match=r"part: expected \(k, n\) with k from 0 to n - 1"):
            next(dataset.batches("attn.1", part=wrong))


_MADE: list[Folder] = []


def _made_once() -> Folder:
    if not _MADE:
        import atexit
        import tempfile

        kept = tempfile.TemporaryDirectory()
        atexit.register(kept.cleanup)
        _MADE.append(open_folder(kept.name))
        produce(_MADE[0], 45)
    return _MADE[0]


def test_rows_that_lie_across_chunks_and_pieces(tmp_path: Path) -> None:
    """Batches that end inside chunks: 3 columns of bf16, 13 MB per tap."""
    root = open_folder(str(tmp_path))
    run = run_identity(d_model=3)
    join_run(root, run)
    store = join_stream(root, 0, stream_identity(9), run)
    samples = [Sample(n, "t", np.arange(1_100_000, dtype=np.int32), np.zeros(1_100_000, np.uint8)) for n in range(2)]
    builder = store.begin(samples)
    for tap in range(len(TAPS)):
        builder.write(tap, 0, np.concatenate([rows_of(sample, tap, d=3) for sample in samples]))
    store.commit([builder.finish()], [])
    for source in (root, Counting(root)):
        rows = np.concatenate(list(open_dataset(source).rows("residual.1", 300_001)))
        assert np.array_equal(rows, np.concatenate([rows_of(sample, 2, d=3) for sample in samples]))


def test_nothing_is_read_that_was_not_asked_for(tmp_path: Path) -> None:
    counting = Counting(open_folder(str(tmp_path)))
    big(counting)
    dataset = open_dataset(counting)
    _ = dataset.taps, dataset.streams, len(dataset.samples)
    assert not counting.ranges
    block = 100_000 * 2 * 16
    batches = dataset.rows("attn.1", 1000)
    next(batches)
    # Of the first shard: header, tail (1.0 MB of tokens and roles in it) and this tap's block; not the second's.
    total = counting.read_of()
    assert len([key for key in total if key.endswith("safetensors")]) <= 2
    list(batches)
    for record in dataset.streams[0].shards:
        read = sum(length for key, _, length in counting.ranges if key.endswith(record.name))
        assert read <= block + record.header[0] + 1_100_000
        starts = {start for key, start, _ in counting.ranges if key.endswith(record.name)}
        shard = dataset._open_shard(dataset.streams[0], record)
        others = [shard.place(tap) for tap in ("residual.0", "residual.1")]
        assert not any(place.start <= start < place.stop for start in starts for place in others)
    counting.ranges.clear()
    dataset.sample(0, 1).rows("residual.1")
    taps = [(start, length) for _, start, length in counting.ranges if length > 4096 and length != 1_000_060]
    place = dataset._open_shard(dataset.streams[0], dataset.streams[0].shards[0]).place("residual.1")
    assert [(start, length) for start, length in taps if place.start <= start < place.stop] == [
        (place.start + 6 * (1 << 18), block - 6 * (1 << 18))  # row 100,000 is in the chunk of 16,384 rows before it
    ]


@pytest.mark.parametrize("how", ["flipped", "short"])
def test_damage_on_the_way_is_never_given_as_data(tmp_path: Path, how: str) -> None:
    counting = Counting(open_folder(str(tmp_path)))
    big(counting, shards=1)
    record = open_dataset(counting).streams[0].shards[0]
    for offset in (9, 5000, 3_200_000 + 5000, record.size - 20, record.size - 1_000_020):
        dataset = open_dataset(counting)

        def spoil(key: str, start: int, data: bytes, offset: int = offset) -> bytes:
            if not start <= offset < start + len(data):
                return data
            at = offset - start
            return data[:at] if how == "short" else bytes([*data[:at], data[at] ^ 4, *data[at + 1 :]])

        counting.spoil = spoil
        with pytest.raises((Damaged, StoreError), match="shard_0001"):
            _read_all(dataset)
        counting.spoil = None
    _read_all(open_dataset(counting))


def _read_all(dataset: spile.reading.dataset.Dataset) -> None:
    for tap in dataset.taps:
        list(dataset.batches(tap))


@given(st.data())
def test_any_flipped_bit_on_disk_is_noticed(data: st.DataObject) -> None:
    root = _made_once()
    record = open_dataset(root).streams[0].shards[1]
    path = Path(root.url) / "tpu_0" / record.name
    before = path.read_bytes()
    at = data.draw(st.integers(0, len(before) - 1))
    spoiled = bytearray(before)
    spoiled[at] ^= 1 << data.draw(st.integers(0, 7))
    path.write_bytes(spoiled)
    try:
        with pytest.raises(Damaged, match=record.name):
            _read_all(open_dataset(root))
    finally:
        path.write_bytes(before)


def test_a_sample_read_is_checked_too(tmp_path: Path) -> None:
    root = open_folder(str(tmp_path))
    big(root, shards=1)
    record = open_dataset(root).streams[0].shards[0]
    path = tmp_path / "tpu_0" / record.name
    data = bytearray(path.read_bytes())
    data[4096 + 100] ^= 1
    path.write_bytes(data)
    dataset = open_dataset(root)
    with pytest.raises(Damaged, match=r"residual\.0, chunk 0: expected crc32c .*, found "):
        dataset.sample(0, 0).rows("residual.0")
    assert len(dataset.sample(0, 0).rows("residual.1")) == 100_000
    path.write_bytes(data[:-1])
    with pytest.raises(Damaged, match=r"has the wrong size: expected \d+, found \d+"):
        open_dataset(root).sample(0, 0)
    path.unlink()
    with pytest.raises(StoreError, match=record.name):
        open_dataset(root).sample(0, 0)


def test_uncommitted_shards_are_not_seen(folder: Folder) -> None:
    store = produce(folder, 20)
    builder = store.begin([sample_of(3)])
    for tap in range(len(TAPS)):
        builder.write(tap, 0, rows_of(sample_of(3), tap))
    builder.finish()
    assert len(open_dataset(folder).samples) == 19


def test_streams_may_tap_different_layers(tmp_path: Path) -> None:
    root = open_folder(str(tmp_path))
    produce(root, 8)
    store = join_stream(root, 12, stream_identity(1, taps=TAPS[:1]), run_identity())
    builder = store.begin([sample_of(0)])
    builder.write(0, 0, rows_of(sample_of(0), 0))
    store.commit([builder.finish()], [])
    dataset = open_dataset(root)
    assert [stream.number for stream in dataset.streams] == [0, 12]
    count = len(sample_of(0))
    assert sum(map(len, dataset.rows("residual.0"))) - sum(map(len, dataset.rows("attn.1"))) == count
    assert sum(map(len, dataset.rows("residual.0", streams=[12]))) == count
    with pytest.raises(UserError, match=r"no tap attn.1 in this dataset: expected one of residual.0, attn.1"):
        dataset.rows("attn.1", streams=[12])
    with pytest.raises(UserError, match=r"no stream 3 in .*: expected one of 0, 12"):
        dataset.sample(3, 0)
    with pytest.raises(UserError, match=r"no sample 5 in stream 0 .*: found it was skipped"):
        dataset.sample(0, 5)
    with pytest.raises(UserError, match="found it is not stored"):
        dataset.sample(0, 500)
    with pytest.raises(UserError, match=r"no tap mlp\.0"):
        dataset.sample(0, 1).rows("mlp.0")


def test_a_dataset_goes_to_another_process_as_its_address(tmp_path: Path) -> None:
    produce(open_folder(str(tmp_path)), 9)
    dataset = spile.open(str(tmp_path))
    list(dataset.rows("attn.1"))
    again = pickle.loads(pickle.dumps(dataset))
    assert np.array_equal(again.sample(0, 4).rows("attn.1"), dataset.sample(0, 4).rows("attn.1"))


def test_a_missing_dataset_is_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no dataset at .*: expected a folder with run.json"):
        spile.open(str(tmp_path))


def test_import_spile_is_light() -> None:
    light = "import sys, spile; assert not {'numpy', 'jax', 'obstore'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", f"{light}; spile.open; assert 'jax' not in sys.modules"], check=True)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = spile.nothing


def test_a_flip_on_the_way_is_read_again(tmp_path: Path) -> None:
    """One mismatch may be a network error; the same mismatch twice means that the object is damaged."""
    counting = Counting(open_folder(str(tmp_path)))
    big(counting, shards=1)
    flipped: list[int] = []

    def spoil(key: str, start: int, data: bytes) -> bytes:
        if start in flipped:
            return data
        flipped.append(start)
        return bytes([data[0] ^ 1]) + data[1:]

    counting.spoil = spoil
    _read_all(open_dataset(counting))
    assert len(flipped) > 3


def copied(root: Path, source: str, target: str) -> None:
    shutil.copytree(root / source, root / target)


def test_a_stream_that_is_not_this_datasets_is_refused(tmp_path: Path) -> None:
    ours, other = tmp_path / "ours", tmp_path / "other"
    produce(open_folder(str(ours)), 12)
    copied(ours, "tpu_0", "tpu_1")
    with pytest.raises(
        Damaged,
        match=r"tpu_1 does not belong .* stream.json belongs to another stream: expected stream 1, found stream 0",
    ):
        open_dataset(str(ours))
    shutil.rmtree(ours / "tpu_1")
    run = run_identity(store_dtype="float32")
    join_run(open_folder(str(other)), run)
    join_stream(open_folder(str(other)), 1, stream_identity(12), run)
    shutil.copytree(other / "tpu_1", ours / "tpu_1")
    with pytest.raises(Damaged, match=r"tpu_1 does not belong .* stream.json belongs to another run.*Move .*tpu_1 out"):
        open_dataset(str(ours))


def test_streams_of_two_splits_are_refused(tmp_path: Path) -> None:
    root = open_folder(str(tmp_path))
    join_run(root, run_identity())
    for number, split in enumerate(("even", "odd")):
        join_stream(root, number, replace(stream_identity(12), streams=2, split=split), run_identity())
    with pytest.raises(Damaged, match="its streams are of different splits of the data"):
        open_dataset(root)


def test_a_shard_that_says_it_is_another_streams_is_refused(tmp_path: Path) -> None:
    """Correct checksums and position but another id: only the header shows it."""
    root = open_folder(str(tmp_path))
    produce(root, 12)
    stream = open_dataset(root).streams[0]
    liar = Stream(stream.folder, replace(stream.record, id="0123456789abcdef"))
    with pytest.raises(Damaged, match=r"is a shard of another stream: expected 0123456789abcdef, found"):
        _ = liar.open(stream.shards[0]).header


def test_a_hundred_streams_are_asked_for_side_by_side(tmp_path: Path) -> None:
    root = open_folder(str(tmp_path))
    join_run(root, run_identity())
    for number in range(40):
        join_stream(root, number, stream_identity(12), run_identity())
    together = threading.Barrier(32, timeout=120)

    class Waiting(Counting):
        def child(self, path: str) -> Counting:
            return Waiting(self.inner.child(path), f"{self.prefix}{path}/", self)

        def get(self, key: str) -> bytes:
            if self.prefix and len(self.gets) < 32:
                self.gets.append(key)
                together.wait()
            return self.inner.get(key)

    assert len(open_dataset(Waiting(root)).streams) == 40


def test_ledgers_are_read_side_by_side(tmp_path: Path) -> None:
    """Streams share no lock, because they wait for replies of the bucket."""
    root = open_folder(str(tmp_path))
    join_run(root, run_identity())
    for number in range(8):
        join_stream(root, number, stream_identity(12), run_identity())
    together = threading.Barrier(8, timeout=120)

    class Waiting(Counting):
        def child(self, path: str) -> Counting:
            return Waiting(self.inner.child(path), f"{self.prefix}{path}/", self)

        def list(self, prefix: str = "") -> Iterator[ObjectInfo]:
            if prefix == "commits/":
                together.wait()
            return self.inner.list(prefix)

    assert len(open_dataset(Waiting(root)).samples) == 0


def test_a_hub_that_does_not_answer_is_asked_once(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each attempt may take minutes, and every sample of a notebook asks for its text."""
    asked = []

    def find(name: str, *_: object, **__: object) -> None:
        asked.append(name)
        raise StoreError(f"{name} cannot be reached")

    monkeypatch.setattr("spile.models.model_files.find", find)
    produce(folder, 6)
    dataset = open_dataset(folder)
    for sample in dataset:
        with pytest.raises(UserError, match=r"no tokenizer for .* cannot be reached"):
            _ = sample.text
        assert sample.shown_texts()[0] == f" {sample.tokens[0]}"
    assert len(asked) == 1
    with pytest.raises(UserError, match="cannot be reached"):
        open_dataset(folder).decode(1)
    assert len(asked) == 2
