"""The chunks of shards: any valid header is read and checked, and an impossible one is refused."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from counting import Counting
from spile.errors import Damaged
from spile.objects import Folder, open_folder
from spile.reading.blocks import StoredBlocks
from spile.reading.rows import BlockOptions, RowBatch, Selection, rebatch
from spile.spec.safetensors import encode_header
from spile.spec.sample import Sample
from spile.spec.taps import TapRows
from spile.store.ledger import FORMAT, ShardRecord
from spile.store.shard import CHUNKS, ShardBuilder, ShardSchema, as_stored, parse_shard_header, plan_shard
from spile.store.shard_reader import ShardReader

NAME = "shard_0001-abcd.safetensors"


class Chunking(NamedTuple):
    """The length of the chunks of tensors in bytes, and of taps in rows."""

    bytes: int
    rows: dict[str, int]


@contextmanager
def cut(chunking: Chunking) -> Iterator[None]:
    """Shards are written so, and none is so small that it is read whole."""
    with ExitStack() as stack:
        stack.enter_context(patch("spile.store.shard.CHUNK", chunking.bytes))
        stack.enter_context(patch.object(ShardSchema, "chunk_rows", lambda _: chunking.rows))
        stack.enter_context(patch("spile.store.shard_reader.SMALL_SHARD", 0))
        yield


def write(folder: Folder, tap: TapRows, tokens: int, steps: int = 1) -> tuple[ShardRecord, np.ndarray]:
    """A shard of one tap and one sample, written in several steps; and its rows."""
    sample = Sample(0, "t", np.arange(tokens, dtype=np.int32), np.zeros(tokens, np.uint8))
    builder = ShardBuilder(folder, NAME, [sample], ShardSchema((tap,), "f" * 32, "s" * 16))
    rows = np.random.default_rng(tokens).standard_normal((tokens, tap.width)).astype(np.float32)
    stored = as_stored(rows, tap.dtype) if tap.scaled else rows.astype(tap.dtype)
    for start in range(0, tokens, steps):
        builder.write(0, start, stored[start : start + steps])
    return builder.finish(), rows


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


SHAPES = st.tuples(
    st.integers(1, 9),  # width
    st.integers(1, 40),  # tokens
    st.sampled_from(["float32", "bfloat16"]),
)
CUTS = st.builds(Chunking, st.integers(1, 60), st.fixed_dictionaries({"residual.0": st.integers(1, 9)}))


@given(shape=SHAPES, chunking=CUTS, steps=st.integers(1, 7), data=st.data())
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_range_is_read_and_checked(
    tmp_path: Path, shape: tuple[int, int, str], chunking: Chunking, steps: int, data: st.DataObject
) -> None:
    width, tokens, dtype = shape
    tap = TapRows("residual.0", (width,), dtype)
    folder = open_folder(str(tmp_path))
    with cut(chunking):
        record, rows = write(folder, tap, tokens, steps)
        start = data.draw(st.integers(0, tokens - 1))
        stop = data.draw(st.integers(start + 1, tokens))
        wanted = rows.astype(dtype)[start:stop]
        for place in (folder, Counting(folder)):
            shard = ShardReader(place, record)
            np.testing.assert_array_equal(shard.rows("residual.0", start, stop), wanted)
            np.testing.assert_array_equal(np.concatenate([part.rows for part in _read(shard)]), rows.astype(dtype))

        inside = data.draw(st.integers(start * tap.bytes, stop * tap.bytes - 1))
        chunk = ShardReader(folder, record).chunk_bytes("residual.0")
        flip(tmp_path / NAME, record.header[0] + inside)
        for place in (folder, Counting(folder)):
            with pytest.raises(Damaged, match=f"residual.0, chunk {inside // chunk}:"):
                ShardReader(place, record).rows("residual.0", start, stop)
        with pytest.raises(Damaged, match=r"residual\.0, chunk"):
            _read(ShardReader(folder, record))


def _read(shard: ShardReader) -> list[RowBatch]:
    with patch("spile.reading.blocks._MOST_GROUP_BYTES", 100):
        return list(_batches(shard, "residual.0", 3))


def _batches(shard: ShardReader, tap: str, batch_rows: int) -> Iterator[RowBatch]:
    """Read the rows of a shard in order."""
    options = BlockOptions(Selection(), context=False, window=1, streams=None)
    stream: Any = SimpleNamespace(number=0, input_turns=None, open=lambda _record: shard)
    found = StoredBlocks((tap,), [(stream, shard.record)], options).in_order()
    return rebatch((RowBatch(rows.chunk.rows[tap][0]) for rows in found if rows.chunk is not None), batch_rows)


@given(width=st.integers(1, 400_000), dtype=st.sampled_from(["float32", "bfloat16", "int8", "int32"]), data=st.data())
def test_a_new_shards_chunks_are_whole_rows(width: int, dtype: str, data: st.DataObject) -> None:
    tap = TapRows("residual.0", (width,), dtype)
    tokens = data.draw(st.integers(0, 1_000_000))
    data, plan = plan_shard(ShardSchema((tap,), "f", "s"), [], tokens)
    header = parse_shard_header(data, plan.size, "it")
    assert header == plan
    length = header.chunk_bytes["residual.0"]
    rows = length // tap.number_bytes
    assert length == rows * tap.number_bytes
    assert rows.bit_count() == 1
    assert rows == 1 or length <= 1 << 19
    assert 2 * length > 1 << 19
    assert header.chunk_count("residual.0") == -(-tokens // rows)


@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3"])
def test_rows_in_whole_chunks_are_read_without_another_byte(tmp_path: Path, dtype: str) -> None:
    folder = Counting(open_folder(str(tmp_path)))
    tap = TapRows("residual.0", (8,), dtype)
    with cut(Chunking(64, {"residual.0": 4})):
        record, _ = write(folder, tap, 21)
        shard = ShardReader(folder, record)
        shard.rows("residual.0", 0, 1)
        assert shard.chunk_rows("residual.0") == 4
        for start, stop in [(0, 4), (4, 12), (16, 21), (20, 21), (0, 21)]:
            folder.ranges.clear()
            shard.rows("residual.0", start, stop)
            place = shard.place("residual.0").start
            assert folder.ranges == [(NAME, place + start * tap.number_bytes, (stop - start) * tap.number_bytes)]


def test_an_empty_shard_has_no_chunks_of_rows(tmp_path: Path) -> None:
    folder = open_folder(str(tmp_path))
    record, _ = write(folder, TapRows("residual.0", (8,), "float32"), 0)
    shard = ShardReader(folder, record)
    assert shard.rows("residual.0", 0, 0).shape == (0, 8)
    assert shard.pieces("residual.0", 1 << 20) == []
    assert shard.tensor_checksum("residual.0") == record.tensors["residual.0"] == 0


def test_added_taps_may_be_cut_otherwise(tmp_path: Path) -> None:
    folders = [open_folder(str(tmp_path / name)) for name in ("own", "added")]
    made = []
    cuts = [Chunking(50, {"residual.0": 3}), Chunking(64, {"mlp.1": 4})]
    taps = [TapRows(name, (5,), "float32") for name in ("residual.0", "mlp.1")]
    for folder, tap, chunking in zip(folders, taps, cuts, strict=True):
        with cut(chunking):
            made.append(write(folder, tap, 30))
    own, added = (ShardReader(folder, record) for folder, (record, _) in zip(folders, made, strict=True))
    shard = ShardReader(own.folder, own.record, added={"mlp.1": added})
    for tap, chunking, (_, rows) in zip(taps, cuts, made, strict=True):
        assert shard.chunk_rows(tap.name) == chunking.rows[tap.name]
        assert shard.chunk_bytes(tap.name) == (60 if tap.name == "residual.0" else 80)
        with patch("spile.reading.blocks._MOST_GROUP_BYTES", 100):
            parts = list(_batches(shard, tap.name, 7))
        np.testing.assert_array_equal(np.concatenate([part.rows for part in parts]), rows)
        np.testing.assert_array_equal(shard.rows(tap.name, 3, 17), rows[3:17])


def header_of(metadata: dict[str, str], chunks: int = 6, width: int = 2, tokens: int = 3) -> tuple[bytes, int]:
    """And the file's size. Of a shard of one tap and one sample, with these words on how it is cut."""
    shapes: list[tuple[str, str, tuple[int, ...]]] = [
        ("residual.0", "F32", (tokens, width)),
        ("offsets", "I64", (2,)),
        ("sample_index", "I64", (1,)),
        (CHUNKS, "U32", (chunks,)),
        ("tokens", "I32", (tokens,)),
        ("roles", "U8", (tokens,)),
    ]
    data, header = encode_header(shapes, {"format_version": str(FORMAT), **metadata}, align=4096)
    return data, header.size


