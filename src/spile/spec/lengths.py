"""What a limit of length does to the prompts of a dataset: forecast before a run, counted after it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

_ENOUGH = 0.95
"""The share of prompts that a suggested limit keeps whole."""
_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True)
class PromptLengths:
    """The lengths of some prompts in tokens, without a limit, and the limit of the run."""

    counted: Sequence[int]
    limit: int
    skips: bool
    """Whether a longer prompt is skipped; otherwise it is cut."""
    exact: bool = True
    """Whether all prompts of the data were counted."""

    @cached_property
    def _sorted(self) -> list[int]:
        return sorted(self.counted)

    @property
    def longest(self) -> int:
        """The longest counted prompt."""
        return self._sorted[-1] if self.counted else 0

    @property
    def share_above(self) -> float:
        """The share of prompts that are longer than the limit."""
        return 1 - self.share_within(self.limit) if self.counted else 0.0

    @property
    def share_text(self) -> str:
        """The share of prompts that are longer than the limit, as text."""
        return ("" if self.exact else "about ") + percent(self.share_above)

    def share_within(self, limit: int) -> float:
        """Return the share of prompts that a limit keeps whole."""
        return sum(length <= limit for length in self.counted) / max(1, len(self.counted))

    def quantile(self, part: float) -> int:
        """Return the length that this part of the prompts does not exceed."""
        return self._sorted[max(0, -(-round(part * 1000) * len(self.counted) // 1000) - 1)] if self.counted else 0

    def tokens(self, limit: int) -> int:
        """Return the tokens of the counted prompts that a run with this limit computes."""
        if self.skips:
            return sum(length for length in self.counted if length <= limit)
        return sum(min(length, limit) for length in self.counted)

    @property
    def suggested(self) -> int:
        """The smallest power of two that keeps 95 % of the prompts whole; all, if the limit of the run keeps those."""
        enough = 1.0 if self.share_within(self.limit) >= _ENOUGH else _ENOUGH
        return 1 << max(0, self.quantile(enough) - 1).bit_length()

    def sentence(self) -> str:
        """Return what the limit does, and what a larger one would do."""
        limit = f"{self.limit:,} tokens"
        if not self.share_above:
            of = f"{len(self.counted):,}{'' if self.exact else ' counted'}"
            return f"{limit}: no prompt is longer; the longest of {of} has {self.longest:,}."
        fate = "are skipped" if self.skips else "lose their end"
        text = f"{limit}: {self.share_text} of prompts are longer and {fate}."
        now, then = self.tokens(self.limit), self.tokens(self.suggested)
        times = f" and takes {then / now:.1f} times the tokens" if now else ""
        return f"{text} {self.suggested:,} keeps {percent(self.share_within(self.suggested))} whole{times}."

    def quantiles(self) -> str:
        """Return the quantiles of the lengths as one line of text."""
        parts = [f"{part:.0%} {self.quantile(part):,}".replace("%", " %") for part in _QUANTILES]
        return f"{', '.join(parts)}, longest {self.longest:,}"

    def record(self) -> dict[str, object]:
        """Return the fields for ``--json``."""
        return {
            "limit": self.limit,
            "counted": len(self.counted),
            "longer": self.share_above,
            "longer_are": "skipped" if self.skips else "cut",
            "quantiles": {f"{part:g}": self.quantile(part) for part in (*_QUANTILES, 1.0)},
            "suggested": self.suggested,
            "sentence": self.sentence(),
        }


def percent(share: float) -> str:
    """Format a share with one decimal; only 0 and 1 themselves are shown as 0 and 100."""
    rounded = 100 * share if share in (0, 1) else min(99.9, max(0.1, 100 * share))
    return f"{rounded:.1f}".removesuffix(".0") + " %"


def cut_text(cut: int, too_long: int, prompts: int, limit: int) -> str:
    """Return what a limit of length did: ``4 of 400 prompts were cut at 2,048 tokens``; empty if it did nothing."""
    did = {"cut at": cut, "skipped as longer than": too_long}
    parts = [
        f"{count:,} of {prompts:,} prompts {'was' if count == 1 else 'were'} {what} {limit:,} tokens"
        for what, count in did.items()
        if count
    ]
    return "; ".join(parts)
