"""The checks before anything is computed."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
from tests.fakes.server import FakeReply, FaultyServer, Request

from backends import BUCKET, Clouds
from spile.errors import StoreError, UserError
from spile.objects import Folder, open_folder
from spile.objects.machine import Region, egress_price, machine_region
from spile.objects.preflight import preflight

NOWHERE = {"NO_GCE_CHECK": "true", "AWS_EC2_METADATA_DISABLED": "true"}


def test_a_good_folder_has_no_warnings_and_nothing_is_left(folder: Folder) -> None:
    assert preflight(folder, environment=NOWHERE) == []
    assert list(folder.list()) == []


def test_no_local_folder_is_made(tmp_path: Path) -> None:
    preflight(open_folder(str(tmp_path / "a/b/c")))
    assert list(tmp_path.iterdir()) == []


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(b"")
    with pytest.raises(UserError, match="found a file where a folder should be"):
        preflight(open_folder(str(tmp_path / "x/y")))


def test_a_read_only_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr("tempfile.NamedTemporaryFile", refuse)
    with pytest.raises(UserError, match=r"cannot write .*: expected a folder with room, found a read-only file system"):
        preflight(open_folder(str(tmp_path)))


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("tempfile.NamedTemporaryFile", refuse)
    with pytest.raises(UserError, match=r"cannot write .*: expected a folder with room, found a full disk"):
        preflight(open_folder(str(tmp_path)))


def test_no_bucket_says_what_to_type(cloud_url: str) -> None:
    folder = open_folder(cloud_url.replace(BUCKET, "not-there"))
    with pytest.raises(UserError, match=r"there is no bucket .*://not-there\. Create it: ") as caught:
        preflight(folder, environment={"SPILE_MACHINE_REGION": "gs/europe-west4"})
    expected = {
        "gs": "gcloud storage buckets create gs://not-there --location=europe-west4",
        "s3": "aws s3 mb s3://not-there --region us-east-1",
    }
    assert str(caught.value).endswith(expected[cloud_url[:2]])
    assert caught.value.exit_code == 2


def test_forbidden(cloud_folder: Folder, clouds: Clouds) -> None:
    clouds.faults(cloud_folder.url).add("status", status=403, count=-1)
    with pytest.raises(UserError, match=r"found 403 permission denied\. Let this account read and write") as caught:
        preflight(cloud_folder, environment=NOWHERE)
    assert caught.value.exit_code == 2


def test_no_network_is_a_failure_and_no_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", "http://127.0.0.1:1")
    monkeypatch.setenv("SPILE_RETRY_SECONDS", "0.05")
    with pytest.raises(StoreError, match="connection refused") as caught:
        preflight(open_folder("gs://b"), environment=NOWHERE)
    assert caught.value.exit_code == 1


def test_another_region_is_warned_about_with_its_price(cloud_folder: Folder, clouds: Clouds) -> None:
    (warning,) = preflight(cloud_folder, environment={"SPILE_MACHINE_REGION": "gs/europe-west4"})
    if cloud_folder.url.startswith("gs:"):
        assert warning == (
            "gs://bucket is in us-central1 and this machine in europe-west4: every TiB written costs about $51 of "
            "egress ($0.05 per GiB, list prices of 2025); a bucket in the same region costs nothing: "
            "gcloud storage buckets create gs://NAME --location=europe-west4"
        )
    else:
        assert "s3://bucket is in us-east-1 and this machine in europe-west4" in warning
        assert "$0.12 per GiB" in warning
    home = "gs/us-central1" if cloud_folder.url.startswith("gs:") else "s3/us-east-1"
    assert preflight(cloud_folder, environment={"SPILE_MACHINE_REGION": home}) == []


@pytest.mark.parametrize("cloud_url", ["gs"], indirect=True)
def test_a_location_that_may_not_be_read_is_no_error(cloud_folder: Folder, clouds: Clouds) -> None:
    clouds.faults(cloud_folder.url).add("status", status=403, target="location")
    assert preflight(cloud_folder, environment={"SPILE_MACHINE_REGION": "gs/europe-west4"}) == []


@pytest.mark.parametrize(
    ("machine", "bucket", "price"),
    [
        ("gs/us-central1", "gs/us-central1", 0.0),
        ("gs/us-central1", "gs/us", 0.0),
        ("gs/us-central1", "gs/nam4", 0.0),
        ("gs/us-west1", "gs/nam4", 0.02),
        ("gs/europe-west4", "gs/eu", 0.0),
        ("gs/europe-west4", "gs/us", 0.05),
        ("gs/us-central1", "gs/us-east1", 0.02),
        ("gs/northamerica-northeast1", "gs/us-east1", 0.02),
        ("gs/us-central1", "gs/asia-east1", 0.08),
        ("gs/us-central1", "gs/southamerica-east1", 0.14),
        ("s3/us-east-1", "s3/us-east-1", 0.0),
        ("s3/us-east-1", "s3/eu-west-1", 0.02),
        ("s3/us-east-1", "gs/us", 0.09),
        ("gs/us-central1", "s3/us-east-1", 0.12),
    ],
)
def test_prices(machine: str, bucket: str, price: float) -> None:
    assert egress_price(Region(*machine.split("/")), Region(*bucket.split("/"))) == price


class _Metadata(FaultyServer):
    """Both clouds' metadata servers in one."""

    def answer(self, request: Request) -> FakeReply:
        if request.path == "/computeMetadata/v1/instance/zone" and request.headers["metadata-flavor"] == "Google":
            return FakeReply(200, b"projects/12/zones/us-central1-a")
        if (request.method, request.path) == ("PUT", "/latest/api/token"):
            return FakeReply(200, b"a-token")
        if request.path.endswith("/placement/region") and request.headers.get("x-aws-ec2-metadata-token") == "a-token":
            return FakeReply(200, b"eu-west-1")
        return FakeReply(404)


def test_machines_know_where_they_are() -> None:
    with _Metadata() as server:
        google = {"GCE_METADATA_HOST": server.url.removeprefix("http://")}
        assert machine_region(google) == Region("gs", "us-central1")
        amazon = {"NO_GCE_CHECK": "true", "AWS_EC2_METADATA_SERVICE_ENDPOINT": server.url}
        assert machine_region(amazon) == Region("s3", "eu-west-1")
    assert machine_region(NOWHERE) is None
    assert machine_region({**google, "AWS_EC2_METADATA_DISABLED": "true"}) is None  # Nothing answers any more.


class _Careless(FaultyServer):
    """Speaks S3 and ignores conditions, as some do."""

    def answer(self, request: Request) -> FakeReply:
        return FakeReply(204) if request.method == "DELETE" else FakeReply(200, b"", {"ETag": '"x"'})


def test_a_store_without_conditions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with _Careless() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "x")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        with pytest.raises(UserError, match=r"cannot use s3://b: expected a store .* found one that overwrites it"):
            preflight(open_folder("s3://b/x"), environment=NOWHERE)
