"""The fake GCS server: its JSON and XML APIs, injected faults, and a proxy with faults for other servers."""

from __future__ import annotations

import argparse
import hashlib
import http.client
import ipaddress
import json
import os
import re
import signal
import socket
import socketserver
import ssl
import struct
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from email.utils import formatdate
from pathlib import Path
from types import TracebackType
from typing import Self, cast
from urllib.parse import parse_qs, parse_qsl, unquote, urlsplit
from xml.etree import ElementTree
from xml.sax.saxutils import escape

from spile_fakes.buckets import Buckets, FakeBucket, Fault, Faults, Stored, Throttle, crc32c_base64

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
    """Return the headers of a reply with an object's bytes."""
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
    stored = buckets.store(name, key, *pieces, content_type=upload.content_type)
    body = f"<Bucket>{name}</Bucket><Key>{escape(key)}</Key><ETag>{escape(stored.etag)}</ETag>"
    headers = {k: v for k, v in read_headers(stored).items() if k.startswith("x-goog")}
    return _xml(f"<CompleteMultipartUploadResult>{body}</CompleteMultipartUploadResult>", headers=headers)


def _text(part: ElementTree.Element, name: str) -> str:
    return next((child.text or "" for child in part if child.tag.rpartition("}")[2] == name), "")


_PIECE = 1 << 19


@dataclass(frozen=True)
class Request:
    """One request with its body."""

    method: str
    target: str
    """The path and the query as they were sent, quoted."""
    headers: dict[str, str]
    """The headers, with names in lower case."""
    body: bytes = b""

    @property
    def path(self) -> str:
        """The quoted path; a key may contain a quoted slash."""
        return self.target.partition("?")[0]

    @property
    def query(self) -> dict[str, str]:
        """The unquoted query; a flag such as ``?uploads`` has an empty value."""
        return dict(parse_qsl(self.target.partition("?")[2], keep_blank_values=True))


