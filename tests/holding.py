"""A command that waits before one of its commits, so that a test can kill or interrupt it in the middle.

A real command can be done before the test that watches it has had its turn on a busy machine.
"""

from __future__ import annotations

import os
from pathlib import Path

__all__ = ["HeldCommits"]

_PATCH = """
import pathlib, sys, time
if {{"extract", "worker"}} & set(sys.orig_argv):
    from spile.store.writer import StreamWriter
    real, released = StreamWriter.commit, pathlib.Path({released!r})
    def commit(self, *args, **options):
        while self.ledger.commits >= {after} and not released.exists():
            time.sleep(0.01)
        return real(self, *args, **options)
    StreamWriter.commit = commit
"""


class HeldCommits:
    """Every ``spile extract`` with this environment makes ``after`` commits, and no more until it is released."""

    def __init__(self, folder: Path, after: int) -> None:
        self._released = folder / "released"
        folder.mkdir(exist_ok=True)
        (folder / "sitecustomize.py").write_text(_PATCH.format(released=str(self._released), after=after))
        paths = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.environment = {"PYTHONPATH": os.pathsep.join(paths)}

    def release(self) -> None:
        self._released.touch()
