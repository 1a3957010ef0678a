"""Work on the streams of a run one after another, each under a claim: ``spile worker --spec URL --claim``."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext

from spile.data.manifest import STREAM, read_manifest
from spile.errors import DataError, Fenced, Interrupted, SpecError, SpileError
from spile.objects import open_folder
from spile.spec.run import DataSpec
from spile.store.claims import Claim, ClaimBook
from spile.store.snapshot import SnapshotReader, State
from spile.worker.pod.pod import SingleProcess, WorkerGroup

_NOTHING = -1
"""The value that the first host of a pod sends to the others if no stream is left to claim."""


def default_worker_name() -> str:
    """Return a name that no other running worker has: host and process."""
    return f"{socket.gethostname()}-{os.getpid()}"


def work_on_claims(
    data: DataSpec,
    output: str,
    book: ClaimBook,
    run: Callable[[int], int],
    *,
    hosts: WorkerGroup | None = None,
    log: Callable[[str], None] = lambda _line: None,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Claim the unfinished stream with the most work left, run it, and repeat until nothing is left to claim.

    If live workers hold all unfinished streams, this worker ends successfully, because a waiting machine costs money.
    It waits only until it has seen whether the other workers renew their claims.

    A single process sets a stream that fails aside and takes the next one, so that one damaged stream does not end
    every worker of the run. It raises the error when no other stream is left, or at once if a second stream fails
    before any is complete: then the cause is not the stream.

    Args:
        data: The data of the run spec; it must name a folder of streams.
        output: The dataset's folder.
        book: The claims, under this worker's name.
        run: Runs one stream and returns its exit code.
        hosts: The pod that this process belongs to. Its first process claims streams for all processes.
        log: Called with each log line.
        sleep: Waits between two looks at the claims.

    Returns:
        0 if no stream was left to claim, else the exit code of the stream that was interrupted.

    """
    hosts = hosts or SingleProcess()
    total = _stream_sizes(data)
    snapshots = SnapshotReader(open_folder(output))
    finished: set[int] = set()
    failed: dict[int, SpileError] = {}
    while True:
        left = {number: size for number, size in total.items() if number not in finished and number not in failed}
        claim = _claim(book, snapshots, left, sleep) if hosts.first else None
        stream = int(hosts.agree("claim", _NOTHING if claim is None else claim.stream))
        if stream == _NOTHING:
            if failed:
                raise next(iter(failed.values()))
            log("no stream is left to claim")
            return 0
        log(f"stream {stream} of {len(total)}")
        try:
            with nullcontext() if claim is None else claim.keep_renewed(log):
                code = run(stream)
        except Fenced as error:
            log(f"{error.problem}; taking the next stream")
            continue
        except SpileError as error:
            if isinstance(error, Interrupted) or hosts.name or (failed and not finished):
                raise
            log(f"stream {stream} failed: {error}")
            error.__traceback__ = error.__cause__ = error.__context__ = None  # they would keep the model in memory
            failed[stream] = error
            continue
        if code == 0:
            finished.add(stream)  # --max-tokens may end a stream before its last sample
        elif code != Fenced.exit_code:
            return code


def _claim(
    book: ClaimBook, snapshots: SnapshotReader, total: Mapping[int, int], sleep: Callable[[float], None]
) -> Claim | None:
    """Return a claim, or None if live workers hold all unfinished streams or none is left."""
    while True:
        left = dict(total)
        for view in snapshots.take().streams:
            if view.number in left:
                done = view.state is State.DONE or view.samples >= left[view.number]
                left[view.number] -= view.samples
                if done:
                    del left[view.number]
        order = sorted(left, key=lambda stream: (-left[stream], stream))
        claim = book.take(order) if order else None
        if claim is not None or book.all_busy(order):
            return claim
        sleep(book.expiry / 4)


def _stream_sizes(data: DataSpec) -> dict[int, int]:
    """Return the number of samples of each stream; bytes if the folder has no ``streams.json``."""
    if data.dataset_dir is None:
        raise SpecError("--claim", expected="a run spec with a folder of streams", found="no --dataset-dir in the spec")
    folder = open_folder(data.dataset_dir)
    manifest = read_manifest(folder)
    limit = data.max_samples
    if manifest is not None:
        sizes = {number: entry.samples for number, entry in enumerate(manifest.streams)}
    else:
        found = ((STREAM.fullmatch(info.key), info.size) for info in folder.list("stream_"))
        sizes = {int(match[1]): size for match, size in found if match is not None}
    if not sizes:
        raise DataError(f"{folder.url} contains no stream_000.jsonl", fix="make streams with: spile data streams")
    return {number: size if limit is None else min(size, limit) for number, size in sizes.items()}
