"""One exception tree. The library raises these; only the command line turns them into text and exit codes.

    SpileError
    ├── UserError            exit 2   a mistake its author can fix; nothing was changed
    │   ├── SpecError                 a flag or a spec's value
    │   ├── DataError                 a dataset, a stream, a sample's content
    │   ├── ModelError                a model's name, config, weights or tokenizer
    │   └── RunMismatch               the output belongs to another run
    ├── Failure              exit 1   the world did not cooperate
    │   ├── StoreError                an object or a file could not be read or written
    │   ├── Damaged                   stored bytes do not match their checksum
    │   ├── PodError                  a host is missing, late or dead
    │   └── CloudError                the cloud's API refused or failed
    ├── Fenced               exit 3   another worker owns this stream; no crash
    └── Interrupted          exit 130 Ctrl+C or SIGTERM, after what was done is committed

Every message is one line: what happened, what was expected, what was found, what to do next.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

__all__ = [
    "CloudError",
    "Damaged",
    "DataError",
    "Failure",
    "Fenced",
    "Interrupted",
    "ModelError",
    "PodError",
    "RunMismatch",
    "SpecError",
    "SpileError",
    "StoreError",
    "UserError",
    "untrusted",
]


class SpileError(Exception):
    """The root of the tree: one line made of up to four parts."""

    exit_code = 1

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
        """``problem: expected A, found B; do C``, with the parts that are known, on one line."""
        comparison = ", ".join(
            f"{word} {value}"
            for word, value in (("expected", self.expected), ("found", self.found))
            if value is not None
        )
        text = ": ".join(part for part in (self.problem, comparison) if part)
        text = "; ".join(part for part in (text, self.fix) if part)
        return " ".join(text.split())


class UserError(SpileError):
    """A mistake that its author can fix. Nothing was changed."""

    exit_code = 2


class SpecError(UserError):
    """A flag or a value of a spec."""


class DataError(UserError):
    """A dataset, a stream, or a sample's content."""


class ModelError(UserError):
    """A model's name, config, weights or tokenizer."""


class RunMismatch(UserError):
    """The output belongs to another run."""


class Failure(SpileError):
    """The world did not cooperate."""


class StoreError(Failure):
    """An object or a file could not be read or written."""


class Damaged(Failure):
    """Stored bytes do not match their checksum or their shape."""


class PodError(Failure):
    """A host of the pod is missing, late or dead."""


class CloudError(Failure):
    """The cloud's API refused or failed."""


class Fenced(SpileError):
    """Another worker owns this stream. It is no crash: stop and let the other finish."""

    exit_code = 3


class Interrupted(SpileError):
    """Ctrl+C or SIGTERM. What was done is committed; the same command resumes."""

    exit_code = 130


@contextmanager
def untrusted(
    kind: type[SpileError], problem: str, *, expected: object = None, fix: str | None = None
) -> Iterator[None]:
    """Around the reading of what somebody else wrote: whatever goes wrong in there becomes one line of ours.

    Parsers fail in more ways than they document: RecursionError for deep nesting, OverflowError for Infinity, a native
    library's panic, which is not even an Exception.
    """
    try:
        yield
    except SpileError:
        raise
    except Exception as error:
        raise kind(problem, expected=expected, found=_said(error), fix=fix) from error
    except BaseException as error:
        if type(error).__module__ != "pyo3_runtime":
            raise
        raise kind(problem, expected=expected, found=_said(error), fix=fix) from error


def _said(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
