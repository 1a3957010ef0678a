"""Hugging Face safetensors → sharded arrays: find a model's files, prove which they are, load what is needed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spile.weights.files import ModelFiles, find

if TYPE_CHECKING:
    from spile.weights.loading import load

__all__ = ["ModelFiles", "find", "load"]


def __getattr__(name: str) -> object:
    """``load`` on first use: finding a model's files needs no jax."""
    if name == "load":
        from spile.weights.loading import load

        return load
    raise AttributeError(name)
