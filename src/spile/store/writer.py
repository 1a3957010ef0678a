"""``stream.json``, and the writer of one stream, which creates shards and commits them."""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from spile.errors import Damaged, Fenced, RunMismatch, StoreError, untrusted
from spile.objects import is_remote
from spile.objects.folder import Folder, get_if_present
from spile.objects.mirror import without_copy
from spile.spec.identity import RunIdentity, StreamIdentity
from spile.spec.positions import ALL
from spile.spec.ranges import Ranges
from spile.spec.records import read_record
from spile.spec.sample import Part, Sample, Skip
from spile.spec.taps import Tap
from spile.store.layout import METADATA, STREAM, commit_key, new_attempt, shard_host, shard_name, stream_folder
from spile.store.ledger import (
    FORMAT,
    Commit,
    Ledger,
    Limit,
    ShardRecord,
    iso_time,
    read_commits,
    read_ledger,
    seal,
    unseal,
)
from spile.store.run import differences, mismatch, read_run
from spile.store.shard import ShardBuilder, ShardSchema
from spile.store.statistics import TapStatistics
from spile.version import __version__


@dataclass(frozen=True)
class StreamRecord:
    """The content of ``stream.json``."""

    id: str
    """Random. A stream that is cleared and started again gets a new id, which every commit and shard contains, so that
    a worker of the earlier stream cannot add to the new one."""
    worker_id: int
    fingerprint: str
    identity: StreamIdentity
    base: str | None = None
    """For added taps: the id of the stream that they were added to."""

    def header_fields(self) -> dict[str, str]:
        """Return the fields of a shard's header that name its stream and run."""
        return {"stream": self.id, "fingerprint": self.fingerprint}

    def schema(self, run: RunIdentity, statistics: bool = False) -> ShardSchema:
        some = run.positions != ALL
        return ShardSchema(self.identity.rows(run), self.fingerprint, self.id, statistics, run.keep, some)


