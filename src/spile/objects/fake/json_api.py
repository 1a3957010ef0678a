"""The JSON half of the fake GCS: what Google's own client and ``gcloud storage`` speak."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from urllib.parse import parse_qs, quote, unquote

from spile.objects.fake.buckets import Buckets, FakeBucket, Stored, crc32c_base64
from spile.objects.fake.http import FakeReply, Request
from spile.objects.fake.xml_api import range_of, read_headers

__all__ = ["answer_json"]

_PAGE = 1000


def answer_json(buckets: Buckets, request: Request) -> FakeReply:
    """One request below ``/storage/v1``, ``/upload/storage/v1`` or ``/download/storage/v1``."""
    upload = request.path.startswith(("/upload/", "/resumable/upload/"))
    parts = [unquote(part) for part in request.path.partition("/storage/v1/")[2].split("/")]
    with buckets.lock:
        match parts:
            case ["b"]:
                return _buckets(buckets, request)
            case ["b", name, *rest]:
                bucket = buckets.buckets.get(name)
                if bucket is None:
                    return _error(404, "The specified bucket does not exist.")
                if upload:
                    return _upload(buckets, name, request)
                return _in_bucket(buckets, name, bucket, rest, request)
    return _error(404, "Not Found")


def _reply(value: dict[str, object], status: int = 200, headers: dict[str, str] | None = None) -> FakeReply:
    return FakeReply(status, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})


def _error(status: int, message: str) -> FakeReply:
    detail = {"message": message, "domain": "global", "reason": "fake"}
    return _reply({"error": {"code": status, "message": message, "errors": [detail]}}, status)


def _when(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _bucket_resource(name: str, bucket: FakeBucket) -> dict[str, object]:
    return {
        "kind": "storage#bucket",
        "id": name,
        "name": name,
        "location": bucket.location,
        "locationType": "region" if "-" in bucket.location else "multi-region",
        "storageClass": "STANDARD",
        "metageneration": "1",
        "timeCreated": _when(0),
        "updated": _when(0),
        "projectNumber": "1",
    }


def _object_resource(bucket: str, key: str, stored: Stored, base: str) -> dict[str, object]:
    where = f"storage/v1/b/{bucket}/o/{quote(key, safe='')}"
    return {
        "selfLink": f"{base}/{where}",
        "mediaLink": f"{base}/download/{where}?generation={stored.generation}&alt=media",
        "kind": "storage#object",
        "id": f"{bucket}/{key}/{stored.generation}",
        "bucket": bucket,
        "name": key,
        "generation": str(stored.generation),
        "metageneration": "1",
        "contentType": stored.content_type,
        "storageClass": "STANDARD",
        "size": str(stored.size),
        "crc32c": stored.crc32c,
        "etag": stored.etag.strip('"'),
        "timeCreated": _when(stored.updated),
        "updated": _when(stored.updated),
        **({"md5Hash": stored.md5} if stored.md5 else {}),
        **({"metadata": stored.metadata} if stored.metadata else {}),
    }


def _buckets(buckets: Buckets, request: Request) -> FakeReply:
    if request.method == "POST":
        wanted = json.loads(request.body)
        if wanted["name"] in buckets.buckets:
            return _error(409, "Your previous request to create the named bucket succeeded and you already own it.")
        bucket = buckets.buckets[wanted["name"]] = FakeBucket(wanted.get("location", "US").upper())
        return _reply(_bucket_resource(wanted["name"], bucket))
    items = [_bucket_resource(name, bucket) for name, bucket in sorted(buckets.buckets.items())]
    return _reply({"kind": "storage#buckets", "items": items})


def _in_bucket(buckets: Buckets, name: str, bucket: FakeBucket, rest: list[str], request: Request) -> FakeReply:
    match request.method, rest:
        case "GET", []:
            return _reply(_bucket_resource(name, bucket))
        case "DELETE", []:
            if bucket.objects:
                return _error(409, "The bucket you tried to delete is not empty.")
            del buckets.buckets[name]
            return FakeReply(204)
        case "GET", ["storageLayout"]:
            layout = {"kind": "storage#storageLayout", "bucket": name, "location": bucket.location}
            return _reply({**layout, "hierarchicalNamespace": {"enabled": False}})
        case "GET", ["iam", "testPermissions"]:
            asked = parse_qs(request.target.partition("?")[2]).get("permissions", [])
            held = [permission for permission in asked if permission not in bucket.refused]
            kind: dict[str, object] = {"kind": "storage#testIamPermissionsResponse"}
            return _reply(kind | ({"permissions": held} if held else {}))
        case "GET", ["iam"]:
            if bucket.bindings is None:
                return _error(403, "does not have storage.buckets.getIamPolicy access")
            return _reply({"kind": "storage#policy", "version": 1, "etag": "CAE=", "bindings": bucket.bindings})
        case "GET", ["o"]:
            return _listing(buckets, name, request.query)
        case method, ["o", key]:
            return _object(buckets, name, bucket, key, method, request)
    return _error(404, "Not Found")


def _listing(buckets: Buckets, name: str, query: dict[str, str]) -> FakeReply:
    bucket = buckets.buckets[name]
    limit = int(query.get("maxResults", _PAGE))
    after = query.get("pageToken", "")
    keys, folded, token = bucket.page(query.get("prefix", ""), query.get("delimiter", ""), after, limit)
    items = [_object_resource(name, key, bucket.objects[key], buckets.base) for key in keys]
    page: dict[str, object] = {"kind": "storage#objects", "items": items, "prefixes": folded}
    return _reply(page | ({"nextPageToken": token} if token else {}))


def _refused(there: Stored | None, query: dict[str, str]) -> bool:
    wanted = query.get("ifGenerationMatch")
    return wanted is not None and int(wanted) != (there.generation if there else 0)


def _object(buckets: Buckets, name: str, bucket: FakeBucket, key: str, method: str, request: Request) -> FakeReply:
    stored = bucket.objects.get(key)
    if stored is None:
        return _error(404, f"No such object: {name}/{key}")
    if _refused(stored, request.query):
        return _error(412, "At least one of the pre-conditions you specified did not hold.")
    match method:
        case "DELETE":
            buckets.remove(name, key)
            return FakeReply(204)
        case "GET" if request.query.get("alt") == "media":
            span = range_of(request.headers.get("range"), stored.size)
            if span is None:
                return FakeReply(200, b"", read_headers(stored)) if not stored.data else _error(416, "no such range")
            headers = read_headers(stored)
            if "range" in request.headers:
                headers["Content-Range"] = f"bytes {span[0]}-{span[1] - 1}/{stored.size}"
            return FakeReply(206 if "range" in request.headers else 200, stored.data[slice(*span)], headers)
        case "GET":
            return _reply(_object_resource(name, key, stored, buckets.base))
    return _error(405, method)


def _upload(buckets: Buckets, name: str, request: Request) -> FakeReply:
    query = request.query
    if "upload_id" in query:
        return _resume(buckets, name, request)
    there = buckets.buckets[name].objects
    match query.get("uploadType"):
        case "media":
            return _insert(
                buckets,
                name,
                query["name"],
                request.body,
                query,
                {"contentType": request.headers.get("content-type", "")},
            )
        case "multipart":
            resource, data = _related(request)
            return _insert(buckets, name, str(resource.get("name") or query["name"]), data, query, resource)
        case "resumable":
            resource = json.loads(request.body or b"{}")
            key = str(resource.get("name") or query["name"])
            if _refused(there.get(key), query):
                return _error(412, "At least one of the pre-conditions you specified did not hold.")
            kept = {**_options(resource), **{k: v for k, v in query.items() if k == "ifGenerationMatch"}}
            handle = buckets.begin(name, key, kept)
            location = f"{buckets.base}/upload/storage/v1/b/{name}/o?uploadType=resumable&upload_id={handle}"
            return FakeReply(200, b"", {"Location": location, "X-GUploader-UploadID": handle})
    return _error(400, "unknown uploadType")


def _options(resource: dict[str, object]) -> dict[str, str]:
    return {k: str(resource[k]) for k in ("contentType", "crc32c") if resource.get(k)}


def _insert(
    buckets: Buckets,
    name: str,
    key: str,
    data: bytes,
    query: dict[str, str],
    resource: dict[str, object] | dict[str, str],
) -> FakeReply:
    if _refused(buckets.buckets[name].objects.get(key), query):
        return _error(412, "At least one of the pre-conditions you specified did not hold.")
    if resource.get("crc32c") and resource["crc32c"] != crc32c_base64(data):
        return _error(400, "Provided CRC32C does not match calculated CRC32C.")
    stored = buckets.store(name, key, data, options={"contentType": str(resource.get("contentType") or "")})
    return _reply(_object_resource(name, key, stored, buckets.base))


def _related(request: Request) -> tuple[dict[str, object], bytes]:
    """The two parts of a multipart/related body: the resource and the data."""
    found = re.search(r"boundary=[\"']?([^\"';]+)", request.headers.get("content-type", ""))
    mark = b"--" + (found.group(1) if found else "").encode()
    _, resource, data = (piece for piece in request.body.split(mark)[:3])
    body = re.split(rb"\r?\n\r?\n", data, maxsplit=1)[1]
    if body.endswith(b"\r\n"):
        body = body[:-2]
    elif body.endswith(b"\n"):
        body = body[:-1]
    return json.loads(re.split(rb"\r?\n\r?\n", resource, maxsplit=1)[1]), body


def _resume(buckets: Buckets, name: str, request: Request) -> FakeReply:
    handle = request.query["upload_id"]
    upload = buckets.uploads.get(handle)
    if upload is None:
        return _error(404, "no such upload")
    if request.method == "DELETE":
        del buckets.uploads[handle]
        return FakeReply(499)
    found = re.fullmatch(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)", request.headers.get("content-range", ""))
    first, _, total = found.groups() if found else ("0", None, str(len(request.body)))
    if first is not None:
        if int(first) > len(upload.received):
            return _error(400, "a gap")
        upload.received[int(first) :] = request.body
    if total == "*" or int(total) != len(upload.received):
        held = {"Range": f"bytes=0-{len(upload.received) - 1}"} if upload.received else {}
        return FakeReply(308, b"", {**held, "X-GUploader-UploadID": handle})
    del buckets.uploads[handle]
    return _insert(buckets, name, upload.key, bytes(upload.received), upload.options, upload.options)
