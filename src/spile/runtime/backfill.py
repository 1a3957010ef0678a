"""``spile extract --add-taps``: taps added to a finished dataset, row-aligned, from the tokens that it holds itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

from spile.objects import Folder, open_folder
from spile.objects.preflight import preflight
from spile.planning.shards import row_bytes
from spile.runtime.backends import rows_of, torch_producer, wants_statistics
from spile.runtime.backfill_checks import dataset_model, finished_streams, refuse_other_numbers, refuse_taps_there
from spile.runtime.beside import add_beside, finish_beside, tasks_beside
from spile.runtime.device import DeviceProducer, configure_jax
from spile.runtime.flow import ShardTask
from spile.runtime.progress import Progress
from spile.runtime.sizing import choose_sizes
from spile.runtime.startup import place_model
from spile.runtime.status_files import StatusFiles
from spile.runtime.summary import Summary, peak_memory
from spile.runtime.worker import LocalControl, Sizes
from spile.spec.backfill import BackfillSpec
from spile.spec.identity import RunIdentity
from spile.spec.phase import Phase
from spile.spec.positions import ALL
from spile.spec.run import DataSpec, ExtractSpec
from spile.spec.taps import TapRows
from spile.store.additions import join_addition
from spile.store.clearing import remove_remains
from spile.store.record import ShardRecord
from spile.store.stream import StreamStore
from spile.store.streams import Stream, open_streams
from spile.weights.files import ModelFiles

__all__ = ["add_taps"]


def add_taps(spec: BackfillSpec, *, progress: Progress | None = None, stop: threading.Event | None = None) -> Summary:
    """Compute these taps for every row that a finished dataset holds, and store them beside it, shard for shard."""
    progress, stop = progress or Progress(), stop or threading.Event()
    configure_jax()
    progress.phase(Phase.LOOKING, "at the dataset and the model")
    root = open_folder(spec.root)
    for warning in preflight(root):
        progress.log(warning)
    plan = _plan(spec, root)
    left = sum(shard.count for stream in plan.streams for shard in _left(stream, plan))
    progress.total_samples = left
    device, finished = "none: nothing was left to do", True
    if left:
        progress.phase(Phase.LOADING, "the model")
        producer = plan.producer(progress)
        with closing(producer):
            device = producer.describe()
            for stream in plan.streams:
                finished = finished and _add_to(stream, plan, producer, progress, stop)
    else:
        for stream in plan.streams:
            finish_beside(stream, plan.join(stream))
    return _summary(plan, progress, interrupted=not finished, device=device)


@dataclass(frozen=True)
class _Plan:
    """What is added to what, by which model; nothing was written yet."""

    spec: BackfillSpec
    root: Folder
    run: RunIdentity
    streams: Sequence[Stream]
    files: ModelFiles
    backend: str
    rows: tuple[TapRows, ...]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(map(str, self.spec.taps))

    @property
    def extraction(self) -> ExtractSpec:
        """The same run again, as far as the machinery needs to know."""
        run, asked = self.run, self.spec
        answer = 0 if run.generation is None else run.generation.max_new_tokens
        return ExtractSpec(
            model=self.files.name,
            output=asked.root,
            data=DataSpec(max_seq_length=run.max_seq_length + answer),
            dtype=run.dtype,  # type: ignore[arg-type]
            store_dtype=run.store_dtype,  # type: ignore[arg-type]
            batch_size=asked.batch_size,
            batch_tokens=asked.batch_tokens,
            mesh_shape=asked.mesh_shape,
        )

    @property
    def sizes(self) -> Sizes:
        config = None if self.backend == "torch" else self.files.config
        return choose_sizes(self.extraction, row_bytes(self.rows), config)

    def producer(self, progress: Progress) -> Any:
        """The model on its devices."""
        spec, taps = self.extraction, self.spec.taps
        if self.backend == "torch":
            return torch_producer(self.files, taps, spec, self.sizes.batch_tokens, progress)

        def prepare(producer: DeviceProducer) -> None:
            todo = (task for stream in self.streams for task in self.tasks(stream, producer.groups))
            first = next((task for task in todo if task.plan.batches), None)
            if first is not None:
                producer.prepare(first.plan.batches[0].shape)

        return place_model(self.files, taps, spec, row_bytes(self.rows), progress, prepare)

    def tasks(self, stream: Stream, groups: int) -> Iterator[ShardTask]:
        return tasks_beside(stream, _left(stream, self), self.sizes, groups, some=self.run.positions != ALL)

    def join(self, stream: Stream) -> StreamStore:
        """Where the taps of one stream go."""
        shapes = {row.name: row.shape for row in self.rows if row.shape != (self.run.d_model,)}
        identity = replace(stream.record.identity, taps=self.spec.taps, shapes=shapes)
        store = join_addition(stream.folder, stream.record, identity, self.run)
        store.statistics = wants_statistics(self.spec.statistics)
        return store


def _plan(spec: BackfillSpec, root: Folder) -> _Plan:
    """Everything checked as far as it can be before the weights are loaded."""
    run = refuse_other_numbers(spec, root)
    streams = finished_streams(spec, root, open_streams(root, run))
    refuse_taps_there(spec.taps, streams)
    files, backend = dataset_model(spec, run, root)
    rows = rows_of(files, spec.taps, run.store_dtype, backend)
    return _Plan(spec, root, run, streams, files, backend, rows)


def _left(stream: Stream, plan: _Plan) -> list[ShardRecord]:
    """The stream's shards beside which these taps are not stored yet."""
    begun = next((added for added in stream.begun if added.taps == plan.names), None)
    return list(stream.shards) if begun is None else begun.left(stream.shards)


def _add_to(stream: Stream, plan: _Plan, producer: Any, progress: Progress, stop: threading.Event) -> bool:
    """One stream. True: to the end; False: told to stop, the shards in the making dropped."""
    store, left = plan.join(stream), _left(stream, plan)
    remove_remains(store.folder)
    expected = sum(shard.count for shard in left)
    progress.phase(Phase.RUNNING)
    with StatusFiles(plan.extraction, store, progress, pulse=True, expected=expected) as status:
        finished = add_beside(
            stream,
            store,
            left,
            producer,
            plan.sizes,
            control=LocalControl(stop, None),
            progress=progress,
            after_commit=status.committed,
        )
        progress.phase(Phase.DONE if finished else Phase.STOPPED)  # which the last heartbeat tells
    return finished


def _summary(plan: _Plan, progress: Progress, *, interrupted: bool, device: str) -> Summary:
    ledgers = [plan.join(stream).ledger for stream in plan.streams] if not interrupted else []
    one = plan.streams[0].folder.url if len(plan.streams) == 1 else plan.root.url
    now = progress.snapshot()
    return Summary(
        root=plan.root.url,
        stream=f"{one}: {', '.join(plan.names)}",
        complete=not interrupted,
        interrupted=interrupted,
        visit=now,
        samples=sum(ledger.samples for ledger in ledgers) or now.samples_committed,
        tokens=sum(ledger.tokens for ledger in ledgers) or now.tokens,
        bytes=sum(ledger.bytes for ledger in ledgers) or now.bytes,
        shards=sum(ledger.shards for ledger in ledgers) or now.shards_committed,
        skipped=0,
        device=device,
        sink="bucket" if plan.root.local_path is None else "disk",
        peak_memory=peak_memory(),
        retries=plan.root.stats.retries,
    )
