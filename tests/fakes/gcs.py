"""The fake GCS server: buckets in memory behind the requests of the JSON and XML APIs that spile makes."""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import signal
import ssl
import sys
import threading
import time
from bisect import bisect_left, bisect_right
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import formatdate
from functools import cached_property
from pathlib import Path
from urllib.parse import parse_qs, unquote
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from tests.fakes.server import FakeReply, FaultyServer, Request, crc32c_base64, make_tls_context


@dataclass(frozen=True)
class Stored:
    """One object."""

    pieces: tuple[bytes, ...]
    """The pieces as they were sent. They are joined at the first read, to keep benchmarks of writes fast."""
    generation: int
    updated: float
    crc32c: str
    content_type: str

    @cached_property
    def data(self) -> bytes:
        return b"".join(self.pieces)

    @property
    def size(self) -> int:
        return sum(map(len, self.pieces))

    @property
    def etag(self) -> str:
        return f'"{self.generation}"'


@dataclass
class Upload:
    """A multipart upload that is not finished."""

    bucket: str
    key: str
    started: float
    content_type: str
    parts: dict[int, tuple[str, bytes]] = field(default_factory=dict)


@dataclass
class FakeBucket:
    """One bucket: objects by key."""

    location: str = "US-CENTRAL1"
    objects: dict[str, Stored] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    """Permissions that the caller does not have."""
    bindings: list[dict[str, object]] | None = field(default_factory=list)
    """The bindings of the IAM policy; None if the policy may not be read."""
    _sorted: list[str] | None = None
    """The keys in order; None after one was added or removed."""

    def page(self, prefix: str, after: str, limit: int) -> tuple[list[str], bool]:
        """Return the next keys, and whether there are more."""
        if self._sorted is None:
            self._sorted = sorted(self.objects)
        start = max(bisect_left(self._sorted, prefix), bisect_right(self._sorted, after))
        keys = self._sorted[start : start + limit + 1]
        found = [key for key in keys if key.startswith(prefix)]
        return found[:limit], len(found) > limit


