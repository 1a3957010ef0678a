"""What a worker leaves beside the ledger, for people and monitors: its heartbeat, the guides' checkpoint file.

None of it is ever read back for correctness.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType

from spile.errors import SpileError
from spile.objects import open_folder
from spile.objects.mirror import MirrorFolder
from spile.planning.amounts import counted
from spile.runtime.progress import Progress
from spile.spec.heartbeat import Reading
from spile.spec.run import ExtractSpec
from spile.status.heartbeat import Heartbeat
from spile.store.stream import StreamStore

__all__ = ["StatusFiles", "write_checkpoint_file"]


class StatusFiles:
    """A pulse while it lasts, and a call for each commit."""

    def __init__(
        self, spec: ExtractSpec, stream: StreamStore, progress: Progress, *, pulse: bool, expected: int | None
    ) -> None:
        self._spec, self._stream, self.progress, self._expected = spec, stream, progress, expected
        self._heart = Heartbeat(stream.folder, stream.attempt, self._reading, log=progress.log) if pulse else None
        self._tidied = 0
        self._stack = ExitStack()

    def __enter__(self) -> StatusFiles:
        if self._heart is not None:
            self._stack.enter_context(self._heart)
            self._stack.enter_context(self.progress.also_logged_to(self._heart.note))
            # Now, so that a folder that cannot be written is told before hours of work.
            write_checkpoint_file(self._spec, self._stream, "in_progress", self.progress.log)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def committed(self) -> None:
        """After each commit."""
        self._tidy()
        if self._heart is not None:  # on a pod, the one process whose ledger is the stream's
            write_checkpoint_file(self._spec, self._stream, "in_progress", self.progress.log)
            ledger = self._stream.ledger
            self.progress.log_detail(
                f"committed: {len(ledger.done):,} samples in {counted(ledger.shards, 'shard')} so far"
            )
            self._heart.beat()

    def _reading(self) -> Reading:
        now = self.progress.snapshot()
        return Reading(
            phase=now.phase,
            samples=now.samples,
            samples_committed=now.samples_committed,
            tokens=now.tokens,
            shards_written=now.shards_written,
            shards_committed=now.shards_committed,
            tokens_per_second=now.tokens_per_second,
            retries=self._stream.folder.stats.retries,
            expected=self._expected,
        )

    def _tidy(self) -> None:
        """``--delete-local-after-upload``: a copy whose commit stands is not needed any more."""
        folder = self._stream.folder
        if not self._spec.delete_local_after_upload or not isinstance(folder, MirrorFolder):
            return
        files = self._stream.ledger.files
        for file in files[self._tidied :]:
            folder.copy.delete(file.name)
        self._tidied = len(files)


def write_checkpoint_file(
    spec: ExtractSpec, stream: StreamStore, status: str, log: Callable[[str], None] = lambda _: None
) -> None:
    """``--checkpoint-dir``: the guides' file, for people. The ledger alone is read."""
    if spec.checkpoint_dir is None:
        return
    ledger, worker_id = stream.ledger, spec.data.worker_id
    record = {
        "worker_id": worker_id,
        "last_processed_sample_idx": len(ledger.done) - 1,
        "total_samples_processed": len(ledger.done),
        "total_shards": ledger.shards,
        "dataset_path": stream.record.identity.data,
        "model_path": spec.model,
        "status": status,
    }
    text = json.dumps(record, indent=2).encode() + b"\n"
    try:
        open_folder(spec.checkpoint_dir).put(f"checkpoint_worker_{worker_id}.json", text)
    except SpileError as error:  # it is for people and never read: no reason to lose a run
        log(f"--checkpoint-dir is not written: {error}")
