"""Taps: the points in a model whose activations can be stored, and the words that select them.

``docs/taps.md`` defines each kind of tap.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from spile.errors import SpecError
from spile.spec.ranges import Ranges

Size = Literal["d_model", "d_mid", "d_ff", "heads", "kv_heads", "head_dim", "experts", "top", "1"]
"""The size of one dimension of a token's row, as the name of a size of the model."""

MODULE = "module:"
"""The prefix of a tap that names a module of a PyTorch model: ``module:model.layers.3.mlp.act_fn``."""


@dataclass(frozen=True)
class TapKind:
    """What all taps of a kind have in common."""

    shape: tuple[Size, ...]
    """The shape of a token's row."""
    layered: bool = True
    """Whether every layer has it. If False, the model has it once, and its tap has no layer number."""
    dtype: str | None = None
    """The dtype on disk, or None for the ``--store-dtype`` of the run."""

    @property
    def per_head(self) -> bool:
        """Whether ``--heads`` applies to it."""
        return self.shape[0] in ("heads", "kv_heads")


TAP_KINDS: Mapping[str, TapKind] = MappingProxyType(
    {
        "residual": TapKind(("d_model",)),
        "attn": TapKind(("d_model",)),
        "mlp": TapKind(("d_model",)),
        "embed": TapKind(("d_model",), layered=False),
        "resid_pre": TapKind(("d_model",)),
        "resid_mid": TapKind(("d_mid",)),
        "attn_in": TapKind(("d_model",)),
        "mlp_in": TapKind(("d_model",)),
        "mlp_hidden": TapKind(("d_ff",)),
        "q": TapKind(("heads", "head_dim")),
        "k": TapKind(("kv_heads", "head_dim")),
        "v": TapKind(("kv_heads", "head_dim")),
        "z": TapKind(("heads", "head_dim")),
        "head_out": TapKind(("heads", "d_model")),
        "pattern_ids": TapKind(("heads", "top"), dtype="int32"),
        "pattern": TapKind(("heads", "top")),
        "router": TapKind(("experts",)),
        "final_norm": TapKind(("d_model",), layered=False),
        "loss": TapKind(("1",), layered=False, dtype="float32"),
        "logits_ids": TapKind(("top",), layered=False, dtype="int32"),
        "logits": TapKind(("top",), layered=False),
    }
)
"""Tap kinds by name. ``--taps`` takes the name, and the tensor names in a shard start with it.

The first three must keep their order, because it is the order of the tensors in existing shards.
"""

_MODULE = TapKind(("1",), layered=False)
"""Stands for the path of a module, whose shape only the module tells."""

TOP = 10
"""The default number of logits stored per token."""

ATTENTION_TOP = 32
"""The default number of attention weights stored per token and head."""

REPORTED = frozenset({"head_out", "pattern", "pattern_ids", "loss", "logits", "logits_ids"})
"""Kinds that the model does not compute with, so that they cannot be edited."""

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


class StoredType(NamedTuple):
    """A data type of stored numbers."""

    code: str
    """Its name in a shard, by which :data:`spile.spec.safetensors.DTYPES` has the NumPy dtype."""
    bytes: int
    largest: float = 0.0
    """The number that stands for the largest of a row, if each row has a scale: see :mod:`spile.store.shard`."""


STORED_TYPES = {
    "bfloat16": StoredType("BF16", 2),
    "float32": StoredType("F32", 4),
    "float16": StoredType("F16", 2),
    "int8": StoredType("I8", 1, 127.0),
    "float8_e4m3": StoredType("F8_E4M3", 1, 448.0),
    "int32": StoredType("I32", 4),
}
SCALED = tuple(name for name, stored in STORED_TYPES.items() if stored.largest)
SCALE_BYTES = 4
_SCALED_MULTIPLE = 8
"""The length of a row of a scaled dtype is a multiple of this, so that all later tensors of a shard are aligned."""
_GRADIENT = "grad."
"""The prefix of a tap that is a gradient."""


