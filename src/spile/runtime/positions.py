"""Samples on their way to the model, each with which of its tokens' rows are stored."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from spile.errors import SpecError
from spile.planning.positions import choose_positions
from spile.spec.positions import ALL, ANSWER
from spile.spec.run import ExtractSpec
from spile.spec.sample import Sample, Skip

__all__ = ["refuse_no_answers", "with_positions"]


def with_positions(items: Iterable[Sample | Skip], spec: ExtractSpec) -> Iterable[Sample | Skip]:
    """The same samples, each with its positions where not all are stored."""
    return items if spec.positions == ALL else _chosen(items, spec)


def _chosen(items: Iterable[Sample | Skip], spec: ExtractSpec) -> Iterator[Sample | Skip]:
    for item in items:
        if isinstance(item, Skip):
            yield item
        else:
            chosen = choose_positions(spec.positions, spec.data.seed, item.index, item.roles)
            yield replace(item, positions=chosen)


def refuse_no_answers(spec: ExtractSpec, kind: str) -> None:
    """Prompts alone have no answers; of chats the assistant's words are."""
    if spec.positions == ANSWER and spec.generation is None and kind != "chat":
        raise SpecError(
            "--positions answer",
            expected="chats, whose assistant's words are kept",
            found=f"--prompt {kind}",
            fix="use spile infer, which makes answers, or --positions last",
        )
