"""What makes two runs the same run: everything that changes the numbers, and nothing else."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from spile.spec.positions import ALL
from spile.spec.run import GenerationSpec, PromptSpec
from spile.spec.taps import SCALED, Tap, TapRows

__all__ = ["RunIdentity", "StreamIdentity"]


@dataclass(frozen=True)
class RunIdentity:
    """What all streams of a run share: the content of ``run.json``."""

    model: str
    """As the user named it; for people, not compared: the hashes are."""
    revision: str | None
    architecture: str
    d_model: int
    n_layers: int
    weights: str
    """A hash over the weight files' names, sizes and checksums."""
    tokenizer: str
    """A hash over the tokenizer's files."""
    prompt: PromptSpec
    """With its kind resolved: never ``auto``."""
    seed: int
    max_seq_length: int
    long: str
    dtype: str
    store_dtype: str
    generation: GenerationSpec | None = None
    """With its stop tokens resolved; None where no answers are generated, and then absent from the numbers."""
    adapter: str | None = None
    """As the user named it, likewise: the weights' hash holds it."""
    backend: str = "jax"
    """Whose arithmetic: ``jax`` or ``torch``."""
    keep: tuple[str, ...] = ()
    """The fields of each row that are stored with its sample."""
    positions: str = ALL
    """Which tokens' rows are stored."""
    unknown: Mapping[str, Any] = field(default_factory=dict)
    """Of a run that a newer version began: what only that one compares. Such a run is read, and not added to."""

    def compared(self) -> dict[str, Any]:
        """The fields that change what is stored, flat: ``prompt.kind`` and so on."""
        fields = asdict(self)
        for part in ("prompt", "generation"):
            fields.update({f"{part}.{name}": value for name, value in (fields.pop(part) or {}).items()})
        fields.update(fields.pop("unknown"))
        if self.backend == "jax":  # written as before there was another
            del fields["backend"]
        if not self.keep:  # likewise
            del fields["keep"]
        if self.positions == ALL:  # likewise
            del fields["positions"]
        return {name: value for name, value in sorted(fields.items()) if name not in ("model", "revision", "adapter")}

    @property
    def format(self) -> int:
        """Of ``run.json``: 2 where a reader that knows version 1 alone would take the rows for something else."""
        return 2 if self.store_dtype in SCALED or self.positions != ALL else 1

    def fingerprint(self) -> str:
        """A short name for :meth:`compared`; every shard's header carries it."""
        canonical = json.dumps(self.compared(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:32]


@dataclass(frozen=True)
class StreamIdentity:
    """What makes two visits to a stream the same stream: the content of ``stream.json``."""

    data: str
    """Where it was read from; for people, not compared: the hash is."""
    sha256: str
    lines: int
    samples: int | None
    """lines × predictions-per-task; None where only reading it all tells (packed documents)."""
    taps: tuple[Tap, ...]
    streams: int | None = None
    """How many streams its dataset was split into; None where nothing says so. Not compared: the stream is the same."""
    split: str | None = None
    """A hash over all streams of that split; None likewise. Not compared either."""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Tap → the shape of one token's row, where it is not the run's d_model alone."""

    def rows(self, run: RunIdentity) -> tuple[TapRows, ...]:
        """What the taps' rows are on disk, in the order of the taps."""
        shapes = [self.shapes.get(str(tap), (run.d_model,)) for tap in self.taps]
        return tuple(
            TapRows(str(tap), shape, tap.stored_as(run.store_dtype, math.prod(shape)))
            for tap, shape in zip(self.taps, shapes, strict=True)
        )

    def compared(self) -> dict[str, Any]:
        """The fields that must not change over a stream's life."""
        return {
            "sha256": self.sha256,
            "lines": self.lines,
            "samples": self.samples,
            "taps": [str(tap) for tap in self.taps],
            **({"shapes": {tap: list(shape) for tap, shape in self.shapes.items()}} if self.shapes else {}),
        }
