"""Untrusted replies, addresses, variables and credentials."""

from __future__ import annotations

import pytest
from tests.fakes.server import FakeReply, Request

from backends import Clouds
from spile.errors import SpecError, StoreError, UserError
from spile.objects import Folder, open_folder
from spile.objects.clouds import GoogleToken, aws_keys
from spile.objects.retry import RequestFailure, from_status


@pytest.mark.parametrize("prefix", ["../other", "a//c", "a/../b", "./a", "..", "a/."])
@pytest.mark.parametrize("scheme", ["gs", "s3", "az"])
def test_a_prefix_leads_nowhere_else(scheme: str, prefix: str) -> None:
    with pytest.raises(SpecError, match="is not a valid folder of a bucket"):
        open_folder(f"{scheme}://bucket/{prefix}")
    with pytest.raises(SpecError, match="is not a valid folder of a bucket"):
        open_folder(f"{scheme}://b@cket/x")


@pytest.mark.parametrize("stored", [False, True])
def test_a_reply_without_a_tag_is_no_commit(
    cloud_folder: Folder, clouds: Clouds, monkeypatch: pytest.MonkeyPatch, stored: bool
) -> None:
    """A captive portal answers 200 to everything: the commit is missing, or it is there and its own reply was lost."""
    server = clouds.server(cloud_folder.url)
    answer, spoilt = server.answer, []

    def portal(request: Request) -> FakeReply:
        if request.method != "PUT" or spoilt:
            return answer(request)
        spoilt.append(request)
        if stored:
            answer(request)
        return FakeReply(200, b"<html>welcome</html>")

    monkeypatch.setattr(server, "answer", portal)
    assert cloud_folder.create("commits/0001.json", b"ours")
    assert spoilt
    assert cloud_folder.get("commits/0001.json") == b"ours"
    assert not cloud_folder.create("commits/0001.json", b"theirs")


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
