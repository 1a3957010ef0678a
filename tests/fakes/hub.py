"""A Hugging Face hub on a loopback port that serves a folder as a dataset and accepts commits to it.

As on the hub, a commit is applied completely or refused, every earlier commit stays readable, and a commit whose parent
is no longer the last commit is refused.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import parse_qs, unquote

from tests.fakes.server import FakeReply, FaultyServer, Request

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@cache
def _git_oid(path: Path, size: int, changed: int) -> str:
    """Return the id that git gives to a file."""
    digest = hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


class DatasetHub(FaultyServer):
    """The folder that is served as the dataset ``name``, what was requested, and what was pushed."""

    def __init__(self, folder: Path, name: str = "someone/rows") -> None:
        super().__init__()
        self.folder, self.name, self.commit = folder, name, COMMIT
        self.requests: list[str] = []
        self.bytes_sent = 0
        """Bytes of files that were sent."""
        self.created = any(folder.iterdir())
        """Whether the repository exists. Before, every address of it is unknown."""
        self.history: dict[str, Path] = {}
        """The folder of each earlier commit, beside the folder that is served."""
        self.token: str | None = None
        """The only token that may push; None for any."""
        self.private: bool | None = None
        self.messages: list[str] = []
        """The messages of the commits."""
        self.objects: dict[str, bytes] = {}
        """The large objects that were uploaded, by their sha256."""
        self.large: dict[str, str] = {}
        """The sha256 of each file that is such an object."""
        self.refuse: int | None = None
        """Refuse large objects after this many."""

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

    def _entry(self, path: Path, folder: Path | None = None) -> dict[str, Any]:
        name, stat = path.relative_to(folder or self.folder).as_posix(), path.stat()
        oid = _git_oid(path, stat.st_size, stat.st_mtime_ns)
        found = {"type": "file", "path": name, "size": stat.st_size, "oid": oid}
        if name in self.large:
            found["lfs"] = {"oid": self.large[name], "size": stat.st_size, "pointerSize": 130}
        return found

    def answer(self, request: Request) -> FakeReply:
        path = unquote(request.path)
        self.requests.append(f"{request.method} {path}")
        found = re.fullmatch(rf"/datasets/{re.escape(self.name)}/resolve/(\w+)/(.+)", path)
        there = self._at(found[1]) if found else None
        if found and there is not None and (there / found[2]).is_file():
            return self._file(there, found[2], request)
        status, answer = self._pushed(request, path) or (200, self._about(path, request.body))
        if answer is not None:
            return FakeReply(status, json.dumps(answer).encode(), {"Content-Type": "application/json"})
        no_entry = found is not None or (self.created and "/tree/" in path)
        missing = "EntryNotFound" if no_entry else "RevisionNotFound" if "/revision/" in path else "RepoNotFound"
        return FakeReply(404, b'{"error": "not found"}', {"X-Error-Code": missing})

    def _file(self, folder: Path, name: str, request: Request) -> FakeReply:
        data, entry = (folder / name).read_bytes(), self._entry(folder / name, folder)
        headers = {"Accept-Ranges": "bytes", "ETag": f'"{entry["oid"]}"', "X-Repo-Commit": self.commit}
        size, status = len(data), 200
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", request.headers.get("range", "")):
            start, stop = int(wanted[1]), min(size, int(wanted[2]) + 1) if wanted[2] else size
            data, status = data[start:stop], 206
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{size}"
        if request.method == "GET":
            self.bytes_sent += len(data)
        return FakeReply(status, data, headers)

    def _at(self, revision: str) -> Path | None:
        """Return the folder of a revision, or None if there is no such revision."""
        if not self.created:
            return None
        return self.folder if revision in ("main", self.commit) else self.history.get(revision)

    def _about(self, path: str, body: bytes) -> object | None:
        """Return what the API says about the dataset and its files, or None if there is no such address."""
        about = re.escape(f"/api/datasets/{self.name}")
        found = re.fullmatch(rf"{about}(?:/(revision|tree|paths-info)/(\w+)(?:/(.*))?)?", path)
        folder = self._at(found[2] or "main") if found else None
        if found is None or folder is None:
            return None
        entries = [self._entry(file, folder) for file in sorted(folder.rglob("*")) if file.is_file()]
        if found[1] == "tree":
            prefix = f"{found[3]}/" if found[3] else ""
            listed = [each for each in entries if each["path"].startswith(prefix)]
            above = {parent.as_posix() for each in listed for parent in PurePosixPath(each["path"]).parents}
            folders = [{"type": "directory", "path": each, "size": 0, "oid": "0" * 40} for each in sorted(above)]
            within = [each for each in folders if each["path"] != "." and str(each["path"]).startswith(prefix)]
            return [*within, *listed] if listed or not prefix else None
        if found[1] == "paths-info":
            wanted = json.loads(body)["paths"] if body.startswith(b"{") else parse_qs(body.decode()).get("paths", [])
            return [each for each in entries if each["path"] in wanted]
        sha = self.commit if folder == self.folder else found[2]
        return {"id": self.name, "sha": sha, "siblings": [{"rfilename": each["path"]} for each in entries]}

    def _pushed(self, request: Request, path: str) -> tuple[int, Any] | None:
        """Answer a request of ``huggingface_hub`` that writes, or return None if it is another one."""
        body, upload = request.body, re.fullmatch(r"/upload/([0-9a-f]{64})", path)
        # The address for an upload is used without a token.
        allowed = (f"Bearer {self.token}", None) if upload else (f"Bearer {self.token}",)
        if self.token is not None and request.method != "GET" and request.headers.get("authorization") not in allowed:
            return 401, {"error": "invalid token"}
        if upload:
            if self.refuse is not None and len(self.objects) >= self.refuse:
                return 400, {"error": "no more"}
            if hashlib.sha256(body).hexdigest() != upload[1]:
                return 400, {"error": "other content"}
            self.objects[upload[1]] = body
            return 200, {}
        if path == "/api/repos/create":
            wanted = json.loads(body)
            url = f"{self.url}/datasets/{wanted['organization']}/{wanted['name']}"
            if self.created:
                return 409, {"error": "You already created this dataset repo", "url": url}
            self.created = True
            self.private = bool(wanted.get("private") or wanted.get("visibility") == "private")
            (self.folder / ".gitattributes").write_text("*.safetensors filter=lfs diff=lfs merge=lfs -text\n")
            return 200, {"url": url}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if "/preupload/" in path:
            return 200, {"files": [self._mode(each["path"]) for each in json.loads(body)["files"]]}
        if path.endswith(".git/info/lfs/objects/batch"):
            return 200, {"transfer": "basic", "objects": [self._upload(each) for each in json.loads(body)["objects"]]}
        if "/commit/" in path:
            refused = self._commit(body)
            if refused is not None:
                return refused
            address = f"{self.url}{path.removeprefix('/api').partition('/commit/')[0]}/commit/{self.commit}"
            return 200, {"commitOid": self.commit, "commitUrl": address, "hookOutput": ""}
        return None

    def _mode(self, name: str) -> dict[str, Any]:
        path, mode = self.folder / name, "lfs" if name.endswith(".safetensors") else "regular"
        oid = (self.large.get(name) or self._entry(path)["oid"]) if path.is_file() else None
        return {"path": name, "uploadMode": mode, "shouldIgnore": False, "oid": oid}

    def _upload(self, wanted: dict[str, Any]) -> dict[str, Any]:
        known = {"oid": wanted["oid"], "size": wanted["size"]}
        if wanted["oid"] in self.objects:
            return known
        return {**known, "actions": {"upload": {"href": f"{self.url}/upload/{wanted['oid']}"}}}

    def _commit(self, body: bytes) -> tuple[int, Any] | None:
        """Apply a commit, or return why it is refused."""
        lines = [(line["key"], line["value"]) for line in map(json.loads, body.decode().splitlines())]
        header = next(value for key, value in lines if key == "header")
        if header.get("parentCommit") not in (None, self.commit):
            return 412, {"error": "A commit has happened since. Please refresh and try again."}
        if any(key == "deletedFile" and not (self.folder / value["path"]).is_file() for key, value in lines):
            return 404, {"error": "A file with this name doesn't exist"}
        if any(key == "lfsFile" and value["oid"] not in self.objects for key, value in lines):
            return 400, {"error": "your push was rejected: an LFS pointer pointed to a file that does not exist"}
        past = self.folder.with_name(f"{self.folder.name}-{self.commit[:10]}")
        self.history[self.commit] = Path(shutil.copytree(self.folder, past))
        for key, value in lines:
            if key != "header":
                self._apply(key, value)
        self.messages.append(header["summary"])
        self.commit = hashlib.sha1("\n".join(self.messages).encode(), usedforsecurity=False).hexdigest()
        return None

    def _apply(self, key: str, value: dict[str, Any]) -> None:
        path = self.folder / value["path"]
        self.large.pop(value["path"], None)
        if key == "deletedFile":
            path.unlink()
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if key == "file":
            path.write_bytes(base64.b64decode(value["content"]))
        else:
            path.write_bytes(self.objects[value["oid"]])
            self.large[value["path"]] = value["oid"]
