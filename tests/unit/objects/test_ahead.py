"""Read-ahead: results in order, errors in their place, a bounded number of calls, and nothing left running."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from itertools import count, islice
from typing import Any

import pytest

from spile.objects.folder import iterate_ahead, read_ahead


def test_results_come_in_order() -> None:
    gate = threading.Event()

    def call(number: int) -> int:
        if number == 0:
            assert gate.wait(30)
        if number == 3:
            gate.set()
        return number

    assert list(read_ahead((partial(call, number) for number in range(20)), 4)) == list(range(20))
    assert list(read_ahead(iter(()), 4)) == []


@pytest.mark.parametrize("depth", [1, 3])
def test_no_more_calls_are_made_than_depth_allows(depth: int) -> None:
    taken = []

    def calls() -> Iterator[Any]:
        for number in count():
            taken.append(number)
            yield lambda: None

    ahead = read_ahead(calls(), depth)
    assert taken == []
    for consumed in range(1, 9):
        next(ahead)
        assert len(taken) == consumed + depth
    ahead.close()  # type: ignore[attr-defined]


def test_an_error_is_raised_in_its_place_and_ends_the_rest() -> None:
    ahead = read_ahead((partial(int, text) for text in ("1", "2", "x", "4")), 2)
    assert list(islice(ahead, 2)) == [1, 2]
    with pytest.raises(ValueError, match="invalid literal"):
        next(ahead)
    assert list(ahead) == []


def test_closing_cancels_what_has_not_started_and_waits_for_the_rest() -> None:
    begun, gate = [], threading.Event()

    def call(number: int) -> int:
        begun.append(number)
        if number:
            assert gate.wait(30)
        return number

    ahead = read_ahead((partial(call, number) for number in range(9)), 5, threads=1)
    assert next(ahead) == 0
    while len(begun) < 2:
        pass
    gate.set()
    ahead.close()  # type: ignore[attr-defined]
    assert begun[:2] == [0, 1]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("spile-ahead")]


def test_an_iterator_runs_in_one_thread_ahead_of_its_reader() -> None:
    closed, threads = [], set()

    def items() -> Iterator[int]:
        try:
            for number in range(10):
                threads.add(threading.current_thread().name)
                yield number
            raise ValueError("the end")
        finally:
            closed.append(True)

    ahead = iterate_ahead(items(), 3)
    assert list(islice(ahead, 10)) == list(range(10))
    with pytest.raises(ValueError, match="the end"):
        next(ahead)
    assert closed == [True]
    assert len(threads) == 1
    assert threading.current_thread().name not in threads
    ahead = iterate_ahead(items(), 3)
    next(ahead)
    ahead.close()  # type: ignore[attr-defined]
    assert closed == [True, True]
    assert list(iterate_ahead(iter("abc"), 2)) == ["a", "b", "c"]


def test_a_program_that_ends_early_says_nothing() -> None:
    code = """
from itertools import count
from spile.objects.folder import iterate_ahead, read_ahead
kept = [iterate_ahead(count(), 3), read_ahead((int for _ in count()), 3)]
for each in kept:
    next(each)
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
