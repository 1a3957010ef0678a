"""Every byte of a shard is written, and no row of padding reaches it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spile.compute.batches import Sizes
from spile.compute.progress import Progress
from spile.objects import open_folder
from spile.objects.local import LocalFolder, LocalWriter
from spile.reading.dataset import open as open_dataset
from spile.run.pipeline import Sink, run_pipeline
from unit.run.test_pipeline import Script, check, open_stream
from world import TAPS, NumpyProducer, lengths, sample_of

POISON = b"\xa5\x5a\xc3\x3c"


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill the buffer of a shard with other bytes before its first row."""
    real = LocalFolder.writer

    def writer(self: LocalFolder, key: str, size: int) -> LocalWriter:
        made = real(self, key, size)
        made.write_at(0, (POISON * (size // len(POISON) + 1))[:size])
        return made

    monkeypatch.setattr(LocalFolder, "writer", writer)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("writers", [1, 3])
@pytest.mark.parametrize("groups", [1, 2, 3])
@pytest.mark.parametrize("decisions", [(), ("continue",) * 4 + ("commit",), ("continue",) * 7 + ("stop",)])
def test_nothing_is_left_of_what_was_there_before(tmp_path: Path, writers: int, groups: int, decisions: Any) -> None:
    items = [sample_of(i, length=n) for i, n in enumerate(lengths(70, seed=groups))]
    stream = open_stream(tmp_path, 70)
    sizes = Sizes(128, None, 64, 9000, writers)
    run_pipeline(items, NumpyProducer(groups), Sink(stream), sizes, progress=Progress(), control=Script(*decisions))
    shards = list(tmp_path.glob("tpu_0/shard_*"))
    assert len(shards) == stream.ledger.shards > 0
    for shard in shards:
        data = shard.read_bytes()
        assert POISON not in data
        assert not any(POISON[turn:] + POISON[:turn] in data for turn in range(4))
    check(tmp_path, [item for item in items if item.index in stream.ledger.done])


def test_the_poison_is_seen_where_a_row_is_not_written(tmp_path: Path, poisoned: None) -> None:
    """The test above can fail."""
    stream = open_stream(tmp_path, 1)
    builder = stream.begin([sample_of(0, length=5)])
    path = next(tmp_path.rglob(".tmp-*"))
    assert POISON in path.read_bytes()
    builder.abort()


@pytest.mark.parametrize("writers", [1, 3])
@pytest.mark.parametrize("groups", [1, 2, 3])
def test_padding_is_not_stored(tmp_path: Path, writers: int, groups: int) -> None:
    """The producer's padding is NaN, so that one row of it would show."""
    items = [sample_of(i, length=n) for i, n in enumerate(lengths(70, seed=groups))]
    stream = open_stream(tmp_path, 70)
    producer = NumpyProducer(groups)
    run_pipeline(
        items, producer, Sink(stream), Sizes(256, None, 64, 9000, writers), progress=Progress(), control=Script()
    )
    real = sum(len(item.tokens) for item in items)
    assert sum(rows * length * groups for rows, length in producer.shapes) > real  # there was padding
    dataset = open_dataset(open_folder(str(tmp_path)))
    for tap in TAPS:
        stored = np.concatenate([batch.rows for batch in dataset.batches(tap)])
        assert len(stored) == real
        assert np.isfinite(stored).all()
