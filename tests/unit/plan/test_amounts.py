import pytest

from spile.plan.amounts import amount, counted, duration, size


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


def test_one_is_singular() -> None:
    assert [counted(n, "shard") for n in (0, 1, 2, 1048)] == ["0 shards", "1 shard", "2 shards", "1,048 shards"]
