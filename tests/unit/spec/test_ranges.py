import itertools

from hypothesis import given
from hypothesis import strategies as st

from spile.spec.ranges import Ranges

numbers = st.sets(st.integers(0, 60))


@given(numbers, numbers)
def test_behaves_as_a_set(a, b):
    x, y = Ranges.of(a), Ranges.of(b)
    assert set(x) == a
    assert len(x) == len(a)
    assert set(x | y) == a | b
    assert set(x - y) == a - b
    assert set(x & y) == a & b
    assert (x == y) == (a == b)
    assert [n in x for n in range(61)] == [n in a for n in range(61)]


@given(numbers)
def test_pairs_are_sorted_disjoint_and_not_adjacent(a):
    pairs = Ranges.of(a).pairs()
    assert all(start < stop for start, stop in pairs)
    assert all(first[1] < second[0] for first, second in itertools.pairwise(pairs))


def test_overlapping_pairs_merge():
    assert Ranges([(5, 9), (0, 3), (2, 6), (20, 20)]).pairs() == [(0, 9)]


def test_text_is_for_people():
    assert Ranges([(0, 12), (20, 21), (31, 41)]).text() == "0-11, 20, 31-40"
    assert Ranges((n, n + 1) for n in range(0, 20, 2)).text(most=2) == "0, 2, and 8 more ranges"
    assert Ranges.of([0, 2]).text(most=2) == "0, 2"
