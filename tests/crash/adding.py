"""Add taps to a finished stream in a separate process that is killed at a chosen step."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
import traceback
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from killing import Switch, _paths

from spile.compute.batches import Sizes
from spile.compute.producer import Control, Decision
from spile.compute.progress import Progress
from spile.errors import SpileError
from spile.objects import Folder, open_folder
from spile.run.backfill import add_to_stream
from spile.spec.taps import Tap
from spile.store.run import read_run
from spile.store.stored_stream import Stream, join_addition, open_streams
from spile.store.writer import StreamWriter
from world import NumpyProducer, stream_identity

__all__ = ["ADDED", "add", "left", "start"]

ADDED = (Tap("mlp", 0), Tap("mlp", 1), Tap("z", 1))


class Cast(NumpyProducer):
    """Rows as the dataset stores them."""

    def fetch(self, pending: object) -> list:
        return [
            [block._replace(rows=block.rows.astype("bfloat16")) for block in blocks]
            for blocks in super().fetch(pending)
        ]


def left(stream: Stream) -> list:
    begun = [added for added in stream.all_additions if added.taps == tuple(map(str, ADDED))]
    return begun[0].remaining(stream.shards) if begun else list(stream.shards)


class StopAfter(Control):
    """Requests a stop before the batch with this number."""

    def __init__(self, batches: int) -> None:
        super().__init__(threading.Event(), None)
        self._left = batches

    def decide(self) -> Decision:
        self._left -= 1
        return "continue" if self._left >= 0 else "stop"


def add(
    root: Folder, groups: int = 1, writers: int = 1, fits: int | None = None, batches: int = 10**9
) -> tuple[bool, StreamWriter]:
    """Process the remaining shards in batches of any size, or only some of the batches."""
    run = read_run(root)
    assert run is not None
    (stream,) = open_streams(root, run)
    store = join_addition(stream.folder, stream.record, stream_identity(None, ADDED), run)
    sizes = Sizes(batch_tokens=128, batch_size=None, longest=64, shard_bytes=1, writers=writers)
    finished = add_to_stream(
        stream,
        store,
        left(stream),
        Cast(groups, fits),
        sizes,
        control=StopAfter(batches),
        progress=Progress(),
    )
    return finished, store


def life(url: str, switch: Switch) -> None:
    """Run the worker; this is the target of a process."""
    switch.patch_system()
    try:
        add(open_folder(url))
    except SpileError as error:
        sys.stderr.write(f"{error}\n")
        os._exit(error.exit_code)
    except BaseException:  # noqa: BLE001  the parent sees the code, the trace goes to its log
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(70)
    os._exit(0)


def start(url: str, switch: Switch) -> ForkServerProcess:
    """A process of :func:`life`, forked from a clean server."""
    context = multiprocessing.get_context("forkserver")
    here = Path(__file__).parent
    with _paths(str(here), str(here.parent)):
        context.set_forkserver_preload(["adding", "killing"])
        process = context.Process(target=life, args=(url, switch))
        process.start()
    return process
