"""The XML half of the fake GCS: what our own client and obstore speak."""

from __future__ import annotations

import base64
import hashlib
import re
from datetime import UTC, datetime
from email.utils import formatdate
from urllib.parse import unquote
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from spile.objects.fake.buckets import Buckets, FakeBucket, Stored, crc32c_base64
from spile.objects.fake.http import FakeReply, Request

__all__ = ["answer_xml", "range_of", "read_headers"]

_PAGE = 1000


def answer_xml(buckets: Buckets, request: Request) -> FakeReply:
    """One request to ``/bucket`` or ``/bucket/key``."""
    name, _, key = unquote(request.path).lstrip("/").partition("/")
    digest = crc32c_base64(request.body)  # before the lock: large parts are many
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
                return _write(buckets, name, key, request, digest)
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
    """What comes with an object's bytes."""
    hashes = f"crc32c={stored.crc32c}" + (f",md5={stored.md5}" if stored.md5 else "")
    return {
        "Content-Type": stored.content_type,
        "ETag": stored.etag,
        "Last-Modified": formatdate(stored.updated, usegmt=True),
        "x-goog-generation": str(stored.generation),
        "x-goog-metageneration": "1",
        "x-goog-hash": hashes,
        "x-goog-stored-content-length": str(stored.size),
        "x-goog-stored-content-encoding": "identity",
        "Accept-Ranges": "bytes",
    }


def range_of(header: str | None, size: int) -> tuple[int, int] | None:
    """First byte and one past the last of a ``Range`` header; None: there is nothing there."""
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


def _bad_digest(request: Request, digest: str) -> bool:
    """Whether the body differs from the checksum that was sent with it."""
    wanted = dict(
        part.strip().partition("=")[::2] for part in request.headers.get("x-goog-hash", "").split(",") if part
    )
    md5 = wanted.get("md5", request.headers.get("content-md5"))
    if "crc32c" in wanted and wanted["crc32c"] != digest:
        return True
    return bool(md5) and md5 != base64.b64encode(hashlib.md5(request.body, usedforsecurity=False).digest()).decode()


def _write(buckets: Buckets, name: str, key: str, request: Request, digest: str) -> FakeReply:
    if _bad_digest(request, digest):
        return _error(400, "BadDigest", "The checksum you specified did not match what we received.")
    there = buckets.buckets[name].objects.get(key)
    wanted = request.headers.get("x-goog-if-generation-match")
    if wanted is not None and int(wanted) != (there.generation if there else 0):
        return _error(412, "PreconditionFailed", "At least one of the pre-conditions you specified did not hold.")
    options = {"contentType": request.headers.get("content-type", "")}
    stored = buckets.store(name, key, request.body, options=options)
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
    keys, folded, token = bucket.page(query.get("prefix", ""), query.get("delimiter", ""), after, limit)
    pieces = [f"<Name>{name}</Name><IsTruncated>{'true' if token else 'false'}</IsTruncated>"]
    if token:
        pieces.append(f"<NextContinuationToken>{escape(token)}</NextContinuationToken>")
    for key in keys:
        stored = bucket.objects[key]
        pieces.append(
            f"<Contents><Key>{escape(key)}</Key><Generation>{stored.generation}</Generation><MetaGeneration>1"
            f"</MetaGeneration><LastModified>{_when(stored.updated)}</LastModified><ETag>{escape(stored.etag)}</ETag>"
            f"<Size>{stored.size}</Size></Contents>"
        )
    pieces += [f"<CommonPrefixes><Prefix>{escape(prefix)}</Prefix></CommonPrefixes>" for prefix in folded]
    return _xml(f"<ListBucketResult>{''.join(pieces)}</ListBucketResult>")


def _uploads(buckets: Buckets, name: str, query: dict[str, str]) -> FakeReply:
    found = [(u.key, handle, u) for handle, u in buckets.uploads.items() if u.bucket == name]
    after = (query.get("key-marker", ""), query.get("upload-id-marker", ""))
    found = sorted(
        (f for f in found if f[0].startswith(query.get("prefix", "")) and (f[0], f[1]) > after), key=lambda f: f[:2]
    )
    limit = int(query.get("max-uploads", _PAGE))
    page = found[:limit]
    pieces = [f"<FakeBucket>{name}</FakeBucket><IsTruncated>{'true' if len(found) > limit else 'false'}</IsTruncated>"]
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
        handle = buckets.begin(name, key, {"contentType": request.headers.get("content-type", "")})
        head = f"<FakeBucket>{name}</FakeBucket><Key>{escape(key)}</Key><UploadId>{handle}</UploadId>"
        return _xml(f"<InitiateMultipartUploadResult>{head}</InitiateMultipartUploadResult>")
    upload = buckets.uploads.get(query["uploadId"])
    if upload is None or (upload.bucket, upload.key) != (name, key):
        return _error(404, "NoSuchUpload", "The specified upload does not exist.")
    match request.method:
        case "PUT":
            if _bad_digest(request, digest):
                return _error(400, "BadDigest", "The checksum you specified did not match what we received.")
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
        for part in ElementTree.fromstring(request.body):  # noqa: S314 - a test's own request
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
    stored = buckets.store(name, key, *pieces, parted=True, options=upload.options)
    body = f"<FakeBucket>{name}</FakeBucket><Key>{escape(key)}</Key><ETag>{escape(stored.etag)}</ETag>"
    headers = {k: v for k, v in read_headers(stored).items() if k.startswith("x-goog")}
    return _xml(f"<CompleteMultipartUploadResult>{body}</CompleteMultipartUploadResult>", headers=headers)


def _text(part: ElementTree.Element, name: str) -> str:
    return next((child.text or "" for child in part if child.tag.rpartition("}")[2] == name), "")
