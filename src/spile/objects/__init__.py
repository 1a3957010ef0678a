"""Files in local folders and buckets (``gs://``, ``s3://``, ``az://``) behind one interface, and their checksums."""

from __future__ import annotations

from spile.objects.folder import (
    Folder,
    NotFound,
    ObjectInfo,
    Removal,
    Stats,
    Unfinished,
    Unwritable,
    Writer,
    read_chunks,
)
from spile.objects.opening import bucket_url, is_remote, open_folder, split

__all__ = [
    "Folder",
    "NotFound",
    "ObjectInfo",
    "Removal",
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
