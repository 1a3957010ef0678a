"""Write docs/cli.md: every command with its flags, generated from the program.

python scripts/make_cli_reference.py [OUTPUT]
"""

from __future__ import annotations

import inspect
import re
import sys
import types
import typing
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

from cyclopts import App
from cyclopts.argument import Argument

from spile.cli.program import COMMANDS, GROUPS, Command, build_app
from spile.errors import ExitCode

__all__ = ["application", "flags", "reference"]

OUTPUT = Path(__file__).parent.parent / "docs" / "cli.md"
KINDS = {"str": "TEXT", "int": "N", "float": "X", "Path": "PATH"}

HEAD = """\
# Every command

*Written by `python scripts/make_cli_reference.py`; a test fails when it is out of date.*

Every flag can be given as `--flag value` or `--flag=value`, as a variable (`SPILE_BATCH_SIZE=8` is `--batch-size 8`),
or in a TOML file (`--config run.toml`, here or in a bucket), one flag per line: `batch-size = 8`. Flags win over
variables, and those over the file. The old guides' spellings work too: [the table](guides/README.md#flags).

`--debug` shows the traceback of an error, which is one line without it. `--help` after any command shows its flags; for
`extract` and `infer` only the most used ones, and `--help-all` shows all of them.

`spile --install-completion` installs completion of commands, flags and their values for bash, zsh or fish: it writes a
script into your home folder, and a line that loads it into `~/.bashrc` or `~/.zshrc`. It takes effect in a new shell.
Run it again after an upgrade of spile.

## Exit codes

| exit code | means |
|---|---|
"""


def application(command: Command) -> App:
    """Return the application of one command."""
    app = build_app(command=command.name)
    for word in command.name.split(" "):
        app = app[word]
    return app


def flags(command: Command) -> Iterator[Argument]:
    """Yield the flags and arguments that ``--help-all`` shows."""
    app, default = application(command), build_app().default_parameter
    for argument in app.assemble_argument_collection(default_parameter=default, parse_docstring=True):
        if argument.show and argument.names[0] != "*":
            yield argument


def reference() -> str:
    """The page."""
    ordered = sorted(COMMANDS, key=lambda command: (command.name.split(" ")[0] in GROUPS, _place(command)))
    index = [f"| [`spile {each.name}`](#{_anchor(each.name)}) | {each.help} |" for each in ordered]
    codes = "".join(f"| {code.value} | {code.meaning} |\n" for code in ExitCode)
    parts = [HEAD + codes, "\n".join(["| command | does |", "|---|---|", *index]) + "\n"]
    return "\n".join([*parts, *(_section(command) for command in ordered)])


def _place(command: Command) -> tuple[str, int]:
    """Return the sort key of a command: its group, then its place in the table of commands."""
    group, _, _ = command.name.rpartition(" ")
    return group, COMMANDS.index(command)


def _anchor(name: str) -> str:
    return f"spile-{name.replace(' ', '-')}"


def _section(command: Command) -> str:
    function = application(command).default_command
    text = (inspect.getdoc(function) or "").partition("\n\nArgs:")[0]
    paragraphs = [" ".join(part.split()).replace("``", "`") for part in text.split("\n\n")]
    groups: dict[str, list[str]] = {}
    order: dict[str, float] = {}
    for argument in flags(command):
        (group, *_) = argument.parameter.group or ()
        title = "Flags" if group.name in ("Parameters", "Arguments") else group.name
        groups.setdefault(title, []).append(_row(argument))
        order.setdefault(title, group.sort_key if isinstance(group.sort_key, int) else 99)
    lines = [f"## `spile {command.name}`", "", *_spaced(paragraphs)]
    for title in sorted(groups, key=lambda name: order[name]):
        lines += [f"| {title} | | default |", "|---|---|---|", *groups[title], ""]
    return "\n".join(lines)


def _spaced(paragraphs: list[str]) -> list[str]:
    return [line for paragraph in paragraphs for line in (paragraph, "")]


def _row(argument: Argument) -> str:
    text, default = _describe(argument)
    kind = _kind(argument)
    placed = argument.index is not None  # A positional argument is shown by its name.
    names = f"`{argument.names[0].strip('-').upper()}`" if placed else " ".join(f"`{name}`" for name in argument.names)
    kind = "" if placed else kind
    return f"| {names}{f' {kind}' if kind else ''} | {text} | {default} |".replace("  ", " ")


def _describe(argument: Argument) -> tuple[str, str]:
    """Return the help and the default of a flag. A default that the help states in words is used."""
    text = " ".join((argument.parameter.help or "").split()).replace("|", "\\|")
    found = re.search(r"\s*\[default(?:, ([^:\]]*))?: ([^\]]*)\]\s*$", text)
    if found:
        return text[: found.start()], found[2] + (f" ({found[1]})" if found[1] else "")
    if argument.required:
        return text, "**required**"
    value = argument.field_info.default
    if value is None or value is inspect.Parameter.empty or value is False:
        return text, ""
    return text, f"`{value.value if isinstance(value, Enum) else value}`" if value is not True else "yes"


def _kind(argument: Argument) -> str:
    """Return the placeholder after the flag."""
    choices = argument.get_choices()
    if choices:
        return " \\| ".join(f"`{choice}`" for choice in choices)
    hint, many = argument.hint, ""
    while typing.get_origin(hint) in (list, tuple, types.UnionType, typing.Union):
        many = "…" if typing.get_origin(hint) in (list, tuple) else many
        hint = next(each for each in typing.get_args(hint) if each is not type(None))
    return KINDS.get(getattr(hint, "__name__", ""), "") + many


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT
    target.write_text(reference(), encoding="utf-8")
