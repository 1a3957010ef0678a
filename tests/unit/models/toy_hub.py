"""A Hugging Face hub on a loopback port: one model, and the answers that real ones give when they refuse."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

__all__ = ["COMMIT", "FakeHub", "fake_hub"]

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """What it holds, what it answers, and what it was asked."""

    files: dict[str, bytes]
    name: str = "me/tiny"
    refuse: tuple[int, str] | None = None
    """HTTP status and the hub's X-Error-Code, for every request."""
    url: str = ""
    asked: list[str] = field(default_factory=list)
    tokens: list[str | None] = field(default_factory=list)


def _answer(hub: FakeHub, path: str) -> tuple[int, dict[str, str], bytes]:
    if hub.refuse:
        status, code = hub.refuse
        return status, {"X-Error-Code": code, "X-Error-Message": code}, b"{}"
    about_it = f"/api/models/{hub.name}"
    if path.startswith(f"{about_it}/tree/"):
        tree = [
            {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
            for name, data in hub.files.items()
        ]
        return 200, {"Content-Type": "application/json"}, json.dumps(tree).encode()
    if path in (about_it, f"{about_it}/revision/main", f"{about_it}/revision/{COMMIT}"):
        about = {"id": hub.name, "sha": COMMIT, "siblings": [{"rfilename": name} for name in hub.files]}
        return 200, {"Content-Type": "application/json"}, json.dumps(about).encode()
    name = path.rpartition(f"/{hub.name}/resolve/{COMMIT}/")[2]
    if name in hub.files:
        data = hub.files[name]
        return 200, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}, data
    code = "RevisionNotFound" if path.startswith(f"{about_it}/") else "RepoNotFound"
    return 404, {"X-Error-Code": code}, b"{}"


@contextmanager
def fake_hub(folder: Path, name: str = "me/tiny") -> Iterator[FakeHub]:
    """The files of a folder as the model of that name."""
    hub = FakeHub({path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}, name)

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            path = self.path.partition("?")[0]
            hub.asked.append(path)
            hub.tokens.append(self.headers.get("Authorization"))
            status, headers, body = _answer(hub, path)
            self.send_response(status)
            for name, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(body)

        do_HEAD = do_GET

        def log_message(self, *_arguments: Any) -> None:
            """Silence."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
