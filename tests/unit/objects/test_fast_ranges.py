"""Large ranges come by obstore, and whatever goes wrong with that is asked for the usual way."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import obstore
import pytest

import spile.objects.cloud.ranges as ranges
from backends import BUCKET, Clouds
from spile.errors import StoreError
from spile.objects import Folder, open_folder
from spile.objects.cloud.folder import CloudFolder
from spile.objects.cloud.rest import RestClient
from spile.objects.folder import NotFound
from spile_fakes.certificates import loopback_context
from spile_fakes.gcs import FakeGcs, FakeReply, Request

DATA = os.urandom(3 << 20)
PART = slice(5, 5 + (2 << 20))


def part(folder: Folder, key: str = "x") -> bytes:
    return bytes(folder.get_range(key, PART.start, PART.stop - PART.start))


@pytest.fixture(autouse=True)
def worth_it_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where nothing is encrypted and processors are few."""
    monkeypatch.setattr(ranges, "_FEW_CORES", 0)


@pytest.fixture
def usual(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys that were asked for the usual way."""
    keys: list[str] = []
    before = RestClient.get_range

    def noted(self: RestClient, key: str, start: int, length: int) -> bytes:
        keys.append(key)
        return before(self, key, start, length)

    monkeypatch.setattr(RestClient, "get_range", noted)
    return keys


@pytest.mark.parametrize("key", ["x", "tpu_0/shard 1+2%20ü~'(!).safetensors"])
def test_they_do(cloud_folder: Folder, usual: list[str], key: str) -> None:
    cloud_folder.put(key, DATA)
    before = cloud_folder.stats.requests
    assert part(cloud_folder, key) == DATA[PART]
    assert not usual
    assert cloud_folder.stats.requests - before == 1
    assert cloud_folder.stats.bytes_read == PART.stop - PART.start


def test_small_ones_do_not(cloud_folder: Folder, usual: list[str]) -> None:
    cloud_folder.put("x", DATA)
    assert bytes(cloud_folder.get_range("x", 7, 9)) == DATA[7:16]
    assert len(usual) == 1


def test_nor_do_they_where_it_costs_more(
    cloud_folder: Folder, usual: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "_FEW_CORES", 1 << 20)
    cloud_folder.put("x", DATA)
    assert part(cloud_folder) == DATA[PART]
    assert len(usual) == 1


@pytest.mark.parametrize("kind", ["status", "reset", "truncate"])
def test_what_fails_is_asked_for_the_usual_way(
    cloud_folder: Folder, clouds: Clouds, usual: list[str], kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud_folder.put("x", DATA)
    assert isinstance(cloud_folder, CloudFolder)
    fast = cloud_folder._bucket.ranges
    monkeypatch.setattr(fast, "_pause", 600.0)
    clouds.faults(cloud_folder.url).add(kind, method="GET")
    assert part(cloud_folder) == DATA[PART]
    assert len(usual) == 1
    assert cloud_folder.stats.retries == 1
    assert part(cloud_folder) == DATA[PART]
    assert len(usual) == 2  # it is left alone for a while
    monkeypatch.setattr(fast, "_not_before", 0.0)
    assert part(cloud_folder) == DATA[PART]
    assert len(usual) == 2


def test_what_fails_together_is_one_failure(
    cloud_folder: Folder, clouds: Clouds, monkeypatch: pytest.MonkeyPatch
) -> None:
    cloud_folder.put("x", DATA)
    assert isinstance(cloud_folder, CloudFolder)
    fast = cloud_folder._bucket.ranges
    clouds.faults(cloud_folder.url).add("status", method="GET", count=12)
    together = threading.Barrier(6)
    before = obstore.get_range

    def at_once(*words: Any, **named: Any) -> Any:
        together.wait(30)
        return before(*words, **named)

    monkeypatch.setattr(obstore, "get_range", at_once)
    with ThreadPoolExecutor(6) as pool:
        assert set(pool.map(lambda _: part(cloud_folder), range(6))) == {DATA[PART]}
    assert fast._pause == 2.0


def test_errors_have_the_usual_words(cloud_folder: Folder, clouds: Clouds) -> None:
    with pytest.raises(NotFound, match="nothing-here"):
        part(cloud_folder, "nothing-here")
    cloud_folder.put("x", DATA)
    clouds.faults(cloud_folder.url).add("status", status=403, method="GET", count=-1)
    with pytest.raises(StoreError, match="permission denied"):
        part(cloud_folder)


def test_without_obstore_all_is_as_it_was(
    cloud_folder: Folder, usual: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges.importlib.util, "find_spec", lambda _: None)
    cloud_folder.put("x", DATA)
    assert part(cloud_folder) == DATA[PART]
    assert len(usual) == 1


class Noting(FakeGcs):
    """Remembers who asked."""

    def answer(self, request: Request) -> FakeReply:
        self.asked = request.headers
        return super().answer(request)


@pytest.fixture
def encrypted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Noting]:
    context, trusted = loopback_context(tmp_path)
    with Noting(tls=context) as fake:
        fake.add_bucket(BUCKET)
        for name, value in {"STORAGE_EMULATOR_HOST": fake.url, "SSL_CERT_FILE": str(trusted)}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield fake


def test_encrypted_ones_do_with_any_number_of_processors(
    encrypted: Noting, usual: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranges, "_FEW_CORES", 1 << 20)
    folder = open_folder(f"gs://{BUCKET}/r")
    folder.put("x", DATA)
    assert part(folder) == DATA[PART]
    assert not usual
    assert "object_store" in encrypted.asked["user-agent"]


def test_who_asks_is_who_asks_the_usual_way(encrypted: Noting, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = open_folder(f"gs://{BUCKET}/r")
    folder.put("x", DATA)
    assert isinstance(folder, CloudFolder)
    dialect: Any = folder._bucket.rest.dialect
    monkeypatch.setattr(dialect, "emulated", False)
    monkeypatch.setattr(dialect.credentials, "token", lambda: "of-this-minute")
    assert part(folder) == DATA[PART]
    assert "object_store" in encrypted.asked["user-agent"]
    assert encrypted.asked["authorization"] == "Bearer of-this-minute"


_FORKED = """
import os, sys
import spile.objects.cloud.ranges as ranges
from spile.objects import open_folder
ranges._FEW_CORES = 0
folder = open_folder(sys.argv[1])
mine = bytes(folder.get_range("x", 0, 2 << 20))
assert ranges._process == os.getpid()
child = os.fork()
if child == 0:
    os._exit(0 if bytes(folder.get_range("x", 0, 2 << 20)) == mine else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_process_that_was_forked_reads_too(cloud_folder: Folder) -> None:
    cloud_folder.put("x", DATA)
    done = subprocess.run(
        [sys.executable, "-c", _FORKED, cloud_folder.url], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
