"""One fixture, three backends: ``from backends import folder, folder_url`` in a conftest or a test module.

``folder`` is an empty folder on the local disk, on the fake GCS and on moto's S3, one after the other.
``folder_url`` is the same as a URL, with the environment set so that a subprocess reaches it too.
``clouds`` are the servers, to spoil their replies: ``clouds.faults(folder.url).add("reset_after", method="PUT")``.
A test that also wants Azure asks for it: ``@pytest.mark.parametrize("cloud_url", ["az"], indirect=True)``. Azurite,
Microsoft's emulator, must be installed (``npm install --prefix .azurite azurite``); the test is skipped otherwise.
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
from contextlib import ExitStack, contextmanager
from email.utils import formatdate
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

from spile.objects import Folder, open_folder
from tests.fakes.gcs import FakeGcs
from tests.fakes.server import Faults, FaultyProxy, FaultyServer

__all__ = ["BACKENDS", "Clouds", "cloud_folder", "cloud_url", "clouds", "folder", "folder_url", "shared_clouds"]

BACKENDS = ("local", "gs", "s3")
BUCKET = "bucket"
_numbers = itertools.count()
AZURE_ACCOUNT = "devstoreaccount1"
AZURE_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # Azurite's own


class Clouds:
    """The fake GCS, and moto's S3 behind a proxy that can corrupt replies. Each server is started at its first use."""

    def __init__(self) -> None:
        self._stack = ExitStack()

    @cached_property
    def gcs(self) -> FakeGcs:
        fake = self._stack.enter_context(FakeGcs())
        fake.add_bucket(BUCKET)
        return fake

    @cached_property
    def s3(self) -> FaultyProxy:
        from moto.server import ThreadedMotoServer

        moto = ThreadedMotoServer(port=0, verbose=False)
        moto.start()
        self._stack.callback(moto.stop)
        host, port = moto.get_host_and_port()
        proxy = self._stack.enter_context(FaultyProxy(f"http://{host}:{port}"))
        self.s3_client(proxy.url).create_bucket(Bucket=BUCKET)
        return proxy

    @cached_property
    def azure(self) -> FaultyProxy:
        installed = Path(__file__).parents[1] / ".azurite/node_modules/.bin"
        program = shutil.which("azurite-blob", path=f"{installed}:{os.environ.get('PATH', '')}")
        if program is None:
            pytest.skip("no Azurite: npm install --prefix .azurite azurite")
        command = [program, "--inMemoryPersistence", "--skipApiVersionCheck", "--disableTelemetry", "--blobPort", "0"]
        process = self._stack.enter_context(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        self._stack.callback(process.kill)
        assert process.stdout is not None
        found = (re.search(r"listens on (http://[\d.:]+)", line) for line in process.stdout)
        url = next(match[1] for match in found if match)
        _make_container(url, BUCKET)
        return self._stack.enter_context(_AzureProxy(url))

    @staticmethod
    def s3_client(url: str) -> Any:
        import boto3

        keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
        return boto3.client("s3", endpoint_url=url, **keys)

    def server(self, url: str) -> FaultyServer:
        """Return the server of this folder."""
        if url.startswith("az:"):
            return self.azure
        return self.gcs if url.startswith("gs:") else self.s3

    def faults(self, url: str) -> Faults:
        """Return the faults that are injected into requests for this folder."""
        return self.server(url).faults

    def close(self) -> None:
        self._stack.close()


class _AzureProxy(FaultyProxy):
    _HOP = tuple(name for name in FaultyProxy._HOP if name != "date")  # Azure's signature covers the date


def _make_container(url: str, name: str) -> None:
    """Create a container. obstore cannot, so the request is signed here."""
    headers = {"x-ms-date": formatdate(usegmt=True), "x-ms-version": "2021-08-06"}
    lines = ["PUT", *[""] * 11, *(f"{key}:{value}" for key, value in headers.items())]
    text = "\n".join([*lines, f"/{AZURE_ACCOUNT}/{AZURE_ACCOUNT}/{name}", "restype:container"])
    signature = base64.b64encode(hmac.new(base64.b64decode(AZURE_KEY), text.encode(), hashlib.sha256).digest())
    headers |= {"Authorization": f"SharedKey {AZURE_ACCOUNT}:{signature.decode()}", "Content-Length": "0"}
    request = urllib.request.Request(f"{url}/{AZURE_ACCOUNT}/{name}?restype=container", method="PUT", headers=headers)
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request) as reply:
        assert reply.status == 201


def environment(clouds: Clouds, backend: str) -> dict[str, str]:
    """Return variables that point a process at the servers and away from the network."""
    variables = {"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost"}
    if backend == "gs":
        variables |= {"STORAGE_EMULATOR_HOST": clouds.gcs.url}
    if backend == "s3":
        variables |= {"AWS_ENDPOINT_URL": clouds.s3.url, "AWS_REGION": "us-east-1"}
        variables |= {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
    if backend == "az":
        variables |= {"AZURE_STORAGE_ACCOUNT_NAME": AZURE_ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": AZURE_KEY}
        variables |= {"AZURE_STORAGE_ENDPOINT": f"{clouds.azure.url}/{AZURE_ACCOUNT}"}
    return variables


@pytest.fixture(scope="session")
def shared_clouds() -> Iterator[Clouds]:
    """Started once a session."""
    clouds = Clouds()
    yield clouds
    clouds.close()


@pytest.fixture
def clouds(shared_clouds: Clouds) -> Iterator[Clouds]:
    """The servers, without faults before and after the test."""
    yield shared_clouds
    for server in (shared_clouds.__dict__.get(name) for name in ("gcs", "s3", "azure")):
        if server is not None:
            server.faults.clear()
            server.throttle.rate = None


@contextmanager
def _at(clouds: Clouds, backend: str, tmp_path: Path) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment(clouds, backend).items():
            patch.setenv(name, value)
        yield f"{backend}://{BUCKET}/{os.getpid()}-{next(_numbers)}" if backend != "local" else str(tmp_path / "root")


@pytest.fixture(params=BACKENDS)
def folder_url(request: pytest.FixtureRequest, clouds: Clouds, tmp_path: Path) -> Iterator[str]:
    """The address of an empty folder that no other test uses."""
    with _at(clouds, request.param, tmp_path) as url:
        yield url


@pytest.fixture
def folder(folder_url: str) -> Folder:
    """An empty folder that no other test uses."""
    return open_folder(folder_url)


@pytest.fixture(params=BACKENDS[1:])
def cloud_url(request: pytest.FixtureRequest, clouds: Clouds, tmp_path: Path) -> Iterator[str]:
    """Like ``folder_url``, but only buckets."""
    with _at(clouds, request.param, tmp_path) as url:
        yield url


@pytest.fixture
def cloud_folder(cloud_url: str) -> Folder:
    """Like ``folder``, but only buckets."""
    return open_folder(cloud_url)
