"""Opt-in: ``SPILE_TEST_BUCKET=gs://… pytest tests/unit/objects/test_real_bucket.py`` (docs/guides/buckets.md)."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from spile.objects import Folder, NotFound, bucket, open_folder, read_chunks
from spile.objects.preflight import preflight

BUCKET = os.environ.get("SPILE_TEST_BUCKET", "")
pytestmark = pytest.mark.skipif(not BUCKET, reason="SPILE_TEST_BUCKET names no bucket")


@pytest.fixture
def real() -> Iterator[Folder]:
    folder = open_folder(f"{BUCKET.rstrip('/')}/spile-test-{secrets.token_hex(6)}")
    yield folder
    for item in list(folder.list()):
        folder.delete(item.key)
    for remains in list(folder.unfinished()):
        folder.discard(remains)


def test_the_real_thing(real: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    for warning in preflight(real):
        print(warning)
    assert list(real.list()) == []
    real.put("a dir/x#1.json", b"one")
    real.put("a dir/x#1.json", b"two")
    assert real.get("a dir/x#1.json") == b"two"
    with pytest.raises(NotFound):
        real.get("nothing")

    with ThreadPoolExecutor(16) as pool:
        won = list(pool.map(lambda n: real.create("commits/0001.json", f"author {n}".encode()), range(16)))
    assert won.count(True) == 1
    assert real.get("commits/0001.json") == f"author {won.index(True)}".encode()

    monkeypatch.setattr(bucket, "PART", 5 << 20)
    data = np.random.default_rng(0).integers(0, 256, (11 << 20) + 7, np.uint8)
    writer = real.writer("shard", data.nbytes)
    writer.write_at(0, data)
    writer.finish(data.nbytes)
    assert real.info("shard").size == data.nbytes
    assert real.get("shard") == data.tobytes()
    assert real.get_range("shard", 5 << 20, 10) == data[5 << 20 : (5 << 20) + 10].tobytes()
    assert b"".join(read_chunks(real, "shard", 4 << 20)) == data.tobytes()

    assert list(real.unfinished()) == []
    assert [item.key for item in real.list()] == ["a dir/x#1.json", "commits/0001.json", "shard"]
    assert list(real.get_many(["commits/0001.json"] * 20)) == [real.get("commits/0001.json")] * 20
    real.delete("shard")
    assert [item.key for item in real.list("sh")] == []
