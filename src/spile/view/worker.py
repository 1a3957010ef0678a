"""The display of a running worker: a progress bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from html import escape
from operator import itemgetter
from pathlib import Path

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from spile.compute.progress import Progress, ProgressSnapshot, Summary
from spile.run.signals import stop_on_signals
from spile.spec.amounts import amount, counted, duration, size
from spile.spec.phase import Phase
from spile.view.table import PipeSafeConsole, how_to_resume, print_event, print_facts

_LINE_EVERY = 10.0  # seconds between plain lines if the output is not a terminal
_NOTEBOOK_EVERY = 0.5  # seconds between updates of the bar in a notebook
_BAR, _GAP = 10, 2  # the smallest width of the bar, which fills the line, and the space between cells


@dataclass
class WorkerDisplay:
    """The display of one worker, its progress counters and its stop event."""

    console: Console
    progress: Progress
    stop: threading.Event

    def finish(self, summary: Summary, more: Sequence[tuple[str, str]] = ()) -> None:
        """Print the summary, with the rows ``more`` before the next command."""
        *rows, command = summary_rows(summary)
        print_facts(self.console, [*rows, *more, command])


@contextmanager
def worker_display(verbose: bool = False, console: Console | None = None) -> Iterator[WorkerDisplay]:
    """Show progress. The first Ctrl+C or SIGTERM commits what is done and stops; a second one ends at once."""
    console = console or PipeSafeConsole()
    stop, log = threading.Event(), partial(print_event, console)
    progress = Progress.of_process(log=log, log_detail=log if verbose else lambda _line: None)
    with ExitStack() as stack:
        stack.enter_context(stop_on_signals(stop, progress))
        if verbose:
            stack.enter_context(_logged(log))
        if console.is_terminal:
            spinner = Spinner("dots")

            def row() -> Table:
                return progress_row(progress.snapshot(), progress.total_samples, console.width, spinner)

            live = Live(get_renderable=row, console=console, refresh_per_second=4, transient=True)
            stack.enter_context(live)
            yield WorkerDisplay(console, progress, stop)
            live.stop()
        else:
            write = _line_printer(progress, console)
            stack.enter_context(_repeated(write, 1.0 if verbose else _LINE_EVERY))
            yield WorkerDisplay(console, progress, stop)


@contextmanager
def _logged(log: Callable[[str], None]) -> Iterator[None]:
    """Print what the package logs."""
    logger, handler = logging.getLogger("spile"), logging.Handler(logging.INFO)
    handler.emit = lambda record: log(record.getMessage())  # type: ignore[method-assign]
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


@contextmanager
def _repeated(action: Callable[[], None], every: float) -> Iterator[None]:
    """Call ``action`` every ``every`` seconds in a thread, while the context is open."""
    over = threading.Event()

    def repeat() -> None:
        while not over.wait(every):
            action()

    thread = threading.Thread(target=repeat, name="spile-display", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _line_printer(progress: Progress, console: Console) -> Callable[[], None]:
    """Return a function that prints the progress as a line, if it has changed."""
    last = ""

    def write() -> None:
        nonlocal last
        text = progress_line(progress.snapshot(), progress.total_samples)
        if text != last:
            console.print(text, soft_wrap=True)
        last = text

    return write


def in_notebook() -> bool:
    """Return whether this is the kernel of a notebook, which shows HTML."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return type(shell).__name__ == "ZMQInteractiveShell"


@contextmanager
def notebook_bar() -> Iterator[Progress]:
    """Show a progress bar below the running cell, and yield the counters that it shows."""
    from IPython.display import HTML, display

    progress = Progress()
    shown = display(HTML(notebook_html(progress)), display_id=True)

    def write() -> None:
        shown.update(HTML(notebook_html(progress)))

    try:
        with _repeated(write, _NOTEBOOK_EVERY):
            yield progress
    finally:
        write()


def notebook_html(progress: Progress) -> str:
    """Return the progress as a bar and a line of text."""
    now, total = progress.snapshot(), progress.total_samples
    part = f' value="{now.samples}" max="{total}"' if total else ""
    bar = "" if now.phase is Phase.DONE else f'<progress{part} style="width:16rem;vertical-align:middle"></progress> '
    return f"<div>{bar}{escape(progress_line(now, total))}</div>"


