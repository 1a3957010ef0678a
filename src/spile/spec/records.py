"""Reading records that another version of spile wrote."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

__all__ = ["known_fields", "typed_fields"]


def known_fields(cls: type, found: Mapping[str, Any], renamed: Mapping[str, str] | None = None) -> dict[str, Any]:
    """A record's fields that this version's dataclass has: what a newer version adds is left out.

    ``renamed``: fields' former names and what they are called now, for records of older versions.
    """
    current = {(renamed or {}).get(name, name): value for name, value in found.items()}
    return {each.name: current[each.name] for each in fields(cls) if each.name in current}


def typed_fields(cls: type, found: object, renamed: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The same, of a record that anybody may have written: each plain field is of its type; else a TypeError.

    Numbers are finite, and lists are the tuples that they were. What is not plain is the caller's to read.
    """
    if not isinstance(found, dict):
        raise TypeError(f"expected a JSON object, found {type(found).__name__}")
    known = known_fields(cls, found, renamed)
    for each in fields(cls):
        kinds = str(each.type).split(" | ")
        if each.name not in known or not all(kind in _PLAIN for kind in kinds):
            continue
        value = known[each.name]
        if not any(_PLAIN[kind](value) for kind in kinds):
            raise TypeError(f"{each.name}: expected {each.type}, found {type(value).__name__}")
        known[each.name] = tuple(value) if isinstance(value, list) else value
    return known


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e18 and math.isfinite(value)


def _texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def _text_of_texts(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(each, str) for each in value.values())


_PLAIN: Mapping[str, Callable[[object], bool]] = {
    "str": lambda value: isinstance(value, str),
    "bool": lambda value: isinstance(value, bool),
    "int": lambda value: _number(value) and isinstance(value, int),
    "float": _number,
    "None": lambda value: value is None,
    "tuple[str, ...]": _texts,
    "Mapping[str, str]": _text_of_texts,
}
