"""What hosts keep locally, brought back here: one folder per worker, checked, and resumed where it broke off."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spile.errors import Damaged
from spile.fleet.ssh.hosts import Access, Host
from spile.fleet.ssh.transfer import Transfers, pull
from spile.objects import open_folder
from spile.store.layout import RUN, STREAM
from spile.store.stream import read_stream

__all__ = ["Collected", "assemble", "collect_from", "folder_of"]


@dataclass(frozen=True)
class Collected:
    """What came from one host."""

    host: Host
    folder: Path
    files: int
    size: int
    received: int
    """Bytes that were not here yet."""


def folder_of(host: Host, hosts: Sequence[Host]) -> str:
    """``worker_2`` of one slice; ``tpu-a-1/worker_2`` of several."""
    many = len({other.slice for other in hosts}) > 1
    return f"{host.node.replace('/', '-')}/worker_{host.worker}" if many else f"worker_{host.worker}"


def collect_from(hosts: Sequence[Host], remote: str, into: Path, access: Access) -> list[Collected]:
    """Copy the hosts' folder ``remote`` here. Files that are here already, whole and equal, are not sent again."""
    folders = {host: into / folder_of(host, hosts) for host in hosts}

    moved = Transfers(access).on_all(hosts, lambda all_, host: pull(all_, host, remote, folders[host]))
    return [
        Collected(host, folders[host], each.files, each.size, each.sent)
        for host, each in zip(hosts, moved, strict=True)
    ]


def assemble(into: Path, folders: Sequence[Path]) -> bool:
    """Make one dataset, at ``into``, of the parts that a pod's hosts kept on their own disks; False: they are none.

    Files are linked, not copied; the first host's count, for it alone commits. Parts of different lives of a stream
    cannot be one.
    """
    parts = [folder for folder in folders if (folder / RUN).is_file()]
    if not parts:
        return False
    ids: dict[str, tuple[str, Path]] = {}
    for part in parts:
        for stream in sorted(part.glob(f"tpu_*/{STREAM}")):
            mine = read_stream(open_folder(str(stream.parent)))
            first = ids.setdefault(stream.parent.name, (mine.id if mine else "", part))
            if mine is not None and mine.id != first[0]:
                raise Damaged(
                    f"{part} and {first[1]} hold parts of different lives of {stream.parent.name}",
                    expected=f"stream id {first[0]}",
                    found=mine.id,
                    fix="they cannot be put together: run it again on all hosts, into a bucket or an empty folder",
                )
    for part in parts:
        for file in sorted(path for path in part.rglob("*") if path.is_file()):
            target = into / file.relative_to(part)
            target.parent.mkdir(parents=True, exist_ok=True)
            if part == parts[0]:
                target.unlink(missing_ok=True)  # its ledger may have grown since an earlier visit
            if not target.exists():
                _link(file, target)
    return True


def _link(file: Path, target: Path) -> None:
    try:
        target.hardlink_to(file)
    except OSError:  # another disk, or one without links
        shutil.copyfile(file, target)
