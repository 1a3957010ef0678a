"""What ssh says when it fails, and what that means: a table from its words to ours."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from spile.errors import Failure, SpileError, UserError
from spile.fleet.ssh.hosts import Host

__all__ = ["explain", "together"]


class SshFailure(NamedTuple):
    """ssh's words, whose mistake it is, our words, what to do."""

    words: str
    kind: type[SpileError]
    problem: str
    fix: str


TABLE: tuple[SshFailure, ...] = (
    SshFailure(r"Could not resolve hostname", UserError, "no such host", "check the address"),
    SshFailure(
        r"REMOTE HOST IDENTIFICATION HAS CHANGED|Host key verification failed|No .* host key is known",
        UserError,
        "the host's key is not the one known",
        "if the machine was really replaced, remove the old key with ssh-keygen -R",
    ),
    SshFailure(
        r"Load key .*|Identity file .* not accessible", UserError, "the ssh key cannot be used", "check --ssh-key"
    ),
    SshFailure(
        r"Permission denied|Too many authentication failures",
        UserError,
        "the host refused the login",
        "check --user and --ssh-key; a TPU VM takes the keys in its ssh-keys metadata",
    ),
    SshFailure(
        r"Connection refused", Failure, "nothing listens there", "is sshd running on the host, and the port right"
    ),
    SshFailure(
        r"timed out|No route to host|Network is unreachable",
        Failure,
        "the host cannot be reached",
        "open tcp:22 in the firewall, or use --internal-ip from inside the network",
    ),
    SshFailure(
        r"not responding|Broken pipe|closed by|[Cc]onnection reset", Failure, "the connection was lost", "run it again"
    ),
    SshFailure(
        r"Bad configuration option|command-line.*(error|Bad|unsupported)",
        UserError,
        "ssh refuses an option",
        "check --ssh-option",
    ),
    SshFailure(
        r"(tar|mkdir): (command )?(not found|No such file)",
        UserError,
        "neither rsync nor tar on the host",
        "install rsync there",
    ),
    SshFailure(
        r"python3?: (command )?not found|python3?: No such file|python3: not found",
        UserError,
        "no python3 on the host",
        "install Python 3.8 or newer there",
    ),
)


def explain(host: Host, code: int | None, words: str) -> SpileError:
    """The error for an ssh that failed before the host's program had spoken."""
    for row in TABLE:
        if re.search(row.words, words):
            return row.kind(f"{host.label}: {row.problem}", found=_last(words), fix=row.fix)
    if code == 127:
        return UserError(f"{host.label}: no python3 on the host", fix="install Python 3.8 or newer there")
    return Failure(f"{host.label}: ssh failed", found=_last(words) or f"exit code {code}")


def together(errors: Sequence[SpileError], total: int) -> SpileError:
    """Many hosts' errors as one line: the first, and how many there are."""
    first = next((error for error in errors if isinstance(error, UserError)), errors[0])
    if len(errors) == 1:
        return first
    return type(first)(
        f"{len(errors)} of {total} hosts failed; {first.problem}",
        expected=first.expected,
        found=first.found,
        fix=first.fix,
    )


def _last(words: str) -> str:
    lines = [line.strip() for line in words.splitlines() if line.strip() and not set(line.strip()) <= {"@"}]
    return lines[-1] if lines else ""