@dataclass(frozen=True)
class FakeReply:
    """One reply."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


class FaultyServer(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """A server that runs in its own thread inside a ``with`` block."""

    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def __init__(self, port: int = 0, host: str = "127.0.0.1", tls: ssl.SSLContext | None = None) -> None:
        super().__init__((host, port), _Connection)
        self.tls = tls
        self.faults = Faults()
        self.throttle = Throttle()
        self.stopping = threading.Event()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,), name="fake-server", daemon=True)

    @property
    def url(self) -> str:
        """``http://127.0.0.1:port``."""
        host, port = self.server_address[:2]
        return f"http{'s' if self.tls else ''}://{host!s}:{port}"

    def answer(self, request: Request) -> FakeReply:
        """Return the reply to a request. Subclasses implement it."""
        raise NotImplementedError

    def administer(self, request: Request) -> FakeReply:
        """Answer a request to the admin endpoint."""
        match request.method, request.path:
            case "POST", "/_fake/faults":
                self.faults.extend([Fault(**rule) for rule in json.loads(request.body)])
            case "DELETE", "/_fake/faults":
                self.faults.clear()
            case "POST", "/_fake/bandwidth":
                self.throttle.rate = json.loads(request.body)["bytes_per_second"]
            case "GET", "/_fake/stats":
                return FakeReply(200, json.dumps(self.faults.report()).encode())
            case _:
                return FakeReply(404)
        return FakeReply(200)

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that disconnect; show errors of the fake."""
        if not isinstance(sys.exc_info()[1], ConnectionError | TimeoutError | ssl.SSLError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stopping.set()
        self.shutdown()
        self._thread.join()
        self.server_close()


class _Connection(socketserver.StreamRequestHandler):
    """Reads requests from one connection until it closes. The library's parser is too slow, so they are parsed here."""

    rbufsize = 1 << 16
    disable_nagle_algorithm = True

    @property
    def _server(self) -> FaultyServer:
        return cast("FaultyServer", self.server)

    def setup(self) -> None:
        if self._server.tls is not None:
            self.request = self._server.tls.wrap_socket(self.request, server_side=True)
        super().setup()

    def finish(self) -> None:
        super().finish()
        if self._server.tls is not None:  # The server closes only the plain socket, which TLS has detached.
            self.connection.close()

    def handle(self) -> None:
        with suppress(ConnectionError):
            while (request := self._read()) is not None:
                if not self._serve(request) or request.headers.get("connection") == "close":
                    return

    def _read(self) -> Request | None:
        line = self.rfile.readline()
        if not line.strip():
            return None
        method, target, _ = line.decode("latin-1").split(" ", 2)
        headers: dict[str, str] = {}
        while (line := self.rfile.readline()).strip():
            name, _, value = line.decode("latin-1").partition(":")
            headers[name.strip().lower()] = value.strip()
        if headers.get("expect", "").lower() == "100-continue":
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        return Request(method, target, headers, self._read_body(headers))

    def _read_body(self, headers: dict[str, str]) -> bytes:
        if headers.get("transfer-encoding", "").lower() == "chunked":
            body = bytearray()
            while length := int(self.rfile.readline().partition(b";")[0], 16):
                body += self._read_exactly(length)
                self.rfile.readline()
            while self.rfile.readline().strip():
                pass
            return bytes(body)
        return self._read_exactly(int(headers.get("content-length", 0)))

    def _read_exactly(self, length: int) -> bytes:
        throttle = self._server.throttle
        step = _PIECE if throttle.rate else length  # Without a limit it is read at once: new memory is expensive.
        pieces, since = [], None
        for start in range(0, length, step or 1):
            pieces.append(self.rfile.read(min(step, length - start)))
            since = throttle.take(len(pieces[-1]), since)
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if len(body) < length:
            raise ConnectionResetError("the client hung up within a body")
        return body

    def _serve(self, request: Request) -> bool:
        """Answer the request or apply its fault; return False if the connection is over."""
        server = self._server
        if request.path.startswith("/_fake/"):
            self._send(request, server.administer(request))
            return True
        fault = server.faults.strike(request.method, request.target)
        match fault:
            case None:
                self._send(request, server.answer(request))
            case Fault(kind="status"):
                self._send(request, _refusal(fault.status))
            case Fault(kind="status_after"):
                server.answer(request)
                self._send(request, _refusal(fault.status))
            case Fault(kind="slow"):
                server.stopping.wait(fault.seconds)
                self._send(request, server.answer(request))
            case Fault(kind="truncate"):
                self._send(request, server.answer(request), cut=True)
                self._reset()
                return False
            case Fault(kind="hang"):
                server.stopping.wait(fault.seconds)
                self._reset()
                return False
            case _:
                if fault.kind == "reset_after":
                    server.answer(request)
                self._reset()
                return False
        return True

    def _send(self, request: Request, reply: FakeReply, *, cut: bool = False) -> None:
        headers = {"Content-Length": str(len(reply.body)), **reply.headers}
        lines = [f"HTTP/1.1 {reply.status} {http.client.responses.get(reply.status, '-')}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
        body = memoryview(b"" if request.method == "HEAD" or reply.status in (204, 304) else reply.body)
        if cut:
            body = body[: len(body) // 2]
        if len(body) <= _PIECE:
            self._server.throttle.take(len(body))
            self.wfile.write(head + body)
            return
        self.wfile.write(head)
        since = None
        for start in range(0, len(body), _PIECE):
            piece = body[start : start + _PIECE]
            since = self._server.throttle.take(len(piece), since)
            self.wfile.write(piece)

    def _reset(self) -> None:
        """Reset the connection (RST, not FIN), as if the machine had disappeared."""
        with suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _refusal(status: int) -> FakeReply:
    name = http.client.responses.get(status, "Error").replace(" ", "")
    body = f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{name}</Code><Message>injected</Message></Error>"
    return FakeReply(status, body.encode(), {"Content-Type": "application/xml"})


class FaultyProxy(FaultyServer):
    """A proxy that passes every request on to another server, except for injected faults."""

    _HOP = ("connection", "transfer-encoding", "expect", "content-length", "date", "server")
    _CONDITIONS = ("if-match", "if-none-match")

    def __init__(self, upstream: str, port: int = 0) -> None:
        super().__init__(port)
        self._upstream = urlsplit(upstream)
        self._one_at_a_time = threading.Lock()

    def answer(self, request: Request) -> FakeReply:
        """Return the answer of the other server, with two checks of Amazon S3 that moto lacks.

        A body that does not match its checksum is refused. Conditional writes are serialised: moto checks whether an
        object exists and then writes it, so two clients could both create it.
        """
        checksum = request.headers.get("x-amz-checksum-crc32c")
        if checksum is not None and request.method == "PUT" and checksum != crc32c_base64(request.body or b""):
            return FakeReply(400, b"<Error><Code>BadDigest</Code></Error>")
        signed = request.headers.get("x-amz-content-sha256", "")
        if len(signed) == 64 and signed != hashlib.sha256(request.body).hexdigest():
            return FakeReply(400, b"<Error><Code>XAmzContentSHA256Mismatch</Code></Error>")
        if request.method in ("PUT", "POST") and any(name in request.headers for name in self._CONDITIONS):
            with self._one_at_a_time:
                return self._pass_on(request)
        return self._pass_on(request)

    def _pass_on(self, request: Request) -> FakeReply:
        connection = http.client.HTTPConnection(self._upstream.hostname or "", self._upstream.port, timeout=60)
        try:
            headers = {k: v for k, v in request.headers.items() if k not in self._HOP}
            connection.request(request.method, request.target, request.body or None, headers)
            found = connection.getresponse()
            body = found.read()
            kept = {k: v for k, v in found.getheaders() if k.lower() not in self._HOP}
            if request.method == "HEAD":
                kept["Content-Length"] = found.getheader("content-length") or "0"
            return FakeReply(found.status, body, kept)
        finally:
            connection.close()


def loopback_context(folder: Path) -> tuple[ssl.SSLContext, Path]:
    """Return the TLS context of a server on 127.0.0.1, and the authority file for ``SSL_CERT_FILE`` of its clients."""
    from cryptography import x509
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
    from cryptography.x509.oid import NameOID

    def signed(name: str, key: ec.EllipticCurvePrivateKey, *, authority: bool) -> x509.Certificate:
        now, subject = datetime.now(UTC), x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        address = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
        builder = x509.CertificateBuilder().subject_name(subject).issuer_name(issuer).public_key(key.public_key())
        builder = builder.serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now - timedelta(hours=1)).not_valid_after(now + timedelta(days=1))
        builder = builder.add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
        return builder.add_extension(address, critical=False).sign(roots, SHA256())

    roots, own = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    issuer = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "loopback")])
    trusted, file = folder / "authority.pem", folder / "server.pem"
    trusted.write_bytes(signed("loopback", roots, authority=True).public_bytes(Encoding.PEM))
    secret = own.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    file.write_bytes(signed("127.0.0.1", own, authority=False).public_bytes(Encoding.PEM) + secret)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(file)
    return context, trusted


