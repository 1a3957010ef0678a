"""Two real clients accept the fake GCS: obstore (XML) and Google's (JSON)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.gcs import FakeGcs

from spile.objects import open_folder


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGcs]:
    with FakeGcs() as fake:
        fake.add_bucket("b", "EUROPE-WEST4")
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", fake.url)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield fake


def test_obstore(fake: FakeGcs) -> None:
    import obstore
    from obstore.exceptions import AlreadyExistsError
    from obstore.store import GCSStore

    key = {"gcs_base_url": fake.url, "disable_oauth": True, "client_email": "", "private_key": "", "private_key_id": ""}
    store = GCSStore("b", service_account_key=json.dumps(key), client_options={"allow_http": True})
    obstore.put(store, "x/1", b"hello", mode="create")
    with pytest.raises(AlreadyExistsError):
        obstore.put(store, "x/1", b"other", mode="create")
    large = os.urandom(11 << 20)
    obstore.put(store, "x/2", large, use_multipart=True)
    assert bytes(obstore.get_range(store, "x/2", start=5, length=9)) == large[5:14]
    assert obstore.head(store, "x/1")["size"] == 5
    assert [found["path"] for page in obstore.list(store, "x") for found in page] == ["x/1", "x/2"]
    assert open_folder("gs://b/x").get("2") == large


def test_googles_own_client(fake: FakeGcs) -> None:
    """The fake answers what spile and the startup script ask through the JSON API."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the client's own deprecations are not ours
        from google.auth.credentials import AnonymousCredentials
        from google.cloud import storage

        client = storage.Client(project="p", credentials=AnonymousCredentials())
        bucket = client.bucket("b")
        assert client.get_bucket("b").location == "EUROPE-WEST4"
        open_folder("gs://b").put("a dir/x#1.txt", b"hello")
        blob = bucket.blob("a dir/x#1.txt")
        assert blob.download_as_bytes(checksum="crc32c") == b"hello"
        assert blob.download_as_bytes(start=1, end=3) == b"ell"
        asked = ["storage.objects.create", "storage.objects.get"]
        assert bucket.test_iam_permissions(asked) == asked
        fake.buckets.buckets["b"].refused.add("storage.objects.create")
        assert bucket.test_iam_permissions(asked) == asked[1:]
        fake.buckets.buckets["b"].bindings = [{"role": "roles/storage.objectUser", "members": ["user:x@y.z"]}]
        assert bucket.get_iam_policy()["roles/storage.objectUser"] == {"user:x@y.z"}
        client.close()


def _admin(url: str, path: str, value: object = None, method: str = "POST") -> bytes:
    body = None if value is None else json.dumps(value).encode()
    request = urllib.request.Request(f"{url}/_fake/{path}", body, method=method)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as reply:
        data: bytes = reply.read()
        return data


@pytest.mark.parametrize("scheme", ["http", "https"])
def test_as_a_process(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-m", "tests.fakes.gcs", "--bucket", "b", "--location", "US-EAST1"]
    command += ["--tls", str(tmp_path)] if scheme == "https" else []
    process = subprocess.Popen([*command, "--with-parent"], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        url = process.stdout.readline().strip()
        assert url.startswith(f"{scheme}://127.0.0.1:")
        if scheme == "https":
            monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "authority.pem"))
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", url)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        folder = open_folder("gs://b/x")
        _admin(url, "faults", [{"kind": "status", "status": 503, "method": "PUT", "count": 1}])
        folder.put("a", b"1")
        assert folder.stats.retries == 1
        stats = json.loads(_admin(url, "stats", method="GET"))
        assert stats["applied"] == {"status": 1}
        assert stats["requests"] == 2
        _admin(url, "faults", method="DELETE")
        _admin(url, "bandwidth", {"bytes_per_second": 1e9})
        folder.put("a", b"2")
        assert folder.get("a") == b"2"
    finally:
        process.terminate()
        assert process.wait(120) == 0
        process.stdout.close()  # type: ignore[union-attr]


def test_pages(fake: FakeGcs) -> None:
    folder = open_folder("gs://b/many")
    names = [f"commits/{n:04d}.json" for n in range(2500)]
    for name in names:
        fake.buckets.store("b", f"many/{name}", name.encode())
    fake.buckets.store("b", "many/z", b"")
    assert [item.key for item in folder.list()] == [*names, "z"]
    assert [item.key for item in folder.list("commits/0")] == names[:1000]
    fake.faults.add("status", skip=1, count=2)  # the second page fails twice
    assert [item.key for item in folder.list("commits/")] == names
    assert folder.stats.retries == 2


def test_many_unfinished_uploads_come_in_pages(fake: FakeGcs) -> None:
    for number in range(1500):
        fake.buckets.begin("b", f"run/shard_{number:04d}")
    found = list(open_folder("gs://b/run").unfinished())
    assert [remains.key for remains in found] == [f"shard_{number:04d}" for number in range(1500)]
