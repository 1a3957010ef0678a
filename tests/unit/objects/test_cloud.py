"""The parts of the bucket backend by themselves: backoff, memory in flight, secrets, TLS, forks, signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.fakes.gcs import FakeGcs
from tests.fakes.server import FakeReply, Request, Throttle, make_tls_context

from backends import BUCKET, Clouds
from spile.errors import StoreError, UserError
from spile.objects import Folder, Stats, bucket, open_folder
from spile.objects.bucket import BucketFolder, Buffers
from spile.objects.clouds import GoogleBucket, GoogleToken
from spile.objects.retry import RequestFailure, Retry, from_status


def test_backoff_grows_is_capped_and_ends() -> None:
    now = 0.0
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        waits.append(seconds)

    def fail() -> None:
        raise from_status(503)

    stats = Stats()
    retry = Retry(first=0.2, cap=15, total=180, sleep=sleep, clock=lambda: now)
    with pytest.raises(RequestFailure, match="503"):
        retry.call(fail, stats)
    assert all(wait <= min(15, 0.2 * 2**number) for number, wait in enumerate(waits))
    assert 150 < now <= 180
    assert 15 < len(waits) < 60  # no storm
    assert len({round(wait, 6) for wait in waits}) == len(waits)  # jitter
    assert (stats.retries, stats.requests) == (len(waits), len(waits) + 1)


def test_an_upload_that_fails_after_a_long_time_is_started_again() -> None:
    now, results = 0.0, iter([from_status(503), None])

    def upload() -> str:
        nonlocal now
        now += 1000.0
        if (failure := next(results)) is not None:
            raise failure
        return "done"

    stats = Stats()
    assert Retry(sleep=lambda _: None, clock=lambda: now).call(upload, stats) == "done"
    assert stats.retries == 1


def test_what_is_for_good_is_not_tried_again() -> None:
    stats = Stats()
    with pytest.raises(RequestFailure):
        Retry(sleep=lambda _: pytest.fail("it waited")).call(lambda: (_ for _ in ()).throw(from_status(403)), stats)
    assert stats.retries == 0


def test_memory_in_flight_is_bounded() -> None:
    buffers = Buffers(budget=8 << 20)
    first, second = buffers.take(4 << 20), buffers.take(4 << 20)
    got: list[np.ndarray] = []
    thread = threading.Thread(target=lambda: got.append(buffers.take(3 << 20)))
    thread.start()
    thread.join(0.2)
    assert thread.is_alive()  # waits
    buffers.give_back(first, 4 << 20)
    thread.join(120)
    assert not thread.is_alive()
    assert got[0] is first  # reused
    buffers.give_back(second, 4 << 20)


def test_two_writers_fit_any_budget() -> None:
    buffers = Buffers(budget=1)
    for _ in range(2):
        assert buffers.take(10 << 20).nbytes == 10 << 20


def test_a_writer_waits_for_an_upload(cloud_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPILE_UPLOAD_GB", "0.001")
    folder = open_folder(cloud_url)
    first, second = folder.writer("a", 100), folder.writer("b", 100)
    opened = threading.Event()
    thread = threading.Thread(target=lambda: (folder.writer("c", 100).abort(), opened.set()))
    thread.start()
    assert not opened.wait(0.2)
    first.finish(100)
    assert opened.wait(120)
    thread.join()
    second.abort()


def test_a_writer_holds_what_it_was_planned_for(cloud_folder: Folder) -> None:
    writer = cloud_folder.writer("a", 10)
    with pytest.raises(StoreError, match="expected at most 10 bytes, found 11"):
        writer.write_at(5, b"123456")
    with pytest.raises(StoreError, match="at most 10"):
        writer.finish(11)
    writer.abort()


def test_parts_arrive_in_order(cloud_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bucket, "PART", 5 << 20)
    data = np.random.default_rng(0).integers(0, 256, (5 << 20) * 4 + 17, np.uint8)
    writer = cloud_folder.writer("shard", data.nbytes + 1000)
    writer.write_at(0, data)
    writer.finish(data.nbytes)
    assert cloud_folder.info("shard").size == data.nbytes
    assert cloud_folder.get("shard") == data.tobytes()
    assert cloud_folder.get_range("shard", (5 << 20) - 3, 6) == data[(5 << 20) - 3 : (5 << 20) + 3].tobytes()


def test_no_secret_in_any_word(clouds: Clouds, monkeypatch: pytest.MonkeyPatch) -> None:
    assert repr(GoogleToken()) == "GoogleToken(…)"
    body = b"<Error><Code>SignatureDoesNotMatch</Code><AWSAccessKeyId>AKIAX</AWSAccessKeyId></Error>"
    assert str(from_status(403, body)) == "403 a wrong secret key"
    for name, value in (("ACCESS_KEY_ID", "AKIAVERYSECRET"), ("SECRET_ACCESS_KEY", "hush-hush")):
        monkeypatch.setenv(f"AWS_{name}", value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", clouds.s3.url)
    clouds.s3.faults.add("status", status=403, count=-1)
    with pytest.raises(StoreError) as caught:
        open_folder("s3://bucket/x").put("y", b"")
    assert "hush" not in str(caught.value)
    assert "AKIA" not in str(caught.value)


def test_missing_google_credentials_are_reported(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STORAGE_EMULATOR_HOST", raising=False)
    monkeypatch.delenv("GOOGLE_APPLICATION_CREDENTIALS", raising=False)
    monkeypatch.setenv("CLOUDSDK_CONFIG", str(tmp_path))
    monkeypatch.setenv("NO_GCE_CHECK", "true")
    folder = open_folder("gs://b")
    for verb in (lambda: folder.get("x"), lambda: folder.info("x"), lambda: next(folder.list())):
        with pytest.raises(UserError, match=r"no Google credentials.*gcloud auth application-default login"):
            verb()


def test_a_throttled_byte_passes_after_all_that_were_before_it() -> None:
    """Each body's bytes pass one after another, and all bodies share the rate: times add up, whoever waits."""
    throttle = Throttle()
    throttle.take(1 << 30)  # unlimited: it must not count once there is a rate
    throttle.rate = 1000.0
    first = throttle.take(1, since=0.0)
    second = throttle.take(2, since=first)
    of_another_body = throttle.take(4, since=0.0)
    assert (first, second - first, of_another_body - second) == pytest.approx((0.001, 0.002, 0.004))


