"""What a running worker looks like: a bar in a terminal, plain lines elsewhere, signals that end it well."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

from spile.cli.signals import heard
from spile.plan.amounts import amount, duration, size
from spile.runtime.progress import Progress, Snapshot
from spile.runtime.summary import Summary

__all__ = ["Watch", "bar", "line", "report", "watched"]

_LINE_EVERY = 10.0
"""Seconds between plain lines where there is no terminal."""


@dataclass
class Watch:
    """A worker being watched."""

    console: Console
    progress: Progress
    stop: threading.Event

    def finish(self, summary: Summary) -> None:
        """Say what it came to."""
        self.console.print(report(summary), soft_wrap=True)


@contextmanager
def watched(verbose: bool = False, console: Console | None = None) -> Iterator[Watch]:
    """Show progress while this lasts. One Ctrl+C or SIGTERM commits what is done and stops; a second ends at once."""
    console = console or _Output(highlight=False)
    stop = threading.Event()
    progress = Progress(say=lambda text: console.print(f"[dim]·[/] {text}", soft_wrap=True))
    with ExitStack() as stack:
        stack.enter_context(heard(stop, progress))
        if console.is_terminal:
            view = _View(progress)
            live = stack.enter_context(Live(get_renderable=view, console=console, refresh_per_second=4, transient=True))
            yield Watch(console, progress, stop)
            live.stop()
        else:
            stack.enter_context(_lines(progress, console, 1.0 if verbose else _LINE_EVERY))
            yield Watch(console, progress, stop)


class _Output(Console):
    """A run goes on when nobody reads its lines any more: Ctrl+C in ``spile extract | tee log`` ends tee first."""

    def on_broken_pipe(self) -> None:
        """Be quiet from now on."""
        self.quiet = True
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextmanager
def _lines(progress: Progress, console: Console, every: float) -> Iterator[None]:
    over = threading.Event()

    def write() -> None:
        last = ""
        while not over.wait(every):
            text = line(progress.snapshot(), progress.total_samples)
            if text != last:
                console.print(text, soft_wrap=True)
            last = text

    thread = threading.Thread(target=write, name="spile-lines", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class _View:
    """The bar, drawn anew from the counters at each refresh."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._spinner = Spinner("dots")

    def __call__(self) -> Table:
        return bar(self._progress.snapshot(), self._progress.total_samples, self._spinner)


def bar(now: Snapshot, total: int | None, spinner: Spinner | None = None) -> Table:
    """One line of a terminal: what goes on, how far, how fast, how long still."""
    row = Table.grid(padding=(0, 1))
    cells: list[object] = [spinner or "", Text(now.phase)]
    if now.samples or now.computed_tokens:
        cells += [
            ProgressBar(total=total, completed=now.samples, width=24) if total else "",
            Text(f"{now.samples:,}{f'/{total:,}' if total else ''} samples"),
            Text(f"{amount(now.tokens_per_second)} tok/s", style="green"),
            Text(f"{now.shards_committed} shards, {size(now.bytes)}"),
            Text(_left(now, total)),
            Text(f"limited by: {now.limit}" if now.limit else "", style="dim"),
        ]
    row.add_row(*cells)  # type: ignore[arg-type]
    return row


def line(now: Snapshot, total: int | None) -> str:
    """The same where there is no terminal."""
    if not now.samples:
        return now.phase
    parts = [
        f"{now.samples:,}{f'/{total:,}' if total else ''} samples",
        f"{now.tokens:,} tokens",
        f"{amount(now.tokens_per_second)} tok/s",
        f"{now.shards_committed} shards",
        size(now.bytes),
        _left(now, total),
        f"limited by: {now.limit}" if now.limit else "",
    ]
    return f"{now.phase}: " + ", ".join(part for part in parts if part)


def _left(now: Snapshot, total: int | None) -> str:
    working = now.seconds - now.compile_seconds
    if not total or not now.samples or working <= 0:
        return ""
    return f"{duration((total - now.samples) * working / now.samples)} left"


def report(summary: Summary) -> Table:
    """The last lines: where, how much, how fast, what next."""
    visit = summary.visit
    table = Table.grid(padding=(0, 2))
    rows = [
        ("activations", summary.stream),
        ("samples", _samples(summary)),
        ("tokens", f"{summary.tokens:,}"),
        ("bytes", f"{size(summary.bytes)} in {summary.shards} shard{'s' * (summary.shards != 1)}"),
        ("speed", _speed(visit)),
        ("limited by", summary.limited_by or ""),
        ("device", summary.device),
        ("memory", f"{size(summary.peak_memory)} of the host's at most"),
        ("retries", f"{summary.retries}" if summary.retries else ""),
        ("next", _next(summary)),
    ]
    for name, text in rows:
        if text:
            table.add_row(Text(name, style="bold"), Text(text))
    return table


def _samples(summary: Summary) -> str:
    visit = summary.visit
    parts = [f"{summary.samples:,} stored"]
    if visit.samples != summary.samples:
        parts.append(f"{visit.samples:,} of them now")
    parts += [f"{count:,} {reason}: skipped" for reason, count in sorted(visit.skipped.items())]
    if visit.truncated:
        parts.append(f"{visit.truncated:,} cut to the maximum length")
    return ", ".join(parts)


def _speed(visit: Snapshot) -> str:
    if not visit.tokens:
        return ""
    return (
        f"{amount(visit.tokens_per_second)} tokens/s over {duration(visit.seconds)}, "
        f"{duration(visit.compile_seconds)} of it waiting for {visit.shapes} programs to compile; "
        f"{visit.padding:.1%} padding"
    )


def _next(summary: Summary) -> str:
    if summary.interrupted or not summary.complete:
        return "the same command again resumes"
    return f"spile verify {summary.root}"
