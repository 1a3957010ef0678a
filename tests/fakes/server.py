"""The HTTP server of all fakes: injected faults, limited bandwidth, TLS, and a proxy with faults for other servers."""

from __future__ import annotations

import hashlib
import http.client
import ipaddress
import json
import random
import socket
import socketserver
import ssl
import struct
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, cast, get_args
from urllib.parse import parse_qsl, unquote, urlsplit

from spile.objects.crc import crc32c, to_base64


def crc32c_base64(*pieces: bytes) -> str:
    """Return the CRC32C in the form that GCS and S3 use."""
    value = 0
    for piece in pieces:
        value = crc32c(piece, value)
    return to_base64(value)


FaultKind = Literal["status", "status_after", "reset", "reset_after", "truncate", "slow", "hang"]


@dataclass
class Fault:
    """A rule that makes requests fail. It matches by method and by a part of the target, ``count`` times."""

    kind: FaultKind
    status: int = 503
    method: str | None = None
    target: str = ""
    """Text that the unquoted path and query must contain."""
    skip: int = 0
    """The number of matching requests that succeed first."""
    count: int = 1
    """The number of matching requests that fail; -1 for all."""
    seconds: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(FaultKind):
            raise ValueError(f"unknown fault {self.kind}, expected one of {', '.join(get_args(FaultKind))}")

    def matches(self, method: str, target: str) -> bool:
        return self.count != 0 and self.method in (None, method) and self.target in unquote(target)


@dataclass
class Faults:
    """The active rules and how often each was applied."""

    rules: list[Fault] = field(default_factory=list)
    applied: dict[str, int] = field(default_factory=dict)
    requests: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, kind: FaultKind, **options: object) -> None:
        self.extend([Fault(kind, **options)])  # type: ignore[arg-type]

    def extend(self, rules: list[Fault]) -> None:
        with self._lock:
            self.rules.extend(rules)

    def clear(self) -> None:
        with self._lock:
            self.rules.clear()

    def next_fault(self, method: str, target: str) -> Fault | None:
        """Return the fault for this request, if any, and count it."""
        with self._lock:
            self.requests += 1
            for rule in self.rules:
                if rule.matches(method, target):
                    if rule.skip > 0:
                        rule.skip -= 1
                        continue
                    rule.count -= rule.count > 0
                    self.applied[rule.kind] = self.applied.get(rule.kind, 0) + 1
                    return rule
        return None

    def report(self) -> dict[str, object]:
        with self._lock:
            rules = [asdict(rule) for rule in self.rules]
            return {"requests": self.requests, "applied": dict(self.applied), "rules": rules}


def random_faults(seed: int, count: int, requests: int = 40) -> list[Fault]:
    """Return temporary faults spread over about ``requests`` requests; the same seed gives the same faults."""
    dice = random.Random(seed)
    kinds: list[FaultKind] = ["status", "status_after", "reset", "reset_after", "truncate", "slow"]
    rules = []
    for _ in range(count):
        kind = dice.choice(kinds)
        status = dice.choice([408, 429, 500, 502, 503, 504])
        method = dice.choice([None, None, "PUT", "POST", "GET"])
        rules.append(
            Fault(kind, status, method, skip=dice.randrange(requests), count=dice.choice([1, 1, 2]), seconds=0.02)
        )
    return rules


class Throttle:
    """A limit on the bytes per second of all connections together. There is no limit until one is set."""

    def __init__(self) -> None:
        self.rate: float | None = None
        self._free = 0.0
        self._lock = threading.Lock()

    def take(self, count: int, since: float | None = None) -> float:
        """Wait until ``count`` bytes may pass; return that time.

        ``since`` is when the previous bytes of the same body passed. These bytes were waiting behind them, so a thread
        that wakes up late on a busy machine does not count as an idle connection.
        """
        now = time.monotonic()
        rate = self.rate
        if not rate:
            return now
        with self._lock:
            self._free = end = max(self._free, now if since is None else since) + count / rate
        if end > now:
            time.sleep(end - now)
        return end


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
        host, port = self.server_address[:2]
        return f"http{'s' if self.tls else ''}://{host!s}:{port}"

    def answer(self, request: Request) -> FakeReply:
        """Return the reply to a request. Subclasses implement it."""
        raise NotImplementedError

    def answer_admin(self, request: Request) -> FakeReply:
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
            self._send(request, server.answer_admin(request))
            return True
        fault = server.faults.next_fault(request.method, request.target)
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


def make_tls_context(folder: Path) -> tuple[ssl.SSLContext, Path]:
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
        builder = builder.add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(roots.public_key()), critical=False
        )
        builder = builder.add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        usage = dict.fromkeys(
            ("content_commitment", "data_encipherment", "key_agreement", "encipher_only", "decipher_only"), False
        )
        signs = {"digital_signature": not authority, "key_encipherment": not authority}
        usage |= signs | {"key_cert_sign": authority, "crl_sign": authority}
        builder = builder.add_extension(x509.KeyUsage(**usage), critical=True)
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
