"""Bytes in folders and buckets: local, gs, s3. The only room that talks to buckets."""

from __future__ import annotations

from spile.objects.chunks import read_chunks
from spile.objects.folder import Folder, NotFound, ObjectInfo, Unfinished, Unwritable, Writer
from spile.objects.opening import bucket_url, is_remote, open_folder, split
from spile.objects.stats import Stats

__all__ = [
    "Folder",
    "NotFound",
    "ObjectInfo",
    "Stats",
    "Unfinished",
    "Unwritable",
    "Writer",
    "bucket_url",
    "is_remote",
    "open_folder",
    "read_chunks",
    "split",
]
