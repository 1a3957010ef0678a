"""The display of a run with many workers: one table in a terminal, plain lines elsewhere."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import FrameType

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from spile.engines.supervisor import EngineOutcome, Supervisor
from spile.errors import SpileError
from spile.run.signals import handle_signals
from spile.spec.amounts import counted
from spile.store.snapshot import Snapshot, SnapshotReader, StreamView
from spile.view.stream_table import render
from spile.view.table import PipeSafeConsole, how_to_resume, print_event, print_facts, progress_parts, totals_line

_LINE_EVERY = 10.0


@dataclass
class EngineDisplay:
    """The display of the run, and the number of stop requests received."""

    console: Console
    reader: SnapshotReader
    live: Live | None = None
    event: threading.Event | None = None
    """Set by a caller to stop the run."""
    signals: int = 0
    """Number of Ctrl+C or SIGTERM signals received."""
    _line_due: float = 0.0
    _last: str = ""

    @property
    def stop_requests(self) -> int:
        """How often the run was asked to stop."""
        return self.signals + (self.event is not None and self.event.is_set())

    def stop(self, number: int, _frame: FrameType | None) -> None:
        """Count a signal; the supervisor acts on the count."""
        self.signals += 1
        what = "all workers commit and stop (again: end at once)" if self.signals == 1 else "ending at once"
        self.log(f"{signal.Signals(number).name}: {what}")

    def log(self, line: str) -> None:
        """Print an event above the table, or as a line of the log."""
        print_event(self.console, line)

    def observe(self, supervisor: Supervisor) -> Mapping[int, StreamView]:
        """Read the state of the dataset and show it."""
        try:
            snapshot = self.reader.take()
        except SpileError as error:  # transient storage errors are reported by the workers if they persist
            self.log(f"Could not read the state of the dataset: {error}")
            return {}
        state = _state(supervisor)
        if self.live is not None:
            self.live.update(Group(render(snapshot), Text(state)), refresh=True)
        elif time.monotonic() >= self._line_due:
            self._line_due = time.monotonic() + _LINE_EVERY
            line = f"{state}; {_totals(snapshot)}"
            if line != self._last:
                self.console.print(line, markup=False, soft_wrap=True)
            self._last = line
        return {view.number: view for view in snapshot.streams}

    def finish(self, outcome: EngineOutcome, streams: int, root: str, *, cleared: bool = False) -> None:
        """Print the result and the next command to type."""
        cut, quarantined = "", list[str]()
        try:
            snapshot = self.reader.take()
            totals, cut, quarantined = _totals(snapshot), snapshot.cut, snapshot.quarantined
        except SpileError as error:
            totals = f"not seen: {error}"
        again = outcome.attempts - streams
        more = f", {counted(again, 'attempt')} more than streams" if again > 0 else ""
        finished = outcome.done == streams
        command = f"spile verify {root}" if finished else how_to_resume(cleared=cleared)
        if outcome.failed and outcome.refused:
            command = "correct what was refused, then run the command again"
        facts = [
            ("activations", root),
            ("streams", f"{outcome.done} of {streams} done{more}"),
            ("dataset", totals),
            *([("length", cut)] if cut else []),
            *(("quarantined", line.removeprefix("quarantined ")) for line in quarantined),
            *(("given up", f"stream {number}: {problem}") for number, problem in outcome.failed.items()),
            ("next", command),
        ]
        print_facts(self.console, facts)


def _state(supervisor: Supervisor) -> str:
    parts = [f"{supervisor.count('done')} done", f"{supervisor.count('running')} running"]
    parts += [f"{count} {word}" for word in ("waiting", "failed") if (count := supervisor.count(word))]
    return f"streams on {supervisor.engine.name}: {', '.join(parts)}"


def _totals(snapshot: Snapshot) -> str:
    return ", ".join([totals_line(snapshot), *progress_parts(None, snapshot.seconds_left)])


@contextmanager
def engine_display(
    reader: SnapshotReader, *, quiet: bool = False, event: threading.Event | None = None
) -> Iterator[EngineDisplay]:
    """Show one display for all workers, unless ``quiet``, and count the signals that arrive."""
    view = EngineDisplay(PipeSafeConsole(quiet=quiet), reader, event=event)
    with ExitStack() as stack:
        stack.enter_context(handle_signals(view.stop, signal.SIGINT, signal.SIGTERM))
        if view.console.is_terminal:
            view.live = stack.enter_context(Live(console=view.console, auto_refresh=False, transient=True))
        yield view
