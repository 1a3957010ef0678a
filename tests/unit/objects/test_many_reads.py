"""Many parts of a file in one call, beside ``os.pread``."""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spile.objects import many_reads
from spile.objects.many_reads import ManyReads

SIZE = 300_000


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("many") / "file"
    path.write_bytes(np.random.default_rng(0).bytes(SIZE))
    return path


@pytest.fixture(scope="module")
def many() -> ManyReads:
    found = ManyReads.here()
    if found is None:
        pytest.skip("this system has no asynchronous reads")
    return found


@given(parts=st.lists(st.tuples(st.integers(0, SIZE + 10), st.integers(1, 5000)), min_size=1, max_size=200))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_parts(made: Path, many: ManyReads, parts: list[tuple[int, int]]) -> None:
    offsets, lengths = (np.array(each) for each in zip(*parts, strict=True))
    at = np.cumsum(lengths) - lengths
    memory = np.zeros(int(lengths.sum()), np.uint8)
    data = made.read_bytes()
    with made.open("rb") as file:
        counts = many.read(file.fileno(), memory.ctypes.data, at, offsets, lengths)
    for place, count, (offset, length) in zip(at.tolist(), counts.tolist(), parts, strict=True):
        assert count == len(data[offset : offset + length])
        assert memory[place : place + count].tobytes() == data[offset : offset + length]


def test_past_the_page_cache(made: Path, many: ManyReads) -> None:
    memory = mmap.mmap(-1, 64 << 10)
    try:
        handle = os.open(made, os.O_RDONLY | os.O_DIRECT)
    except OSError:
        pytest.skip("this file system always has a page cache")
    try:
        address = np.frombuffer(memory, np.uint8).ctypes.data
        places = np.array([0, 8192, 4096])
        try:
            counts = many.read(handle, address, places, places * 10, np.full(3, 4096))
        except OSError as error:
            assert error.errno == errno.EINVAL  # noqa: PT017  a file system that opens it so and cannot read it so
            return
        assert counts.tolist() == [4096] * 3
        data = made.read_bytes()
        assert all(memory[place : place + 4096] == data[place * 10 :][:4096] for place in places.tolist())
        with pytest.raises(OSError, match="Invalid argument"):
            many.read(handle, address, np.array([1]), np.array([7]), np.array([100]))
    finally:
        os.close(handle)


def test_what_cannot_be_read_is_an_error_and_the_next_read_works(made: Path, many: ManyReads) -> None:
    memory = np.zeros(100, np.uint8)
    one = np.array([0]), np.array([5]), np.array([100])
    with pytest.raises(OSError, match="Bad file descriptor"):
        many.read(10_000, memory.ctypes.data, *one)
    with made.open("rb") as file:
        assert many.read(file.fileno(), memory.ctypes.data, *one).tolist() == [100]
    assert memory.tobytes() == made.read_bytes()[5:105]


def test_a_system_that_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_reads, "_CALLS", {})
    assert ManyReads.here() is None
    calls = dict.fromkeys(("setup", "destroy", "wait", "submit"), 9999)  # no such call
    monkeypatch.setattr(many_reads, "_CALLS", dict.fromkeys(("x86_64", "aarch64"), calls))
    assert ManyReads.here() is None
