"""Read records that another version of spile wrote."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import cache
from typing import Any


def known_fields(cls: type, found: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a record that the dataclass has; fields that a newer version added are left out."""
    return {name: found[name] for name in _names(cls) if name in found}


def typed_fields(cls: type, found: object) -> dict[str, Any]:
    """Return the known fields of an untrusted record; raise TypeError if a plain field has the wrong type.

    Numbers must be finite, and lists become tuples. The caller must check the fields that are not plain.
    """
    if not isinstance(found, dict):
        raise TypeError(f"expected a JSON object, found {type(found).__name__}")
    known = known_fields(cls, found)
    for name, kind, checks in _plain(cls):
        if name not in known:
            continue
        value = known[name]
        if not any(check(value) for check in checks):
            raise TypeError(f"{name}: expected {kind}, found {type(value).__name__}")
        known[name] = tuple(value) if isinstance(value, list) else value
    return known


@cache  # A monitor reads the same kinds of records again and again.
def _names(cls: type) -> tuple[str, ...]:
    return tuple(each.name for each in fields(cls))


@cache
def _plain(cls: type) -> tuple[tuple[str, str, tuple[Callable[[object], bool], ...]], ...]:
    """Return the name, the type and the type checks of each plain field."""
    kinds = {each.name: str(each.type).split(" | ") for each in fields(cls)}
    return tuple(
        (name, " | ".join(each), tuple(_PLAIN[kind] for kind in each))
        for name, each in kinds.items()
        if all(kind in _PLAIN for kind in each)
    )


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e18 and math.isfinite(value)


_PLAIN: Mapping[str, Callable[[object], bool]] = {
    "str": lambda value: isinstance(value, str),
    "bool": lambda value: isinstance(value, bool),
    "int": lambda value: _number(value) and isinstance(value, int),
    "float": _number,
    "None": lambda value: value is None,
    "tuple[str, ...]": lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value),
    "Mapping[str, str]": lambda value: isinstance(value, dict) and all(isinstance(v, str) for v in value.values()),
}
