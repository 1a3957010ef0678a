"""The program: finds the command, runs it, turns errors into one line and an exit code."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from cyclopts import App, CycloptsError
from rich.console import Console

from spile.cli.aliases import modern
from spile.cli.commands import COMMANDS, GROUPS
from spile.errors import SpileError
from spile.version import __version__

__all__ = ["build", "main"]


def build() -> App:
    """The command tree, with nothing imported but the table."""
    app = App(
        name="spile",
        help="Tap a language model: run it over a dataset and store its layers' activations, each sample exactly once.",
        version=f"spile {__version__}",
    )
    groups = {name: App(name=name, help=text) for name, text in GROUPS.items()}
    for group in groups.values():
        app.command(group)
    for command in COMMANDS:
        group_name, _, name = command.name.rpartition(" ")
        (groups[group_name] if group_name else app).command(command.function, name=name, help=command.help)
    return app


def main(argv: Sequence[str] | None = None) -> None:
    """Run ``spile`` and exit with its code: 0 done, 1 a failure, 2 a user's mistake, 3 fenced."""
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words
    words = [word for word in words if word != "--debug"]
    sys.exit(_run(words, debug))


def _run(words: list[str], debug: bool) -> int:
    errors = Console(stderr=True, soft_wrap=True, highlight=False)
    try:
        code = build()(modern(words, os.environ), exit_on_error=False, print_error=False, result_action="return_value")
    except CycloptsError as error:
        errors.print(f"spile: {' '.join(str(error).split())} See: spile --help", markup=False)
        return 2
    except SpileError as error:
        if debug:
            raise
        errors.print(f"spile: {error}", markup=False)
        return error.exit_code
    except KeyboardInterrupt:
        errors.print("spile: interrupted", markup=False)
        return 130
    except BrokenPipeError:
        # The reader of our output has gone (spile … | head): not a failure of ours. Keep the interpreter's own flush quiet.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    main()
