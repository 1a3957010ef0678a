"""Bytes in folders and buckets: local, gs, s3. The only import of the object-store library."""

from __future__ import annotations

from spile.objects.chunks import read_chunks
from spile.objects.folder import Folder, NotFound, ObjectInfo, Unfinished, Unwritable, Writer
from spile.objects.opening import open_folder, split
from spile.objects.stats import Stats

__all__ = [
    "Folder",
    "NotFound",
    "ObjectInfo",
    "Stats",
    "Unfinished",
    "Unwritable",
    "Writer",
    "open_folder",
    "read_chunks",
    "split",
]
