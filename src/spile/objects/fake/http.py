"""A small threaded HTTP/1.1 server whose replies go wrong on demand.

``FaultyServer`` reads requests, lets a subclass answer them, and applies the faults around that. Two stand on it:
the fake GCS, and ``FaultyProxy``, which passes requests on to another server (moto's S3) and spoils those.
The admin endpoint ``/_fake/…`` is never spoiled: ``POST /_fake/faults`` (a JSON list of rules), ``DELETE
/_fake/faults``, ``POST /_fake/bandwidth`` (``{"bytes_per_second": n}`` or null), ``GET /_fake/stats``.
"""

from __future__ import annotations

import http.client
import json
import socket
import socketserver
import ssl
import struct
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, cast
from urllib.parse import parse_qsl, urlsplit

from spile.objects.fake.buckets import crc32c_base64
from spile.objects.fake.faults import Fault, Faults, Throttle

__all__ = ["FakeReply", "FaultyProxy", "FaultyServer", "Request"]

_PIECE = 1 << 19
_CHECKSUMS = ("x-goog-hash", "x-amz-checksum-crc32c")


@dataclass(frozen=True)
class Request:
    """One request, its body read."""

    method: str
    target: str
    """As it came: path and query, quoted."""
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes = b""

    @property
    def path(self) -> str:
        """Still quoted: a key may hold a quoted slash."""
        return self.target.partition("?")[0]

    @property
    def query(self) -> dict[str, str]:
        """Unquoted; a flag such as ``?uploads`` has an empty value."""
        return dict(parse_qsl(self.target.partition("?")[2], keep_blank_values=True))


@dataclass(frozen=True)
class FakeReply:
    """One reply."""

    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)


class FaultyServer(socketserver.ThreadingMixIn, socketserver.TCPServer):
    """Serves in a thread of its own between ``with`` and its end."""

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
        """What the server says. Subclasses know."""
        raise NotImplementedError

    def administer(self, request: Request) -> FakeReply:
        """The admin endpoint."""
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
        """A client that hangs up is no news; a bug in the fake is."""
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
    """Reads requests from one connection until it closes. Parsed by hand: the library's parser is most of the time."""

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
        if self._server.tls is not None:  # the server closes the socket below it, which has been let go
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
        step = _PIECE if throttle.rate else length  # at once where nothing holds it back: fresh memory is dear
        pieces, since = [], None
        for start in range(0, length, step or 1):
            pieces.append(self.rfile.read(min(step, length - start)))
            since = throttle.take(len(pieces[-1]), since)
        body = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        if len(body) < length:
            raise ConnectionResetError("the client hung up within a body")
        return body

    def _serve(self, request: Request) -> bool:
        """Answer, spoiled or not; False when the connection is over."""
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
            case Fault(kind="corrupt"):
                self._send(request, _corrupted(server.answer(request)))
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
        """RST, not FIN: as a machine that vanished would look."""
        with suppress(OSError):
            self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def _refusal(status: int) -> FakeReply:
    name = http.client.responses.get(status, "Error").replace(" ", "")
    body = f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{name}</Code><Message>injected</Message></Error>"
    return FakeReply(status, body.encode(), {"Content-Type": "application/xml"})


def _corrupted(reply: FakeReply) -> FakeReply:
    kind = next((v for k, v in reply.headers.items() if k.lower() == "content-type"), "")
    if reply.body and not any(word in kind for word in ("xml", "json", "html")):  # data, not the server's own words
        middle = len(reply.body) // 2
        flipped = bytes([reply.body[middle] ^ 0x20])
        return FakeReply(reply.status, reply.body[:middle] + flipped + reply.body[middle + 1 :], reply.headers)
    headers = {k: ("crc32c=AAAAAA==" if k.lower() in _CHECKSUMS else v) for k, v in reply.headers.items()}
    return FakeReply(reply.status, reply.body, headers)


class FaultyProxy(FaultyServer):
    """Passes every request on to another server, and spoils what it is told to."""

    _HOP = ("connection", "transfer-encoding", "expect", "content-length", "date", "server")
    _CONDITIONS = ("if-match", "if-none-match")

    def __init__(self, upstream: str, port: int = 0) -> None:
        super().__init__(port)
        self._upstream = urlsplit(upstream)
        self._one_at_a_time = threading.Lock()

    def answer(self, request: Request) -> FakeReply:
        """What the other server answers, made as strict as Amazon is where moto is not.

        A body that is not its checksum's is refused. Conditional writes go one at a time: moto looks whether an object
        exists and then writes it, so that two creators can both win.
        """
        said = request.headers.get("x-amz-checksum-crc32c")
        if said is not None and request.method == "PUT" and said != crc32c_base64(request.body or b""):
            return FakeReply(400, b"<Error><Code>BadDigest</Code></Error>")
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
