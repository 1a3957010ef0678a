"""Benchmarks for ``make bench`` or manual use, never run by tests. The ``main`` of each module prints a table."""

from pathlib import Path

SCRATCH = Path(".bench")
"""The folder for temporary files, on the measured disk and ignored by git."""
