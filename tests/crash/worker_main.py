"""The real worker loop in a separate process, with NumPy as the model, the signals of the command line and any backend.

``start`` forks one from a clean server. It ends as ``spile extract`` does: an exit code, and one line of error.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from multiprocessing import get_context
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from threading import Event, Thread
from typing import Any

from killing import Stepped, Switch, _paths
from whole import assert_rows

from spile.compute.batches import Batch, Sizes
from spile.compute.producer import Control, RowBlock
from spile.compute.progress import Progress, StatusFiles
from spile.errors import SpileError
from spile.objects import Folder, is_remote, open_folder
from spile.run.pipeline import Sink, run_pipeline
from spile.spec.ranges import Ranges
from spile.spec.run import RunSpec
from spile.spec.sample import Sample
from spile.store.ledger import read_ledger
from spile.store.run import join_run
from spile.store.writer import StreamWriter, join_stream, read_stream
from world import TAPS, NumpyProducer, items, rows_of, run_identity, stream_identity

__all__ = ["KILLED", "Life", "assert_whole", "committed", "start", "until", "visit"]

KILLED = -9
_HANDED_ON = ("STORAGE_EMULATOR_HOST", "AWS_", "SPILE_", "NO_PROXY", "no_proxy")


@dataclass(frozen=True)
class Life:
    """The settings of one worker. None of them may change a row."""

    writers: int = 1
    groups: int = 1
    batch_tokens: int = 128
    batch_size: int | None = None
    shard_bytes: float = 12_000
    commit_every: float | None = None
    seconds: float = 0.0
    """The seconds that a batch takes."""
    stuck_after: int | None = None
    """The batch after which the device stops answering."""
    mark: tuple[str, int] | None = None
    """A file that is created after this many batches."""
    holds: bool = False
    """Whether the device waits there, with the next batch, until the worker was asked to stop."""
    stopping: str | None = None
    """A file to create once the worker was asked to stop: its first signal was handled."""
    switch: Switch = field(default_factory=lambda: Switch(None))
    stderr: str | None = None


class _Producer(NumpyProducer):
    """Creates the mark, and may then wait or stop answering."""

    def __init__(self, life: Life, stop: Event) -> None:
        super().__init__(life.groups, seconds=life.seconds)
        self._life, self._stop, self._fetched = life, stop, 0

    def fetch(self, pending: object) -> Sequence[Sequence[RowBlock]]:
        assert isinstance(pending, Batch)
        if self._life.stuck_after is not None and self._fetched >= self._life.stuck_after:
            if self._life.mark is not None:
                Path(self._life.mark[0]).touch()
            time.sleep(3600)
        blocks = super().fetch(pending)
        self._fetched += 1
        if self._life.mark is not None and self._fetched >= self._life.mark[1]:
            Path(self._life.mark[0]).touch()
            if self._life.holds:
                self._stop.wait()
        return blocks


def visit(
    url: str, count: int, life: Life, stop: Event | None = None, progress: Progress | None = None
) -> tuple[bool, StreamWriter]:
    """One visit to the stream through ``runtime.worker``, as ``spile extract`` makes it."""
    root: Any = open_folder(url)
    if life.switch.name is not None or is_remote(url):
        root = Stepped(root, life.switch)
    run, progress, stop = run_identity(store_dtype="float32"), progress or Progress(), stop or Event()
    join_run(root, run)
    stream = join_stream(root, 0, stream_identity(count), run)
    spec = RunSpec(output=url, commit_every=life.commit_every)
    sizes = Sizes(life.batch_tokens, life.batch_size, 64, life.shard_bytes, life.writers)
    with StatusFiles(spec, stream, progress, writes=True, expected=count) as status:
        finished = run_pipeline(
            items(count, stream.ledger.done),
            _Producer(life, stop),
            Sink(stream, status.committed),
            sizes,
            progress=progress,
            control=Control(stop, life.commit_every),
        )
    if finished:
        stream.finish()
    return finished, stream


def _live(url: str, count: int, life: Life) -> int:
    from spile.view.worker import worker_display

    with worker_display() as watch:
        if life.stopping is not None:
            Thread(target=_mark_stop, args=(watch.stop, Path(life.stopping)), daemon=True).start()
        finished, _ = visit(url, count, life, watch.stop, watch.progress)
    return 0 if finished else 130


def _mark_stop(stop: Event, mark: Path) -> None:
    stop.wait()
    mark.touch()


def main(url: str, count: int, environment: dict[str, str], life: Life) -> None:
    """Run the worker; this is the target of a process."""
    for name in [name for name in os.environ if name.startswith(_HANDED_ON)]:
        del os.environ[name]  # what the fork server was started with
    os.environ.update(environment)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    if life.stderr is not None:
        os.dup2(os.open(life.stderr, os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    if life.switch.at is not None and life.switch.name is None and not is_remote(url):
        life.switch.patch_system()
    try:
        code = _live(url, count, life)
    except SpileError as error:
        sys.stderr.write(f"spile: {error}\n")
        code = error.exit_code
    except KeyboardInterrupt:
        code = 130
    except BaseException:  # noqa: BLE001 - the parent sees the code, the trace goes to its log
        traceback.print_exc()
        code = 70
    sys.stderr.flush()
    os._exit(code)


def start(url: str, count: int, life: Life | None = None, **changes: Any) -> ForkServerProcess:
    """A worker in a process of its own."""
    context = get_context("forkserver")
    here = Path(__file__).parent
    with _paths(str(here), str(here.parent)):
        context.set_forkserver_preload(["worker_main", "killing", "spile.view.worker", "spile.objects.bucket"])
        environment = {name: value for name, value in os.environ.items() if name.startswith(_HANDED_ON)}
        process = context.Process(target=main, args=(url, count, environment, replace(life or Life(), **changes)))
        process.start()
    return process


def until(path: Path, process: ForkServerProcess) -> None:
    """Wait until the worker has created this file."""
    while not path.exists():
        assert process.is_alive(), process.exitcode
        time.sleep(0.005)


def committed(folder: Folder) -> Ranges:
    """What is done, by the ledger."""
    stream = folder.child("tpu_0")
    record = read_stream(stream)
    return Ranges() if record is None else read_ledger(stream, record.id).done


def assert_whole(url: str, count: int) -> None:
    """Check that the dataset is verified and that every row equals that of an uninterrupted run."""
    folder = open_folder(url)
    wanted = [item for item in items(count) if isinstance(item, Sample)]
    assert_rows(folder, wanted, TAPS, lambda s, number: rows_of(s, number, dtype="float32"))
