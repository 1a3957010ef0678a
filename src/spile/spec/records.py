"""Reading records that another version of spile wrote."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

__all__ = ["known_fields"]


def known_fields(cls: type, found: Mapping[str, Any], renamed: Mapping[str, str] | None = None) -> dict[str, Any]:
    """A record's fields that this version's dataclass has: what a newer version adds is left out.

    ``renamed``: fields' former names and what they are called now, for records of older versions.
    """
    current = {(renamed or {}).get(name, name): value for name, value in found.items()}
    return {each.name: current[each.name] for each in fields(cls) if each.name in current}