@dataclass(frozen=True)
class Tap:
    """A tap kind at one layer, or of the whole model if the model has it once."""

    kind: str
    """A key of :data:`TAP_KINDS`, or ``module:PATH``."""
    layer: int | None = None
    heads: tuple[int, ...] | None = None
    """The selected heads of a kind that has heads, or None for all."""
    top: int | None = None
    """The number of logits or of attention weights per head, for the kinds that store the largest."""
    gradient: bool = False
    """Whether it is the gradient of the sample's loss with respect to the tap, instead of the value."""

    def __str__(self) -> str:
        """Return the name: ``residual.12``, ``z.12.0-3,7``, ``embed``, ``pattern.12.top32`` or ``grad.mlp.12``."""
        layers = None if self.layer is None else (self.layer,)
        return _GRADIENT * self.gradient + str(_TapWord(self.kind, layers, self.heads, self.top))

    @property
    def spec(self) -> TapKind | None:
        """The entry of the table, or None for the path of a module."""
        return TAP_KINDS.get(self.kind)

    def stored_as(self, store_dtype: str, width: int) -> str:
        """Return the dtype on disk of rows of ``width`` numbers in a run with this ``store_dtype``."""
        spec = self.spec
        if spec is not None and spec.dtype is not None:
            return spec.dtype
        return "bfloat16" if store_dtype in SCALED and width % _SCALED_MULTIPLE else store_dtype

    @classmethod
    def parse(cls, text: str) -> Tap:
        """Parse the name of a tap: the inverse of ``str``."""
        gradient = text.startswith(_GRADIENT)
        with suppress(SpecError):
            word = _parse_tap_word(text.removeprefix(_GRADIENT))
            spec, (layer, *more) = TAP_KINDS.get(word.kind, _MODULE), word.layers or (None,)
            complete = (layer is not None) == spec.layered and (word.top is not None) == ("top" in spec.shape)
            if complete and not more and not (gradient and (spec is _MODULE or word.kind in REPORTED)):
                return cls(word.kind, layer, word.heads, word.top, gradient)
        raise SpecError("not a tap", expected="KIND.LAYER such as residual.12", found=repr(text))


@dataclass(frozen=True)
class TapRows:
    """The rows of a tap on disk: one block of ``[tokens, width]``."""

    name: str
    shape: tuple[int, ...]
    """The shape of one token's row, such as ``(heads, head_dim)``. It is flattened on disk."""
    dtype: str

    @property
    def width(self) -> int:
        """The number of elements of a row."""
        return math.prod(self.shape)

    @property
    def scaled(self) -> bool:
        """Whether each row is stored with a scale."""
        return self.dtype in SCALED

    @property
    def number_bytes(self) -> int:
        """The bytes of the numbers of a row."""
        return self.width * STORED_TYPES[self.dtype].bytes

    @property
    def bytes(self) -> int:
        """The bytes of a row, including its scale."""
        return self.number_bytes + SCALE_BYTES * self.scaled


_INDEX_BYTES = 5
"""Bytes of a token's id and role."""


def row_bytes(taps: Iterable[TapRows]) -> int:
    """Return the bytes that one token takes in a shard, over all taps."""
    return sum(tap.bytes for tap in taps) + _INDEX_BYTES


def parse_layers(text: str, flag: str = "--layers") -> tuple[int, ...] | None:
    """Parse ``--layers``: ``"all"`` gives None (every layer); ``"0-11,20"`` gives sorted distinct numbers."""
    words = text.replace(",", " ").split()
    if words == ["all"]:
        return None
    layers: set[int] = set()
    for word in words:
        match = _RANGE.fullmatch(word)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first or last - first > 10_000:
            raise SpecError(flag, expected="all, or numbers and ranges such as 0-11,20", found=repr(text))
        layers.update(range(first, last + 1))
    if not layers:
        raise SpecError(flag, expected="all, or numbers and ranges such as 0-11,20", found=repr(text))
    return tuple(sorted(layers))


def layers_text(layers: Sequence[int] | None) -> str:
    """Return the layers as text with ranges: ``(0, 1, 2, 20)`` gives ``"0-2,20"``. Inverse of :func:`parse_layers`."""
    if layers is None:
        return "all"
    return ",".join(str(a) if b == a + 1 else f"{a}-{b - 1}" for a, b in Ranges.of(layers).pairs())


class _TapWord(NamedTuple):
    """One word of ``--taps``: a kind, and the layers, heads or number of logits that it names itself."""

    kind: str
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    top: int | None = None

    @property
    def order(self) -> tuple[Any, ...]:
        """The sort key: kinds in the order of the table, then module paths."""
        known = list(TAP_KINDS)
        place = known.index(self.kind) if self.kind in TAP_KINDS else len(known)
        return place, self.kind, self.layers or (), self.heads or (), self.top or 0

    def __str__(self) -> str:
        parts = [self.kind, *(layers_text(part) for part in (self.layers, self.heads) if part is not None)]
        return ".".join(parts + ([f"top{self.top}"] if self.top is not None else []))


