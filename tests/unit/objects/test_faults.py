"""Every kind of fault in every operation: it is retried or is one clear line; never wrong data or silent loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from tests.fakes import gcs
from tests.fakes.server import FakeReply, FaultKind, Request, random_faults

from backends import BUCKET, Clouds
from spile.errors import StoreError
from spile.objects import Folder, bucket, open_folder
from spile.objects.retry import Retry

PASSING = [
    pytest.param("status", 429, marks=pytest.mark.slow),
    pytest.param("status", 500, marks=pytest.mark.slow),
    ("status", 503),
    pytest.param("status_after", 500, marks=pytest.mark.slow),
    ("status_after", 503),
    ("reset", 0),
    ("reset_after", 0),
    ("truncate", 0),
    ("slow", 0),
]
SIZE = 11 << 20


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPILE_RETRY_SECONDS", "60")
    monkeypatch.setattr(Retry, "first", 0.01)
    monkeypatch.setattr(bucket, "PART", 5 << 20)


@pytest.fixture(scope="module")
def payload() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, SIZE, np.uint8)


def write(folder: Folder, key: str, data: np.ndarray) -> None:
    writer = folder.writer(key, data.nbytes)
    writer.write_at(0, data)
    writer.finish(data.nbytes)


def check_get(folder: Folder) -> None:
    assert folder.get("there") == b"hello world"


def check_range(folder: Folder) -> None:
    assert folder.get_range("there", 2, 5) == b"llo w"


def check_info(folder: Folder) -> None:
    assert folder.info("there").size == 11


def check_list(folder: Folder) -> None:
    assert [item.key for item in folder.list()] == ["there"]


def check_put(folder: Folder) -> None:
    folder.put("new", b"1")


def check_create(folder: Folder) -> None:
    assert folder.create("new", b"mine")
    assert not folder.create("new", b"theirs")


def check_lost_race(folder: Folder) -> None:
    assert not folder.create("there", b"mine")


def check_delete(folder: Folder) -> None:
    folder.delete("there")


def check_many(folder: Folder) -> None:
    assert list(folder.get_many(["there"] * 5)) == [b"hello world"] * 5


def check_unfinished(folder: Folder) -> None:
    assert list(folder.unfinished()) == []


VERBS = [
    check_get,
    check_range,
    check_info,
    check_list,
    check_put,
    check_create,
    check_lost_race,
    check_delete,
    check_many,
    check_unfinished,
]


@pytest.mark.parametrize(("kind", "status"), PASSING)
@pytest.mark.parametrize("verb", VERBS)
def test_a_fault_that_passes(
    cloud_folder: Folder, clouds: Clouds, verb: Callable[[Folder], None], kind: FaultKind, status: int
) -> None:
    cloud_folder.put("there", b"hello world")
    faults = clouds.faults(cloud_folder.url)
    faults.add(kind, status=status or 503, seconds=0.01, count=2)
    verb(cloud_folder)
    assert faults.rules[0].count < 2  # it struck
    if kind.startswith(("status", "reset")):
        assert cloud_folder.stats.retries >= 1


@pytest.mark.parametrize(("kind", "status"), PASSING)
@pytest.mark.parametrize(
    ("method", "target"), [("POST", "uploads"), ("PUT", "partNumber=2"), ("POST", "uploadId="), ("PUT", "partNumber")]
)
def test_uploads_survive(
    cloud_folder: Folder,
    clouds: Clouds,
    payload: np.ndarray,
    kind: FaultKind,
    status: int,
    method: str,
    target: str,
) -> None:
    faults = clouds.faults(cloud_folder.url)
    faults.add(kind, status=status or 503, method=method, target=target, seconds=0.01)
    write(cloud_folder, "shard", payload)
    assert faults.rules[0].count == 0
    assert cloud_folder.info("shard").size == SIZE
    assert cloud_folder.get("shard") == payload.tobytes()
    if target != "uploads":  # an upload begun twice, because the first reply was lost, is what --gc is for
        assert list(cloud_folder.unfinished()) == []


@pytest.mark.parametrize("verb", VERBS)
def test_a_hang_is_cut_off_and_tried_again(
    cloud_url: str, clouds: Clouds, verb: Callable[[Folder], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPILE_HTTP_TIMEOUT", "0.4")
    folder = open_folder(cloud_url)
    folder.put("there", b"hello world")
    clouds.faults(folder.url).add("hang", seconds=4)
    verb(folder)
    assert folder.stats.retries >= 1


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize(("status", "words"), [(403, "403 permission denied"), (401, "401 no valid credentials")])
def test_a_missing_permission_is_reported_at_once(
    cloud_folder: Folder, clouds: Clouds, verb: Callable[[Folder], None], status: int, words: str
) -> None:
    clouds.faults(cloud_folder.url).add("status", status=status, count=-1)
    with pytest.raises(StoreError, match=words) as caught:
        verb(cloud_folder)
    assert cloud_folder.url in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "injected" not in str(caught.value)
    assert caught.value.exit_code == 1
    assert cloud_folder.stats.retries == 0


@pytest.mark.parametrize("verb", VERBS)
def test_giving_up_names_the_object_and_the_cause(
    cloud_url: str, clouds: Clouds, verb: Callable[[Folder], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPILE_RETRY_SECONDS", "0.1")
    folder = open_folder(cloud_url)
    clouds.faults(folder.url).add("status", status=503, count=-1)
    with pytest.raises(StoreError, match=r"503.*Run the same command again") as caught:
        verb(folder)
    assert folder.url in str(caught.value)


def test_an_upload_that_cannot_succeed_leaves_nothing(
    cloud_folder: Folder, clouds: Clouds, payload: np.ndarray
) -> None:
    faults = clouds.faults(cloud_folder.url)
    faults.add("status", status=403, method="PUT", target="partNumber=2", count=-1)
    with pytest.raises(StoreError, match=r"cannot write .*/tpu_0/shard: found 403 permission denied"):
        write(cloud_folder, "tpu_0/shard", payload)
    faults.clear()
    assert list(cloud_folder.list()) == []
    assert list(cloud_folder.unfinished()) == []
    write(cloud_folder, "tpu_0/shard", payload)
    assert cloud_folder.get("tpu_0/shard") == payload.tobytes()


def test_an_upload_whose_part_fails_for_too_long_is_started_again_and_counted(
    cloud_url: str, clouds: Clouds, payload: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket, "_PART_RETRIES", 0)
    folder = open_folder(cloud_url)
    clouds.faults(cloud_url).add("status", method="PUT", target="partNumber=2", count=2)
    write(folder, "shard", payload)
    assert folder.stats.retries == 2
    assert folder.get("shard") == payload.tobytes()
    assert list(folder.unfinished()) == []


def test_an_abandoned_upload_is_found_and_removed(cloud_folder: Folder, clouds: Clouds, payload: np.ndarray) -> None:
    faults = clouds.faults(cloud_folder.url)
    faults.add("status", status=403, method="PUT", target="partNumber=1&", count=-1)
    faults.add("status", status=403, method="DELETE", count=-1)
    with pytest.raises(StoreError):
        write(cloud_folder, "tpu_0/shard", payload)
    faults.clear()
    (remains,) = cloud_folder.unfinished("tpu_0/")
    assert remains.key == "tpu_0/shard"
    assert list(cloud_folder.unfinished("tpu_1/")) == []
    assert [r.key for r in cloud_folder.child("tpu_0").unfinished()] == ["shard"]
    retries = cloud_folder.stats.retries
    cloud_folder.discard(remains)
    cloud_folder.discard(remains)
    assert cloud_folder.stats.retries == retries
    assert list(cloud_folder.unfinished()) == []


@pytest.mark.parametrize("cloud_url", ["s3"], indirect=True)
@pytest.mark.parametrize("size", [1000, SIZE])
def test_s3_refuses_an_upload_that_was_damaged_on_the_way(
    cloud_folder: Folder, clouds: Clouds, monkeypatch: pytest.MonkeyPatch, payload: np.ndarray, size: int
) -> None:
    """obstore signs the SHA-256 of each body. The proxy compares it, as Amazon does and moto does not."""
    answer = clouds.s3.answer
    damaged: list[str] = []

    def damage_first(request: Request) -> FakeReply:
        if request.method == "PUT" and not damaged:
            damaged.append(request.target)
            return answer(replace(request, body=bytes([request.body[0] ^ 1]) + request.body[1:]))
        return answer(request)

    monkeypatch.setattr(clouds.s3, "answer", damage_first)
    write(cloud_folder, "shard", payload[:size])
    assert len(damaged) == 1
    assert cloud_folder.stats.retries == 1
    assert cloud_folder.get("shard") == payload[:size].tobytes()


def test_no_bucket(clouds: Clouds, monkeypatch: pytest.MonkeyPatch, payload: np.ndarray) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", clouds.gcs.url)
    clouds.gcs.add_bucket("short-lived")
    folder = open_folder("gs://short-lived/run")
    folder.put("x", b"1")
    clouds.gcs.delete_bucket("short-lived")
    words = r"404 no such bucket. Create it \(gcloud storage buckets create gs://short-lived --location=REGION\)"
    for verb in (check_put, check_create, check_list, lambda f: write(f, "shard", payload), check_get):
        with pytest.raises(StoreError, match=words):
            verb(folder)
    clouds.gcs.add_bucket("short-lived")
    check_put(folder)
    clouds.gcs.delete_bucket("short-lived")


@pytest.mark.parametrize(
    ("host", "words"),
    [("http://127.0.0.1:1", "connection refused"), ("http://no-such-host.invalid", "name does not resolve")],
)
def test_no_connection(host: str, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", host)
    monkeypatch.setenv("SPILE_RETRY_SECONDS", "0.05")
    folder = open_folder("gs://b/x")
    for verb in (check_get, check_range, check_put, check_create):
        with pytest.raises(StoreError, match=words):
            verb(folder)


def _schedule(folder: Folder, clouds: Clouds, seed: int, payload: np.ndarray) -> None:
    """A small run under faults: confirmed writes exist, and refused ones were not stored by us."""
    faults = clouds.faults(folder.url)
    faults.extend(random_faults(seed, 6, 20))
    root = folder.child(f"schedule-{seed}")
    output: dict[str, bytes] = {}
    for number in range(4):
        data = f"{seed} {number}".encode() * 10
        root.put(f"put/{number}", data)
        output[f"put/{number}"] = data
        if root.create(f"commits/{number:04d}", data):
            output[f"commits/{number:04d}"] = data
        assert not root.create(f"commits/{number:04d}", b"a zombie's")
    write(root, "shard", payload[: 6 << 20])
    output["shard"] = payload[: 6 << 20].tobytes()
    faults.clear()
    assert {item.key: root.get(item.key) for item in root.list()} == output
    assert len(output) == 9  # There was no other writer, so each create must have succeeded.


@pytest.mark.parametrize("seed", range(10))
def test_random_schedules(cloud_folder: Folder, clouds: Clouds, payload: np.ndarray, seed: int) -> None:
    _schedule(cloud_folder, clouds, seed, payload)


@pytest.mark.soak
@pytest.mark.parametrize("block", range(20))
def test_a_thousand_schedules(cloud_folder: Folder, clouds: Clouds, payload: np.ndarray, block: int) -> None:
    for seed in range(1000 + block * 50, 1050 + block * 50):
        _schedule(cloud_folder, clouds, seed, payload)


@pytest.mark.parametrize("ask", [lambda folder: list(folder.list()), lambda folder: list(folder.unfinished())])
@pytest.mark.parametrize("cloud_url", ["gs"], indirect=True)
def test_a_page_in_place_of_a_listing_is_requested_again(
    cloud_folder: Folder, clouds: Clouds, monkeypatch: pytest.MonkeyPatch, ask: Callable[[Folder], object]
) -> None:
    """A captive portal answers every request with a page and status 200."""
    answer, asked = clouds.gcs.answer, []

    def portal(request: Request) -> FakeReply:
        asked.append(request)
        return FakeReply(200, b"<html>log in") if len(asked) == 1 else answer(request)

    monkeypatch.setattr(clouds.gcs, "answer", portal)
    ask(cloud_folder)
    assert len(asked) == 2


@pytest.mark.parametrize("cloud_url", ["gs"], indirect=True)
def test_a_listing_continues_after_a_page_that_failed(
    cloud_folder: Folder, clouds: Clouds, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gcs, "_PAGE", 3)
    monkeypatch.setattr(bucket, "_PAGE", 3)
    names = [f"x/{number:02d}" for number in range(8)]
    for name in names:
        cloud_folder.put(name, b"")
    found = []
    for number, item in enumerate(cloud_folder.list("x/")):
        found.append(item.key)
        if number in (2, 5):
            clouds.faults(cloud_folder.url).add("status", method="GET")
    assert found == names
    assert cloud_folder.stats.retries == 2


@pytest.mark.parametrize("cloud_url", ["s3"], indirect=True)
def test_a_name_that_obstore_cannot_list_is_listed_by_botocore(cloud_folder: Folder, clouds: Clouds) -> None:
    prefix = cloud_folder.url.removeprefix(f"s3://{BUCKET}/")
    cloud_folder.put("good", b"")
    clouds.s3_client(clouds.s3.url).put_object(Bucket=BUCKET, Key=f"{prefix}/a/../b", Body=b"")
    assert sorted(info.key for info in cloud_folder.list()) == ["a/../b", "good"]
