"""The parts of the cloud backends by themselves: signatures, backoff, memory in flight, secrets, regions."""

from __future__ import annotations

import threading
from datetime import UTC, datetime

import numpy as np
import pytest

from backends import Clouds
from spile.errors import StoreError, UserError
from spile.objects import Folder, open_folder
from spile.objects.cloud import upload
from spile.objects.cloud.aws import AwsKeys
from spile.objects.cloud.credentials import GoogleToken, sign_v4
from spile.objects.cloud.failures import RequestFailure, from_status
from spile.objects.cloud.upload import Buffers
from spile.objects.retry import Retry
from spile.objects.stats import Stats
from spile_fakes.buckets import Throttle


@pytest.mark.parametrize("token", [None, "session-token"])
@pytest.mark.parametrize(
    "url",
    [
        "https://s3.eu-west-1.amazonaws.com/b/a%20dir/x%23~1.json",
        "https://s3.eu-west-1.amazonaws.com/b?uploads=&prefix=a%2Fb&key-marker=x%20y",
        "http://127.0.0.1:5000/b/k?partNumber=12&uploadId=abc",
    ],
)
def test_signature_equals_botocores(url: str, token: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    import botocore.auth
    from botocore.awsrequest import AWSRequest
    from botocore.credentials import Credentials

    now = datetime(2026, 11, 1, 12, 30, tzinfo=UTC)
    ours = sign_v4("PUT", url, {"x-amz-checksum-crc32c": "AAAA"}, AwsKeys("id", "secret", token), "eu-west-1", now)
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda *_, **__: now.replace(tzinfo=None))
    request = AWSRequest("PUT", url, headers={"x-amz-checksum-crc32c": "AAAA"})
    signer = botocore.auth.S3SigV4Auth(Credentials("id", "secret", token), "s3", "eu-west-1")
    monkeypatch.setattr(signer, "payload", lambda _: "UNSIGNED-PAYLOAD")
    signer.add_auth(request)
    assert request.headers["X-Amz-Date"] == "20261101T123000Z"  # its clock was set
    assert ours["authorization"] == request.headers["Authorization"]


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
    assert stats.waited == pytest.approx(now)


def test_a_retry_within_a_retry_ends_with_the_inner_one() -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    def fail() -> None:
        raise from_status(503)

    retry = Retry(sleep=sleep, clock=lambda: now)
    with pytest.raises(RequestFailure, match="503"):
        retry.call(lambda: retry.call(fail, Stats()), Stats())
    assert now <= retry.total


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
    assert buffers.in_flight == 8 << 20
    buffers.give(first, 4 << 20)
    thread.join(120)
    assert not thread.is_alive()
    assert got[0] is first  # reused
    buffers.give(second, 4 << 20)


def test_two_writers_fit_whatever_the_budget() -> None:
    buffers = Buffers(budget=1)
    for _ in range(2):
        buffers.take(10 << 20)
    assert buffers.in_flight == 20 << 20


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
    monkeypatch.setattr(upload, "PART", 5 << 20)
    data = np.random.default_rng(0).integers(0, 256, (5 << 20) * 4 + 17, np.uint8)
    writer = cloud_folder.writer("shard", data.nbytes + 1000)
    writer.write_at(0, data)
    writer.finish(data.nbytes)
    assert cloud_folder.info("shard").size == data.nbytes
    assert cloud_folder.get("shard") == data.tobytes()
    assert cloud_folder.get_range("shard", (5 << 20) - 3, 6) == data[(5 << 20) - 3 : (5 << 20) + 3].tobytes()


def test_no_secret_in_any_word(clouds: Clouds, monkeypatch: pytest.MonkeyPatch) -> None:
    keys = AwsKeys("AKIAVERYSECRET", "hush-hush", "token-token")
    assert "hush" not in repr(keys)
    assert "AKIA" not in repr(keys)
    assert "token" not in repr(keys).lower().replace("awskeys", "")
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


def test_no_google_credentials_is_said(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
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
