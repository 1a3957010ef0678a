"""Read records that another version of spile wrote."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from types import UnionType
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

Record = TypeVar("Record")


def read_record(cls: type[Record], found: object) -> Record:
    """Return a dataclass, with the dataclasses inside of it, from untrusted JSON.

    Fields that a newer version added are left out. Numbers must be finite, and lists become tuples. A value that has
    the type of its field is kept, so a caller can convert the fields that are not plain.

    Raises:
        TypeError, ValueError: A field is missing or has the wrong type.
    """
    if not isinstance(found, dict):
        raise TypeError(f"expected a JSON object, found {type(found).__name__}")
    kinds = _kinds(cast("type", cls))
    return cls(**{name: _read(kinds[name], value, name) for name, value in found.items() if name in kinds})


@cache  # A monitor reads the same kinds of records again and again.
def _kinds(cls: Any) -> dict[str, Any]:
    hints = get_type_hints(cls)
    return {each.name: hints[each.name] for each in fields(cls)}


def _read(kind: Any, value: Any, name: str) -> Any:
    origin, parts = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return None if value is None else _read(parts[0], value, name)
    if isinstance(kind, type) and is_dataclass(kind):
        return value if isinstance(value, kind) else read_record(kind, value)
    if isinstance(kind, type) and issubclass(kind, Enum):
        return kind(value)
    if origin is tuple and isinstance(value, list):
        return tuple(_read(parts[0], each, name) for each in value)
    if origin in (dict, Mapping) and isinstance(value, dict):
        return {parts[0](key): _read(parts[1], each, name) for key, each in value.items()}
    if kind is Any or (origin is Literal and value in parts) or _is_plain(kind, value):
        return value
    raise TypeError(f"{name}: expected {kind}, found {type(value).__name__}")


def _is_plain(kind: Any, value: Any) -> bool:
    if kind not in (int, float):
        return isinstance(kind, type) and isinstance(value, kind)
    number = isinstance(value, int if kind is int else int | float) and not isinstance(value, bool)
    return number and abs(value) < 1 << 63 and math.isfinite(value)