def _parse_tap_word(text: str) -> _TapWord:
    """Parse ``residual``, ``residual.12``, ``mlp.3-5,7``, ``z.12.0-3``, ``logits.top5`` or ``module:PATH``."""
    if text.startswith(MODULE) and len(text) > len(MODULE):
        return _TapWord(text)
    kind, *parts = text.split(".")
    spec = TAP_KINDS.get(kind)
    if spec is None:
        expected = f"some of {', '.join(TAP_KINDS)}, or {MODULE}PATH"
        raise SpecError("--taps", expected=expected, found=text)
    layers = parse_layers(parts.pop(0), f"--taps {text}") if spec.layered and parts else None
    named = spec.per_head and parts and not parts[0].startswith("top")
    heads = parse_layers(parts.pop(0), f"--taps {text}") if named else None
    top = int(parts.pop(0)[3:]) if "top" in spec.shape and parts and re.fullmatch(r"top\d{1,5}", parts[0]) else None
    if parts:
        expected = "a kind and its layers, such as residual.12 or mlp.3-5"
        raise SpecError("--taps", expected=expected, found=repr(text))
    return _TapWord(kind, layers, heads, top)


def _split_words(words: Iterable[str]) -> list[str]:
    """Split words at spaces, and at commas that are not part of a list of layers or heads."""
    return [text for word in words for text in re.split(r"\s+|,(?=[a-z])", word.strip(" ,")) if text]


def parse_tap_words(words: Iterable[str]) -> tuple[str, ...]:
    """Return the words of ``--taps`` in a fixed order, each once.

    A word names a kind (``residual``: at every layer that ``--layers`` selects) or taps (``residual.12``, ``mlp.3-5``).
    ``logits`` and ``pattern`` add the kinds that are stored with them.

    Raises:
        SpecError: If a word names no tap.

    """
    found = {_parse_tap_word(text) for text in _split_words(words)}
    if not found:
        raise SpecError("--taps", expected=f"some of {', '.join(TAP_KINDS)}, or {MODULE}PATH", found="none")
    for word in [word for word in found if word.kind == "logits"]:
        found |= {_TapWord("loss"), _TapWord("logits_ids", top=word.top)}
    found |= {word._replace(kind="pattern_ids") for word in found if word.kind == "pattern"}
    return tuple(str(word) for word in sorted(found, key=lambda word: word.order))


def tap_kinds(taps: Iterable[str]) -> tuple[str, ...]:
    """Return the kinds of these words of ``--taps``, each once, in their order."""
    return tuple(dict.fromkeys(_parse_tap_word(text).kind for text in taps))


def select_taps(
    taps: Sequence[str],
    layers: Sequence[int] | None,
    n_layers: int,
    heads: tuple[int, ...] | None = None,
    top: int = TOP,
    attention_top: int = ATTENTION_TOP,
) -> tuple[Tap, ...]:
    """Return the taps of a model with ``n_layers`` layers, layer by layer.

    Taps that a model has only once come where they are computed. Taps with four-byte values come first, so that all
    tensors of a shard are aligned. ``layers``, ``heads``, ``top`` (of logits) and ``attention_top`` apply to the words
    that name none themselves; None stands for all layers or heads.

    Raises:
        SpecError: If the model does not have one of the layers, or ``heads`` applies to no tap.

    """
    words = [_parse_tap_word(text) for text in parse_tap_words(taps)]
    _check_layers(words, layers, n_layers)
    every = range(n_layers) if layers is None else layers
    found: set[Tap] = set()
    for word in words:
        spec = TAP_KINDS.get(word.kind, _MODULE)
        chosen = (word.layers or every) if spec.layered else (None,)
        own = (word.heads or heads) if spec.per_head else None
        count = word.top or (attention_top if spec.layered else top) if "top" in spec.shape else None
        found |= {Tap(word.kind, layer, own, count) for layer in chosen}
    if heads is not None and not any(tap.heads for tap in found):
        raise SpecError(
            "--heads", expected="q, k, v, z, head_out or pattern among --taps", found=f"--taps {' '.join(taps)}"
        )
    return tuple(sorted(found, key=_stored_order))


def with_gradients(taps: Sequence[Tap]) -> tuple[Tap, ...]:
    """Return the taps, followed by the gradient of each tap that the model computes with."""
    found = [replace(tap, gradient=True) for tap in taps if tap.spec is not None and tap.kind not in REPORTED]
    if not found:
        raise SpecError(
            "--gradients loss", expected="taps that the model computes with", found=" ".join(map(str, taps))
        )
    return (*taps, *found)


def _check_layers(words: Sequence[_TapWord], layers: Sequence[int] | None, n_layers: int) -> None:
    for flag, chosen in (("--layers", layers), *((f"--taps {word}", word.layers) for word in words)):
        beyond = [layer for layer in chosen or () if layer >= n_layers]
        if beyond:
            expected = f"layers 0 to {n_layers - 1} (the model has {n_layers})"
            raise SpecError(flag, expected=expected, found=layers_text(beyond))


