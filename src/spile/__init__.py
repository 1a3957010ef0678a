"""spile taps language models: it draws off the activations of their layers, each sample exactly once."""

from spile.version import __version__

__all__ = ["__version__"]
