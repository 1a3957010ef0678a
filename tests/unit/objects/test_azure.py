"""``az://`` against Azurite, Microsoft's emulator: every method of a folder, faults, commits and verification.

Install it with ``npm install --prefix .azurite azurite``; without it these tests are skipped.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import itertools
import os
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path

import numpy as np
import pytest
from test_faults import SIZE, _schedule, write
from test_folder import (  # noqa: F401 - collected here too, with the fixture below
    test_aborted_writer_leaves_nothing,
    test_create_once,
    test_empty_and_odd_names,
    test_empty_writer,
    test_get_many_keeps_the_order,
    test_info,
    test_list_is_sorted_and_exact,
    test_put_get_replace_delete,
    test_ranges,
    test_read_chunks,
    test_replace_only_the_same_version,
    test_sixteen_creators_one_winner,
    test_sixteen_replacements_one_winner,
    test_writer_shrinks_with_moves,
    test_writer_writes_anywhere_and_is_seen_at_once,
)

from spile.errors import StoreError, UserError
from spile.objects import Folder, bucket, open_folder
from spile.objects.preflight import preflight
from spile.objects.retry import Retry
from spile.store.verification import verify
from spile_fakes.buckets import Faults
from spile_fakes.gcs import FaultyProxy
from world import produce

_ROOT = Path(__file__).parents[3]
AZURITE = shutil.which("azurite-blob", path=f"{_ROOT}/.azurite/node_modules/.bin:{os.environ.get('PATH', '')}")
pytestmark = pytest.mark.skipif(AZURITE is None, reason="no Azurite: npm install --prefix .azurite azurite")

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # Azurite's own
_numbers = itertools.count()


class _Proxy(FaultyProxy):
    _HOP = tuple(name for name in FaultyProxy._HOP if name != "date")  # Azure's signature covers the date


@pytest.fixture(scope="module")
def azurite() -> Iterator[FaultyProxy]:
    """The emulator behind a proxy that can spoil its replies."""
    assert AZURITE is not None
    command = [AZURITE, "--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry", "--blobPort", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            found = (re.search(r"listens on (http://[\d.:]+)", line) for line in process.stdout)
            url = next(match[1] for match in found if match)
            _make_container(url, "bucket")
            with _Proxy(url) as proxy:
                yield proxy
        finally:
            process.kill()


def _make_container(url: str, name: str) -> None:
    """Create a container. obstore cannot, so the request is signed here."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    lines = ["PUT", *[""] * 11, *(f"{key}:{value}" for key, value in headers.items())]
    text = "\n".join([*lines, f"/{ACCOUNT}/{ACCOUNT}/{name}", "restype:container"])
    signature = base64.b64encode(hmac.new(base64.b64decode(KEY), text.encode(), hashlib.sha256).digest()).decode()
    headers |= {"Authorization": f"SharedKey {ACCOUNT}:{signature}", "Content-Length": "0"}
    address = f"{url}/{ACCOUNT}/{name}?restype=container"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(address, method="PUT", headers=headers)) as reply:
        assert reply.status == 201


@pytest.fixture
def folder(azurite: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Folder]:
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", ACCOUNT)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", KEY)
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", f"{azurite.url}/{ACCOUNT}")
    monkeypatch.setenv("SPILE_RETRY_SECONDS", "5")
    monkeypatch.setattr(Retry, "first", 0.01)
    yield open_folder(f"az://bucket/{os.getpid()}-{next(_numbers)}")
    azurite.faults.clear()


class _Clouds:
    """What the schedules of ``test_faults`` ask for."""

    def __init__(self, proxy: FaultyProxy) -> None:
        self._proxy = proxy

    def faults(self, _: str) -> Faults:
        return self._proxy.faults


@pytest.mark.parametrize("seed", range(6))
def test_random_faults(folder: Folder, azurite: FaultyProxy, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    monkeypatch.setattr(bucket, "PART", 5 << 20)
    payload = np.random.default_rng(seed).integers(0, 256, SIZE, np.uint8)
    _schedule(folder, _Clouds(azurite), seed, payload)  # type: ignore[arg-type]


def test_a_lost_reply_to_a_commit_is_read_back(folder: Folder, azurite: FaultyProxy) -> None:
    azurite.faults.add("reset_after", method="PUT")
    assert folder.create("commits/0001.json", b"ours")
    assert folder.stats.retries == 1
    azurite.faults.add("reset_after", method="PUT")
    assert not folder.create("commits/0001.json", b"theirs")


def test_an_upload_in_parts(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket, "PART", 1 << 20)
    data = np.random.default_rng(0).integers(0, 256, (3 << 20) + 17, np.uint8)
    write(folder, "shard", data)
    assert folder.get("shard") == data.tobytes()
    assert list(folder.unfinished()) == []


def test_a_run_is_stored_and_proven(folder: Folder) -> None:
    assert preflight(folder, environment={"SPILE_MACHINE_REGION": "none"}) == []
    produce(folder, 30)
    produce(folder, 30)
    assert verify(folder).ok


def test_errors_name_the_container_and_the_fix(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = r"there is no bucket az://nothing; create it: az storage container create --name nothing$"
    with pytest.raises(UserError, match=missing):
        preflight(open_folder("az://nothing/x"), environment={"SPILE_MACHINE_REGION": "none"})
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", base64.b64encode(b"wrong").decode())
    with pytest.raises(StoreError, match=r"cannot read az://bucket/x/y: found 403.*; let this account read"):
        open_folder("az://bucket/x").get("y")
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_KEY")
    monkeypatch.setattr("spile.objects.clouds.ask_metadata", lambda *_: None)
    with pytest.raises(UserError, match=r"no Azure credentials: expected AZURE_STORAGE_ACCOUNT_KEY, .*; set one, or"):
        open_folder("az://bucket/x").get("y")
    monkeypatch.delenv("AZURE_STORAGE_ACCOUNT_NAME")
    with pytest.raises(UserError, match=r"no storage account for az://bucket: .*; export AZURE_STORAGE_ACCOUNT_NAME"):
        open_folder("az://bucket/x").get("y")