def _stored_order(tap: Tap) -> tuple[Any, ...]:
    """Return the sort key of tensors in a shard: four-byte values, the embedding, layer by layer, then the rest."""
    spec = tap.spec or _MODULE
    stage = 0 if spec.dtype else 2 if spec.layered else 1 if tap.kind == "embed" else 3
    return stage, tap.layer or 0, *_TapWord(tap.kind, heads=tap.heads, top=tap.top).order


_NEEDS = {
    "d_mid": "attention before its MLP, not parallel to it",
    "d_ff": "one MLP in this layer, not experts",
    "experts": "experts in this layer",
}


def tap_rows(tap: Tap, sizes: Mapping[str, int], store_dtype: str) -> TapRows:
    """Return the rows of a tap in a model whose layer has these sizes (0 for a size that it does not have)."""
    spec = tap.spec
    if spec is None:
        raise SpecError("--taps", expected="--backend torch for a module's path", found=tap.kind)
    shape = [{"1": 1, "top": tap.top or 0}.get(size, sizes.get(size, 0)) for size in spec.shape]
    if not shape[0]:
        raise SpecError(f"--taps {tap.kind}", expected=f"a model with {_NEEDS[spec.shape[0]]}", found=f"none at {tap}")
    if spec.shape[0] == "top" and shape[0] > sizes["vocab"]:
        raise SpecError("--top-k", expected=f"at most the vocabulary's {sizes['vocab']}", found=shape[0])
    if tap.heads is not None:
        if tap.heads[-1] >= shape[0]:
            has = f"heads 0 to {shape[0] - 1} (the model's {tap.kind} has {shape[0]})"
            raise SpecError("--heads", expected=has, found=layers_text(tap.heads))
        shape[0] = len(tap.heads)
    return TapRows(str(tap), tuple(shape), tap.stored_as(store_dtype, math.prod(shape)))


def parse_taps(words: Iterable[str]) -> tuple[Tap, ...]:
    """Parse ``mlp.12 z.3.0-3,7`` into taps, each once, in an order that does not depend on the order of the words.

    Taps with a four-byte data type of their own come first, so that every tensor of a shard is aligned.
    """
    taps = {Tap.parse(text) for text in _split_words(words)}
    if not taps:
        raise SpecError("--add-taps", expected="taps such as mlp.12", found="none")
    own = {tap: tap.spec is not None and tap.spec.dtype is not None for tap in taps}
    return tuple(sorted(taps, key=lambda tap: (not own[tap], -1 if tap.layer is None else tap.layer, str(tap))))


# -- changed taps -----------------------------------------------------------------------------------------------------

SteerKind = Literal["add", "zero", "ablate", "patch"]
_SCALED_SOURCE = re.compile(r"(.+):([-+]?(?:\d+\.?\d*|\.\d+)(?:e[-+]?\d+)?)", re.IGNORECASE)


@dataclass(frozen=True)
class Steer:
    """One word of ``--steer``: a change of a tap while the model computes."""

    tap: Tap
    kind: SteerKind
    source: str = ""
    """The safetensors file of the vector, or the root of the dataset to patch from."""
    name: str = ""
    """The tensor in the file, or the sample of the dataset."""
    scale: float = 1.0

    @classmethod
    def parse(cls, text: str) -> Steer:
        """Parse ``TAP=FILE#NAME:SCALE`` or ``TAP=`` and ``zero``, ``ablate:FILE#NAME`` or ``patch:ROOT#SAMPLE``."""
        word, _, change = text.partition("=")
        if not change:
            expected = "TAP=CHANGE, such as residual.12=vector.safetensors:2.0"
            raise SpecError("--steer", expected=expected, found=repr(text))
        try:
            tap = Tap.parse(word)
        except SpecError as error:
            raise SpecError(f"--steer {text}", expected=error.expected, found=repr(word)) from error
        if change == "zero":
            return cls(tap, "zero")
        prefix, _, after_prefix = change.partition(":")
        kind, rest = (prefix, after_prefix) if prefix in ("add", "ablate", "patch") else ("add", change)
        scaled = _SCALED_SOURCE.fullmatch(rest) if kind == "add" else None
        source, _, name = (rest if scaled is None else scaled[1]).partition("#")
        if not source or (kind == "patch" and not name):
            expected = "patch:ROOT#SAMPLE" if kind == "patch" else "the name of a safetensors file"
            raise SpecError(f"--steer {text}", expected=expected, found=repr(change))
        return cls(tap, kind, source, name, 1.0 if scaled is None else float(scaled[2]))  # type: ignore[arg-type]

    def __str__(self) -> str:
        """Return the change in a form that :meth:`parse` reads."""
        if self.kind == "zero":
            return f"{self.tap}=zero"
        name, scale = f"#{self.name}" if self.name else "", f":{self.scale!r}" if self.kind == "add" else ""
        return f"{self.tap}={self.kind}:{self.source}{name}{scale}"
