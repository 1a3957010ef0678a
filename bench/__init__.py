"""Benchmarks: run by hand or by ``make bench``, never by a test. Each module's ``main`` prints a table of its own."""

from pathlib import Path

SCRATCH = Path(".bench")
"""Where they write: on the disk that is measured, out of git's sight."""
