"""spile taps language models: it draws off the activations of their layers, each sample exactly once."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from spile.version import __version__

if TYPE_CHECKING:
    from spile.runtime.extract import extract
    from spile.spec.run import DataSpec, ExtractSpec, PromptSpec
    from spile.store.reader import open  # noqa: A004

__all__ = ["DataSpec", "ExtractSpec", "PromptSpec", "__version__", "extract", "open"]

# Imported when first used, so that ``import spile`` and ``spile --help`` stay light.
_LAZY = {
    "DataSpec": "spile.spec.run",
    "ExtractSpec": "spile.spec.run",
    "PromptSpec": "spile.spec.run",
    "extract": "spile.runtime.extract",
    "open": "spile.store.reader",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'spile' has no attribute {name!r}")
