"""Shards: read back with nothing but what the format says, and with the safetensors library."""

from __future__ import annotations

import json
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import google_crc32c
import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from spile.errors import Damaged, RunMismatch
from spile.objects import open_folder
from spile.proof.verification import verify
from spile.spec.ranges import Ranges
from spile.spec.sample import Sample
from spile.spec.taps import TapRows
from spile.store.ledger import ShardRecord
from spile.store.run import join_run
from spile.store.shard import ShardSchema, parse_shard_header, plan_shard
from spile.store.writer import StreamWriter, join_stream, read_stream
from world import TAPS, D, rows_of, run_identity, sample_of, stream_identity, write_shard


def joined(path: Path, **changes: object) -> StreamWriter:
    return join_stream(open_folder(str(path)), 0, stream_identity(1000), run_identity(**changes))


def plain_read(path: Path) -> tuple[dict[str, str], dict[str, np.ndarray]]:
    """As docs/format.md says, with json and struct alone."""
    data = path.read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__")
    kinds = {
        "BF16": ml_dtypes.bfloat16,
        "F32": "<f4",
        "F16": "<f2",
        "I64": "<i8",
        "I32": "<i4",
        "U32": "<u4",
        "U8": "u1",
    }
    tensors = {}
    for name, field in header.items():
        start, stop = (8 + length + offset for offset in field["data_offsets"])
        tensors[name] = np.frombuffer(data[start:stop], kinds[field["dtype"]]).reshape(field["shape"])
    return metadata, tensors


def chunk_sums(metadata: dict[str, str], tensors: dict[str, np.ndarray]) -> list[int]:
    """As docs/format.md says."""
    rows = json.loads(metadata["chunk_rows"])
    assert metadata["chunk_bytes"] == "524288"
    assert list(rows) == [str(tap) for tap in TAPS]
    found = []
    for name, array in tensors.items():
        step = 1 << 19
        if name in rows:
            step = rows[name] * array.shape[1] * array.itemsize
            assert step <= 1 << 19 < 2 * step
            assert rows[name].bit_count() == 1
        if name != "chunk_crc32c":
            found += [google_crc32c.value(array.tobytes()[at : at + step]) for at in range(0, array.nbytes, step)]
    return found


def check(path: Path, samples: list[Sample], record: ShardRecord, dtype: str = "bfloat16") -> None:
    data = path.read_bytes()
    assert record.size == len(data)
    assert record.crc32c == google_crc32c.value(data)
    assert record.header == ((int.from_bytes(data[:8], "little") + 8), google_crc32c.value(data[: record.header[0]]))
    assert record.header[0] % 4096 == 0
    metadata, tensors = plain_read(path)
    assert {name: google_crc32c.value(array.tobytes()) for name, array in tensors.items()} == dict(record.tensors)
    assert tensors["chunk_crc32c"].tolist() == chunk_sums(metadata, tensors)
    offsets = np.cumsum([0, *(len(sample) for sample in samples)])
    assert tensors["offsets"].tolist() == offsets.tolist()
    assert tensors["sample_index"].tolist() == [sample.index for sample in samples]
    assert np.array_equal(tensors["tokens"], np.concatenate([sample.tokens for sample in samples]))
    assert np.array_equal(tensors["roles"], np.concatenate([sample.roles for sample in samples]))
    for number, tap in enumerate(TAPS):
        wanted = np.concatenate([rows_of(sample, number, dtype=dtype) for sample in samples])
        assert np.array_equal(tensors[str(tap)], wanted)
    notes = json.loads(metadata["samples"])
    assert [note["task_id"] for note in notes] == [sample.task_id for sample in samples]
    assert [note.get("augmentation") for note in notes] == [sample.augmentation for sample in samples]
    assert record.samples == Ranges.of(sample.index for sample in samples)
    assert (record.count, record.tokens) == (len(samples), offsets[-1])
    by_library = load_file(path)
    assert all(np.array_equal(by_library[name], array) for name, array in tensors.items())


@given(lengths=st.lists(st.integers(0, 9), min_size=1, max_size=9), data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_shard_whole_or_cut_reads_back(tmp_path: Path, lengths: list[int], data: st.DataObject) -> None:
    store = joined(tmp_path)
    samples = [
        Sample(3 * place, f"t{place}", np.arange(length, dtype=np.int32), np.zeros(length, np.uint8), "pré\ud800view")
        for place, length in enumerate(lengths)
    ]
    kept = data.draw(st.integers(1, len(samples)))
    builder = store.begin(samples)
    write_shard(builder, samples, kept, step=data.draw(st.integers(1, 4)))
    record = builder.finish(kept if kept < len(samples) or data.draw(st.booleans()) else None)
    check(tmp_path / "tpu_0" / record.name, samples[:kept], record)


def test_a_cut_shard_ignores_rows_written_past_the_cut(tmp_path: Path) -> None:
    samples = [sample_of(index) for index in range(12)]
    builder = joined(tmp_path).begin(samples)
    write_shard(builder, samples, 9, step=3)
    record = builder.finish(6)
    check(tmp_path / "tpu_0" / record.name, samples[:6], record)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_chunks_of_a_larger_shard_written_by_threads(tmp_path: Path, dtype: str) -> None:
    store = joined(tmp_path, d_model=D, store_dtype=dtype)
    samples = [
        Sample(n, str(n), np.full(40_000, n, np.int32), np.zeros(40_000, np.uint8)) for n in range(5)
    ]  # 3.2 MB per tap in bf16
    builder = store.begin(samples)

    def one(tap: int) -> None:
        for place, sample in enumerate(samples):
            builder.write(tap, int(builder.offsets[place]), rows_of(sample, tap, dtype=dtype))

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(one, range(3)))
    record = builder.finish(4)
    check(tmp_path / "tpu_0" / record.name, samples[:4], record, dtype)


