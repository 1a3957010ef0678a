"""The ferry: moves files over a pair of pipes, in either direction, and only what the other side lacks.

    giver  {"files": [{"path", "size", "mode", "mtime", "link"}…]}
    taker  {"have": {path: [bytes, sha256 of those bytes]}}          an earlier copy, whole or cut off
    giver  {"path", "from"} · chunks, each after its length, a zero · {"sha256"} of the whole file; for each file
    taker  {"done": files}

The same code runs here and, sent inline, on the host: the standard library of Python 3.8 is all it needs. A file is
written beside its place, checked, and moved there whole; a name that would leave the folder is refused.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import signal
import stat
import struct
import sys
from typing import Any, BinaryIO, Callable, Iterable, NamedTuple  # noqa: UP035

__all__ = ["FerryError", "Tally", "describe", "give", "main", "take", "walk"]

CHUNK = 1 << 20
DEADLINE = [0]  # on a host: seconds without a byte after which the ferry ends, should the link die unheard
STORE = ".spile-ferry"
Entry = Any


class Tally(NamedTuple):
    """What a crossing moved."""

    files: int
    size: int
    """All the files' bytes."""
    moved: int
    """The bytes that had to be sent."""


class FerryError(Exception):
    """The other side broke off, or sent what it may not."""


def read_exactly(source: BinaryIO, size: int) -> bytes:
    """Just that many bytes."""
    if DEADLINE[0]:
        signal.alarm(DEADLINE[0])
    data = source.read(size)
    if len(data) != size:
        raise FerryError("the other side broke off")
    return data


def write_record(sink: BinaryIO, record: object) -> None:
    """A JSON record after its length."""
    text = json.dumps(record).encode("ascii")
    sink.write(struct.pack(">Q", len(text)) + text)
    sink.flush()


def read_record(source: BinaryIO) -> Any:
    """The next record."""
    (size,) = struct.unpack(">Q", read_exactly(source, 8))
    if size > 1 << 30:
        raise FerryError("the other side does not speak our language")
    return json.loads(read_exactly(source, size).decode("ascii"))


def read_size(source: BinaryIO) -> int:
    """The next chunk's length; zero after the last."""
    (size,) = struct.unpack(">I", read_exactly(source, 4))
    if size > CHUNK:
        raise FerryError("the other side does not speak our language")
    return int(size)


def describe(root: str, path: str) -> Entry | None:
    """One file's entry; None for what is neither a file nor a link, or has gone."""
    try:
        facts = os.lstat(os.path.join(root, path))
        link = os.readlink(os.path.join(root, path)) if stat.S_ISLNK(facts.st_mode) else None
    except FileNotFoundError:
        return None
    if link is None and not stat.S_ISREG(facts.st_mode):
        return None
    size = 0 if link is not None else facts.st_size
    return {"path": path, "size": size, "mode": facts.st_mode & 0o777, "mtime": facts.st_mtime_ns, "link": link}


def walk(root: str, skip: Callable[[str], bool] = lambda _: False) -> list[str]:
    """Every file and link below ``root``, sorted; ``skip`` may refuse a file or a whole folder by its path."""
    found = []
    for folder, folders, files in os.walk(root):
        below = os.path.relpath(folder, root)
        inside = "" if below == "." else below + "/"
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        folders[:] = [name for name in folders if name not in links and name != STORE and not skip(inside + name)]
        found += [inside + name for name in files + links if not skip(inside + name)]
    return sorted(found)


def digest_of(path: str, size: int) -> Any:
    """The running sha256 of a file's first ``size`` bytes."""
    digest, left = hashlib.sha256(), size
    if not size:
        return digest
    with open(path, "rb") as file:
        while left:
            data = file.read(min(CHUNK, left))
            if not data:
                break
            digest.update(data)
            left -= len(data)
    return digest


def claim(path: str) -> list[Any]:
    """A copy's size and checksum."""
    size = os.path.getsize(path)
    return [size, digest_of(path, size).hexdigest()]


def give(root: str, entries: Iterable[Entry], source: BinaryIO, sink: BinaryIO) -> Tally:
    """Send what the taker lacks."""
    entries, sent = list(entries), 0
    write_record(sink, {"files": entries})
    have = read_record(source)["have"]
    for entry in entries:
        if entry["link"] is None:
            sent += give_file(os.path.join(root, entry["path"]), entry["path"], have.get(entry["path"]), sink)
    sink.flush()
    if read_record(source).get("done") != len(entries):
        raise FerryError("the other side did not keep every file")
    return Tally(len(entries), sum(entry["size"] for entry in entries), sent)


def give_file(file_path: str, path: str, have: Any, sink: BinaryIO) -> int:
    """One file from where the taker's copy ends, or from its beginning if that copy is another's."""
    start = have[0] if have else 0
    digest = digest_of(file_path, start)
    if have and digest.hexdigest() != have[1]:
        start, digest = 0, hashlib.sha256()
    write_record(sink, {"path": path, "from": start})
    sent = 0
    with open(file_path, "rb") as file:
        file.seek(start)
        for data in iter(lambda: file.read(CHUNK), b""):
            digest.update(data)
            sink.write(struct.pack(">I", len(data)) + data)
            sent += len(data)
    sink.write(struct.pack(">I", 0))
    write_record(sink, {"sha256": digest.hexdigest()})
    return sent