class FakeGcs(FaultyServer):
    """The fake GCS server. Its buckets live as long as the server."""

    def __init__(
        self,
        port: int = 0,
        host: str = "127.0.0.1",
        known_as: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """Create the server. ``known_as`` is its URL for clients on other machines, if they cannot use ``host``."""
        super().__init__(port, host, tls)
        self.buckets = Buckets(known_as or self.url)

    def add_bucket(self, name: str, location: str = "US-CENTRAL1") -> None:
        """Create an empty bucket."""
        with self.buckets.lock:
            self.buckets.buckets[name] = FakeBucket(location)

    def delete_bucket(self, name: str) -> None:
        """Delete a bucket with its objects."""
        with self.buckets.lock:
            self.buckets.buckets.pop(name, None)

    def damage(self, bucket: str, key: str, at: int = 0) -> None:
        """Flip a byte of a stored object without changing its reported checksums."""
        self.buckets.damage(bucket, key, at)

    def answer(self, request: Request) -> FakeReply:
        """Answer with the JSON API below ``/storage/v1``, with the XML API elsewhere."""
        if "/storage/v1/" in request.path:
            return answer_json(self.buckets, request)
        return answer_xml(self.buckets, request)

    def administer(self, request: Request) -> FakeReply:
        """Answer a request to the admin endpoint, including those about buckets."""
        match request.method, request.path.split("/")[2:]:
            case "POST", ["buckets"]:
                self.add_bucket(**json.loads(request.body))
            case "DELETE", ["buckets", name]:
                self.delete_bucket(name)
            case "POST", ["damage"]:
                self.damage(**json.loads(request.body))
            case _:
                return super().administer(request)
        return FakeReply(200)


def main(arguments: list[str] | None = None) -> int:
    """Serve until SIGINT or SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m spile_fakes.gcs", description="a fake GCS for tests")
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on")
    parser.add_argument("--url", help="how others reach it, where that is another name")
    parser.add_argument("--bucket", action="append", default=[], help="a bucket to begin with; may be repeated")
    parser.add_argument("--location", default="US-CENTRAL1", help="where those buckets say they are")
    parser.add_argument("--tls", type=Path, help="speak TLS; the authority to trust is put into this folder")
    parser.add_argument("--with-parent", action="store_true", help="end when the process that started this one ends")
    options = parser.parse_args(arguments)
    asked: list[int] = []  # An Event must not be set in a signal handler, because of its lock.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: asked.append(number))
    tls = None if options.tls is None else loopback_context(options.tls)[0]
    with FakeGcs(options.port, options.host, options.url, tls) as fake:
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
