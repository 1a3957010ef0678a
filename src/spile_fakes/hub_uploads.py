"""The part of the hub's API that creates repositories and commits, as ``huggingface_hub`` uses it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from pathlib import Path
from typing import Any


def git_oid(data: bytes) -> str:
    """Return the id that git gives to a file."""
    return hashlib.sha1(f"blob {len(data)}\0".encode() + data, usedforsecurity=False).hexdigest()


class Uploads:
    """Repositories in memory: large objects by hash, and the files of the newest commit on disk.

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
        """Return what the hub tells about a file."""
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
