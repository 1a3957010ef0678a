"""A folder of streams as tasks, and the check that every machine means the same folders."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from spile.errors import DataError
from spile.launch.supervisor import ClusterCheck, StreamTask
from spile.objects import open_folder
from spile.objects.preflight import preflight

__all__ = ["cluster_check", "stream_tasks"]

_STREAM = re.compile(r"stream_(\d{3,})\.jsonl", re.ASCII)


def stream_tasks(
    dataset_dir: str, words: Callable[[int], tuple[str, ...]], without: tuple[str, ...] = ()
) -> list[StreamTask]:
    """One task per ``stream_NNN.jsonl`` of a folder or a bucket's."""
    found = []
    for info in open_folder(dataset_dir).list("stream_"):
        named = _STREAM.fullmatch(info.key)
        if named is not None:
            found.append(StreamTask(int(named[1]), words(int(named[1])), info.size, without=without))
    if not found:
        raise DataError(
            f"no stream in {dataset_dir}",
            expected="stream_000.jsonl, stream_001.jsonl, …",
            fix="make them: spile data streams --output-dir DIR; or name one file with --dataset",
        )
    return found


@contextmanager
def cluster_check(output: str, inputs: tuple[str, ...]) -> Iterator[ClusterCheck]:
    """What machines are asked; while this lasts the output holds an object that says which folder is meant."""
    home = open_folder(output)
    preflight(home)
    token = f".spile-home-{secrets.token_hex(8)}"
    home.put(token, b"spile\n")
    try:
        yield ClusterCheck(output, token, inputs)
    finally:
        home.delete(token)