class Taker:
    """The receiving side: a folder, and beside its files a store for what is not whole yet."""

    def __init__(self, root: str, mirror: bool) -> None:
        self.root, self.mirror = os.path.realpath(root), mirror
        self.store = os.path.join(self.root, STORE)
        self.waiting: list[tuple[str, Entry]] = []
        self.moved = 0
        os.makedirs(self.store, exist_ok=True)

    def place(self, path: str) -> str:
        """Where a file goes; never outside the folder."""
        parts = path.split("/")
        if path.startswith("/") or ".." in parts or STORE in parts:
            raise FerryError("a file that would leave the folder: " + path)
        return os.path.join(self.root, path)

    def behind_link(self, place: str) -> bool:
        """Whether the way there leads through a link, perhaps out of the folder."""
        return os.path.realpath(os.path.dirname(place)) != os.path.dirname(place)

    def part(self, path: str) -> str:
        """Where a file waits until it is whole."""
        return os.path.join(self.store, hashlib.sha256(os.fsencode(path)).hexdigest())

    def have(self, entry: Entry) -> list[Any] | None:
        """What is here of a file: [bytes, their sha256]."""
        part, place = self.part(entry["path"]), self.place(entry["path"])
        if os.path.exists(part):
            if 0 < os.path.getsize(part) <= entry["size"]:
                return claim(part)
            os.unlink(part)
        if self.behind_link(place) or os.path.islink(place) or not os.path.isfile(place):
            return None
        return claim(place) if os.path.getsize(place) == entry["size"] > 0 else None

    def take_file(self, entry: Entry, source: BinaryIO, claimed: list[Any] | None) -> None:
        """One file's bytes, onto what is here of it."""
        head, part, place = read_record(source), self.part(entry["path"]), self.place(entry["path"])
        if head["path"] != entry["path"] or head["from"] not in (0, claimed[0] if claimed else 0):
            raise FerryError("the other side sent another file than " + entry["path"])
        whole = head["from"] > 0 and not os.path.exists(part)
        digest = digest_of(place if whole else part, head["from"])
        size = read_size(source)
        if whole and size:  # the giver's file grew since it was listed
            shutil.copyfile(place, part)
        if size or not whole:
            with open(part, "ab" if head["from"] else "wb") as file:
                while size:
                    data = read_exactly(source, size)
                    digest.update(data)
                    file.write(data)
                    self.moved += size
                    size = read_size(source)
        if read_record(source)["sha256"] != digest.hexdigest():
            if os.path.exists(part):
                os.unlink(part)
            raise FerryError("the checksum differs: " + entry["path"])
        self.waiting.append((part if os.path.exists(part) else place, entry))

    def settle(self) -> None:
        """Move what is whole into place."""
        for part, entry in self.waiting:
            place = self.place(entry["path"])
            if self.behind_link(place):
                raise FerryError("a file that would leave the folder: " + entry["path"])
            os.makedirs(os.path.dirname(place), exist_ok=True)
            if entry["link"] is not None:
                if os.path.lexists(place):
                    os.unlink(place)
                os.symlink(entry["link"], place)
                continue
            if part != place:
                os.replace(part, place)
            os.chmod(place, entry["mode"])
            os.utime(place, ns=(entry["mtime"], entry["mtime"]))
        self.waiting = []

    def forget_stale(self, paths: list[str]) -> None:
        """Remove what an earlier copy brought and this one does not; what the host made itself stays."""
        manifest = os.path.join(self.store, "copied.json")
        old: list[str] = []
        if os.path.exists(manifest):
            with open(manifest, encoding="ascii") as file:
                old = json.load(file)
        for path in sorted(set(old) - set(paths)):
            place = self.place(path)
            if self.behind_link(place):
                continue
            if os.path.lexists(place) and (os.path.islink(place) or not os.path.isdir(place)):
                os.unlink(place)
            above = os.path.dirname(place)
            while above != self.root and os.path.isdir(above) and not os.listdir(above):
                os.rmdir(above)
                above = os.path.dirname(above)
        with open(manifest, "w", encoding="ascii") as file:
            json.dump(paths, file)

    def tidy(self) -> None:
        """Nothing waits any more: drop what earlier, broken copies left."""
        for name in os.listdir(self.store):
            if name != "copied.json":
                os.unlink(os.path.join(self.store, name))
        if not self.mirror:
            os.rmdir(self.store)


def take(root: str, source: BinaryIO, sink: BinaryIO, mirror: bool) -> Tally:
    """Receive into ``root``. A mirror changes nothing before all has come, and drops what is stale."""
    entries = read_record(source)["files"]
    taker = Taker(root, mirror)
    have = {entry["path"]: taker.have(entry) for entry in entries if entry["link"] is None}
    write_record(sink, {"have": {path: known for path, known in have.items() if known}})
    for entry in entries:
        if entry["link"] is None:
            taker.take_file(entry, source, have[entry["path"]])
        else:
            taker.waiting.append(("", entry))
        if not mirror:
            taker.settle()
    if mirror:
        taker.forget_stale([entry["path"] for entry in entries])
    taker.settle()
    taker.tidy()
    write_record(sink, {"done": len(entries)})
    return Tally(len(entries), sum(entry["size"] for entry in entries), taker.moved)


def main(mode: str, folder: str) -> None:
    """The host's side: ``take`` a copy into a folder, or ``give`` what is in one."""
    DEADLINE[0] = 3600
    root = os.path.expanduser(folder)
    source, sink = sys.stdin.buffer, sys.stdout.buffer
    try:
        if mode == "take":
            os.makedirs(root, exist_ok=True)
            take(root, source, sink, mirror=True)
        elif not os.path.isdir(root):
            raise FerryError("no such folder: " + folder)
        else:
            give(root, [entry for entry in (describe(root, path) for path in walk(root)) if entry], source, sink)
    except (FerryError, OSError) as error:
        sys.stderr.write("\x1espile " + json.dumps({"event": "refused", "reason": str(error)}) + "\n")
        sys.exit(1)
