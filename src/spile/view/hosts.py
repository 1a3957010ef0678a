"""Show the output of hosts: each line with the coloured name of its host, and all bytes in a file per host."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import count, cycle
from pathlib import Path
from typing import BinaryIO

from rich.console import Console
from rich.table import Table
from rich.text import Text

from spile.errors import Failure, SpecError, printable
from spile.hosts.files import RESULTS
from spile.hosts.hosts import Access, Host
from spile.hosts.run import HostOutcome, Job, run, worst_exit_code
from spile.view.table import NO_WIDTH, SafeConsole

COLOURS = ("cyan", "green", "yellow", "magenta", "blue", "bright_red", "bright_cyan", "bright_green")
_MAX_LINE = 1 << 16


class Logs:
    """The logs of all hosts: a file for each, and lines for the terminal."""

    def __init__(
        self, hosts: Sequence[Host], folder: Path | None, console: SafeConsole | None, *, bare: bool = False
    ) -> None:
        self.folder, self._console = folder, console
        self._rest = dict.fromkeys(hosts, b"")
        self._files: dict[Host, BinaryIO] = {}
        width = max((len(host.label) for host in hosts), default=0)
        # Rich is slow for single lines, so it renders each prefix once, and of the lines only those with control codes.
        self._prefixes = {
            host: "" if bare else self._render(Text(f"{host.label:<{width}} │ ", style=colour))
            for host, colour in zip(hosts, cycle(COLOURS), strict=False)
        }

    def open(self) -> None:
        """Create the file of every host. It is called after all hosts were reached."""
        if self.folder is not None and not self._files:
            self.folder.mkdir(parents=True, exist_ok=True)
            for host in self._rest:
                self._files[host] = (self.folder / f"{host.file_name}.log").open("wb", buffering=0)

    def path(self, host: Host) -> Path | None:
        """Return the file of a host."""
        return None if self.folder is None else self.folder / f"{host.file_name}.log"

    def write(self, host: Host, data: bytes) -> None:
        """Store the bytes; print complete lines to the terminal."""
        try:
            self.open()
            if host in self._files:
                self._files[host].write(data)
        except OSError as error:
            raise Failure(f"cannot write the log of {host.label}", found=str(error)) from error
        *lines, rest = (self._rest[host] + data).split(b"\n")
        if len(rest) > _MAX_LINE:
            lines, rest = [*lines, rest], b""
        self._rest[host] = rest
        self._print(host, lines)

    def close(self) -> None:
        """Print last lines without a line break, and close the files."""
        for host, rest in self._rest.items():
            if rest:
                self._print(host, [rest])
        for file in self._files.values():
            file.close()

    def __enter__(self) -> Logs:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _print(self, host: Host, lines: Sequence[bytes]) -> None:
        if self._console is not None and lines:
            self._console.file.write("".join(f"{self._prefixes[host]}{self._plain(line)}\n" for line in lines))
            self._console.file.flush()

    def _plain(self, line: bytes) -> str:
        """Return a line that is safe to print: colours stay, codes that move the cursor are removed or escaped."""
        # A progress bar redraws its line after carriage returns, so only its last state is shown.
        text = line.decode("utf-8", "replace").rstrip("\r").rpartition("\r")[2]
        return text if printable(text) == text else self._render(Text.from_ansi(text))

    def _render(self, text: Text) -> str:
        if self._console is None:
            return text.plain
        with self._console.capture() as drawn:
            self._console.print(text, end="", soft_wrap=True)
        return drawn.get()


def results_folder(logs: Path | None) -> Path:
    """Return the folder for the logs, which must not exist yet: the given one, or one named after the time."""
    if logs is not None:
        if logs.exists():
            raise SpecError("--logs names an existing folder", expected="a new folder", found=logs)
        return logs
    stem = f"{RESULTS}{datetime.now():%Y%m%d-%H%M%S}"
    names = (Path(f"{stem}-{again}" if again else stem) for again in count())
    return next(path for path in names if not path.exists())


class HostConsole(SafeConsole):
    """A console whose closed pipe (``spile run … | head``) ends the command on all hosts, like any failed write."""

    def on_broken_pipe(self) -> None:
        """Raise BrokenPipeError instead of rich's SystemExit, which would end the event loop before the hosts."""
        raise BrokenPipeError


def print_outcomes(outcomes: Sequence[HostOutcome], logs: Logs, console: Console) -> None:
    """Print host, exit code, seconds, log and cause, and write them as ``outcome.json`` next to the logs."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    # The end of a host's name is its number, so the name is not cut.
    longest = max((len(outcome.host.label) for outcome in outcomes), default=4)
    table.add_column("host", no_wrap=True, min_width=longest)
    table.add_column("code", no_wrap=True, justify="right")
    table.add_column("seconds", no_wrap=True, justify="right")
    table.add_column("log", overflow="fold")
    table.add_column("", overflow="fold")
    for outcome in outcomes:
        style = "dim" if outcome.stopped else "green" if outcome.code == 0 else "red"
        path, seconds = str(logs.path(outcome.host) or ""), f"{outcome.seconds:.1f}"
        table.add_row(outcome.host.label, str(outcome.code), seconds, path, _details(outcome), style=style)
    # In a pipe lines are not wrapped, for grep and for logs.
    console.print(table, width=None if console.is_terminal else NO_WIDTH, crop=False)
    if logs.folder is None:
        return
    rows = [
        {
            "host": outcome.host.label,
            "address": outcome.host.address,
            "code": outcome.code,
            "cause": outcome.cause,
            "seconds": outcome.seconds,
            "left": list(outcome.left),
            "log": os.fspath(logs.path(outcome.host) or ""),
        }
        for outcome in outcomes
    ]
    (logs.folder / "outcome.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def run_on_all(jobs: Mapping[Host, Job], access: Access, results: Path, *, quiet: bool = False) -> int:
    """Run the job of each host, print output and outcomes, and return the worst exit code. Logs go to ``results``."""
    console = HostConsole()
    with Logs(list(jobs), results, None if quiet else console) as logs:
        outcomes = run(jobs, access=access, output=logs.write)
        logs.open()
    print_outcomes(outcomes, logs, console)
    return worst_exit_code(outcomes)


def _details(outcome: HostOutcome) -> str:
    if outcome.left:
        return f"{outcome.cause}; still running: {', '.join(map(str, outcome.left))}"
    return "" if outcome.cause == "ended" else outcome.cause
