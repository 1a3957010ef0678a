from __future__ import annotations

import threading

import google_crc32c
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spile.objects.crc import ChunkedCrc, combine, combine_all, combine_chunks, crc32c, from_hex, to_hex


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_crc_and_combine_agree_with_google(first: bytes, second: bytes) -> None:
    assert crc32c(first) == google_crc32c.value(first)
    assert crc32c(second, crc32c(first)) == google_crc32c.value(first + second)
    assert combine(crc32c(first), crc32c(second), len(second)) == google_crc32c.value(first + second)


@given(st.lists(st.binary(max_size=100), max_size=8))
def test_fold_is_the_crc_of_the_concatenation(parts: list[bytes]) -> None:
    assert combine_all((crc32c(part), len(part)) for part in parts) == google_crc32c.value(b"".join(parts))


@given(st.binary(max_size=200), st.integers(1, 24))
def test_the_crc_of_a_whole_comes_from_those_of_its_chunks(whole: bytes, chunk: int) -> None:
    chunks = [google_crc32c.value(whole[at : at + chunk]) for at in range(0, len(whole), chunk)]
    assert combine_chunks(chunks, len(whole), chunk) == google_crc32c.value(whole)


def test_combine_over_long_parts() -> None:
    first, second = bytes(range(256)) * 5000, b"\x07" * 3_000_001
    assert combine(crc32c(first), crc32c(second), len(second)) == google_crc32c.value(first + second)


@given(st.lists(st.binary(min_size=1, max_size=40), max_size=12), st.integers(1, 24), st.data())
def test_chunks_can_be_cut_where_a_write_ended(writes: list[bytes], chunk: int, data: st.DataObject) -> None:
    chunked = ChunkedCrc(chunk)
    ends = [0]
    for write in writes:
        chunked.extend(memoryview(write))
        ends.append(ends[-1] + len(write))
    cut = data.draw(st.sampled_from(ends))
    whole = b"".join(writes)[:cut]
    assert chunked.chunks(cut) == [google_crc32c.value(whole[at : at + chunk]) for at in range(0, cut, chunk)]


def test_a_cut_inside_a_write_is_refused() -> None:
    chunked = ChunkedCrc(8)
    chunked.extend(memoryview(b"0123456789"))
    with pytest.raises(KeyError):
        chunked.chunks(5)


def test_the_known_value_of_the_standard() -> None:
    assert to_hex(crc32c(b"123456789")) == "e3069283"
    assert from_hex("e3069283") == 0xE3069283
    for bad in ("e306928", 5, None, "zzzzzzzz"):
        with pytest.raises(ValueError):
            from_hex(bad)


def test_the_interpreter_lock_is_free_while_a_crc_runs() -> None:
    """Another thread runs Python before a long crc returns: impossible if the lock were held throughout."""
    data = np.zeros(512 << 20, np.uint8)
    ticks: list[int] = []
    stop = threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks.append(1)

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        before = len(ticks)
        crc32c(data.data)
        during = len(ticks) - before
    finally:
        stop.set()
        thread.join()
    assert during > 100
