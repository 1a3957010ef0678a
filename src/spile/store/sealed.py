"""Small JSON records that carry their own checksum: ``run.json``, ``stream.json`` and the commits.

The last field of the object is always ``"crc32c"``: the object's last 22 bytes are ``,"crc32c":"hhhhhhhh"}`` and a
line feed, and the checksum covers every byte before them. So a reader checks the bytes as they are, whatever its
JSON library.
"""

from __future__ import annotations

import json
import re
from typing import Any

from spile.errors import Damaged, untrusted
from spile.objects.crc import crc32c, to_hex

__all__ = ["FORMAT", "RUN_FORMATS", "seal", "unseal"]

FORMAT = 1
"""The version of the format; ``docs/format.md`` describes it."""
RUN_FORMATS = (1, 2)
"""Of ``run.json``, which every reader reads first: 2 keeps those out that would take its rows for something else."""

_TAIL = re.compile(rb',"crc32c":"([0-9a-f]{8})"\}\n')
_TAIL_LENGTH = 22


def seal(record: dict[str, Any], *, indent: int | None = None) -> bytes:
    """The record as JSON with its checksum."""
    separators = (",", ":") if indent is None else (",", ": ")
    body = json.dumps(record, separators=separators, indent=indent, allow_nan=False).encode()
    body = body[:-1].rstrip()
    return body + f',"crc32c":"{to_hex(crc32c(body))}"}}\n'.encode()


def unseal(data: bytes, where: str, formats: tuple[int, ...] = (FORMAT,)) -> dict[str, Any]:
    """The record, checked; :class:`Damaged` names the object where it is torn, garbled or of a later format."""
    tail = _TAIL.fullmatch(data[-_TAIL_LENGTH:])
    if tail is None:
        raise Damaged(
            f"{where} is torn", expected="a record that ends with its checksum", found=f"{len(data)} bytes that do not"
        )
    body = data[:-_TAIL_LENGTH]
    found = to_hex(crc32c(body))
    if found != tail[1].decode():
        raise Damaged(f"{where} is damaged", expected=f"crc32c {tail[1].decode()}", found=found)
    with untrusted(Damaged, f"{where} is no JSON object"):
        record = json.loads(body + b"}")
    version = record.get("format") if isinstance(record, dict) else None
    if version not in formats:
        raise Damaged(
            f"{where} has a format this version cannot read",
            expected=formats[-1],
            found=version,
            fix="upgrade spile to read it",
        )
    return dict(record)
