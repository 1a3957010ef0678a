"""What comes over the wire is not believed: replies, addresses, variables, credentials."""

from __future__ import annotations

from typing import Any

import pytest

from backends import Clouds
from spile.errors import SpecError, StoreError, UserError
from spile.objects import Folder, open_folder
from spile.objects.cloud.aws import AwsKeys, aws_keys
from spile.objects.cloud.credentials import GoogleToken
from spile.objects.cloud.failures import RequestFailure, from_status
from spile.objects.cloud.folder import CloudFolder
from spile.objects.cloud.rest import Reply, RestClient
from spile.objects.cloud.upload import PART
from spile.objects.preflight import preflight

NOWHERE = {"NO_GCE_CHECK": "true", "AWS_EC2_METADATA_DISABLED": "true"}


@pytest.mark.parametrize("prefix", ["../other", "a//c", "a/../b", "./a", "..", "a/."])
@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_a_prefix_leads_nowhere_else(scheme: str, prefix: str) -> None:
    with pytest.raises(SpecError, match="names no folder of a bucket"):
        open_folder(f"{scheme}://bucket/{prefix}")
    with pytest.raises(SpecError, match="names no folder of a bucket"):
        open_folder(f"{scheme}://b@cket/x")


class Answers:
    """Puts other replies in the place of the server's: the first few of one method."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, method: str, *spoilt: tuple[bool, Reply]) -> None:
        self.left = list(spoilt)
        real = RestClient.request

        def request(client: RestClient, verb: str, key: str = "", **more: Any) -> Reply:
            if verb != method or not self.left or key.endswith(".probe"):
                return real(client, verb, key, **more)
            stored, reply = self.left.pop(0)
            if stored:
                real(client, verb, key, **more)
            return reply

        monkeypatch.setattr(RestClient, "request", request)


@pytest.mark.parametrize("stored", [False, True])
def test_a_reply_without_a_tag_is_no_commit(
    cloud_folder: Folder, monkeypatch: pytest.MonkeyPatch, stored: bool
) -> None:
    """A portal says 200 to everything: the commit is not there, or it is and its own reply was lost."""
    Answers(monkeypatch, "PUT", (stored, Reply({}, b"<html>welcome</html>")))
    assert cloud_folder.create("commits/0001.json", b"ours")
    assert cloud_folder.get("commits/0001.json") == b"ours"
    assert not cloud_folder.create("commits/0001.json", b"theirs")


def written(folder: Folder, size: int) -> bytes:
    data = bytes(range(256)) * (size // 256)
    writer = folder.writer("large", size)
    writer.write_at(0, data)
    writer.finish(size)
    return data


@pytest.mark.parametrize("method", ["PUT", "POST"])
def test_an_upload_survives_replies_that_say_nothing(
    cloud_folder: Folder, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    nothing = Reply({}, b"")
    Answers(monkeypatch, method, (method == "PUT", nothing), (False, nothing))
    data = written(cloud_folder, PART + 4096)
    assert cloud_folder.get("large") == data


def test_a_store_that_does_not_compare_checksums_is_read_back(
    cloud_folder: Folder, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert isinstance(cloud_folder, CloudFolder)
    assert preflight(cloud_folder, environment=NOWHERE) == []
    real = RestClient.request

    def deaf(client: RestClient, verb: str, key: str = "", **more: Any) -> Reply:
        headers = {name: value for name, value in (more.pop("headers", None) or {}).items() if "hash" not in name}
        headers = {name: value for name, value in headers.items() if "checksum" not in name}
        return real(client, verb, key, headers=headers, **more)

    monkeypatch.setattr(RestClient, "request", deaf)
    (warning,) = preflight(cloud_folder, environment=NOWHERE)
    assert "does not compare the checksums" in warning
    assert list(cloud_folder.list()) == []
    before = cloud_folder.stats.requests
    cloud_folder.put("a", b"x")
    assert written(cloud_folder, PART + 4096) == cloud_folder.get("large")
    real_get = RestClient.get
    monkeypatch.setattr(RestClient, "get", lambda *_: b"other bytes")
    monkeypatch.setenv("SPILE_RETRY_SECONDS", "0.1")
    with pytest.raises(Exception, match="other bytes came back"):
        open_folder(cloud_folder.url).put("b", b"x")
    monkeypatch.setattr(RestClient, "get", real_get)
    assert cloud_folder.stats.requests > before
    cloud_folder._bucket.rest.read_back = False


@pytest.mark.parametrize("name", ["SPILE_HTTP_TIMEOUT", "SPILE_RETRY_SECONDS", "SPILE_UPLOAD_GB"])
@pytest.mark.parametrize("junk", ["abc", "-1", "nan", "inf", "0"])
def test_junk_in_a_variable_is_named(clouds: Clouds, monkeypatch: pytest.MonkeyPatch, name: str, junk: str) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", clouds.gcs.url)
    monkeypatch.setenv(name, junk)
    with pytest.raises(SpecError, match=rf"{name}: expected a number above 0, found '{junk}'"):
        open_folder("gs://bucket/x").get("y")


def test_a_secret_with_a_line_break_is_in_no_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_SESSION_TOKEN", "t0ken\nsecond line")
    with pytest.raises(UserError) as caught:
        aws_keys()
    assert "AWS_SESSION_TOKEN" in str(caught.value)
    assert "t0ken" not in repr(caught.value) + str(caught.value)
    assert "t0ken" not in repr(AwsKeys("a", "b", "t0ken"))


def test_no_header_that_cannot_be_sent_is_quoted(clouds: Clouds, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", clouds.gcs.url)
    folder = open_folder("gs://bucket/x")
    assert isinstance(folder, CloudFolder)
    client = folder._bucket.rest
    with pytest.raises(RequestFailure) as caught:
        client.request("GET", "y", headers={"Authorization": "Bearer s3cret\nx"})
    assert "s3cret" not in str(caught.value)
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


class Refreshing:
    """Google's credentials, whose second refresh fails."""

    def __init__(self) -> None:
        self.token, self.valid, self.calls = "token", False, 0

    def refresh(self, _: object) -> None:
        from google.auth.exceptions import RefreshError

        self.calls += 1
        if self.calls == 2:
            raise RefreshError("the metadata server is busy")


def test_a_refresh_that_fails_in_mid_run_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is no user's mistake: the same credentials worked an hour ago."""
    chain = Refreshing()
    monkeypatch.setattr("google.auth.default", lambda **_: (chain, None))
    token = GoogleToken()
    assert token.token() == "token"
    with pytest.raises(RequestFailure) as caught:
        token.token()
    assert caught.value.transient
    assert token.token() == "token"


def test_a_wrong_clock_is_called_so() -> None:
    body = b"<Error><Code>RequestTimeTooSkewed</Code></Error>"
    assert "this machine's clock is wrong" in from_status(403, body).cause
    assert issubclass(StoreError, Exception)
