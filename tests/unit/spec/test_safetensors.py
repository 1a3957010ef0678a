from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given
from hypothesis import strategies as st

from spile.spec.safetensors import DTYPES, encode_header, header_length, parse_header

_SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
_TENSORS = st.dictionaries(st.text(min_size=1, max_size=8), st.tuples(st.sampled_from(sorted(DTYPES)), _SHAPES))


@given(
    tensors=_TENSORS,
    metadata=st.dictionaries(st.text(max_size=4), st.text(max_size=4)),
    align=st.sampled_from([8, 4096]),
)
def test_what_is_laid_out_is_read_back(
    tensors: dict[str, tuple[str, tuple[int, ...]]], metadata: dict[str, str], align: int
) -> None:
    tensors.pop("__metadata__", None)
    data, header = encode_header(((name, *about) for name, about in tensors.items()), metadata, align=align)
    assert len(data) == header.length
    assert header.length % align == 0
    read = parse_header(data, header.size)
    assert (read.length, read.metadata) == (header.length, metadata)
    assert read.places == header.places
    assert {name: (place.code, place.shape) for name, place in read.places.items()} == tensors


def test_the_library_reads_ours_and_we_read_its(tmp_path: Path) -> None:
    arrays = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array([1, 2], np.int64)}
    theirs = safetensors.numpy.save(arrays, metadata={"k": "v"})
    header = parse_header(theirs, len(theirs))
    assert header.metadata == {"k": "v"}
    for name, array in arrays.items():
        place = header.places[name]
        np.testing.assert_array_equal(
            np.frombuffer(theirs[place.start : place.stop], place.dtype).reshape(place.shape), array
        )
    ours, laid_out = encode_header([("a", "F32", (2, 3)), ("b", "I64", (2,))], {"k": "v"})
    content = ours + arrays["a"].tobytes() + arrays["b"].tobytes()
    assert len(content) == laid_out.size
    for name, array in safetensors.numpy.load(content).items():
        np.testing.assert_array_equal(array, arrays[name])


def _file(fields: object, size: int) -> tuple[bytes, int]:
    text = json.dumps(fields).encode()
    return len(text).to_bytes(8, "little") + text, 8 + len(text) + size


@pytest.mark.parametrize(
    ("fields", "size", "message"),
    [
        ([1], 0, "cannot be read"),
        ({"a": {"dtype": "F32", "shape": [2]}}, 8, "cannot be read .*data_offsets"),
        ({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, 4, "a has 4 bytes for the shape .2. of F32"),
        ({"a": {"dtype": "F8_E4M3", "shape": [-1], "data_offsets": [0, 4]}}, 4, "a has 4 bytes"),
        ({"a": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [4, 0]}}, 4, "a has -4 bytes"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, 8, "a at byte .* was due"),
        ({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, 5, "bytes where its header needs"),
    ],
)
def test_a_header_that_cannot_be_says_why(fields: object, size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_header(*_file(fields, size))


@pytest.mark.parametrize(("start", "size"), [(b"", 0), (bytes(7), 7), (bytes(8), 8), (b"\xff" * 8, 100)])
def test_an_impossible_length(start: bytes, size: int) -> None:
    with pytest.raises(ValueError, match="bytes"):
        header_length(start, size)


def test_a_shape_of_a_million_dimensions_is_refused_before_its_product_is_computed() -> None:
    """The product would have tens of millions of bits."""
    fields = {"x": {"dtype": "F32", "shape": [2**60] * 1_000_000, "data_offsets": [0, 4]}}
    text = json.dumps(fields).encode()
    data = len(text).to_bytes(8, "little") + text
    with pytest.raises(ValueError, match="x has 1000000 dimensions"):
        parse_header(data, len(data) + 4)
