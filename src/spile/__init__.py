"""spile taps language models: it draws off the activations of their layers, each sample exactly once."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from spile.version import __version__

if TYPE_CHECKING:
    from spile.reading.dataset import open  # noqa: A004
    from spile.runtime.extract import extract
    from spile.spec.run import DataSpec, ExtractSpec, PromptSpec

__all__ = ["DataSpec", "ExtractSpec", "PromptSpec", "__version__", "extract", "open"]

# Imported when first used, so that ``import spile`` and ``spile --help`` stay light.
_LAZY = {
    "DataSpec": "spile.spec.run",
    "ExtractSpec": "spile.spec.run",
    "PromptSpec": "spile.spec.run",
    "extract": "spile.runtime.extract",
    "open": "spile.reading.dataset",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'spile' has no attribute {name!r}")
