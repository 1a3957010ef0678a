"""Plain requests to a bucket: objects and ranges of them, single parts, listings; checksums sent and compared.

GCS's XML API and S3 speak one dialect, with other names for a few headers: ``Dialect`` holds those, and everything
above it is written once. One call is one attempt; who calls decides about trying again.
"""

from __future__ import annotations

import os
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Protocol
from urllib.parse import urlsplit

import urllib3
from typing_extensions import Buffer

from spile.objects.cloud.aws import aws_endpoint, aws_keys, aws_region
from spile.objects.cloud.credentials import GoogleToken, quoted, sign_v4
from spile.objects.cloud.failures import RequestFailure, from_status, from_urllib3
from spile.objects.cloud.listing import ListedObject
from spile.objects.crc import crc32c, to_base64
from spile.objects.environment import positive_number

__all__ = ["CONNECT_SECONDS", "GoogleDialect", "Reply", "RestClient", "S3Dialect", "http_timeout"]

CONNECT_SECONDS = 10.0
_READ_BACK: set[str] = set()
"""Buckets whose server was found not to compare checksums, for all clients of this process."""
_REGIONS: dict[str, str | None] = {}
"""Where S3 said that buckets lie, for all clients of this process; None where it was asked and said nothing yet."""
_REGION_HEADER = "x-amz-bucket-region"


def http_timeout() -> float:
    """Seconds without a byte before a connection counts as dead: ``SPILE_HTTP_TIMEOUT``, 60."""
    return positive_number("SPILE_HTTP_TIMEOUT", 60)


@dataclass(frozen=True)
class Reply:
    """A reply of 2xx."""

    headers: Mapping[str, str]
    body: bytes


class Dialect(Protocol):
    """What differs between the two clouds."""

    scheme: str
    if_absent: Mapping[str, str]
    """Headers of a write that must find nothing."""

    @property
    def base(self) -> str:
        """The server's address."""

    def authorized(self, method: str, url: str, headers: Mapping[str, str]) -> dict[str, str]:
        """The headers with proof of who we are."""

    def sent_checksum(self, crc: int) -> dict[str, str]:
        """Headers by which the server checks what it receives."""

    def reported_checksum(self, headers: Mapping[str, str]) -> str | None:
        """The CRC32C of the whole object that a reply reports, if it does."""

    def lies_elsewhere(self, asked: str, headers: Mapping[str, str]) -> bool:
        """Whether a refusal says that the bucket is not where this URL is: the next request goes where it is."""


class GoogleDialect:
    """GCS's XML API."""

    scheme = "gs"
    if_absent: Mapping[str, str] = {"x-goog-if-generation-match": "0"}

    def __init__(self) -> None:
        emulator = os.environ.get("STORAGE_EMULATOR_HOST", "")
        if emulator and "://" not in emulator:
            emulator = f"http://{emulator}"
        self.emulated = bool(emulator)
        self.base = emulator.rstrip("/") or "https://storage.googleapis.com"
        self.credentials = GoogleToken()

    def authorized(self, method: str, url: str, headers: Mapping[str, str]) -> dict[str, str]:  # noqa: ARG002
        """With a bearer token; an emulator needs none."""
        return dict(headers) if self.emulated else {**headers, "Authorization": f"Bearer {self.credentials.token()}"}

    def sent_checksum(self, crc: int) -> dict[str, str]:
        """Google's own header."""
        return {"x-goog-hash": f"crc32c={to_base64(crc)}"}

    def reported_checksum(self, headers: Mapping[str, str]) -> str | None:
        """From ``x-goog-hash: crc32c=…,md5=…``; of what is stored, so not where it is unzipped on the way."""
        if headers.get("x-goog-stored-content-encoding", "identity") != "identity":
            return None
        for part in headers.get("x-goog-hash", "").split(","):
            name, _, value = part.strip().partition("=")
            if name == "crc32c":
                return value
        return None

    def lies_elsewhere(self, asked: str, headers: Mapping[str, str]) -> bool:  # noqa: ARG002
        """One address has all of Google's buckets."""
        return False