class StreamWriter:
    """Writes the shards and commits of one stream. ``begin`` and ``commit`` may be called from different threads."""

    def __init__(self, folder: Folder, record: StreamRecord, run: RunIdentity, attempt: str, ledger: Ledger) -> None:
        self.folder, self.record, self.run, self.attempt = folder, record, run, attempt
        self._ledger = ledger
        self._lock = threading.Lock()
        self._last_number = ledger.commits
        self._outcome_unknown = False
        self._committed = False
        self.statistics = False
        """Whether to compute statistics of the rows that are written."""
        self.read_parts: Callable[[], Sequence[Part]] = tuple
        """Returns the rows of a streamed dataset that were read so far; each commit records the new ones."""

    @property
    def ledger(self) -> Ledger:
        """The ledger, including the commits of this worker."""
        return self._ledger

    def begin(self, samples: Sequence[Sample], host: int | None = None, number: int | None = None) -> ShardBuilder:
        """Start a shard of these samples, in this order. The default of ``number`` is the next one."""
        with self._lock:
            self._last_number = number if number is not None else max(self._last_number, self._ledger.commits) + 1
            name = shard_name(self._last_number, self.attempt, host)
        return ShardBuilder(self.folder, name, samples, self.record.schema(self.run, self.statistics))

    def commit(
        self,
        shards: Sequence[ShardRecord],
        skipped: Sequence[Skip] = (),
        end: int | None = None,
        limit: Limit | None = None,
    ) -> Commit:
        """Make shards and skipped samples part of the dataset atomically.

        Raises:
            Fenced: If another worker has committed to the stream.

        """
        with self._lock:
            if self._outcome_unknown:
                raise StoreError(
                    f"it is unknown whether the last commit of {self.folder.url} was stored",
                    fix="run the same command again",
                )
            recorded = self._ledger.rows or 0
            commit = Commit(
                number=self._ledger.commits + 1,
                attempt=self.attempt,
                stream=self.record.id,
                shards=tuple(shards),
                skipped=tuple(skipped),
                end=end,
                created=iso_time(),
                version=__version__,
                parts=tuple(part for part in self.read_parts() if part.first >= recorded),
                limit=limit,
            )
            if twice := Ranges.repeated([*self._ledger.done.pairs(), *commit.pairs()]):
                raise StoreError(
                    f"refused to commit samples of {self.folder.url} twice",
                    expected="samples that are not in the ledger",
                    found=twice.text(),
                )
            if self.record.identity.head is not None and not all_rows_hashed(self._ledger.plus([commit]), self.run):
                raise StoreError(f"refused to commit samples of {self.folder.url} whose rows were not hashed")
            self._refuse_restarted_stream()
            self._outcome_unknown = True
            while not self._created(commit):
                commit = replace(commit, number=commit.number + 1)
            self._ledger = self._ledger.plus([commit])
            self._outcome_unknown, self._committed = False, True
            return commit

    def record_commit(
        self, shards: Sequence[ShardRecord], skipped: Sequence[Skip] = (), end: int | None = None
    ) -> None:
        """Record the shards of this process that process 0 of the pod has committed. Nothing is written."""
        with self._lock:
            number = self._ledger.commits + 1
            commit = Commit(number, self.attempt, self.record.id, tuple(shards), tuple(skipped), end)
            self._ledger = self._ledger.plus([commit])

    def _refuse_restarted_stream(self) -> None:
        """Stop a worker whose stream was cleared with ``--overwrite`` in the meantime.

        If the stream is cleared right after this check, the commit is ignored, because it carries the old id.
        """
        stored = read_stream(without_copy(self.folder))
        if stored is None:
            raise StoreError(
                f"{self.folder.url}/{STREAM} is gone",
                expected=f"the stream that this worker joined, {self.record.id}",
                fix="find out what removed it, then run the same command again",
            )
        if stored.id != self.record.id:
            raise Fenced(
                f"{self.folder.url} was started again",
                expected=f"stream id {self.record.id}",
                found=stored.id,
                fix="this worker stops; its commits were removed with --overwrite",
            )

    def _created(self, commit: Commit) -> bool:
        """Create the commit; return False if a stale commit has its number."""
        data, key = commit.to_bytes(), commit_key(commit.number)
        if self.folder.create(key, data):
            return True
        # If the reply was lost, our own commit exists. The stored bytes contain the attempt, so they show whose it is.
        winner = self.folder.get(key)
        if winner == data:
            return True
        owner = Commit.from_bytes(winner, f"{self.folder.url}/{key}")
        if owner.stream != self.record.id:
            return False
        raise Fenced(
            f"another worker owns this stream: {self.folder.url}/{key}",
            expected=f"attempt {self.attempt}",
            found=f"attempt {owner.attempt}",
            fix="this worker stops; the other worker processes what is not committed",
        )

    def _read_back(self) -> Ledger:
        """Read the stored ledger again; raise :class:`Damaged` if this worker's samples or any shards are missing."""
        self._refuse_restarted_stream()
        stored = read_ledger(self.folder, self.record.id)
        lost = self._ledger.done - stored.done
        there = {info.key: info.size for info in self.folder.list("shard_")}
        absent = [
            file.name
            for file in stored.files
            if there.get(file.name) != file.size and (file.name in there or not self._may_be_on_another_host(file.name))
        ]
        fix = "find out what changed it, see what is left with spile verify, then run the same command again"
        if lost or absent:
            raise Damaged(
                f"{self.folder.url} has lost committed data",
                expected=f"{self._ledger.samples} samples in {self._ledger.shards} shards",
                found=f"samples {lost.text()} no longer committed" if lost else f"{len(absent)} shards gone or cut",
                fix=fix,
            )
        if stored.doubled:
            problem = f"the commits of {self.folder.url} list samples twice, as stored or as skipped"
            raise Damaged(problem, expected="each sample once", found=f"samples {stored.doubled.text()} twice", fix=fix)
        return stored

    def _may_be_on_another_host(self, name: str) -> bool:
        """Return whether the shard may be on the local disk of another host of the pod."""
        return bool(shard_host(name)) and not is_remote(self.folder.url)

    def finish(self) -> dict[str, Any]:
        """Write ``metadata.json`` from the stored ledger and return its content."""
        if self._committed:
            self._ledger = self._read_back()
        commits = read_commits(self.folder, self.record.id) if self.statistics else None
        content = metadata_bytes(self.record, self.run, self._ledger, commits)
        self.folder.put(METADATA, content)
        return dict(json.loads(content))


