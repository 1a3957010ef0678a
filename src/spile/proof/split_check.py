"""The checks of a dataset's streams as a whole: none is missing, and all are of one split."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from spile.proof.report import Problem
from spile.spec.ranges import Ranges
from spile.store.stored_stream import expected_streams, mixed_splits
from spile.store.writer import StreamRecord


def check_split(
    root: str, started: Collection[int], records: Sequence[StreamRecord], chosen: Collection[int] | None = None
) -> tuple[Ranges, list[Problem]]:
    """Return the streams that no worker has started, and the problems of the split as a whole.

    ``chosen`` are the streams that must exist; None means all streams of the split.
    """
    total = expected_streams(records)
    wanted = Ranges.of(chosen) if chosen is not None else Ranges([(0, total or 0)])
    absent = wanted - Ranges.of(started)
    problems = []
    if absent:
        noun, verb = ("stream", "was") if len(absent) == 1 else ("streams", "were")
        text = f"{noun} {absent.text()} {verb} never begun ({len(absent)} of {len(wanted)})"
        problems.append(Problem("missing", root, text))
    elif not wanted and not started:
        problems.append(Problem("missing", root, "the dataset has no stream"))
    if mixed := mixed_splits(records):
        problems.append(Problem("wrong", root, mixed))
    return absent, problems
