"""The region of an S3 bucket: requested once, or taken from the bucket's reply."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.fakes.server import FakeReply, FaultyServer, Request

from spile.errors import StoreError
from spile.objects import clouds, open_folder

OBJECT = {"ETag": '"x"', "Last-Modified": "Mon, 16 Nov 2026 12:00:00 GMT"}
HOME = {"x-amz-bucket-region": "eu-west-1"}


class _Amazon(FaultyServer):
    """S3's addresses as folders of one server: of all regions, and of each."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.silent = False
        self.closed = False

    def answer(self, request: Request) -> FakeReply:
        region = request.path.split("/")[1]
        self.seen.append(f"{request.method} {region}")
        if region == "all":
            return FakeReply(503) if self.silent else FakeReply(403, headers=HOME)
        if region != "eu-west-1":
            return FakeReply(301, b"<Error><Code>PermanentRedirect</Code></Error>", HOME)
        return FakeReply(403, headers=HOME) if self.closed else FakeReply(200, b"here", OBJECT)


@pytest.fixture
def amazon(monkeypatch: pytest.MonkeyPatch) -> Iterator[_Amazon]:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "test")
    monkeypatch.setenv("AWS_REGION", "us-west-2")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setattr(clouds, "_REGIONS", {})
    with _Amazon() as server:
        monkeypatch.setattr(clouds, "_amazon_url", lambda region=None: f"{server.url}/{region or 'all'}")
        yield server


def test_it_is_asked_once_for_all_folders(amazon: _Amazon) -> None:
    assert [open_folder(f"s3://bucket/{name}").get("x") for name in "ab"] == [b"here"] * 2
    assert amazon.seen == ["HEAD all", "GET eu-west-1", "GET eu-west-1"]


def test_a_region_that_could_not_be_found_out_is_an_error_with_a_fix(amazon: _Amazon) -> None:
    amazon.silent = True
    for name in "ab":
        with pytest.raises(
            StoreError, match=r"the bucket is in another region\. Set AWS_REGION to the region of s3://buc"
        ):
            open_folder(f"s3://bucket/{name}").get("x")
    assert amazon.seen == ["HEAD all", "GET us-west-2", "GET us-west-2"]


def test_a_refusal_at_home_is_one(amazon: _Amazon) -> None:
    amazon.closed = True
    with pytest.raises(StoreError, match="403"):
        open_folder("s3://bucket/a").get("x")
    assert amazon.seen == ["HEAD all", "GET eu-west-1"]