class Noting(FakeGcs):
    """Remembers the headers of the last request."""

    def answer(self, request: Request) -> FakeReply:
        self.asked = request.headers
        return super().answer(request)


@pytest.fixture
def encrypted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Noting]:
    context, trusted = make_tls_context(tmp_path)
    with Noting(tls=context) as fake:
        fake.add_bucket(BUCKET)
        for name, value in {"STORAGE_EMULATOR_HOST": fake.url, "SSL_CERT_FILE": str(trusted)}.items():
            monkeypatch.setenv(name, value)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        yield fake


def test_tls_with_a_private_authority_and_a_bearer_token(encrypted: Noting, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = open_folder(f"gs://{BUCKET}/r")
    assert isinstance(folder, BucketFolder)
    cloud = folder.bucket.cloud
    assert isinstance(cloud, GoogleBucket)
    monkeypatch.setattr(cloud, "emulated", False)
    monkeypatch.setattr(cloud.credentials, "token", lambda: "of-this-minute")
    folder.put("x", b"data")
    assert encrypted.asked["authorization"] == "Bearer of-this-minute"
    assert folder.get("x") == b"data"
    assert encrypted.asked["authorization"] == "Bearer of-this-minute"
    assert list(folder.unfinished()) == []
    assert encrypted.asked["authorization"] == "Bearer of-this-minute"


def test_an_unknown_certificate_is_refused_at_once(encrypted: Noting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SSL_CERT_FILE")
    folder = open_folder(f"gs://{BUCKET}/r")
    for verb in (lambda: folder.get("x"), lambda: list(folder.unfinished())):
        with pytest.raises(StoreError, match="no secure connection: the certificate was refused"):
            verb()


_FORKED = """
import os, sys
from spile.objects import open_folder
folder = open_folder(sys.argv[1])
mine = folder.get("x")
assert list(folder.get_many(["x", "x"])) == [mine, mine]
child = os.fork()
if child == 0:
    folder.put("from-the-child", mine)
    same = list(folder.get_many(["x", "from-the-child"])) == [mine, mine]
    os._exit(0 if same and open_folder(sys.argv[1]).get("x") == mine else 1)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
sys.exit(status or folder.get("from-the-child") != mine)
"""


def test_a_forked_process_reads_and_writes(cloud_folder: Folder) -> None:
    cloud_folder.put("x", b"data")
    command = [sys.executable, "-W", "error", "-c", _FORKED, cloud_folder.url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_ctrl_c_does_not_wait_for_a_server_that_hangs(cloud_folder: Folder, clouds: Clouds) -> None:
    cloud_folder.put("x", b"data")
    clouds.faults(cloud_folder.url).add("hang", method="GET", seconds=100)
    code = "import sys; from spile.objects import open_folder; print(1, flush=True); open_folder(sys.argv[1]).get('x')"
    command = [sys.executable, "-c", code, cloud_folder.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        while not clouds.faults(cloud_folder.url).applied.get("hang"):
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        try:
            assert process.wait(30) == -signal.SIGINT
        finally:
            process.kill()
            clouds.faults(cloud_folder.url).applied.clear()


def test_a_proxy_of_the_environment_is_used(cloud_folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_PROXY", "no_proxy"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("SPILE_RETRY_SECONDS", "0.1")
    with pytest.raises(StoreError, match="connection refused"):
        open_folder(cloud_folder.url).get("x")
    assert os.environ["HTTP_PROXY"]


def test_a_name_without_an_owner_is_asked_for_only_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be a mistyped path, and the user waits."""
    assert (Retry.for_name("Qwen/Qwen2.5-0.5B").total, Retry.for_name("gpt2").total) == (180, 10)
    monkeypatch.setenv("SPILE_RETRY_SECONDS", "2")
    assert (Retry.for_name("Qwen/Qwen2.5-0.5B").total, Retry.for_name("gpt2").total) == (2, 2)


def test_the_hub_is_asked_briefly_if_somebody_waits() -> None:
    found = [Retry.for_name("Qwen/Qwen2.5-0.5B"), Retry.for_name("Qwen/Qwen2.5-0.5B", patient=False)]
    found += [Retry.for_name("activatoins"), Retry.for_name("activatoins", patient=False)]
    assert [retry.total for retry in found] == [180, 10, 10, 10]
