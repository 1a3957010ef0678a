"""What a bucket's listings and its location say: GCS's XML API and S3 write them alike."""

from __future__ import annotations

from datetime import datetime
from typing import NamedTuple
from xml.etree import ElementTree

from spile.objects.cloud.failures import RequestFailure

__all__ = ["ListedObject", "parse_location", "parse_objects", "parse_uploads"]


class ListedObject(NamedTuple):
    """One object as a listing or a HEAD describes it."""

    key: str
    size: int
    modified: float
    tag: str | None


def parse_objects(body: bytes) -> tuple[list[ListedObject], str | None]:
    """A page's objects, and the token of the next page where there is one."""
    fields, rows = _parse(body, "Contents")
    try:
        found = [
            ListedObject(row["Key"], int(row["Size"]), _seconds(row["LastModified"]), row.get("ETag")) for row in rows
        ]
    except (KeyError, ValueError) as error:
        raise _unreadable() from error
    token = fields.get("NextContinuationToken") if fields.get("IsTruncated") == "true" else None
    return found, token or None


def parse_uploads(body: bytes) -> tuple[dict[str, str], list[tuple[str, str, float]]]:
    """A listing's own fields, and each upload's name, handle and start."""
    fields, rows = _parse(body, "Upload")
    try:
        return fields, [(row["Key"], row["UploadId"], _seconds(row["Initiated"])) for row in rows]
    except (KeyError, ValueError) as error:
        raise _unreadable() from error


def parse_location(body: bytes) -> str | None:
    """The region of a bucket; None for the one that needs no name."""
    try:
        return ElementTree.fromstring(body).text  # noqa: S314 - the store's own reply
    except ElementTree.ParseError as error:
        raise _unreadable() from error


def _parse(body: bytes, wanted: str) -> tuple[dict[str, str], list[dict[str, str]]]:
    """The document's own fields, and those of each element of this name."""
    fields: dict[str, str] = {}
    rows = []
    try:
        for child in ElementTree.fromstring(body):  # noqa: S314 - the store's own reply
            tag = child.tag.rpartition("}")[2]
            if tag == wanted:
                rows.append({part.tag.rpartition("}")[2]: part.text or "" for part in child})
            else:
                fields[tag] = child.text or ""
    except ElementTree.ParseError as error:
        raise _unreadable() from error
    return fields, rows


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()


def _unreadable() -> RequestFailure:
    return RequestFailure("an unreadable reply", transient=True)
