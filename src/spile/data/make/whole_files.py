"""Files that appear whole or not at all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from spile.objects import Unwritable

__all__ = ["replacing", "workspace"]


@contextmanager
def workspace(folder: Path) -> Iterator[Path]:
    """A temporary folder inside this one, on the same disk. It goes afterwards, and so does a new folder left empty."""
    fresh = not folder.exists()
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=".making-", dir=folder))
        try:
            yield work
        finally:
            shutil.rmtree(work, ignore_errors=True)
            if fresh and not any(folder.iterdir()):
                folder.rmdir()


@contextmanager
def replacing(*files: Path) -> Iterator[Sequence[IO[bytes]]]:
    """Files to write in place of these, all of one folder. They take their names, in order, when the block ends well.

    When it does not, nothing has changed and nothing is left behind.
    """
    with workspace(files[0].parent) as work, _writing(files[0]):
        made = [work / file.name for file in files]
        with ExitStack() as stack:
            handles = [stack.enter_context(path.open("wb", buffering=1 << 20)) for path in made]
            yield handles
            for handle in handles:
                handle.flush()
                os.fsync(handle.fileno())
        for path, file in zip(made, files, strict=True):
            path.replace(file)


@contextmanager
def _writing(place: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Unwritable(f"{place} cannot be written", found=error.strerror or str(error)) from error
