"""Files in local folders and buckets (``gs://``, ``s3://``, ``az://``) behind one interface, and their checksums."""

from __future__ import annotations

import re
from pathlib import Path

from spile.errors import SpecError, UserError
from spile.objects.folder import (
    Folder,
    NotFound,
    ObjectInfo,
    Stats,
    Unfinished,
    Unwritable,
    Writer,
    is_valid_prefix,
    read_chunks,
)

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

_CLOUDS = ("gs", "s3", "az")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def open_folder(url: str) -> Folder:
    """Return the folder at a path, ``gs://bucket/prefix``, ``s3://bucket/prefix`` or ``az://container/prefix``.

    Sends no request and creates nothing.

    Raises:
        SpecError: The text names no folder.

    """
    from spile.objects.local import LocalFolder

    scheme, separator, rest = url.partition("://")
    if not separator:
        if not url:
            raise SpecError(
                "no folder was named",
                expected="a path, gs://bucket/prefix, s3://bucket/prefix or az://container/prefix",
            )
        return LocalFolder(Path(url).expanduser(), url)
    if scheme == "file":
        return LocalFolder(Path(rest), rest)
    if scheme == "hf":
        from spile.objects.hub import HubFolder

        return HubFolder.parse(url)
    if scheme not in _CLOUDS:
        raise SpecError(
            f"unknown kind of folder {url}", expected="a path, gs://, s3://, az:// or hf://", found=f"{scheme}://"
        )
    bucket, _, prefix = rest.partition("/")
    if not bucket:
        raise SpecError(f"no bucket in {url}", expected=f"{scheme}://bucket/prefix")
    prefix = prefix.strip("/")
    if not _BUCKET.fullmatch(bucket) or (prefix and not is_valid_prefix(f"{prefix}/")):
        raise SpecError(
            f"{url} is not a valid folder of a bucket",
            expected=f"{scheme}://bucket/prefix, with no empty part, . or .. in it",
            found=url,
        )
    from spile.objects.bucket import Bucket, BucketFolder  # imported here: local folders need no bucket client

    return BucketFolder(Bucket(scheme, bucket), prefix)


def is_remote(url: str) -> bool:
    """Return whether a path or URL names a bucket rather than this machine's disk."""
    scheme, separator, _ = url.partition("://")
    return bool(separator) and scheme != "file"


def bucket_url(text: str) -> str:
    """Return the URL of a bucket given as ``name`` or as a URL. A plain name means ``gs://``; a path is unchanged."""
    text = text.rstrip("/")
    return text if "://" in text or text.startswith(("/", ".")) else f"gs://{text}"


def split(url: str) -> tuple[str, str]:
    """Split an object's URL or path into folder and key: ``gs://b/data/x.jsonl`` → (``gs://b/data``, ``x.jsonl``)."""
    scheme, separator, rest = url.partition("://")
    above, slash, key = rest.rpartition("/") if separator else url.rpartition("/")
    if not key or (separator and scheme in _CLOUDS and not above):
        raise UserError(f"{url or 'an empty name'} names no file", expected="a path or a URL that ends in a name")
    if not separator:
        return (above or "/") if slash else ".", key
    return f"{scheme}://{above}", key
