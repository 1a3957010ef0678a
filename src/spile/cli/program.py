"""The program: finds the command, runs it, turns errors into one line and an exit code."""

from __future__ import annotations

import io
import os
import re
import select
import sys
import tomllib
import traceback
from pathlib import Path
from typing import Any, get_args

from cyclopts import App, ArgumentCollection, CoercionError, CycloptsError, Group
from cyclopts.config import Dict, Env

from spile.cli.shell.aliases import modern
from spile.cli.shell.commands import COMMANDS, GROUPS, SECTIONS
from spile.cli.shell.mistakes import mistake
from spile.errors import SpecError, SpileError
from spile.version import __version__
from spile.view.table import Lasting
from spile.worker.signals import interruptible

__all__ = ["build", "run"]


def build(config: str | None = None, meant: str | None = None) -> App:
    """The command tree, with nothing imported but the table. Flags win over variables, and those over the file.

    The command that is ``meant`` is described by its own docstring, the others by their line in the table.
    """
    file = [] if config is None else [Dict(_read_config(config), use_commands_as_keys=False, source=config)]
    app = App(
        name="spile",
        help="Tap a language model: run it over a dataset and store its layers' activations, each sample exactly once.",
        version=f"spile {__version__}",
        config=(Env("SPILE_", command=False), *file, _refuse_fractions, _refuse_buckets),
        suppress_keyboard_interrupt=False,  # it is ours to tell
    )
    places = _places()
    groups = {name: App(name=name, help=text, **places[name]) for name, text in GROUPS.items()}
    for group in groups.values():
        app.command(group)
    for command in COMMANDS:
        group_name, _, name = command.name.rpartition(" ")
        told = None if command.name == meant else command.help
        place = {} if group_name else places[name]
        (groups[group_name] if group_name else app).command(command.function, name=name, help=told, **place)
    more = Group("More", sort_key=99)
    for flag in ("--help", "--version"):
        app[flag].group = more
    return app


def _refuse_fractions(_app: App, _commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """``--max-samples 1.5`` is a mistake. Left alone, it would be rounded to a number that nobody asked for."""
    for argument in arguments:
        if argument.hint is not int and int not in get_args(argument.hint):
            continue
        for token in argument.tokens:
            if float not in get_args(argument.hint) and re.fullmatch(r"[+-]?\d*\.\d*[1-9]\d*", token.value):
                raise CoercionError(argument=argument, token=token, target_type=int)


def _refuse_buckets(_app: App, _commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """A path of this machine is no bucket. Left alone, ``--logs gs://b/x`` would be a local folder named ``gs:``."""
    for argument in arguments:
        if argument.hint is not Path and Path not in get_args(argument.hint):
            continue
        for token in argument.tokens:
            if "://" in token.value:
                raise SpecError(argument.name, expected="a path on this machine", found=token.value)


def _places() -> dict[str, dict[str, Any]]:
    """Where each word stands in ``spile --help``."""
    sections = [(Group(title, sort_key=number), words) for number, (title, words) in enumerate(SECTIONS.items(), 1)]
    return {word: {"group": group, "sort_key": place} for group, words in sections for place, word in enumerate(words)}


def run(words: list[str]) -> int:
    """Run ``spile`` with these words; its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that knows ASCII alone gets ?, not the end of a run
    end = words.index("--") if "--" in words else len(words)  # what follows is another program's
    debug = "--debug" in words[:end]
    return _run([word for word in words[:end] if word != "--debug"] + words[end:], debug)


def _run(words: list[str], debug: bool) -> int:
    errors = Lasting(stderr=True, soft_wrap=True, highlight=False)
    try:
        words, config = _config(words)
        words = modern(words, os.environ)
        app = build(config, _meant(words))
        with interruptible():
            code = app(words, exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        known = [*GROUPS, *(command.name for command in COMMANDS)]
        errors.print(f"spile: {mistake(error, _meant(words), known)}", markup=False)
        return 2
    except SpileError as error:
        if debug:
            raise
        errors.print(f"spile: {error}", markup=False)
        return error.exit_code
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # rich's answer to a reader that has gone
            return 0
        raise
    except Exception as error:
        if isinstance(error, BrokenPipeError) and _reader_has_gone():
            # spile … | head: no failure of ours; keep the last flush quiet.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        if debug:
            raise
        errors.print(f"spile: {_fault(error)}", markup=False)
        return 1
    return code if isinstance(code, int) else 0


def _reader_has_gone() -> bool:
    """Whether the pipe that broke is our output's: one to a server or to a child of ours is a failure like any."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    return any(seen & (select.POLLERR | select.POLLHUP) for _, seen in output.poll(0))


def _fault(error: Exception) -> str:
    """An error that no author of ours foresaw, on one line too: what, where, and how to see more."""
    place = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(place.filename).name}:{place.lineno}"
    said = " ".join(f"{type(error).__name__}: {error}".split())
    return f"a fault in spile, or in what it uses: {said} ({where}); the same command with --debug shows more"


def _config(words: list[str]) -> tuple[list[str], str | None]:
    """The words without ``--config FILE``, and the file."""
    rest: list[str] = []
    config: str | None = None
    place = 0
    while place < len(words) and words[place] != "--":
        name, equals, value = words[place].partition("=")
        if name != "--config":
            rest.append(words[place])
        elif equals:
            config = value
        elif place + 1 < len(words):
            place += 1
            config = words[place]
        else:
            raise SpecError("--config", expected="a TOML file after it", found="nothing")
        place += 1
    return rest + words[place:], config


def _read_config(location: str) -> dict[str, Any]:
    """A TOML file, here or in a bucket: one flag per line, spelled with dashes or underscores."""
    from spile.objects import open_folder, split
    from spile.objects.folder import NotFound

    folder, key = split(location)
    try:
        values = tomllib.loads(open_folder(folder).get(key).decode())
    except NotFound as error:
        raise SpecError("--config", expected="a TOML file", found=f"no {location}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SpecError("--config", expected="a TOML file", found=f"{location}: {error}") from error
    return {name: value for name, value in values.items() if name not in ("version", "command")}  # RunSpec.to_toml


def _meant(words: list[str]) -> str:
    """The command or the group that was meant, or nothing."""
    known = {command.name for command in COMMANDS} | set(GROUPS)
    names = [word for word in words if not word.startswith("-")]
    return next((name for name in (" ".join(names[:2]), " ".join(names[:1])) if name in known), "")
