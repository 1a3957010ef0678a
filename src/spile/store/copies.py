"""A local copy beside a bucket: what it lacks, and what brings it."""

from __future__ import annotations

from dataclasses import dataclass

from spile.objects.folder import Folder, NotFound
from spile.spec.amounts import size
from spile.store.layout import stream_folder
from spile.store.ledger import read_ledger

__all__ = ["Lacking", "lacking"]

_BRINGS = {"gs": "gcloud storage rsync --recursive", "s3": "aws s3 sync"}


@dataclass(frozen=True)
class Lacking:
    """Shards of a stream that are committed at home, and not in the copy."""

    copy: str
    """The stream's folder."""
    shards: int
    of: int
    bytes: int

    def line(self, home: str) -> str:
        """For people, with the command that brings them from the stream's folder at ``home``."""
        brings = _BRINGS.get(home.partition("://")[0], "cp -rn")
        return (
            f"the local copy {self.copy} has {self.of - self.shards} of {self.of} shards: {self.shards} "
            f"({size(self.bytes)}) were stored before it was there, or by other machines; "
            f"{brings} {home} {self.copy} brings them"
        )


def lacking(copy: Folder, worker_id: int) -> Lacking | None:
    """What a copy lacks of the shards that its own commits name; None where it has them all."""
    folder = copy.child(stream_folder(worker_id))
    files = read_ledger(folder, None).files
    absent = [file.size for file in files if _size(folder, file.name) != file.size]
    return Lacking(folder.url, len(absent), len(files), sum(absent)) if absent else None


def _size(folder: Folder, name: str) -> int | None:
    try:
        return folder.info(name).size
    except NotFound:
        return None
