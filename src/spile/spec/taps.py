"""Taps: the points of a model that a run draws from, written ``residual.12``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from spile.errors import SpecError

__all__ = ["SITES", "Site", "Tap", "layers_text", "parse_layers", "parse_sites", "select_taps"]

Site = Literal["residual", "attn", "mlp"]
"""``residual``: after a layer's both adds. ``attn``, ``mlp``: that part's output before its add."""

SITES: tuple[Site, ...] = get_args(Site)

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


@dataclass(frozen=True, order=True)
class Tap:
    """One site of one layer."""

    site: Site
    layer: int

    def __str__(self) -> str:
        return f"{self.site}.{self.layer}"

    @classmethod
    def parse(cls, text: str) -> Tap:
        """``residual.12`` → ``Tap("residual", 12)``."""
        site, _, layer = text.partition(".")
        if site not in SITES or not layer.isdecimal():
            raise SpecError("not a tap", expected="SITE.LAYER such as residual.12", found=repr(text))
        return cls(site, int(layer))


def parse_layers(text: str) -> tuple[int, ...] | None:
    """``"all"`` → None (every layer of the model); ``"0-11,20"`` → those, sorted, each once."""
    words = text.replace(",", " ").split()
    if words == ["all"]:
        return None
    layers: set[int] = set()
    for word in words:
        match = _RANGE.fullmatch(word)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first or last - first > 10_000:
            raise SpecError("--layers", expected="all, or numbers and ranges such as 0-11,20", found=repr(text))
        layers.update(range(first, last + 1))
    if not layers:
        raise SpecError("--layers", expected="all, or numbers and ranges such as 0-11,20", found=repr(text))
    return tuple(sorted(layers))


def layers_text(layers: Sequence[int] | None) -> str:
    """The inverse of :func:`parse_layers`, with runs folded: ``(0, 1, 2, 20)`` → ``"0-2,20"``."""
    if layers is None:
        return "all"
    runs: list[list[int]] = []
    for layer in sorted(layers):
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def parse_sites(words: Iterable[str]) -> tuple[Site, ...]:
    """Site names in the order of :data:`SITES`, each once."""
    found = {part for word in words for part in word.replace(",", " ").split()}
    unknown = sorted(found - set(SITES))
    if unknown or not found:
        raise SpecError("--taps", expected=f"some of {', '.join(SITES)}", found=", ".join(unknown) or "none")
    return tuple(site for site in SITES if site in found)


def select_taps(sites: Sequence[Site], layers: Sequence[int] | None, n_layers: int) -> tuple[Tap, ...]:
    """Every site at every layer asked for, layer by layer, checked against the model's depth."""
    chosen = range(n_layers) if layers is None else layers
    beyond = [layer for layer in chosen if layer >= n_layers]
    if beyond:
        raise SpecError(
            "--layers",
            expected=f"layers 0 to {n_layers - 1} (the model has {n_layers})",
            found=layers_text(beyond),
        )
    return tuple(Tap(site, layer) for layer in chosen for site in sites)