class Buckets:
    """All buckets, behind one lock, so that each request is atomic."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.buckets: dict[str, FakeBucket] = {}
        self.uploads: dict[str, Upload] = {}
        self._generations = itertools.count(time.time_ns() // 1000)
        self._ids = itertools.count(1)

    def store(self, bucket: str, key: str, *pieces: bytes, content_type: str = "") -> Stored:
        content_type, checksum = content_type or "application/octet-stream", crc32c_base64(*pieces)
        with self.lock:
            home = self.buckets[bucket]
            stored = Stored(pieces, next(self._generations), time.time(), checksum, content_type)
            if key not in home.objects:
                home._sorted = None
            home.objects[key] = stored
        return stored

    def remove(self, bucket: str, key: str) -> bool:
        """Remove an object; return False if there is none."""
        with self.lock:
            home = self.buckets[bucket]
            home._sorted = None
            return home.objects.pop(key, None) is not None

    def begin(self, bucket: str, key: str, content_type: str = "") -> str:
        """Start an upload and return its id."""
        with self.lock:
            name = f"upload-{next(self._ids)}"
            self.uploads[name] = Upload(bucket, key, time.time(), content_type)
            return name


_PAGE = 1000


def answer_json(buckets: Buckets, request: Request) -> FakeReply:
    """Answer the requests of the JSON API that spile and its startup script make; objects otherwise use XML."""
    upload = request.path.startswith("/upload/")
    parts = [unquote(part) for part in request.path.partition("/storage/v1/b/")[2].split("/")]
    with buckets.lock:
        name, *rest = parts
        bucket = buckets.buckets.get(name)
        if bucket is None:
            return _json_error(404, "The specified bucket does not exist.")
        match request.method, rest:
            case "GET", []:
                return _json({"kind": "storage#bucket", "id": name, "name": name, "location": bucket.location})
            case "GET", ["iam", "testPermissions"]:
                asked = parse_qs(request.target.partition("?")[2]).get("permissions", [])
                return _json({"permissions": [permission for permission in asked if permission not in bucket.refused]})
            case "GET", ["iam"] if bucket.bindings is None:
                return _json_error(403, "does not have storage.buckets.getIamPolicy access")
            case "GET", ["iam"]:
                return _json({"kind": "storage#policy", "version": 1, "etag": "CAE=", "bindings": bucket.bindings})
            case "GET", ["o", key] if request.query.get("alt") == "media":
                return _read(bucket, key, request)
            case "POST", ["o"] if upload and request.query.get("uploadType") == "media":
                key = request.query["name"]
                stored = buckets.store(name, key, request.body, content_type=request.headers.get("content-type", ""))
                return _json({"bucket": name, "name": key, "generation": str(stored.generation)})
    return _json_error(404, "Not Found")


def _json(value: dict[str, object], status: int = 200) -> FakeReply:
    return FakeReply(status, json.dumps(value).encode(), {"Content-Type": "application/json"})


def _json_error(status: int, message: str) -> FakeReply:
    return _json({"error": {"code": status, "message": message}}, status)


def answer_xml(buckets: Buckets, request: Request) -> FakeReply:
    """Answer a request to ``/bucket`` or ``/bucket/key``."""
    name, _, key = unquote(request.path).lstrip("/").partition("/")
    digest = crc32c_base64(request.body)  # Computed before the lock is taken, because parts are large.
    with buckets.lock:
        bucket = buckets.buckets.get(name)
        if bucket is None:
            return _error(404, "NoSuchBucket", "The specified bucket does not exist.")
        if not key:
            return _bucket(buckets, name, bucket, request)
        if "uploads" in request.query or "uploadId" in request.query:
            return _multipart(buckets, name, key, request, digest)
        match request.method:
            case "GET" | "HEAD":
                return _read(bucket, key, request)
            case "PUT":
                return _write(buckets, name, key, request)
            case "DELETE":
                return FakeReply(204) if buckets.remove(name, key) else _no_key()
    return _error(405, "MethodNotAllowed", request.method)


def _error(status: int, code: str, message: str) -> FakeReply:
    return _xml(f"<Error><Code>{code}</Code><Message>{escape(message)}</Message></Error>", status)


def _no_key() -> FakeReply:
    return _error(404, "NoSuchKey", "The specified key does not exist.")


def _xml(text: str, status: int = 200, headers: dict[str, str] | None = None) -> FakeReply:
    body = f"<?xml version='1.0' encoding='UTF-8'?>{text}".encode()
    return FakeReply(status, body, {"Content-Type": "application/xml", **(headers or {})})


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def read_headers(stored: Stored) -> dict[str, str]:
    return {
        "Content-Type": stored.content_type,
        "ETag": stored.etag,
        "Last-Modified": formatdate(stored.updated, usegmt=True),
        "x-goog-generation": str(stored.generation),
        "x-goog-metageneration": "1",
        "x-goog-hash": f"crc32c={stored.crc32c}",
        "x-goog-stored-content-length": str(stored.size),
        "x-goog-stored-content-encoding": "identity",
        "Accept-Ranges": "bytes",
    }


def range_of(header: str | None, size: int) -> tuple[int, int] | None:
    """Return the first byte and the end of a ``Range`` header; None if the range is empty."""
    found = re.fullmatch(r"bytes=(\d*)-(\d*)", header or "bytes=0-")
    if found is None:
        return 0, size
    first, last = found.groups()
    start, stop = (int(first), int(last) + 1 if last else size) if first else (max(0, size - int(last)), size)
    return (start, min(stop, size)) if start < size else None


def _read(bucket: FakeBucket, key: str, request: Request) -> FakeReply:
    stored = bucket.objects.get(key)
    if stored is None:
        return _no_key()
    headers = read_headers(stored)
    if request.method == "HEAD":
        return FakeReply(200, b"", {**headers, "Content-Length": str(stored.size)})
    if "range" not in request.headers:
        return FakeReply(200, stored.data, headers)
    span = range_of(request.headers["range"], stored.size)
    if span is None:
        return _error(416, "InvalidRange", "The requested range cannot be satisfied.")
    headers["Content-Range"] = f"bytes {span[0]}-{span[1] - 1}/{stored.size}"
    return FakeReply(206, stored.data[slice(*span)], headers)


def _write(buckets: Buckets, name: str, key: str, request: Request) -> FakeReply:
    there = buckets.buckets[name].objects.get(key)
    wanted = request.headers.get("x-goog-if-generation-match")
    if wanted is not None and int(wanted) != (there.generation if there else 0):
        return _error(412, "PreconditionFailed", "At least one of the pre-conditions you specified did not hold.")
    stored = buckets.store(name, key, request.body, content_type=request.headers.get("content-type", ""))
    headers = read_headers(stored)
    headers.pop("Content-Type")
    return FakeReply(200, b"", headers)


def _bucket(buckets: Buckets, name: str, bucket: FakeBucket, request: Request) -> FakeReply:
    query = request.query
    if request.method == "HEAD":
        return FakeReply(200)
    if request.method != "GET":
        return _error(405, "MethodNotAllowed", request.method)
    if "location" in query:
        return _xml(f"<LocationConstraint>{bucket.location}</LocationConstraint>")
    if "uploads" in query:
        return _uploads(buckets, name, query)
    after = max(query.get("continuation-token", ""), query.get("start-after", ""))
    limit = int(query.get("max-keys", _PAGE))
    keys, more = bucket.page(query.get("prefix", ""), after, limit)
    pieces = [f"<Name>{name}</Name><IsTruncated>{'true' if more else 'false'}</IsTruncated>"]
    if more:
        pieces.append(f"<NextContinuationToken>{escape(keys[-1])}</NextContinuationToken>")
    for key in keys:
        stored = bucket.objects[key]
        pieces.append(
            f"<Contents><Key>{escape(key)}</Key><Generation>{stored.generation}</Generation><MetaGeneration>1"
            f"</MetaGeneration><LastModified>{_when(stored.updated)}</LastModified><ETag>{escape(stored.etag)}</ETag>"
            f"<Size>{stored.size}</Size></Contents>"
        )
    return _xml(f"<ListBucketResult>{''.join(pieces)}</ListBucketResult>")


def _uploads(buckets: Buckets, name: str, query: dict[str, str]) -> FakeReply:
    found = [(u.key, handle, u) for handle, u in buckets.uploads.items() if u.bucket == name]
    after = (query.get("key-marker", ""), query.get("upload-id-marker", ""))
    found = sorted(
        (f for f in found if f[0].startswith(query.get("prefix", "")) and (f[0], f[1]) > after), key=lambda f: f[:2]
    )
    limit = int(query.get("max-uploads", _PAGE))
    page = found[:limit]
    pieces = [f"<Bucket>{name}</Bucket><IsTruncated>{'true' if len(found) > limit else 'false'}</IsTruncated>"]
    if page:
        pieces.append(f"<NextKeyMarker>{escape(page[-1][0])}</NextKeyMarker>")
        pieces.append(f"<NextUploadIdMarker>{page[-1][1]}</NextUploadIdMarker>")
    for key, handle, upload in page:
        pieces.append(
            f"<Upload><Key>{escape(key)}</Key><UploadId>{handle}</UploadId>"
            f"<Initiated>{_when(upload.started)}</Initiated></Upload>"
        )
    return _xml(f"<ListMultipartUploadsResult>{''.join(pieces)}</ListMultipartUploadsResult>")


def _multipart(buckets: Buckets, name: str, key: str, request: Request, digest: str) -> FakeReply:
    query = request.query
    if request.method == "POST" and "uploads" in query:
        handle = buckets.begin(name, key, request.headers.get("content-type", ""))
        head = f"<Bucket>{name}</Bucket><Key>{escape(key)}</Key><UploadId>{handle}</UploadId>"
        return _xml(f"<InitiateMultipartUploadResult>{head}</InitiateMultipartUploadResult>")
    upload = buckets.uploads.get(query["uploadId"])
    if upload is None or (upload.bucket, upload.key) != (name, key):
        return _error(404, "NoSuchUpload", "The specified upload does not exist.")
    match request.method:
        case "PUT":
            upload.parts[int(query["partNumber"])] = (digest, request.body)
            return FakeReply(200, b"", {"ETag": f'"{digest}"', "x-goog-hash": f"crc32c={digest}"})
        case "DELETE":
            del buckets.uploads[query["uploadId"]]
            return FakeReply(204)
        case "POST":
            return _complete(buckets, name, key, request)
    return _error(405, "MethodNotAllowed", request.method)


def _complete(buckets: Buckets, name: str, key: str, request: Request) -> FakeReply:
    upload = buckets.uploads[request.query["uploadId"]]
    try:
        pieces = []
        for part in ElementTree.fromstring(request.body):
            number = int(_text(part, "PartNumber"))
            tag, data = upload.parts[number]
            if _text(part, "ETag").strip('"') != tag:
                raise KeyError(number)
            pieces.append(data)
    except (KeyError, ElementTree.ParseError):
        return _error(400, "InvalidPart", "One or more of the specified parts could not be found.")
    if any(len(piece) < 5 << 20 for piece in pieces[:-1]):
        return _error(400, "EntityTooSmall", "A part other than the last is smaller than 5 MiB.")
    del buckets.uploads[request.query["uploadId"]]
    stored = buckets.store(name, key, *pieces, content_type=upload.content_type)
    body = f"<Bucket>{name}</Bucket><Key>{escape(key)}</Key><ETag>{escape(stored.etag)}</ETag>"
    headers = {k: v for k, v in read_headers(stored).items() if k.startswith("x-goog")}
    return _xml(f"<CompleteMultipartUploadResult>{body}</CompleteMultipartUploadResult>", headers=headers)


def _text(part: ElementTree.Element, name: str) -> str:
    return next((child.text or "" for child in part if child.tag.rpartition("}")[2] == name), "")


class FakeGcs(FaultyServer):
    """The fake GCS server. Its buckets live as long as the server."""

    def __init__(self, port: int = 0, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> None:
        super().__init__(port, host, tls)
        self.buckets = Buckets()

    def add_bucket(self, name: str, location: str = "US-CENTRAL1") -> None:
        with self.buckets.lock:
            self.buckets.buckets[name] = FakeBucket(location)

    def delete_bucket(self, name: str) -> None:
        with self.buckets.lock:
            self.buckets.buckets.pop(name, None)

    def answer(self, request: Request) -> FakeReply:
        """Answer with the JSON API below ``/storage/v1``, with the XML API elsewhere."""
        if "/storage/v1/" in request.path:
            return answer_json(self.buckets, request)
        return answer_xml(self.buckets, request)


def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m tests.fakes.gcs", description="a fake GCS for tests")
    parser.add_argument("--port", type=int, default=0, help="0 picks a free one")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on")
    parser.add_argument("--bucket", action="append", default=[], help="a bucket to create; may be repeated")
    parser.add_argument("--location", default="US-CENTRAL1", help="the location of these buckets")
    parser.add_argument("--tls", type=Path, help="use TLS; the authority to trust is written to this folder")
    parser.add_argument("--with-parent", action="store_true", help="end with the process that started this one")
    options = parser.parse_args(arguments)
    asked: list[int] = []  # An Event must not be set in a signal handler, because of its lock.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: asked.append(number))
    tls = None if options.tls is None else make_tls_context(options.tls)[0]
    with FakeGcs(options.port, options.host, tls) as fake:
        for name in options.bucket:
            fake.add_bucket(name, options.location)
        print(fake.url, flush=True)
        parent = os.getppid()
        while not asked:
            time.sleep(0.1)
            if options.with_parent and os.getppid() != parent:
                break
    return 0


if __name__ == "__main__":
    sys.exit(main())
