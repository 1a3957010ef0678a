"""Benchmarks for ``make bench`` or manual use, never run by tests. The ``main`` of each module prints a table."""

from pathlib import Path

SCRATCH = Path(".bench")
"""Where they write: on the disk that is measured, out of git's sight."""
