"""All exceptions of spile. The library raises them; only the command line turns them into text and exit codes.

    SpileError
    ├── UserError            exit 2   a mistake that the user can fix; 1 if something was written before
    │   ├── SpecError                 a wrong flag or value of a spec
    │   ├── DataError                 a wrong dataset, stream or sample
    │   ├── ModelError                a wrong model name, config, weights or tokenizer
    │   │   └── UnsupportedModel      a model that spile's own decoder does not implement; PyTorch may
    │   └── RunMismatch               the output belongs to another run
    ├── Failure              exit 1   a failure of the environment
    │   ├── StoreError                an object or a file could not be read or written
    │   ├── Damaged                   stored bytes do not match their checksum
    │   ├── PodError                  a host is missing, late or dead; exit 4 if it was lost during the run
    │   └── CloudError                the cloud's API refused a request or failed
    ├── Fenced               exit 3   another worker owns this stream; this is not a crash
    └── Interrupted          exit 130 Ctrl+C or SIGTERM; finished work is committed

Every message is one line: what happened, what was expected and found, and, as a sentence of its own, how to fix it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum

_COMMANDS = frozenset({"pip", "spile"})
"""First words of a fix that keep their small letter."""
_UNPRINTABLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters except tab and line feed, characters that change the direction of text, and lone surrogates."""


def printable(text: str) -> str:
    """Return text with control characters as ``\\x1b``, so that names from outside cannot command a terminal."""
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode("ascii"), text)


class ExitCode(IntEnum):
    """How a command ends. docs/cli.md has this table, and whether a worker is restarted depends on it."""

    meaning: str

    def __new__(cls, code: int, meaning: str) -> ExitCode:
        """Return the code with its meaning, which is a row of the documentation."""
        member = int.__new__(cls, code)
        member._value_, member.meaning = code, meaning
        return member

    DONE = 0, "done"
    FAILED = (
        1,
        "a failure of a store, a host or the cloud; a mistake that was found after something had been written, such as "
        "a bad row; or `spile verify` found something wrong",
    )
    REFUSED = 2, "a mistake in the command or the data; nothing was changed, and trying again does not help"
    FENCED = 3, "another worker owns this stream"
    HOST_LOST = 4, "another host of the pod was lost; the same command on all hosts resumes"
    INTERRUPTED = 130, "interrupted; what was done is committed, and the same command resumes"
    TERMINATED = 143, "ended by SIGTERM before anything had to be committed; the same command resumes"


class SpileError(Exception):
    """The base class. The message is one line of up to four parts."""

    exit_code: int = ExitCode.FAILED

    def __init__(
        self,
        problem: str,
        *,
        expected: object = None,
        found: object = None,
        fix: str | None = None,
    ) -> None:
        self.problem = problem
        self.expected = expected
        self.found = found
        self.fix = fix
        super().__init__(self.line())

    def line(self) -> str:
        """Return ``problem: expected A, found B. Do C.`` on one line, without the parts that are not given."""
        comparison = ", ".join(
            f"{word} {value}"
            for word, value in (("expected", self.expected), ("found", self.found))
            if value is not None
        )
        text = ": ".join(part for part in (self.problem, comparison) if part)
        if self.fix:
            text += " " if text.endswith((".", "?", "!", "…")) else ". "
            text += _as_sentence(self.fix)
        return printable(" ".join(text.split()))


class UserError(SpileError):
    """A mistake that the user can fix. Nothing was changed, unless :func:`found_late` says so."""

    exit_code = ExitCode.REFUSED


class SpecError(UserError):
    """A flag or a value of a spec is wrong."""


class DataError(UserError):
    """A dataset, a stream or the content of a sample is wrong."""


class ModelError(UserError):
    """A model's name, config, weights or tokenizer is wrong."""


class UnsupportedModel(ModelError):
    """The model is valid, but spile's own decoder does not implement it. PyTorch may run it."""


class RunMismatch(UserError):
    """The output belongs to another run."""


class Failure(SpileError):
    """A failure that the user's input did not cause."""


class StoreError(Failure):
    """An object or a file could not be read or written."""


class Damaged(Failure):
    """Stored bytes do not match their checksum or their shape."""


class PodError(Failure):
    """A host of the pod is missing, late or dead."""


class CloudError(Failure):
    """The cloud's API refused a request or failed."""


class Fenced(SpileError):
    """Another worker owns this stream. This is not a crash: the worker stops and the other one finishes."""

    exit_code = ExitCode.FENCED


class Interrupted(SpileError):
    """The run was interrupted by Ctrl+C or SIGTERM. Finished work is committed; the same command resumes."""

    exit_code = ExitCode.INTERRUPTED


@contextmanager
def found_late(changed: Callable[[], bool]) -> Iterator[None]:
    """Give a mistake that is found after something was changed the code of a failure: 2 promises that nothing was."""
    try:
        yield
    except UserError as error:
        if changed():
            error.exit_code = ExitCode.FAILED
        raise


@contextmanager
def untrusted(
    kind: type[SpileError], problem: str, *, expected: object = None, fix: str | None = None
) -> Iterator[None]:
    """Convert every error of a block that reads untrusted data into an error of this kind.

    Parsers raise more than they document: RecursionError for deep nesting, OverflowError for Infinity, or a panic of a
    native library, which is not a subclass of Exception.
    """
    try:
        yield
    except BaseException as error:
        panic = type(error).__module__ == "pyo3_runtime"
        if isinstance(error, SpileError) or not (panic or isinstance(error, Exception)):
            raise
        raise kind(problem, expected=expected, found=_describe(error), fix=fix) from error


def _describe(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def _as_sentence(text: str) -> str:
    """Return the text with a capital letter and a full stop, except where a command, a flag or a path would change."""
    first = text.split(maxsplit=1)[0].rstrip(",;:")
    if first.isalpha() and first not in _COMMANDS:
        text = text[0].upper() + text[1:]
    ends_with_command = ": " in text
    return text if ends_with_command or text.endswith((".", "?", "!", "…")) else f"{text}."


@contextmanager
def name_arguments(function: str) -> Iterator[None]:
    """Name the public function and its arguments in errors, instead of the flags of the command line."""
    try:
        yield
    except SpileError as error:
        error.problem, error.fix = _flags_to_arguments(error.problem), error.fix and _flags_to_arguments(error.fix)
        error.expected, error.found = (
            _flags_to_arguments(each) if isinstance(each, str) else each for each in (error.expected, error.found)
        )
        if isinstance(error, SpecError) and not error.problem.startswith("spile."):
            error.problem = f"{function}(): {error.problem}"
        error.args = (error.line(),)
        raise


_VALUES = "auto|jax|torch|arc|chat|text|tokens|truncate|skip|error|both|prompt|answer|none|all|last"
_FLAG = re.compile(rf"--([a-z][a-z0-9-]*)(?: (\d[\w.,]*|(?:b?float\d+|int8|{_VALUES})\b))?")


def _flags_to_arguments(text: str) -> str:
    """Write ``--max-seq-length 512`` as ``max_seq_length=512``; a whole command stays as it is."""
    if re.search(r"\bspile [a-z]", text):
        return text

    def argument(found: re.Match[str]) -> str:
        name, value = found[1].replace("-", "_"), found[2]
        return name if value is None else f"{name}={value if value[0].isdigit() else repr(value)}"

    return _FLAG.sub(argument, text)
