"""A Hugging Face hub on a loopback port that serves a folder as a dataset and, if asked, accepts commits to it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "0123456789abcdef0123456789abcdef01234567"
_BLOCK = 1 << 20


def git_oid(data: bytes) -> str:
    """Return the id that git gives to a file."""
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data, usedforsecurity=False).hexdigest()


class Uploads:
    """The requests of ``huggingface_hub`` that write. Large objects are kept by hash, committed files on disk.

    ``refuse`` makes the server answer 500 to uploads of large objects after that many.
    """

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder, url
        self.token: str | None = None
        self.objects: dict[str, bytes] = {}
        self.private: bool | None = None
        self.messages: list[str] = []
        self.large: dict[str, str] = {}
        self.refuse: int | None = None

    def entry(self, path: Path) -> dict[str, Any]:
        name = path.relative_to(self.folder).as_posix()
        data = path.read_bytes()
        found = {"type": "file", "path": name, "size": len(data), "oid": git_oid(data)}
        if name in self.large:
            found["lfs"] = {"oid": self.large[name], "size": len(data), "pointerSize": 130}
        return found

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any] | None:
        """Return status and content for a request that writes, or None if it is another one."""
        if path == "/api/repos/create":
            wanted = json.loads(body)
            self.private = bool(wanted.get("private") or wanted.get("visibility") == "private")
            return 200, {"url": f"{self.url}/datasets/{wanted['organization']}/{wanted['name']}"}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if "/preupload/" in path:
            return 200, {"files": [self._mode(each) for each in json.loads(body)["files"]]}
        if path.endswith(".git/info/lfs/objects/batch"):
            return 200, {"transfer": "basic", "objects": [self._upload(each) for each in json.loads(body)["objects"]]}
        if method == "PUT" and (found := re.fullmatch(r"/upload/([0-9a-f]{64})", path)):
            if self.refuse is not None and len(self.objects) >= self.refuse:
                return 400, {"error": "no more"}
            if hashlib.sha256(body).hexdigest() != found[1]:
                return 400, {"error": "other content"}
            self.objects[found[1]] = body
            return 200, {}
        if "/commit/" in path:
            repository = path.removeprefix("/api").partition("/commit/")[0]
            return 200, self._commit(body, f"{self.url}{repository}")
        return None

    def _mode(self, file: dict[str, Any]) -> dict[str, Any]:
        name = file["path"]
        large = name.endswith(".safetensors")
        path = self.folder / name
        oid = None
        if path.is_file():
            oid = self.large.get(name) or git_oid(path.read_bytes())
        return {"path": name, "uploadMode": "lfs" if large else "regular", "shouldIgnore": False, "oid": oid}

    def _upload(self, wanted: dict[str, Any]) -> dict[str, Any]:
        known = {"oid": wanted["oid"], "size": wanted["size"]}
        if wanted["oid"] in self.objects:
            return known
        return {**known, "actions": {"upload": {"href": f"{self.url}/upload/{wanted['oid']}"}}}

    def _commit(self, body: bytes, address: str) -> dict[str, Any]:
        for line in body.decode().splitlines():
            value = json.loads(line)["value"]
            kind = json.loads(line)["key"]
            if kind == "header":
                self.messages.append(value["summary"])
                continue
            path = self.folder / value["path"]
            path.parent.mkdir(parents=True, exist_ok=True)
            if kind == "file":
                path.write_bytes(base64.b64decode(value["content"]))
            else:
                path.write_bytes(self.objects[value["oid"]])
                self.large[value["path"]] = value["oid"]
        oid = hashlib.sha1("\n".join(self.messages).encode(), usedforsecurity=False).hexdigest()
        return {"commitOid": oid, "commitUrl": f"{address}/commit/{oid}", "hookOutput": ""}


@dataclass
class DatasetHub:
    """The folder that is served as the dataset ``name``, and what was requested."""

    folder: Path
    name: str
    commit: str = COMMIT
    url: str = ""
    requests: list[str] = field(default_factory=list)
    bytes_sent: int = 0
    """Bytes of files that were sent."""
    uploads: Uploads | None = None
    """What was written; None if the hub is read-only."""

    def environment(self, cache: Path) -> dict[str, str]:
        """Return the variables with which a process uses this hub."""
        return {
            "HF_ENDPOINT": self.url,
            "HF_HOME": str(cache),
            "HF_HUB_DISABLE_PROGRESS_BARS": "1",
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "NO_PROXY": "127.0.0.1",
        }

    def paths(self) -> list[Path]:
        return sorted(path for path in self.folder.rglob("*") if path.is_file())

    def entry(self, path: Path) -> dict[str, object]:
        if self.uploads is not None:
            return self.uploads.entry(path)
        name = path.relative_to(self.folder).as_posix()
        oid = hashlib.sha1(f"{self.commit}/{name}".encode(), usedforsecurity=False).hexdigest()
        return {"type": "file", "path": name, "size": path.stat().st_size, "oid": oid}


def _json(hub: DatasetHub, path: str, body: bytes) -> object | None:
    """Return the answer of the API, or None if there is no such address."""
    about = f"/api/datasets/{hub.name}"
    entries = [hub.entry(file) for file in hub.paths()]
    if path == about or re.fullmatch(rf"{re.escape(about)}/revision/(main|{hub.commit})", path):
        return {"id": hub.name, "sha": hub.commit, "siblings": [{"rfilename": each["path"]} for each in entries]}
    if found := re.fullmatch(rf"{re.escape(about)}/tree/(?:main|{hub.commit})/?(.*)", path):
        return [each for each in entries if str(each["path"]).startswith(found[1])]
    if path.startswith(f"{about}/paths-info/"):
        wanted = json.loads(body)["paths"] if body.startswith(b"{") else parse_qs(body.decode()).get("paths", [])
        return [each for each in entries if each["path"] in wanted]
    return None


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: DatasetHub

    def log_message(self, *_: object) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        self._answer(send=True)

    def do_HEAD(self) -> None:
        self._answer(send=False)

    def do_POST(self) -> None:
        self._answer(send=True)

    def do_PUT(self) -> None:
        self._answer(send=True)

    def _answer(self, *, send: bool) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(f"{self.command} {path}")
        found = re.fullmatch(rf"/datasets/{re.escape(self.hub.name)}/resolve/(main|{self.hub.commit})/(.+)", path)
        if found and (self.hub.folder / found[2]).is_file():
            self._file(self.hub.folder / found[2], send=send)
            return
        written = self._written(path, body)
        status, answer = written or (200, _json(self.hub, path, body))
        content = json.dumps(answer if answer is not None else {"error": "not found"}).encode()
        self.send_response(status if answer is not None else 404)
        if answer is None:
            missing = "EntryNotFound" if found else "RevisionNotFound" if "/revision/" in path else "RepoNotFound"
            self.send_header("X-Error-Code", missing)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if send:
            self.wfile.write(content)

    def _written(self, path: str, body: bytes) -> tuple[int, object] | None:
        """Answer a request that writes, or return None if it is another one."""
        uploads = self.hub.uploads
        if uploads is None or self.command not in ("POST", "PUT"):
            return None
        if uploads.token is not None and self.headers.get("Authorization") not in (f"Bearer {uploads.token}", None):
            return 401, {"error": "invalid token"}
        if uploads.token is not None and not path.startswith("/upload/") and "Authorization" not in self.headers:
            return 401, {"error": "no token"}
        found = uploads.answer(self.command, path, body)
        if found is not None and isinstance(found[1], dict) and "commitOid" in found[1]:
            self.hub.commit = found[1]["commitOid"]
        return found

    def _file(self, file: Path, *, send: bool) -> None:
        size = file.stat().st_size
        wanted = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        start = int(wanted[1]) if wanted else 0
        stop = min(size, int(wanted[2]) + 1) if wanted and wanted[2] else size
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {start}-{stop - 1}/{size}")
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(stop - start))
        self.send_header("ETag", f'"{self.hub.entry(file)["oid"]}"')
        self.send_header("X-Repo-Commit", self.hub.commit)
        self.end_headers()
        if not send:
            return
        with file.open("rb") as content, suppress(BrokenPipeError, ConnectionResetError):
            content.seek(start)
            while start < stop and (block := content.read(min(_BLOCK, stop - start))):
                self.wfile.write(block)
                start += len(block)
                self.hub.bytes_sent += len(block)


@contextmanager
def dataset_hub(folder: Path, name: str = "someone/rows", *, writable: bool = False) -> Iterator[DatasetHub]:
    """Serve the files of a folder as a dataset of the hub; ``writable`` accepts commits, which change the folder."""
    hub = DatasetHub(folder, name)
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    hub.uploads = Uploads(folder, hub.url) if writable else None
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
