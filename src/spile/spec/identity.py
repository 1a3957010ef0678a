"""The identity of runs and streams: exactly the properties that change the stored numbers."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any

from spile.spec.positions import ALL
from spile.spec.run import FolderNames, GenerationSpec, PromptSpec
from spile.spec.taps import Tap, TapRows

IN_TURN = "rows in turn"
"""The name of the split of a dataset whose streams read their rows from it, instead of from files of their own."""
_NOT_COMPARED = ("model", "revision", "adapter", "vocab_size", "steer", "folders")
_DEFAULTS: dict[str, Any] = {
    "backend": "jax", "keep": (), "positions": ALL, "prompt.template_from": None, "steering": None,
}  # fmt: skip
"""Values that are left out, so that a new field does not change the fingerprints of existing runs."""


@dataclass(frozen=True)
class RunIdentity:
    """The properties that all streams of a run share: the content of ``run.json``."""

    model: str
    """The name that the user gave. It is only displayed; the hashes are compared."""
    revision: str | None
    architecture: str
    d_model: int
    n_layers: int
    weights: str
    """A hash of the names, sizes and checksums of the weight files."""
    tokenizer: str
    """A hash of the tokenizer's files."""
    prompt: PromptSpec
    """The prompt settings; the kind is resolved and never ``auto``."""
    seed: int
    max_seq_length: int
    long: str
    dtype: str
    store_dtype: str
    generation: GenerationSpec | None = None
    """The generation settings with resolved stop tokens; None, and absent from ``run.json``, without answers."""
    adapter: str | None = None
    """The name that the user gave. It is only displayed; the hash of the weights includes the adapter."""
    backend: str = "jax"
    """The framework that computes: ``jax`` or ``torch``."""
    keep: tuple[str, ...] = ()
    """The fields of each dataset row that are stored with its sample."""
    positions: str = ALL
    """The tokens whose rows are stored."""
    vocab_size: int | None = None
    """The number of token ids of the model; None if it is unknown. It is not compared: the weights are."""
    steer: tuple[str, ...] = ()
    """The changes of taps that the user gave. They are not compared; :attr:`steering` is."""
    steering: str | None = None
    """A hash of the changed taps, the kinds of changes and the numbers of all vectors; None without ``--steer``."""
    folders: FolderNames = "tpu"
    """The names of the streams' folders: ``stream`` or, in runs of the guides, ``tpu``."""
    unknown: Mapping[str, Any] = field(default_factory=dict)
    """Compared fields that only a newer version knows. Such a run can be read but not continued."""

    @property
    def answers_are_grids(self) -> bool:
        """Whether the answers are outputs of ARC tasks, which ``spile score`` can compare with references."""
        arc = self.prompt.kind == "arc" and self.prompt.version.startswith("output-from-examples")
        return arc and self.generation is not None

    def compared(self) -> dict[str, Any]:
        """Return the fields that change what is stored as a flat mapping with names such as ``prompt.kind``."""
        fields = asdict(self)
        for part in ("prompt", "generation"):
            fields.update({f"{part}.{name}": value for name, value in (fields.pop(part) or {}).items()})
        fields.update(fields.pop("unknown"))
        return {
            name: value
            for name, value in sorted(fields.items())
            if name not in _NOT_COMPARED and (name not in _DEFAULTS or value != _DEFAULTS[name])
        }

    def fingerprint(self) -> str:
        """Return a hash of :meth:`compared`. The header of every shard contains it."""
        return self._fingerprint

    @cached_property
    def _fingerprint(self) -> str:  # cached, because opening a dataset compares it with every stream's
        canonical = json.dumps(self.compared(), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()[:32]


def place_in_turn(index: Any, stream: Any, streams: int, turn: int) -> Any:
    """Return the number in the input of sample ``index`` of one of the streams that have ``turn`` samples in turn."""
    return (index // turn * streams + stream) * turn + index % turn


@dataclass(frozen=True)
class StreamIdentity:
    """The properties that identify a stream: the content of ``stream.json``."""

    data: str
    """The location of the data. It is only displayed; the hash is compared."""
    sha256: str
    """The hash of all data or, of a streamed dataset, of its first ``head`` rows."""
    lines: int | None
    """The number of rows; None for a streamed dataset, whose rows are hashed as they are read."""
    samples: int | None
    """lines × predictions-per-task; None if the number is only known after reading all data."""
    taps: tuple[Tap, ...]
    streams: int | None = None
    """The number of streams of the split; None if it is unknown. It is not compared."""
    split: str | None = None
    """A hash of all streams of the split; None if it is unknown. It is not compared."""
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The shape of one token's row by tap, if it is not just the run's d_model."""
    head: int | None = None
    """For a streamed dataset: the number of rows that ``sha256`` covers. Commits hold the hashes of all rows."""
    revision: str | None = None
    """The commit of a dataset on the hub, which pins its content."""
    turn: int | None = None
    """The number of samples that a row of the input makes, if the streams of the split have its rows in turn: row r is
    in stream r % streams. None: the stream is the whole input, or a prepared part of it."""

    def place(self, stream: int, index: Any) -> Any:
        """Return the number in the input of sample ``index`` of a stream, or the numbers of several.

        Prepared streams are not parts of one input: there it is the index in the stream.
        """
        if self.turn is None or self.streams is None:
            return index
        return place_in_turn(index, stream, self.streams, self.turn)

    def rows(self, run: RunIdentity) -> tuple[TapRows, ...]:
        """Return the shape and dtype of each tap's stored rows, in the order of the taps."""
        shapes = [self.shapes.get(str(tap), (run.d_model,)) for tap in self.taps]
        return tuple(
            TapRows(str(tap), shape, tap.stored_as(run.store_dtype, math.prod(shape)))
            for tap, shape in zip(self.taps, shapes, strict=True)
        )

    def compared(self) -> dict[str, Any]:
        """Return the fields that must not change while the stream exists."""
        return {
            "sha256": self.sha256,
            "lines": self.lines,
            "samples": self.samples,
            "taps": [str(tap) for tap in self.taps],
            **({"shapes": {tap: list(shape) for tap, shape in self.shapes.items()}} if self.shapes else {}),
            **({} if self.head is None else {"head": self.head, "revision": self.revision}),
            **({} if self.turn is None else {"streams": self.streams, "turn": self.turn}),
        }
