"""``spile run``: this directory and a command onto every host of a slice, or of several."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter
from rich.console import Console

from spile.cli.shell.flag import flag
from spile.cli.shell.host_flags import HostFlags
from spile.cli.shell.pairs import variables
from spile.errors import SpecError

__all__ = ["Output", "RunFlags", "run"]

_WHAT = Group("What to run", sort_key=1)
_COPY = Group("What to copy, where to", sort_key=4)


@Parameter(name="*")
@dataclass(frozen=True)
class RunFlags:
    """The flags of ``spile run`` itself."""

    command: Annotated[str | None, flag(_WHAT, "The command as one line for the hosts' shell, instead of -- CMD.")] = (
        None
    )
    env: Annotated[list[str] | None, flag(_WHAT, "A variable for the command, NAME=value.", negative="")] = None
    install: Annotated[
        bool, flag(_WHAT, "Put spile itself onto the hosts first, as spile install does.", negative="")
    ] = False
    quiet: Annotated[bool, flag(_WHAT, "The hosts' output goes to the log files only.", negative="")] = False
    logs: Annotated[Path | None, flag(_COPY, "The folder for the logs. [default: spile-run-TIME]")] = None
    folder: Annotated[str | None, flag(_COPY, "Where on the hosts. [default: ~/spile-run/THIS-DIRECTORY]")] = None
    copy: Annotated[bool, flag(_COPY, "Copy first; or run in what an earlier copy left there.")] = True
    copy_limit_gb: Annotated[float, flag(_COPY, "Refuse to copy more than this.")] = 2.0

    def line(self, words: tuple[str, ...]) -> str:
        """The command as one line: a single word is a line already."""
        if words and words[0].startswith("-"):
            flag = words[0].partition("=")[0]
            raise SpecError(f"no flag {flag}", fix="flags of the command itself go after --; see spile run --help")
        if bool(words) == bool(self.command):
            raise SpecError("two commands" if words else "no command", expected="one, after -- or with --command")
        return self.command or (words[0] if len(words) == 1 else shlex.join(words))

    def results(self, prefix: str) -> Path:
        """A folder that is not there yet: the one asked for, or one named after the time."""
        if self.logs is not None:
            if self.logs.exists():
                raise SpecError("--logs is there already", expected="a folder to be made", found=self.logs)
            return self.logs
        stem = f"{prefix}{datetime.now():%Y%m%d-%H%M%S}"
        names = (Path(f"{stem}-{again}" if again else stem) for again in count())
        return next(path for path in names if not path.exists())


class Output(Console):
    """A reader that goes away (``spile run … | head``) ends the command on all hosts, as any failed write does."""

    def on_broken_pipe(self) -> None:
        """Not rich's SystemExit, which would tear the event loop down under the hosts."""
        raise BrokenPipeError


def run(
    *words: Annotated[str, Parameter(show=False, allow_leading_hyphen=True)],
    flags: RunFlags = RunFlags(),  # noqa: B008  (frozen)
    where: HostFlags = HostFlags(),  # noqa: B008
) -> int:
    """Copy this directory to every host of the slices, run a command on all at once, bring back logs and codes.

    ``spile run --tpu-prefix my-tpu -- python3 train.py``. The first host that fails, or Ctrl+C, ends the command on all
    hosts and leaves no process behind. The exit code is the worst of the hosts' own.
    """
    from spile.hosts import run as fanout
    from spile.hosts.files import RESULTS, copy_to, load
    from spile.hosts.run import Job
    from spile.view.hosts import Logs, print_outcomes

    line, given, results = flags.line(words), variables(flags.env), flags.results(RESULTS)
    console = Output(highlight=False)
    here, access = Path.cwd(), where.access()
    target = flags.folder or f"~/spile-run/{here.name or 'root'}"
    files = load(here, int(flags.copy_limit_gb * 1e9)) if flags.copy else None
    hosts = where.find()
    if flags.install:
        from spile.cli.install import put_on

        put_on(hosts, where)
    if files is not None:
        copied = copy_to(hosts, files, target, access)
        size = f"{files.size / 1e6:.1f} MB, {copied.sent / 1e6:.1f} MB sent"
        console.print(f"copied {copied.files} files ({size}) to {target} on {copied.hosts} hosts", markup=False)
    with Logs(hosts, results, None if flags.quiet else console) as logs:
        outcomes = fanout.run(hosts, Job(line, target, given), access=access, output=logs.write)
        logs.open()
    print_outcomes(outcomes, logs, console)
    return fanout.worst(outcomes)