class S3Dialect:
    """S3 and what speaks it (``AWS_ENDPOINT_URL``, or the profile's ``endpoint_url``)."""

    scheme = "s3"
    if_absent: Mapping[str, str] = {"if-none-match": "*"}

    def __init__(self, bucket: str) -> None:
        self._bucket, self._endpoint = bucket, aws_endpoint()
        said = None if self._endpoint else _ask_region(bucket)
        self._region = said or aws_region() or "us-east-1"

    @property
    def region(self) -> str:
        """Where S3 said that the bucket lies; else as the environment or the profile says."""
        return (None if self._endpoint else _REGIONS.get(self._bucket)) or self._region

    @property
    def base(self) -> str:
        """The server's address."""
        return (self._endpoint or _amazon(self.region)).rstrip("/")

    def authorized(self, method: str, url: str, headers: Mapping[str, str]) -> dict[str, str]:
        """Signed with whatever keys are in force now."""
        return sign_v4(method, url, headers, aws_keys(), self.region, datetime.now(UTC))

    def sent_checksum(self, crc: int) -> dict[str, str]:
        """Amazon's own headers."""
        return {"x-amz-sdk-checksum-algorithm": "CRC32C", "x-amz-checksum-crc32c": to_base64(crc)}

    def reported_checksum(self, headers: Mapping[str, str]) -> str | None:
        """Of whole objects only: what was put together from parts reports a checksum of checksums."""
        found = headers.get("x-amz-checksum-crc32c", "")
        return None if not found or "-" in found or headers.get("x-amz-checksum-type") == "COMPOSITE" else found

    def lies_elsewhere(self, asked: str, headers: Mapping[str, str]) -> bool:
        """A refusal names the bucket's region: where nobody said it before, the region was a guess."""
        if self._endpoint or not (said := headers.get(_REGION_HEADER)):
            return False
        _REGIONS[self._bucket] = said
        return not asked.startswith(f"{self.base}/")


def _ask_region(bucket: str) -> str | None:
    """Where S3 says the bucket lies; it tells everybody, even with a refusal.

    Asked once: where no answer comes (a closed network), each folder that is opened would wait for it again.
    """
    if bucket not in _REGIONS:
        url = f"{_amazon()}/{quoted(bucket)}"
        try:
            reply = _pool(url).request("HEAD", url, redirect=False, retries=False, timeout=CONNECT_SECONDS)
            _REGIONS[bucket] = reply.headers.get(_REGION_HEADER)
        except urllib3.exceptions.HTTPError:
            _REGIONS[bucket] = None
    return _REGIONS[bucket]


def _amazon(region: str | None = None) -> str:
    """S3's address in a region, or the one that knows all regions."""
    china = ".cn" if region is not None and region.startswith("cn-") else ""
    return f"https://s3.{region}.amazonaws.com{china}" if region else "https://s3.amazonaws.com"


def _pool(url: str) -> urllib3.PoolManager:
    timeout = urllib3.Timeout(connect=min(CONNECT_SECONDS, http_timeout()), read=http_timeout())
    parts = urlsplit(url)
    proxy = urllib.request.getproxies().get(parts.scheme)
    if proxy and not urllib.request.proxy_bypass(parts.hostname or ""):
        return urllib3.ProxyManager(proxy, maxsize=64, timeout=timeout, retries=False)
    return urllib3.PoolManager(maxsize=64, timeout=timeout, retries=False)


