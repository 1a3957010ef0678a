import pytest
from hypothesis import given
from hypothesis import strategies as st

from spile.spec.amounts import amount, counted, duration, size


@pytest.mark.parametrize(
    ("value", "text"), [(78, "78"), (9999, "9,999"), (45_600, "45.6 k"), (1_230_000, "1.23 M"), (2.5e9, "2.5 G")]
)
def test_amount(value, text):
    assert amount(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(12, "12 bytes"), (1_050_000_000, "1.05 GB"), (43_000, "43 kB"), (2e15, "2 PB")]
)
def test_size(value, text):
    assert size(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0.4 s"), (12, "12 s"), (200, "3 min 20 s"), (18_720, "5 h 12 min"), (3600, "1 h"), (275_000, "3 d 4 h")],
)
def test_duration(seconds, text):
    assert duration(seconds) == text


def test_a_unit_begins_where_it_is_full() -> None:
    assert [size(999), size(1000), size(1e9)] == ["999 bytes", "1 kB", "1 GB"]


@given(st.floats(0, 1e20))
def test_no_powers_of_ten_are_shown(value: float) -> None:
    assert "e+" not in amount(value) + size(value)


def test_what_rounds_up_takes_the_next_unit() -> None:
    assert [size(999_700), size(999_999_999), size(999_400)] == ["1 MB", "1 GB", "999 kB"]
    assert [amount(999_700), amount(999_400)] == ["1 M", "999 k"]
    assert [duration(9.94), duration(9.96), size(2e18)] == ["9.9 s", "10 s", "2,000 PB"]


def test_one_is_singular() -> None:
    assert [counted(n, "shard") for n in (0, 1, 2, 1048)] == ["0 shards", "1 shard", "2 shards", "1,048 shards"]
