"""Parts of files, read past the page cache where that has none of them."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spile.objects import staging as module
from spile.objects.folder import NotFound
from spile.objects.staging import StagedFiles, Staging

SIZE = (3 << 20) + 1234


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A file that no page cache has."""
    path = tmp_path / "file"
    path.write_bytes(np.random.default_rng(0).bytes(SIZE))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return path


def cached(path: Path) -> bool:
    return StagedFiles(past_cache=True).open(path).was_cached(np.arange(0, SIZE, 4096), 1)


@pytest.mark.parametrize("past_cache", [True, False])
def test_any_part_of_a_file(made: Path, past_cache: bool) -> None:
    staging = Staging(StagedFiles(past_cache=past_cache))
    parts = [
        bytes(staging.read(made, offset, length))
        for offset, length in ((0, 4096), (4096, 1 << 20), (5, 1), (4095, 2), (1000, (2 << 20) + 77), (SIZE - 10, 10))
    ]
    data = made.read_bytes()
    assert parts == [
        data[:4096],
        data[4096 : 4096 + (1 << 20)],
        data[5:6],
        data[4095:4097],
        data[1000:][: (2 << 20) + 77],
        data[-10:],
    ]
    for offset, length, there in ((SIZE - 10, 20, 10), (SIZE, 5, 0), (SIZE + 9999, 5, 0)):
        assert bytes(staging.read(made, offset, length)) == data[offset : offset + there]


def test_what_is_read_once_stays_out_of_the_page_cache(made: Path) -> None:
    if cached(made):
        pytest.skip("this file system keeps it anyway")
    Staging(StagedFiles(past_cache=True)).read(made, 0, SIZE)
    assert not cached(made)
    Staging(StagedFiles(past_cache=False)).read(made, 0, SIZE)
    assert cached(made)
    assert bytes(Staging(StagedFiles(past_cache=True)).read(made, 7, 7)) == made.read_bytes()[7:14]


@pytest.mark.parametrize("many", [True, False])
@pytest.mark.parametrize("past_cache", [True, False])
def test_many_parts_at_once(made: Path, past_cache: bool, many: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not many:
        monkeypatch.setattr(module.ManyReads, "here", classmethod(lambda _: None))
    staging = Staging(StagedFiles(past_cache=past_cache))
    data = made.read_bytes()
    if hasattr(os, "posix_fadvise"):
        with made.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    for offsets in ([0], [5, 99, 4096], [8192, 4096, 8192, 20480], [0, 3000, 6000], [SIZE - 3000, 7]):
        found = staging.blocks(made, np.array(offsets), 3000)
        assert found is not None
        assert [block.tobytes() for block in found] == [data[offset : offset + 3000] for offset in offsets]
    assert staging.blocks(made, np.array([0, SIZE - 2999]), 3000) is None


@pytest.mark.parametrize("past_cache", [True, False])
def test_a_system_that_gives_less_than_it_was_asked_for(
    made: Path, past_cache: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if module.ManyReads.here() is None:
        pytest.skip("this system has no asynchronous reads")
    read = module.ManyReads.read

    def less(many: Any, handle: int, memory: int, at: Any, offsets: Any, lengths: Any) -> Any:
        return read(many, handle, memory, at, offsets, np.minimum(lengths, 1024 if lengths.min() < 4096 else 4096))

    monkeypatch.setattr(module.ManyReads, "read", less)
    offsets = np.array([5, 9000, 100_000])
    found = Staging(StagedFiles(past_cache=past_cache)).blocks(made, offsets, 9000)
    assert found is not None
    data = made.read_bytes()
    assert [block.tobytes() for block in found] == [data[offset : offset + 9000] for offset in offsets.tolist()]


def test_a_file_system_that_cannot(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read = os.preadv
    plain = made.read_bytes()
    monkeypatch.setattr(module, "_pages_in_cache", lambda _: np.zeros(1, np.bool_))
    monkeypatch.setattr(module.ManyReads, "here", classmethod(lambda _: None))

    def refused(handle: int, *rest: object) -> int:
        if os.O_DIRECT & fcntl.fcntl(handle, fcntl.F_GETFL):
            raise OSError(22, "Invalid argument")
        return read(handle, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "preadv", refused)
    assert bytes(Staging(StagedFiles(past_cache=True)).read(made, 5, 99)) == plain[5:104]


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        Staging(StagedFiles(past_cache=True)).read(tmp_path / "none", 0, 1)