def progress_row(now: ProgressSnapshot, total: int | None, width: int, spinner: Spinner | None = None) -> Table:
    """Return the progress line, as wide as the terminal; cells of high rank are omitted first if it is narrow."""
    cells: list[tuple[int, RenderableType, int]] = [(0, spinner or "", 1), (0, now.doing, cell_len(now.doing))]
    counts, filling = _counts(now, total), ProgressBar(total=total, completed=now.samples, width=_BAR)
    if total and counts:
        cells.append((3, filling, _BAR))
    cells += [(rank, Text(text, style), cell_len(text)) for rank, text, style in counts]
    while (spare := width + _GAP - sum(wide + _GAP for _, _, wide in cells)) < 0:
        last = max(cells, key=itemgetter(0))
        if not last[0]:
            break
        cells.remove(last)
    filling.width = _BAR + max(0, spare)
    row = Table.grid(padding=(0, _GAP))
    for _ in cells:
        row.add_column(no_wrap=True)
    row.add_row(*(cell for _, cell, _ in cells))
    return row


def progress_line(now: ProgressSnapshot, total: int | None) -> str:
    """Return the progress as one line of text."""
    counts = ", ".join(text for _, text, _ in _counts(now, total))
    return f"{now.doing}: {counts}" if counts else now.doing


def _counts(now: ProgressSnapshot, total: int | None) -> list[tuple[int, str, str]]:
    """Return rank, text and style of each count; none before the first sample."""
    if not now.samples and not now.computed_tokens:
        return []
    cells = [
        (0, f"{now.samples:,}{f'/{total:,}' if total else ''} samples", ""),
        (6, f"{now.tokens:,} tokens", ""),
        (1, f"{now.generated_tokens:,} generated tokens" if now.generated_tokens else "", ""),
        (1, f"{amount(now.recent_tokens_per_second)} tokens/s", "green"),
        (4, f"{counted(now.shards_committed, 'shard')}, {size(now.bytes)}", ""),
        (2, _time_left(now, total), ""),
        (5, f"limited by: {now.limit}" if now.limit else "", "dim"),
    ]
    return [cell for cell in cells if cell[1]]


def _time_left(now: ProgressSnapshot, total: int | None) -> str:
    working = now.seconds - now.compile_seconds
    if not total or not now.samples or working <= 0 or now.samples >= total or now.phase.ended:
        return ""
    return f"{duration((total - now.samples) * working / now.samples)} left"


def summary_rows(summary: Summary) -> list[tuple[str, str]]:
    """Return the rows of the summary: location, amounts, rates and the next command."""
    progress = summary.progress
    rows = [
        ("activations", summary.stream),
        ("samples", _samples(summary)),
        *(("bad row", text) for text in progress.bad_rows),
        ("quarantined", ", ".join(map(str, summary.quarantined))),
        ("length", summary.cut),
        ("tokens", f"{summary.tokens:,}"),
        ("generated", f"{progress.generated_tokens:,} tokens by this run" if progress.generated_tokens else ""),
        ("bytes", f"{size(summary.bytes)} in {counted(summary.shards, 'shard')}"),
        ("speed", _speed(summary.progress)),
        ("limited by", summary.limited_by or ""),
        ("wall time", _wall_time(summary.progress)),
        ("device", summary.device),
        ("memory", f"at most {size(summary.peak_memory)} of host memory"),
        ("retries", f"{summary.retries}" if summary.retries else ""),
        ("next", _next(summary)),
    ]
    return [(name, text) for name, text in rows if text]


def _samples(summary: Summary) -> str:
    progress = summary.progress
    parts = [f"{summary.samples:,} stored"]
    if progress.samples != summary.samples:
        parts.append(f"{progress.samples:,} of them now")
    parts += [f"{count:,} skipped ({reason})" for reason, count in sorted(progress.skipped.items())]
    return ", ".join(parts)


def _speed(progress: ProgressSnapshot) -> str:
    if not progress.tokens:
        return ""
    return (
        f"{amount(progress.tokens_per_second)} tokens/s over {duration(progress.seconds)}, "
        f"{duration(progress.compile_seconds)} of it waiting for {counted(progress.shapes, 'program')} to compile; "
        f"{progress.padding:.1%} padding"
    )


def _wall_time(progress: ProgressSnapshot) -> str:
    wall = progress.wall
    parts = (("start", wall.start), ("compile", wall.compile), ("run", wall.run), ("end", wall.end))
    return f"{duration(wall.total)}: " + ", ".join(f"{name} {duration(max(0.0, spent))}" for name, spent in parts)


def _next(summary: Summary) -> str:
    if summary.interrupted or not summary.complete:
        return how_to_resume(cleared=summary.cleared)
    if not summary.scattered:
        return f"spile verify {summary.root}"
    here = Path(summary.root).absolute()
    return (
        f"on your computer: spile collect {here} --tpu-prefix NAME && spile verify collected_activations "
        f"(if the hosts share this disk: spile verify {here})"
    )
