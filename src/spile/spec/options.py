"""The fields of the run spec: what is known about each, and checks of their values."""

from __future__ import annotations

import json
import math
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from spile.errors import SpecError

CommandName = Literal["extract", "infer"]
FlagGroup = Literal["Model", "Data", "Taps", "Prompts", "Answers", "Output", "Batching (does not change the numbers)"]


@dataclass(frozen=True)
class Option:
    """What is known about a field of the run spec besides its type and default.

    Attributes:
        help: What the field does, then its values.
        group: The heading under which ``--help`` lists the flag.
        name: The flat name, if it differs from the attribute's name.
        identity: Whether the field is part of the run's identity: another value cannot append to the run.
        common: The commands whose ``--help`` lists the flag; ``--help-all`` lists every flag.
        default: How the default is described, if its value alone does not say it.
        parse: Converts text (flags, variables, TOML) to the field's value, if the field is not a plain value.
        format: The inverse of ``parse``.
        limits: The smallest and the largest value of a number.
        flag: Whether the field can be given as a flag.

    """

    help: str
    group: FlagGroup
    name: str = ""
    identity: bool = False
    common: tuple[CommandName, ...] = ()
    default: str = ""
    parse: Callable[[str], Any] | None = None
    format: Callable[[Any], str] | None = None
    limits: tuple[float, float] | None = None
    flag: bool = True


OPTION = "option"
"""The key of a field's metadata under which its :class:`Option` is found."""


def option(group: FlagGroup, value: Any, text: str, **more: Any) -> Any:
    """Return a dataclass field with a default and its :class:`Option`."""
    return field(default=value, metadata={OPTION: Option(text, group, **more)})


def split_names(text: str) -> tuple[str, ...]:
    """Split names at commas and spaces."""
    return tuple(text.replace(",", " ").split())


def parse_pairs(flag: str, words: Sequence[str] | None, expected: str = "NAME=value") -> dict[str, str]:
    """Parse ``NAME=value`` words. Errors never quote a value, which may be a secret."""
    found = {}
    for word in words or ():
        name, equals, value = word.partition("=")
        if not equals or not name or (flag == "--env" and not name.isidentifier()):
            raise SpecError(flag, expected=expected, found=repr(name))
        found[name] = value
    return found


def check_options(spec: Any) -> None:
    """Raise an error if a field of a dataclass of options is not one of its choices or outside of its limits."""
    for name, flag, choices, limits in _restricted_fields(spec.__class__):
        value = getattr(spec, name)
        if choices and value not in choices:
            raise SpecError(flag, expected=f"one of {', '.join(choices)}", found=repr(value))
        if limits is not None:
            check_number(flag, value, *limits)


@cache
def _restricted_fields(kind: type) -> list[tuple[str, str, tuple[str, ...], tuple[float, float] | None]]:
    """Return the name, the flag, the choices and the limits of each field that has choices or limits."""
    found, hints = [], get_type_hints(kind)
    for each in fields(kind):
        option: Option | None = each.metadata.get(OPTION)
        choices = get_args(hints[each.name]) if get_origin(hints[each.name]) is Literal else ()
        if option is not None and (choices or option.limits):
            flag = f"--{(option.name or each.name).replace('_', '-')}"
            found.append((each.name, flag, choices, option.limits))
    return found


def check_number(flag: str, value: float | None, low: float, high: float = math.inf) -> None:
    """Raise an error unless the value is None or a finite number from ``low`` to ``high``."""
    if value is not None and not (low <= value <= high and value < math.inf):
        expected = f"{low:,} or more" if high == math.inf else f"from {low:,} to {high:,}"
        raise SpecError(flag, expected=expected, found=f"{value:,}")


def convert_value(hint: Any, value: Any, problem: str) -> Any:
    """Return a value whose type is the hint's; integers are accepted for floats, and lists for tuples."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        (hint,) = (each for each in arguments if each is not type(None))
        return convert_value(hint, value, problem)
    if origin is Literal:
        if value in arguments:
            return value
        raise SpecError(problem, expected=f"one of {', '.join(map(str, arguments))}", found=repr(value))
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(convert_value(arguments[0], each, problem) for each in value)
    if hint is float and type(value) is int and abs(value) <= _LARGEST:
        return float(value)
    if origin is None and type(value) is hint:
        return value
    expected = "a list" if origin is tuple else _KINDS.get(hint, str(hint))
    raise SpecError(problem, expected=expected, found=repr(value))


_LARGEST = 1 << 1000
"""Larger integers than about this have no value as a float."""
_KINDS = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}


def toml_value(value: Any) -> str:
    """Return a value as TOML."""
    if isinstance(value, list):
        return f"[{', '.join(map(toml_value, value))}]"
    if isinstance(value, str):  # A JSON string is a TOML string, except for the delete character.
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return json.dumps(value)
