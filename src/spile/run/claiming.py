"""Work on the streams of a run one after another, each under a claim: ``spile worker --spec URL --claim``."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Callable
from typing import NamedTuple

from spile.data.manifest import list_streams, read_manifest
from spile.errors import DataError, Fenced, Interrupted, SpileError, found_late
from spile.objects import open_folder
from spile.run.pod.pod import WorkerGroup
from spile.spec.run import LIMITS, DataSpec
from spile.store.claims import CLAIM_SECONDS, Claim, ClaimBook
from spile.store.snapshot import SnapshotReader, State, StreamView


def work_on_claims(
    data: DataSpec,
    output: str,
    run: Callable[[int], int],
    *,
    worker: str | None = None,
    expiry: float = CLAIM_SECONDS,
    hosts: WorkerGroup | None = None,
    log: Callable[[str], None] = lambda _line: None,
) -> int:
    """Claim one of the largest unfinished streams, run it, and repeat until nothing is left to claim.

    If live workers hold all unfinished streams, this worker ends successfully, because a waiting machine costs money.
    One process alone sets a failed stream aside. It raises the error at the end, or if two fail before one succeeds.
    Return 0 if no stream was left to claim, else the exit code of the stream that was interrupted.

    Args:
        data: The data of the run spec: a folder of streams, or one dataset whose rows the streams read in turn.
        output: The dataset's folder.
        run: Runs one stream and returns its exit code.
        worker: A name that no other running worker has; host and process unless given.
        expiry: Seconds without a renewal after which the claim of another worker is taken over.
        hosts: The pod that this process belongs to. Its first process claims streams for all processes.
        log: Called with each log line.
    """
    hosts, root = hosts or WorkerGroup(), open_folder(output)
    goal = *(getattr(data, name) for name in LIMITS), data.expect_split  # what ends a stream
    book = ClaimBook(root, worker or f"{socket.gethostname()}-{os.getpid()}", expiry=expiry, goal=repr(goal))
    snapshots, left = SnapshotReader(root), planned_streams(data)
    count, finished, failed = len(left), 0, list[SpileError]()
    for turn in itertools.count(1):  # A key of a pod must not be used twice: other hosts would read its old value.
        claim = take_unfinished(book, snapshots, left) if hosts.first else None
        stream: int | None = hosts.agree(f"claim/{turn}", None if claim is None else claim.stream)
        if stream is None:
            break
        log(f"stream {stream} of {count}")
        try:
            code = run(stream) if claim is None else _run_claimed(claim, run, log)
        except SpileError as error:
            if hosts.name or isinstance(error, Interrupted):  # The other hosts of a pod cannot know what happened here.
                raise
            if isinstance(error, Fenced):
                log(f"{error.problem}; taking the next stream")
                continue
            if failed and not finished:
                raise
            log(f"stream {stream} failed: {error}")
            error.__traceback__ = error.__cause__ = error.__context__ = None  # Their frames hold the model in memory.
            failed.append(error)
            left.pop(stream, None)
            continue
        if code == 0:
            finished += 1
            left.pop(stream, None)  # --max-tokens may end a stream before its last sample
        elif code != Fenced.exit_code:
            return code
    if failed:
        with found_late(lambda: finished > 0):
            raise failed[0]
    log("no stream is left to claim")
    return 0


def _run_claimed(claim: Claim, run: Callable[[int], int], log: Callable[[str], None]) -> int:
    with claim.keep_renewed(log):
        code = run(claim.stream)
        claim.finished = code == 0
    return code


class PlannedStream(NamedTuple):
    """One stream of the run."""

    size: int
    """Its samples, or bytes if the folder has no ``streams.json``. Larger streams are claimed first."""
    limits: str
    """The limits of the run, as flags."""

    def is_done(self, view: StreamView) -> bool:
        """Return whether its ledger has all samples that the run asks for: earlier limits may have ended it."""
        return view.state is State.DONE and view.limits in ("", self.limits)


def take_unfinished(
    book: ClaimBook,
    snapshots: SnapshotReader,
    left: dict[int, PlannedStream],
    sleep: Callable[[float], None] = time.sleep,
) -> Claim | None:
    """Return a claim on an unfinished stream, or None if live workers hold all unfinished streams or none is left.

    Only the ledger of the claimed stream is read. A stream that turns out to be finished is removed from ``left``.
    """
    while True:
        order = sorted(left, key=lambda number: (-left[number].size, number))
        claim = book.take(order)
        if claim is None:
            if book.all_busy(number for number in order if not book.is_done(number)):
                return None
            sleep(book.expiry / 4)
        elif left[claim.stream].is_done(snapshots.stream(claim.stream)):
            del left[claim.stream]
            claim.finished = True
            claim.release()
        else:
            return claim


def planned_streams(data: DataSpec) -> dict[int, PlannedStream]:
    """Return the streams of the data, by number."""
    if data.dataset_dir is None:  # the rows of one dataset, in turn or by a single stream
        numbers = range(data.of_streams) if data.of_streams is not None else [data.worker_id]
        return {number: PlannedStream(1, data.limits) for number in numbers}
    folder = open_folder(data.dataset_dir)
    manifest = read_manifest(folder)
    sizes = list_streams(folder) if manifest is None else {n: each.samples for n, each in enumerate(manifest.streams)}
    if not sizes:
        raise DataError(f"{folder.url} contains no stream_000.jsonl", fix="make streams with: spile data streams")
    return {number: PlannedStream(size, data.limits) for number, size in sizes.items()}
