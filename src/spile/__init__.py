"""spile taps language models: it draws off the activations of their layers, each sample exactly once."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from spile.version import __version__

if TYPE_CHECKING:
    from spile.store.reader import open  # noqa: A004

__all__ = ["__version__", "open"]

# Imported when first used, so that ``import spile`` and ``spile --help`` stay light.
_LAZY = {"open": "spile.store.reader"}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'spile' has no attribute {name!r}")
