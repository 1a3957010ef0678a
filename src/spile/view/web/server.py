"""The web server of ``spile view``: loopback or a token, a strict content security policy, and read access only."""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from spile.errors import SpecError, SpileError, UserError
from spile.view.web.export import page_template, static_files, to_json
from spile.view.web.pages import Query, Viewer

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

PORT = 8765
TOKEN = "SPILE_VIEW_TOKEN"  # noqa: S105  the name of the variable
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data: blob:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_LOCAL_NAMES = ("localhost", "127.0.0.1", "[::1]")
_HOST = re.compile(r"([\w.-]+|\[[0-9A-Fa-f:.]+\])(?::\d{1,5})?", re.ASCII)
_PUBLIC = re.compile(r"/|/template|/static/[^/]+")
"""The paths that need no token: the page and its code, which are the same for everyone."""


def _refusal(request: Request, token: str) -> tuple[int, str] | None:
    """Return the status and the reason if a request is refused. Without a token, only loopback names are served.

    The name in the Host header is checked, because a page of another site can make its own name resolve to 127.0.0.1
    and would then be of the same origin as the server (DNS rebinding). The path is that of the request line, by which
    the routes are chosen: ``request.url`` is made from the Host header, which may contain anything.
    """
    headers = request.headers
    host = _HOST.fullmatch(headers.get("host", ""))
    if host is None:
        return 400, "the Host header is not a name with a port"
    if not token and host[1] not in _LOCAL_NAMES:
        return 421, "this server answers only to localhost"
    if request.method not in ("GET", "HEAD"):
        return 405, "only GET and HEAD: this server changes nothing"
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return 403, "a page of another site may not read this"
    if token and not _PUBLIC.fullmatch(request.scope["path"]):
        given = headers.get("authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), token.encode()):
            return 401, "the token is missing or wrong; open the address that spile view printed"
    return None


def _json(value: Any, status: int = 200) -> Response:
    from starlette.responses import Response

    return Response(to_json(value), status, media_type="application/json")


def _make_app(viewer: Viewer, token: str, interval: float) -> Starlette:
    """Return the ASGI application."""
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
    from starlette.responses import Response, StreamingResponse
    from starlette.routing import Route

    files = static_files()

    async def guard(request: Request, answer: RequestResponseEndpoint) -> Response:
        refusal = _refusal(request, token)
        response = await answer(request) if refusal is None else _json({"error": refusal[1]}, refusal[0])
        response.headers.update(_HEADERS)
        return response

    def static(request: Request) -> Response:
        name = request.path_params["name"]
        if name not in files:  # Only names of this dictionary are served, so no path can leave the folder.
            return _json({"error": "no such file"}, 404)
        return Response(files[name], media_type=_TYPES["." + name.rpartition(".")[2]])

    def answer(request: Request) -> Response:
        try:
            return _json(viewer.answer(request.path_params["name"], request.query_params))
        except SpileError as error:
            return _json({"error": str(error)}, 404 if isinstance(error, UserError) else 503)
        except (LookupError, ValueError, OSError) as error:  # A damaged or foreign dataset may have any content.
            return _json({"error": f"{type(error).__name__}: {error}"}, 500)

    async def live(request: Request) -> Response:
        events = _events(viewer, request.query_params, interval)
        return StreamingResponse(events, media_type="text/event-stream")

    routes = [
        Route("/", lambda _: Response(files["index.html"], media_type="text/html")),
        Route("/static/{name}", static),
        Route("/template", lambda _: Response(page_template(), media_type="text/plain")),
        Route("/api/live", live),
        Route("/api/{name}", answer),
    ]
    return Starlette(routes=routes, middleware=[Middleware(BaseHTTPMiddleware, dispatch=guard)])


async def _events(viewer: Viewer, query: Mapping[str, str], interval: float) -> AsyncIterator[bytes]:
    """Yield the state of a run as server-sent events, when it has changed."""
    sent: object = None
    while True:
        try:
            root = Query(viewer, query).root()
            state, event = await asyncio.to_thread(root.describe_run, interval / 2), b"run"
        except (SpileError, OSError) as error:
            state, event = {"error": str(error)}, b"problem"
        known = {name: value for name, value in state.items() if name != "taken"}
        yield b": nothing new\n\n" if known == sent else b"event: %s\ndata: %s\n\n" % (event, to_json(state))
        sent = known
        await asyncio.sleep(interval)


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _listening_socket(host: str, port: int | None) -> socket.socket:
    """Return a listening socket; without a port, the default one, or a free one if that is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    for number in (PORT, 0) if port is None else (port,):
        listener = socket.socket(family)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, number))
            return listener
        except OSError as error:
            listener.close()
            reason = error
    raise SpecError("--host and --port", expected="an address that is free", found=f"{host}: {reason.strerror}")


class WebServer:
    """The server with its address. The address of one that needs a token contains it after the ``#``.

    A browser does not send that part, so the token is in no log and no Referer header.
    """

    def __init__(
        self, viewer: Viewer, *, host: str = "127.0.0.1", port: int | None = None, interval: float = 5.0
    ) -> None:
        try:
            import uvicorn

            token = "" if _is_loopback(host) else os.environ.get(TOKEN) or secrets.token_urlsafe(24)
            app = _make_app(viewer, token, interval)
        except ImportError as error:
            raise UserError(
                f"the web application needs the package {error.name}", fix="install it with: pip install 'spile[view]'"
            ) from error
        for root in viewer.roots:
            root.open_in_background()
        self._socket = _listening_socket(host, port)
        name = f"[{host}]" if ":" in host else host
        name = socket.gethostname() if host in ("0.0.0.0", "::") else name  # noqa: S104  compared, not bound
        self.url = f"http://{name}:{self._socket.getsockname()[1]}/" + (f"#token={token}" if token else "")
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=1, server_header=False
        )
        self._server = uvicorn.Server(config)

    def run(self) -> None:
        """Serve until Ctrl+C."""
        self._server.run(sockets=[self._socket])

    @contextmanager
    def in_background(self) -> Iterator[WebServer]:
        """Serve in a thread while the block runs."""
        thread = threading.Thread(target=self.run, name="web", daemon=True)
        thread.start()
        while not self._server.started and thread.is_alive():
            time.sleep(0.01)
        try:
            yield self
        finally:
            self._server.should_exit = True
            thread.join(5)