def test_rows_out_of_order_or_of_another_kind_are_refused(tmp_path: Path) -> None:
    samples = [sample_of(index) for index in range(4)]
    builder = joined(tmp_path).begin(samples)
    rows = rows_of(samples[0], 0)
    for tap, row, wrong in [
        (0, 1, rows),
        (0, 0, rows.astype(np.float32)),
        (0, 0, rows[:, :-1]),
        (0, 0, np.zeros((10_000, D), rows.dtype)),
    ]:
        with pytest.raises(ValueError):
            builder.write(tap, row, wrong)
    builder.write(0, 0, np.asfortranarray(rows))
    with pytest.raises(ValueError, match=r"attn\.1: no write ended at row"):
        builder.finish(1)
    assert not list((tmp_path / "tpu_0").glob("*.safetensors"))
    assert not list((tmp_path / "tpu_0").glob(".tmp*"))


def test_an_aborted_shard_leaves_nothing(tmp_path: Path) -> None:
    builder = joined(tmp_path).begin([sample_of(0)])
    builder.abort()
    builder.abort()
    assert [path.name for path in (tmp_path / "tpu_0").iterdir()] == ["stream.json"]


def test_nonsense_shards_are_refused(tmp_path: Path) -> None:
    store = joined(tmp_path)
    with pytest.raises(ValueError, match="at least one"):
        store.begin([])
    with pytest.raises(ValueError, match="twice"):
        store.begin([sample_of(1), sample_of(1)])
    with pytest.raises(ValueError, match="begin smaller shards"):
        plan_shard(
            ShardSchema((TapRows("residual.0", (4,), "float32"),), "f", "s"), [{"preview": "x" * 60_000_000}] * 2, 0
        )


def test_taps_of_other_widths(tmp_path: Path) -> None:
    """Each block has its own width; the stream says the shapes, and cannot be joined with others."""
    root, wide = open_folder(str(tmp_path)), {"attn.1": (3, 2), "residual.1": (1,)}
    identity = replace(stream_identity(3), shapes=wide)
    join_run(root, run_identity())
    store = join_stream(root, 0, identity, run_identity())
    samples = [sample_of(index) for index in range(3)]
    builder = store.begin(samples)
    rows = [
        np.arange(builder.rows * width, dtype=np.float32).reshape(-1, width).astype("bfloat16") for width in (D, 6, 1)
    ]
    for tap, block in enumerate(rows):
        builder.write(tap, 0, block)
        with pytest.raises(ValueError, match=r"for bfloat16 \[n, "):
            builder.write(tap, 0, block[:, :0])
    store.commit([builder.finish()])
    _, tensors = plain_read(tmp_path / "tpu_0" / builder.name)
    for name, block in zip(("residual.0", "attn.1", "residual.1"), rows, strict=True):
        np.testing.assert_array_equal(tensors[name], block)
    record = read_stream(root.child("tpu_0"))
    assert record is not None
    assert record.identity == identity
    assert not verify(root).problems
    with pytest.raises(RunMismatch, match=r"was created with shapes .*, but this command asks for shapes"):
        join_stream(root, 0, stream_identity(3), run_identity())


def test_a_garbled_header_is_named(tmp_path: Path) -> None:
    samples = [sample_of(0)]
    builder = joined(tmp_path).begin(samples)
    write_shard(builder, samples)
    record = builder.finish()
    data = (tmp_path / "tpu_0" / record.name).read_bytes()
    parse_shard_header(data, len(data), "it")
    for bad, size in [
        (data[:100], len(data)),
        (b"\0" * 8 + data[8:], len(data)),
        (data.replace(b'"I64"', b'"I63"', 1), len(data)),
        (data.replace(b'"__metadata__"', b'"__metadatX__"', 1), len(data)),
        (data, len(data) + 1),
        (data.replace(b"roles", b"rolls", 1), len(data)),
    ]:
        with pytest.raises(Damaged, match=r"^it has a header"):
            parse_shard_header(bad, size, "it")
