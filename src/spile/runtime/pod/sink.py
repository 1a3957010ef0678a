"""Each host writes its own rows; process 0 commits them all as one record: the pipeline's sink on a pod."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from spile.errors import PodError
from spile.runtime.pod.pod import Pod
from spile.spec.sample import Sample, Skip
from spile.store.record import ShardRecord
from spile.store.shard import ShardBuilder
from spile.store.stream import StreamStore

__all__ = ["PodSink"]


class PodSink:
    """A :class:`~spile.runtime.pipeline.Sink` whose commits all hosts make together."""

    def __init__(self, pod: Pod, stream: StreamStore, after_commit: Callable[[], None] = lambda: None) -> None:
        self._pod, self._stream, self._after = pod, stream, after_commit
        self._number = 0

    def begin(self, samples: Sequence[Sample]) -> ShardBuilder:
        """Lay out this host's part of a shard."""
        return self._stream.begin(samples, host=self._pod.identity.process)

    def commit(self, record: ShardRecord | None, skipped: Sequence[Skip], end: int | None) -> None:
        """Called on every host for the same shard, with what this host stored of it, and comes back when it is done."""
        self._number += 1
        directory, me = self._pod.coordination, self._pod.identity.process
        self._pod.report(f"committing shard {self._number} of this visit")
        directory.put(f"record/{self._number}/{me}", json.dumps(None if record is None else record.to_json()))
        if self._pod.identity.first:
            records = [found for process in range(self._pod.identity.count) if (found := self._record(process))]
            if records or skipped or end is not None:
                self._stream.commit(records, skipped, end=end)
            directory.put(f"committed/{self._number}", "")
            directory.delete(f"record/{self._number}/")
        elif directory.get(f"committed/{self._number}", self._pod.times.barrier) is None:
            raise self._late("commit", 0)
        else:
            self._stream.follow([] if record is None else [record], skipped, end)
        self._after()
        self._pod.report(f"computing; {self._number} shards committed in this visit")

    def _record(self, process: int) -> ShardRecord | None:
        said = self._pod.coordination.get(f"record/{self._number}/{process}", self._pod.times.barrier)
        if said is None:
            raise self._late("finish", process)
        fields = json.loads(said)
        return None if fields is None else ShardRecord.from_json(fields)

    def _late(self, verb: str, process: int) -> PodError:
        return PodError(
            f"{self._pod.identity.host(process)} did not {verb} shard {self._number} of this visit "
            f"within {self._pod.times.barrier:g} s",
            fix="see that host's log, then run the same command again",
        )