def all_rows_hashed(ledger: Ledger, run: RunIdentity) -> bool:
    """Return whether the commits of a streamed dataset cover the rows of all committed samples without a gap."""
    per_row = run.prompt.predictions_per_task
    needed = 0 if run.prompt.pack else -(-max(ledger.done.bounds(), default=0) // per_row)
    return ledger.rows is not None and ledger.rows >= needed


def metadata_bytes(
    record: StreamRecord, run: RunIdentity, ledger: Ledger, commits: Iterable[Commit] | None = None
) -> bytes:
    """Return the content of ``metadata.json``, with the statistics of these commits unless they are None."""
    found = {} if commits is None else {"statistics": _merged_statistics(record, commits)}
    return json.dumps({**metadata(record, run, ledger), **found}, indent=1).encode() + b"\n"


def _merged_statistics(record: StreamRecord, commits: Iterable[Commit]) -> dict[str, Any]:
    """Return the summary of each tap over all shards that have statistics."""
    shards = [shard for commit in commits for shard in commit.shards]
    merged: dict[str, Any] = {}
    for tap in map(str, record.identity.taps):
        parts = (TapStatistics.from_json(shard.statistics.get(tap)) for shard in shards)
        if known := [part for part in parts if part is not None]:
            merged[tap] = TapStatistics.merged(known).summary()
    return merged


def metadata(record: StreamRecord, run: RunIdentity, ledger: Ledger) -> dict[str, Any]:
    expected = record.identity.samples if record.identity.samples is not None else ledger.end
    complete = expected is not None and ledger.done == Ranges([(0, expected)])
    return {
        "worker_id": record.worker_id,
        "total_samples": ledger.samples,
        "total_shards": ledger.shards,
        "shards": [
            {"shard_id": place, "file": file.name, "samples": file.samples, "tokens": file.tokens, "size": file.size}
            for place, file in enumerate(ledger.files, 1)
        ],
        "status": "completed" if complete else "partial",
        "dataset_path": record.identity.data,
        "model_path": run.model,
        "layers": sorted({tap.layer for tap in record.identity.taps if tap.layer is not None}),
        "taps": [str(tap) for tap in record.identity.taps],
        "d_model": run.d_model,
        "dtype": run.store_dtype,
        "total_tokens": ledger.tokens,
        "total_bytes": ledger.bytes,
        "skipped_samples": ledger.skipped,
        "cut_samples": ledger.cut,
        "max_seq_length": run.max_seq_length,
        **({"quarantined": list(map(str, ledger.quarantined))} if ledger.quarantined else {}),
        "stream_samples": expected,
        "fingerprint": record.fingerprint,
        "stream": record.id,
        "finished": ledger.created,
    }


def join_stream(
    root: Folder,
    worker_id: int,
    identity: StreamIdentity,
    run: RunIdentity,
    attempt: str | None = None,
    stream: str | None = None,
) -> StreamWriter:
    """Create or open the stream's folder, check that it belongs to this stream, and read its ledger.

    ``attempt`` is a unique name of this execution of the worker. The hosts of a pod share the attempt and the id of the
    ``stream``, because each host may store its part of the stream on its own disk.
    """
    folder = root.child(stream_folder(worker_id, run.folders))
    run = read_run(root) or run  # an equal one, with the names that the dataset was begun with
    fresh = StreamRecord(stream or secrets.token_hex(8), worker_id, run.fingerprint(), identity)
    stored = read_or_create(folder, fresh)
    if stream is not None and stored.id != stream:
        raise RunMismatch(
            f"{folder.url} on this host holds a different stream than on worker 0",
            expected=f"stream id {stream}",
            found=stored.id,
            fix="move it away on this host, or give all hosts another --output",
        )
    ours = {**identity.compared(), "fingerprint": run.fingerprint()}
    differing = differences({**stored.identity.compared(), "fingerprint": stored.fingerprint}, ours)
    if differing:
        raise mismatch(folder.url, differing, _other_stream_fix(root, worker_id, differing))
    return StreamWriter(folder, stored, run, attempt or new_attempt(), read_ledger(folder, stored.id))


def read_or_create(folder: Folder, fresh: StreamRecord) -> StreamRecord:
    """Return the record of a stream's folder; create it from ``fresh`` if there is none."""
    stored = read_stream(folder)
    if stored is None:
        stored = fresh if folder.create(STREAM, stream_bytes(fresh)) else read_stream(folder)
    if stored is None:
        raise Damaged(f"{folder.url}/{STREAM} vanished while it was being read", fix="run the same command again")
    return stored


def _other_stream_fix(root: Folder, worker_id: int, differing: list[tuple[str, Any, Any]]) -> str:
    if [name for name, _, _ in differing] == ["taps"]:
        ((_, stored, ours),) = differing
        new = [tap for tap in ours if tap not in stored]
        if not new:
            return "give the same taps, or another --output; the dataset has these taps already"
        return f"use another --output, or add taps to it: spile extract --add-taps {' '.join(new)} --to {root.url}"
    return (
        "give the same dataset and taps, or another --output; "
        f"if another worker made it, give this worker its own number with --worker-id (this is {worker_id})"
    )


def stream_bytes(record: StreamRecord) -> bytes:
    identity = record.identity
    optional = {
        "streams": identity.streams,
        "split": identity.split,
        "revision": identity.revision,
        "base": record.base,
    }
    return seal(
        {
            "format": FORMAT,
            "id": record.id,
            "worker_id": record.worker_id,
            "fingerprint": record.fingerprint,
            "data": record.identity.data,
            **record.identity.compared(),
            **{name: value for name, value in optional.items() if value is not None},
            "created": iso_time(),
            "version": __version__,
        },
        indent=1,
    )


def read_stream(folder: Folder) -> StreamRecord | None:
    """Read the ``stream.json`` of a stream's folder; return None if there is none."""
    data = get_if_present(folder, STREAM)
    return None if data is None else parse_stream(data, f"{folder.url}/{STREAM}")


def parse_stream(data: bytes, where: str) -> StreamRecord:
    """Return the content of a ``stream.json``; raise :class:`Damaged`, which names ``where``, if it is malformed."""
    fields = unseal(data, where)
    with untrusted(Damaged, f"{where} is not the record of a stream"):
        taps = [Tap.parse(tap) for tap in fields["taps"]]
        identity = read_record(StreamIdentity, {**fields, "taps": taps})
        if (identity.lines is None) == (identity.head is None):
            raise ValueError("either the number of all rows or of the hashed first ones")
        record = read_record(StreamRecord, {**fields, "identity": identity})
        if identity.turn is not None and not (0 <= record.worker_id < (identity.streams or 0) and identity.turn > 0):
            raise ValueError("a stream with rows in turn is one of a number of streams")
        return record
