"""What is wrong with a command line, in the words of every other error: expected, found, what to do."""

from __future__ import annotations

import difflib
from typing import TYPE_CHECKING, Literal, get_args, get_origin

from cyclopts import CoercionError, CycloptsError, MissingArgumentError, UnknownOptionError
from cyclopts.exceptions import UnknownCommandError, UnusedCliTokensError

from spile.errors import SpecError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cyclopts.token import Token

__all__ = ["mistake"]

_HINTS = {
    ("extract", "--force"): "extract goes on where it was; spile deploy --launch ssh --force installs anew",
}
"""What the users of a flag that another command has, or had, need to know."""
_KINDS = {int: "a whole number", float: "a number", bool: "true or false"}


def mistake(error: CycloptsError, command: str, known: Iterable[str]) -> str:
    """One line. ``command`` is the one that was meant, ``known`` are the names of all of them."""
    fix = f"see {' '.join(word for word in ('spile', command, '--help') if word)}"
    match error:
        case UnknownCommandError(unused_tokens=[word, *_]):
            below = [name.removeprefix(command).strip() for name in known if name.startswith(command)]
            kind = "flag" if word.startswith("-") else "command"
            return SpecError(f"no {kind} {f'{command} {word}'.strip()}", fix=_near(word, below) + fix).line()
        case UnknownOptionError(token=token):
            flags = [name for each in error.argument_collection if each.parse for name in each.names]
            name = _name(token) or token.value
            hint = _HINTS.get((command, name)) or _near(name, flags) + fix
            return SpecError(f"no flag {name}{_source(token)}", fix=hint).line()
        case UnusedCliTokensError(unused_tokens=[word]) if command == "extract" and word.isdecimal():
            return SpecError(command, expected="flags only", found=word, fix=f"did you mean --worker-id {word}?").line()
        case UnusedCliTokensError(unused_tokens=[*words]):
            return SpecError(command, expected="flags only", found=" ".join(words), fix=fix).line()
        case MissingArgumentError(argument=argument) if argument is not None:
            given = error.keyword or any(token.keyword for token in argument.tokens)
            name = argument.name if argument.index is None else argument.name.lstrip("-").upper()
            problem, expected = (argument.name, "a value") if given else (command, name)
            return SpecError(problem, expected=expected, found="none", fix=fix).line()
        case CoercionError(token=token) if token is not None and error.msg is None:
            name = _name(token) or (error.argument.name if error.argument is not None else "")
            expected = _expected(error.target_type)
            return SpecError(f"{name}{_source(token)}", expected=expected, found=token.value, fix=fix).line()
    return SpecError(" ".join(str(error).split()), fix=fix).line()


def _name(token: Token) -> str:
    """The flag, as it is typed: a file's ``[batch-size]`` is ``--batch-size``."""
    name = token.keyword or ""
    return f"--{name[1:-1]}" if name.startswith("[") else name


def _source(token: Token) -> str:
    """Where a flag was said, unless on the command line or in a variable, which is its own name."""
    return "" if token.source in ("", "cli", "env") else f" in {token.source}"


def _expected(kind: type | None) -> str:
    if get_origin(kind) is Literal:
        *most, last = map(str, get_args(kind))
        return f"{', '.join(most)} or {last}"
    return _KINDS.get(kind, getattr(kind, "__name__", str(kind))) if kind is not None else "another value"


def _near(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f"did you mean {near[0]}? or " if near else ""
