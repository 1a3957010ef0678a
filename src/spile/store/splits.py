"""The streams of a dataset against the split of its data: those that nobody has begun, those of another split."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from spile.spec.ranges import Ranges
from spile.store.layout import stream_folder
from spile.store.report import Problem
from spile.store.stream import StreamRecord

__all__ = ["expected_streams", "judge_split", "mixed_splits"]


def expected_streams(records: Sequence[StreamRecord]) -> int | None:
    """How many streams there must be, as the streams themselves say; None where none does."""
    return max((r.identity.streams for r in records if r.identity.streams is not None), default=None)


def judge_split(
    root: str, begun: Collection[int], records: Sequence[StreamRecord], chosen: Collection[int] | None = None
) -> tuple[Ranges, list[Problem]]:
    """Streams that were never begun, and what is wrong with the split as a whole. ``chosen``: those that must be."""
    total = expected_streams(records)
    wanted = Ranges.of(chosen) if chosen is not None else Ranges([(0, total or 0)])
    absent = wanted - Ranges.of(begun)
    problems = []
    if absent:
        noun, verb = ("stream", "was") if len(absent) == 1 else ("streams", "were")
        text = f"{noun} {absent.text()} {verb} never begun ({len(absent)} of {len(wanted)})"
        problems.append(Problem("missing", root, text))
    elif not wanted and not begun:
        problems.append(Problem("missing", root, "the dataset has no stream"))
    return absent, problems + mixed_splits(root, records)


def mixed_splits(root: str, records: Sequence[StreamRecord]) -> list[Problem]:
    """Streams of two splits, or beside a split of none, have samples in common, and lack others."""
    groups: dict[tuple[int, str | None] | None, list[int]] = {}
    for record in records:
        known = record.identity.streams is not None
        groups.setdefault((record.identity.streams or 0, record.identity.split) if known else None, []).append(
            record.worker_id
        )
    if len(groups) < 2:
        return []
    told = "; ".join(_told(group, numbers) for group, numbers in sorted(groups.items(), key=lambda item: item[1]))
    return [Problem("wrong", root, f"its streams are of different splits of the data: {told}")]


def _told(group: tuple[int, str | None] | None, numbers: list[int]) -> str:
    names = f"{stream_folder(numbers[0])}{f' and {len(numbers) - 1} more' if len(numbers) > 1 else ''}"
    return f"{names} of no split" if group is None else f"{names} of {group[0]} streams (split {group[1] or 'unknown'})"