def test_a_header_says_how_it_is_cut() -> None:
    for metadata, chunks, length in [
        ({"chunk_bytes": "1048576", "chunk_rows": '{"residual.0":3}'}, 5, 24),
        ({"chunk_bytes": "24", "chunk_rows": '{"residual.0":2}'}, 6, 16),
        ({"chunk_bytes": "24", "chunk_rows": '{"residual.0":1,"from_the":"future"}'}, 7, None),
    ]:
        data, size = header_of(metadata, chunks)
        if length is None:
            with pytest.raises(Damaged, match="'from_the': future"):
                parse_shard_header(data, size, "it")
        else:
            assert parse_shard_header(data, size, "it").chunk_bytes["residual.0"] == length


HOSTILE: dict[str, tuple[dict[str, str], str]] = {
    "nothing": ({}, "a header without the sizes of its chunks: found KeyError"),
    "no number": ({"chunk_bytes": "many"}, "a header without the sizes of its chunks: found ValueError"),
    "a number without end": ({"chunk_bytes": "9" * 5000}, "a header without the sizes of its chunks: found ValueError"),
    "nothing at a time": ({"chunk_bytes": "0"}, "an invalid chunk_bytes: expected 1 to 67108864, found 0"),
    "less than nothing": ({"chunk_bytes": "-1048576"}, "an invalid chunk_bytes: .* found -1048576"),
    "all at a time": ({"chunk_bytes": str(1 << 40)}, "an invalid chunk_bytes: .* found 1099511627776"),
    "byte for byte": (
        {"chunk_bytes": "1", "chunk_rows": '{"residual.0":1}'},
        r"the wrong number of chunks: expected U32 \[42\], found U32 \[6\]",
    ),
    "no rows": ({"chunk_bytes": "64"}, "without chunk_rows of a tap: expected residual.0"),
    "no object": ({"chunk_bytes": "64", "chunk_rows": "[1]"}, "a header without the sizes of its chunks"),
    "no JSON": ({"chunk_bytes": "64", "chunk_rows": "{"}, "a header without the sizes of its chunks"),
    "a deep one": ({"chunk_bytes": "64", "chunk_rows": "[" * 100_000}, "a header without the sizes of its chunks"),
    **{
        f"rows: {value}": (
            {"chunk_bytes": "64", "chunk_rows": json.dumps({"residual.0": value})},
            "an invalid chunk_rows",
        )
        for value in (0, -1, 1.5, "4", True, None, [4], {"a": 1})
    },
    "rows without end": (
        {"chunk_bytes": "64", "chunk_rows": json.dumps({"residual.0": 1 << 70})},
        "one row, or rows of at most 67108864 bytes together, found 'residual.0': 1180591620717411303424",
    ),
    **{
        f"rows of {name}": (
            {"chunk_bytes": "64", "chunk_rows": json.dumps({name: 2})},
            f"an invalid chunk_rows: .*'{name}'",
        )
        for name in ("tokens", "residual.7", CHUNKS, "")
    },
}


@pytest.mark.parametrize("what", HOSTILE)
def test_an_impossible_header_is_refused(what: str) -> None:
    metadata, says = HOSTILE[what]
    data, size = header_of(metadata)
    with pytest.raises(Damaged, match=f"^it has .*{says}") as raised:
        parse_shard_header(data, size, "it")
    assert len(str(raised.value)) < 400


def test_rows_of_no_width_are_in_no_chunks() -> None:
    data, size = header_of({"chunk_bytes": "64", "chunk_rows": '{"residual.0":2}'}, 4, width=0)
    with pytest.raises(Damaged, match="an invalid chunk_rows"):
        parse_shard_header(data, size, "it")


def test_one_row_may_be_longer_than_any_chunk() -> None:
    data, size = header_of({"chunk_bytes": "64", "chunk_rows": '{"residual.0":1}'}, 5, width=20 << 20, tokens=1)
    assert parse_shard_header(data, size, "it").chunk_bytes["residual.0"] == 80 << 20