class RestClient:
    """Requests to one bucket. Threads share it."""

    def __init__(self, dialect: Dialect, bucket: str) -> None:
        self.dialect = dialect
        self._name = quoted(bucket)
        self._pool = _pool(self._url)

    @property
    def _url(self) -> str:
        return f"{self.dialect.base}/{self._name}"

    def request(
        self,
        method: str,
        key: str = "",
        *,
        query: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        body: Buffer | None = None,
    ) -> Reply:
        """One attempt: a reply of 2xx, or :class:`RequestFailure`."""
        url = f"{self._url}/{quoted(key, slash=True)}" if key else self._url
        if query:
            url += "?" + "&".join(f"{quoted(name)}={quoted(value)}" for name, value in query.items())
        signed = self.dialect.authorized(method, url, headers or {})
        signed.pop("host", None)
        # Nothing is unzipped on the way: the checksum is that of the stored bytes.
        signed["accept-encoding"] = "identity"
        try:
            reply = self._pool.request(
                method,
                url,
                body=body,  # type: ignore[arg-type] # it takes any buffer
                headers=signed,
                redirect=False,
                decode_content=False,
            )
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise from_urllib3(error) from error
        except ValueError:
            raise RequestFailure("a header that cannot be sent") from None  # its text quotes the header, a token's too
        if not 200 <= reply.status < 300:
            failure = from_status(reply.status, reply.data)
            failure.transient |= self.dialect.lies_elsewhere(url, reply.headers)
            raise failure
        return Reply(reply.headers, reply.data)

    def get(self, key: str) -> bytes:
        """A whole object, checked against the checksum that comes with it."""
        headers = {"x-amz-checksum-mode": "ENABLED"} if self.dialect.scheme == "s3" else {}
        reply = self.request("GET", key, headers=headers)
        expected = self.dialect.reported_checksum(reply.headers)
        if expected is not None and expected != to_base64(crc32c(reply.body)):
            raise RequestFailure("damaged: its checksum does not match", code="Damaged", transient=True)
        return reply.body

    def get_range(self, key: str, start: int, length: int) -> bytes:
        """Exactly these bytes of an object."""
        reply = self.request("GET", key, headers={"range": f"bytes={start}-{start + length - 1}"})
        if len(reply.body) != length:
            raise RequestFailure(f"cut short: expected {start + length} bytes, found {start + len(reply.body)}")
        return reply.body

    def head(self, key: str) -> ListedObject:
        """An object's size, time and tag."""
        headers = self.request("HEAD", key).headers
        try:
            modified = parsedate_to_datetime(headers["Last-Modified"]).timestamp()
            return ListedObject(key, int(headers["Content-Length"]), modified, headers.get("ETag"))
        except (KeyError, ValueError) as error:
            raise RequestFailure("a reply without size or time", transient=True) from error

    def put(self, key: str, data: Buffer, *, if_absent: bool = False) -> None:
        """Create or replace (or only create) in one request; the server checks what it receives."""
        condition = self.dialect.if_absent if if_absent else {}
        reply = self.request("PUT", key, headers={**self.dialect.sent_checksum(crc32c(data)), **condition}, body=data)
        if not reply.headers.get("ETag"):  # a proxy's or a portal's page; who calls asks again what is there
            raise RequestFailure("a reply that does not say what was stored", transient=True)
        if self.read_back and self.get(key) != bytes(data):
            raise RequestFailure("damaged on the way: other bytes came back", code="Damaged", transient=True)

    def compares_checksums(self, key: str) -> bool:
        """Whether the server refuses what does not have the checksum that was sent along; it leaves nothing behind."""
        try:
            self.request("PUT", key, headers=self.dialect.sent_checksum(crc32c(b"other")), body=b"probe")
        except RequestFailure as failure:
            if failure.status != 400:
                raise
            return True
        self.request("DELETE", key)
        return False

    @property
    def read_back(self) -> bool:
        """Whether what is written is read and compared, because the server does not."""
        return self._url in _READ_BACK

    @read_back.setter
    def read_back(self, wanted: bool) -> None:
        (_READ_BACK.add if wanted else _READ_BACK.discard)(self._url)
