"""``spile verify``: prove that a dataset is complete, or report what is missing, doubled or damaged."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from cyclopts import Parameter
from rich.box import ROUNDED
from rich.console import Console
from rich.table import Table
from rich.text import Text

from spile.api import answer_decoder, verify_with_model
from spile.cli.engines import part_workers
from spile.cli.flags import ENGINE, AsJson, print_json, stream_numbers
from spile.engines.registry import WorkerOptions
from spile.errors import SpecError
from spile.objects import open_folder
from spile.proof.report import Kind, Report, StreamReport
from spile.proof.verification import verify_part
from spile.spec.amounts import amount, counted, duration, size
from spile.spec.options import check_number
from spile.spec.sample import BAD_ROW
from spile.store.layout import SPLIT
from spile.store.parts import DatasetPart
from spile.view.table import FittingTable, output, progress_bar

_MOST_LINES = 50
_MOST_NAMED = 16
_BAD_ROWS = 5
_KINDS: tuple[Kind, ...] = ("missing", "doubled", "damaged", "wrong")


@Parameter(name="*")
@dataclass(frozen=True)
class VerifyFlags:
    """What is checked, and what is done about what was found."""

    streams: str | None = None
    """Only these streams: 0-3,7. [default: all that the data has]"""
    recompute: int = 0
    """Compute this many random samples again and compare them."""
    seed: int = 0
    """The seed that chooses the samples to recompute."""
    max_samples: int | None = None
    """The expected number of samples of each stream. [default: those of the data, or of the run that was limited]"""
    gc: bool = False
    """List orphaned shards and unfinished uploads."""
    repair: bool = False
    """List commits that were written before their stream was started again."""
    yes: bool = False
    """With --gc: remove them. With --repair: set them aside."""
    older_than: float = 1.0
    """With --gc: only files that are older than this many hours."""

    def check(self) -> None:
        """Raise for numbers below their least value, and for flags that exclude each other."""
        check_number("--recompute", self.recompute, 0)
        check_number("--seed", self.seed, 0)
        check_number("--max-samples", self.max_samples, 1)
        check_number("--older-than", self.older_than, 0)
        if self.yes and not (self.gc or self.repair):
            raise SpecError("--yes", expected="--gc or --repair as well", found="--yes alone")
        if self.gc and self.repair:
            raise SpecError("--repair", expected="no --gc", found="--gc as well")
        if self.gc and self.streams is not None:
            raise SpecError("--gc", expected="all streams", found="--streams")


def verify(
    root: str = "./activations",
    *,
    flags: VerifyFlags = VerifyFlags(),
    as_json: AsJson = False,
    part: Annotated[str | None, Parameter(show=False)] = None,
    engine: Annotated[WorkerOptions, ENGINE] = WorkerOptions(),
) -> int:
    """Check that every sample of every stream is stored exactly once and that every byte is as it was committed.

    Every shard is read once; with --engine, many processes or machines read them. The exit code is 1 if anything is
    missing, doubled or damaged. A stream of the split that no worker has started counts as missing. Quarantined
    samples, which ended their workers, are named. The dataset records them as skipped, so the exit code is 0 if all
    other samples are proven.

    Args:
        root: A folder, gs://bucket/prefix, s3://… or az://….
        as_json: Print the report as JSON.
        part: Check only these shards, for --engine.
    """
    flags.check()
    if part is not None:
        print(json.dumps(verify_part(open_folder(root), DatasetPart.parse(part), *answer_decoder(root))))
        return 0
    with (
        part_workers("verify", root, engine) as run_parts,
        progress_bar("verifying", "bytes", quiet=as_json) as progress,
    ):
        report = verify_with_model(
            root,
            streams=stream_numbers(flags.streams),
            max_samples=flags.max_samples,
            recompute=flags.recompute,
            seed=flags.seed,
            gc=flags.gc,
            remove=flags.gc and flags.yes,
            repair=flags.repair and flags.yes,
            older_than=flags.older_than * 3600,
            progress=progress,
            run_parts=run_parts,
        )
    if as_json:
        print_json(report.to_json())
    else:
        print_report(report, output())
    return 0 if report.ok else 1


def print_report(report: Report, console: Console) -> None:
    """Print the report: a table, the problems, and a summary in one line."""
    console.print(FittingTable(partial(_table, report), _OPTIONAL_COLUMNS))
    for line in _lines(report):
        console.print(line, markup=False, soft_wrap=True)


def _lines(report: Report) -> Iterator[str | Text]:
    problems = report.all_problems
    for problem in problems[:_MOST_LINES]:
        yield Text(f"✗ {problem.line()}", style="red")
    if len(problems) > _MOST_LINES:
        yield f"✗ and {len(problems) - _MOST_LINES} more; --json lists them all"
    yield from _skipped_lines(report)
    yield from (f"not checked: {text}" for text in report.unchecked)
    yield from _recomputed_lines(report)
    yield from _garbage_lines(report)
    yield from _stale_commit_lines(report)
    yield _verdict(report)


def _table(report: Report, without: Collection[str] = ()) -> Table:
    table = Table(box=ROUNDED, header_style="bold")
    shown = {title: cell for title, cell in _COLUMNS.items() if title not in without}
    for title in shown:
        left = title in ("STREAM", "STATE")
        table.add_column(title, justify="left" if left else "right", no_wrap=title != "STATE")
    for stream in report.streams:
        table.add_row(*(cell(stream) for cell in shown.values()))
    return table


def _state(stream: StreamReport) -> Text:
    if stream.ok:
        return Text("complete", style="green")
    kinds = sorted({problem.kind for problem in stream.problems})
    counts = {"missing": len(stream.missing), "doubled": len(stream.doubled)}
    return Text(", ".join(f"{counts.get(kind) or ''} {kind}".strip() for kind in kinds), style="red")


_COLUMNS: dict[str, Callable[[StreamReport], str | Text]] = {
    "STREAM": lambda stream: stream.name,
    "SAMPLES": lambda stream: f"{stream.samples:,}",
    "SKIPPED": lambda stream: f"{stream.skipped:,}",
    "OF": lambda stream: "?" if stream.expected is None else f"{stream.expected:,}",
    "SHARDS": lambda stream: f"{stream.shards:,}",
    "TOKENS": lambda stream: amount(stream.tokens),
    "SIZE": lambda stream: size(stream.bytes),
    "STATE": _state,
}
_OPTIONAL_COLUMNS = ("TOKENS", "SIZE", "SHARDS", "SKIPPED")
"""The columns that are omitted first in a narrow terminal."""


def _skipped_lines(report: Report) -> Iterator[str]:
    """Yield why samples were skipped, and the first bad rows."""
    reasons: Counter[str] = Counter()
    for stream in report.streams:
        reasons.update(stream.skip_reasons)
    if not reasons:
        return
    yield "skipped: " + ", ".join(f"{count:,} ({reason})" for reason, count in sorted(reasons.items()))
    bad = [text for stream in report.streams for text in stream.bad_rows]
    yield from (f"  {text}" for text in bad[:_BAD_ROWS])
    if reasons[BAD_ROW] > _BAD_ROWS:
        yield f"  and {reasons[BAD_ROW] - _BAD_ROWS:,} more bad rows; the commits list them all"


def _recomputed_lines(report: Report) -> Iterator[str]:
    """Yield the measured noise, and what the check can and cannot find with it."""
    found = report.recomputed
    if found is None or not found.taps:
        return
    by_noise = sorted(found.taps.values(), key=lambda noise: noise.fresh)
    middle, noisiest = by_noise[len(by_noise) // 2], by_noise[-1]
    yield (
        f"recomputed {counted(found.samples, 'sample')} ({counted(middle.rows, 'row')}) at "
        f"{counted(len(found.taps), 'tap')}: {found.dtype} rows of this model differ from float32 by "
        f"{_percent(middle.fresh)} of their norm at {middle.tap}, stored rows by {_percent(middle.stored)}"
    )
    yield f"noisiest tap: {noisiest.tap}, {_percent(noisiest.fresh)}, stored rows {_percent(noisiest.stored)}"
    yield (
        f"finds, at {middle.tap}: one row that is off by {_percent(middle.row_limit)} of its norm, a sample whose rows "
        f"are off by {_percent(middle.sample_limit)}, a sample that is scaled by {1 - middle.gain_limit:.3g}; "
        f"at {noisiest.tap}: {_percent(noisiest.row_limit)}, {_percent(noisiest.sample_limit)}, "
        f"{1 - noisiest.gain_limit:.3g}"
    )
    yield "does not find: smaller errors, and errors in samples that were not chosen"
    unjudged = sum(noise.unjudged for noise in found.taps.values())
    if unjudged:
        rows = sum(noise.rows for noise in found.taps.values())
        yield f"{unjudged:,} of {rows:,} rows are too noisy to be judged alone; --json lists them by tap"


def _percent(share: float) -> str:
    return f"{100 * share:.2g} %"


def _garbage_lines(report: Report) -> Iterator[str]:
    for item in report.garbage:
        what = {"shard": "orphaned shard", "upload": "unfinished upload"}[item.kind]
        # A temporary file is named by its own name, an upload by its object and its id.
        name = item.handle if "/" in item.handle else f"{item.key} (upload {item.handle})"
        known = "" if item.size is None else f", {size(item.size)}"
        yield f"{what}: {report.root}/{name}{known}, {duration(max(0.0, item.age))} old: {item.state}"
    young = sum(item.state == "too young" for item in report.garbage)
    if young:
        yield (
            f"{young} younger than --older-than allows (default: 1 hour): spile verify {report.root} --gc --yes "
            "--older-than 0 removes them; use it only if no worker is running"
        )
    waiting = [item for item in report.garbage if item.state == "found"]
    if waiting:
        total = size(sum(item.size or 0 for item in waiting))
        yield f"{len(waiting)} can be removed ({total}): spile verify {report.root} --gc --yes removes them"


def _stale_commit_lines(report: Report) -> Iterator[str]:
    """Yield commits from before a stream was started again, and what --repair does or did about them."""
    for stream in report.streams:
        if not stream.stale_commits:
            continue
        found = f"{stream.name}: commits {stream.stale_commits.text()} were written before the stream was started again"
        if stream.kept:
            yield f"{found}; moved out of the ledger to {', '.join(stream.kept)}; copy them back to undo this"
        else:
            yield (
                f"{found}, and are ignored. spile verify {report.root} --repair --yes replaces them by "
                f"empty commits and keeps copies in {report.root}/{stream.name}/strays"
            )


def _verdict(report: Report) -> Text:
    samples = sum(stream.samples for stream in report.streams)
    shards = sum(stream.shards for stream in report.streams)
    if report.ok:
        some = report.streams_expected is not None and len(report.streams) < report.streams_expected
        streams = f"{len(report.streams)} of {report.streams_expected} streams"  # The streams that --streams names.
        streams = streams if some else counted(len(report.streams), "stream")
        where = f"{counted(samples, 'sample')} in {streams}, each exactly once"
        answers = sum(stream.predictions for stream in report.streams)
        files = counted(shards, "shard") + (f", {counted(answers, 'answer')}" if answers else "")
        added = sorted({tap for stream in report.streams for tap in stream.added})
        files += f", {counted(len(added), 'tap')} added row for row" if added else ""
        aside = _quarantined_text(report)
        cut = f"; {report.cut}" if report.cut else ""
        text = f"✓ proven{aside}{cut}: {where}; {files}, every checksum right, no NaN"
        text += f"; limited with {report.limits}" if report.limits else ""
        return Text(text, style="bold yellow" if aside else "bold green")
    kinds = [problem.kind for problem in report.all_problems]
    found = ", ".join(_problem_count(report, kind, kinds.count(kind)) for kind in _KINDS if kind in kinds)
    return Text(f"✗ not proven: {found}{_hint(report, damaged='damaged' in kinds)}", style="bold red")


def _quarantined_text(report: Report) -> str:
    found = report.quarantined
    if not found:
        return ""
    more = f" and {len(found) - _MOST_NAMED} more" if len(found) > _MOST_NAMED else ""
    named = ", ".join(map(str, found[:_MOST_NAMED]))
    return f" except {counted(len(found), 'quarantined sample')}: {named}{more}"


def _problem_count(report: Report, kind: Kind, problems: int) -> str:
    """Return the number of samples and streams if they are known, otherwise the number of problems of the kind."""
    known = {
        "missing": [
            (sum(len(stream.missing) for stream in report.streams), "sample"),
            (len(report.never_begun), "stream"),
        ],
        "doubled": [(sum(len(stream.doubled) for stream in report.streams), "sample")],
    }
    amounts = [counted(count, noun) for count, noun in known.get(kind, []) if count]
    return f"{' and '.join(amounts) or problems} {kind}"


def _made_its_streams(root: str) -> bool:
    """Return whether the command of the run made its streams, so that the same command also begins the others."""
    from spile.store.run import stored_spec

    spec = stored_spec(open_folder(root))
    return spec is not None and spec.data.dataset_dir in (None, f"{spec.output.rstrip('/')}/{SPLIT}")


def _hint(report: Report, *, damaged: bool) -> str:
    """Return what to do next, if the dataset only has to be continued."""
    if damaged:
        return ""
    unfinished = any(problem.kind == "missing" for stream in report.streams for problem in stream.problems)
    own = _made_its_streams(report.root)
    again = "; run the same spile extract again to finish it" if unfinished or (own and report.never_begun) else ""
    if own or not report.never_begun:
        return again
    first = next(iter(report.never_begun))
    return f"{again}; begin the others: spile extract with --worker-id {first} …, or prove some alone with --streams"
