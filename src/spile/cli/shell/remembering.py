"""A command line's flags as words and as JSON, so that a later one can take them again."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import MISSING, Field, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = ["as_before", "as_words", "given", "words_of"]

Flags = TypeVar("Flags", bound="DataclassInstance")


def given(flags: DataclassInstance, without: Collection[str] = ()) -> dict[str, Any]:
    """The flags that differ from their defaults, by name."""
    values = {each.name: getattr(flags, each.name) for each in fields(flags) if each.name not in without}
    return {name: value for name, value in values.items() if value != _default(flags, name)}


def as_before(flags: Flags, before: Mapping[str, Any], without: Collection[str] = ()) -> tuple[Flags, list[str]]:
    """The flags with what an earlier command line said where this one says nothing, and the words for that."""
    now = given(flags)
    known = {each.name for each in fields(flags)} - set(without)
    taken = {name: value for name, value in before.items() if name in known and name not in now}
    return replace(flags, **taken), as_words(taken)


def words_of(flags: DataclassInstance, without: Collection[str] = ()) -> list[str]:
    """The flags that differ from their defaults, as a command line."""
    return as_words(given(flags, without))


def _default(flags: DataclassInstance, name: str) -> object:
    field: Field[Any] = next(each for each in fields(flags) if each.name == name)
    return None if field.default is MISSING else field.default


def as_words(values: Mapping[str, Any]) -> list[str]:
    """Flags by name as a command line."""
    words: list[str] = []
    for key, value in values.items():
        name = f"--{key.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(name if value else f"--no-{name[2:]}")
        elif isinstance(value, list | tuple):
            words += [name, *map(str, value)]
        else:
            words += [name, str(value)]
    return words
