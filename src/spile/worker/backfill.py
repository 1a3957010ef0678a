"""``--add-taps``: compute more taps for a finished dataset and store them in shards parallel to its own.

The same pipeline runs. A task is one shard of the dataset, with the same samples in the same order; it is committed
with all its batches or not at all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from spile.errors import Damaged, ModelError, RunMismatch, SpecError, UserError
from spile.models.decoder import Steering
from spile.models.model_files import ModelFiles
from spile.objects import Folder, open_folder
from spile.objects.preflight import preflight
from spile.spec.identity import RunIdentity
from spile.spec.phase import Phase
from spile.spec.positions import ALL, refuse_mean_of_ids
from spile.spec.ranges import Ranges
from spile.spec.records import known_fields
from spile.spec.run import BackfillSpec, DataSpec, ExtractSpec
from spile.spec.sample import Sample, Skip
from spile.spec.taps import Tap, TapRows, row_bytes
from spile.store.cleanup import remove_remains
from spile.store.index import write_entry
from spile.store.layout import RUN
from spile.store.ledger import Ledger, ShardRecord
from spile.store.shard import CONTEXT, CONTEXT_OFFSETS, POSITIONS
from spile.store.shard_reader import ShardReader
from spile.store.stream import StreamStore, differences, mismatch, read_run
from spile.store.streams import (
    Alignment,
    Stream,
    alignment,
    expected_streams,
    join_addition,
    open_streams,
    read_ledgers,
)
from spile.worker.batches import Sizes, batches_in_order
from spile.worker.device import DeviceProducer, configure_jax, place_model
from spile.worker.pipeline import Pipeline, ShardTask, Sink
from spile.worker.producer import Control, Producer
from spile.worker.progress import Progress, StatusFiles, Summary, peak_memory
from spile.worker.resolve import find_model, rows_of, steering_of_run, use_device, wants_statistics
from spile.worker.sizes import choose_sizes
from spile.worker.torch_producers import torch_producer


def refuse_other_numbers(spec: BackfillSpec, root: Folder) -> RunIdentity:
    """Return the run of the dataset; refuse settings that differ from it."""
    run = read_run(root)
    if run is None:
        raise UserError(f"no dataset at {root.url}", expected=f"a folder with {RUN}", found="none")
    if run.unknown:
        raise RunMismatch(
            f"{root.url} was written by a newer version of spile",
            expected="a run with settings that this version knows",
            found=", ".join(sorted(run.unknown)),
            fix="upgrade spile to add to it",
        )
    asked = {
        "dtype": None if spec.dtype == "auto" else spec.dtype,
        "store_dtype": spec.store_dtype,
        "positions": spec.positions,
    }
    given = {name: value for name, value in asked.items() if value is not None}
    differing = differences({name: getattr(run, name) for name in given}, given)
    if differing:
        raise mismatch(
            root.url,
            differing,
            "leave them out, because added rows always have the settings of the stored ones",
        )
    capture = None if run.generation is None else run.generation.capture
    if capture == "none" or (capture == "answer" and run.positions == ALL):
        raise SpecError(
            "--add-taps",
            expected="a dataset that holds all tokens of its samples",
            found=f"answers made with --capture {capture}",
        )
    return run


def finished_streams(spec: BackfillSpec, root: Folder, streams: Sequence[Stream]) -> list[Stream]:
    """Return the streams to add to; refuse streams that are not finished."""
    chosen = [stream for stream in streams if spec.worker_id in (None, stream.number)]
    if not chosen:
        which = "" if spec.worker_id is None else f" {spec.worker_id}"
        raise SpecError("--add-taps", expected="a finished dataset", found=f"no stream{which} in {root.url}")
    expected = expected_streams([stream.record for stream in streams])
    absent = set(range(expected or 0)) - {stream.number for stream in streams}
    if absent and spec.worker_id is None:
        raise _unfinished(root, f"streams {Ranges.of(absent).text()} were never begun")
    read_ledgers(chosen)
    for stream in chosen:
        ledger = Ledger().plus(stream.commits)
        samples = stream.record.identity.samples
        total = ledger.end if samples is None else samples
        bounds = [count for count in (total, spec.max_samples) if count is not None]
        if not bounds or Ranges([(0, min(bounds))]) - ledger.done:
            of = f" of {min(bounds)}" if bounds else ""
            raise _unfinished(root, f"{len(ledger.done)}{of} samples in stream {stream.number}")
    return chosen


def _unfinished(root: Folder, found: str) -> SpecError:
    return SpecError(
        "--add-taps",
        expected=f"a finished dataset in {root.url}",
        found=found,
        fix="finish it with the command that started it, or give the --max-samples that it was made with",
    )


def refuse_taps_there(taps: Sequence[Tap], streams: Sequence[Stream]) -> None:
    """Refuse taps that the dataset has, and taps of an unfinished addition with other taps."""
    names = tuple(map(str, taps))
    for stream in streams:
        own = set(names) & {str(tap) for tap in stream.record.identity.taps}
        if own:
            raise _taps_exist(own, f"they are in {stream.folder.url} already")
        for added in stream.all_additions:
            if added.taps != names and set(names) & set(added.taps):
                words = " ".join(added.taps)
                state = "added already" if added in stream.additions else f"begun: --add-taps {words} finishes them"
                raise _taps_exist(set(names) & set(added.taps), f"in {stream.folder.url} {words} are {state}")


def _taps_exist(taps: set[str], found: str) -> SpecError:
    return SpecError(
        f"--add-taps {' '.join(sorted(taps))}", expected="taps that the dataset does not have", found=found
    )


def dataset_model(spec: BackfillSpec, run: RunIdentity, root: Folder) -> tuple[ModelFiles, Literal["jax", "torch"]]:
    """Return the model of the dataset; refuse other weights or another tokenizer."""
    again = ExtractSpec(
        model=spec.model or run.model,
        revision=spec.revision or (run.revision if spec.model is None else None),
        adapter=run.adapter,
    )
    files, backend = find_model(again, run, root.url)
    use_device(spec.device, backend)
    refuse_mean_of_ids(run.positions, spec.taps)
    beyond = [str(tap) for tap in spec.taps if (tap.layer or 0) >= files.config.n_layers]
    if beyond:
        raise SpecError(
            "--add-taps", expected=f"layers 0 to {files.config.n_layers - 1}, as the model has", found=", ".join(beyond)
        )
    for what, wanted, found in (
        ("weights", run.weights, files.weights_hash()),
        ("tokenizer", run.tokenizer, files.tokenizer_hash() if run.tokenizer != "none" else "none"),
    ):
        if found != wanted:
            raise ModelError(
                f"{files.name} is not the model of {root.url}",
                expected=f"{what} {wanted}",
                found=f"{what} {found}",
                fix=f"give the model that made it: {run.model}" + (f" at {run.revision}" if run.revision else ""),
            )
    return files, backend


def add_to_stream(
    stream: Stream,
    store: StreamStore,
    left: Sequence[ShardRecord],
    producer: Producer,
    sizes: Sizes,
    *,
    control: Control,
    progress: Progress,
    after_commit: Callable[[], None] = lambda: None,
) -> bool:
    """Compute the added taps for the shards that are ``left``.

    Returns:
        False if the control stopped it; incomplete shards are dropped.

    """
    sink = _AlignedSink(store, left, after_commit)
    tasks = shard_tasks(stream, left, sizes, producer.groups, some=store.run.positions != ALL)
    finished = Pipeline(producer, sink, control, progress, sizes).run(tasks)
    if finished:
        finish_addition(stream, store)
    return finished


def finish_addition(stream: Stream, store: StreamStore) -> None:
    """Commit the samples that the stream skipped, so that both ledgers cover the same samples."""
    skips = [skip for commit in stream.commits for skip in commit.skipped if skip.index not in store.ledger.done]
    ends = [commit.end for commit in stream.commits if commit.end is not None]
    end = ends[-1] if ends and store.ledger.end is None else None
    if skips or end is not None:
        store.commit([], skips, end=end)
    store.finish()


def shard_tasks(
    stream: Stream, left: Iterable[ShardRecord], sizes: Sizes, groups: int, *, some: bool
) -> Iterator[ShardTask]:
    """Yield a task for each shard that is ``left``, with the same samples in the same order.

    Args:
        stream: The stream of the dataset.
        left: Its shards without the added taps.
        sizes: The limits of a batch.
        groups: Groups per batch.
        some: Whether only some tokens have rows (``--positions``).

    """
    known: list[int] = []
    sizes = replace(sizes, groups=groups)
    for record in left:
        samples = _samples(stream.open(record), some)
        yield ShardTask(tuple(batches_in_order(samples, sizes, known)), undivided=True)


def _samples(shard: ShardReader, some: bool) -> list[Sample]:
    """Read the samples of a stored shard as they were computed."""
    every, starts = (
        shard.read_tensor(name) for name in ((CONTEXT, CONTEXT_OFFSETS) if some else ("tokens", "offsets"))
    )
    found = []
    for place, note in enumerate(shard.notes):
        rows = slice(*shard.bounds(place))
        tokens, roles, positions = every[starts[place] : starts[place + 1]], shard.read_tensor("roles")[rows], None
        if some:
            positions = shard.read_tensor(POSITIONS)[rows]
            known, roles = roles, np.zeros(len(tokens), np.uint8)
            roles[positions] = known
        found.append(Sample(**{**known_fields(Sample, note), "tokens": tokens, "roles": roles, "positions": positions}))
    return found


class _AlignedSink(Sink):
    """A sink that commits a shard only if it holds the same rows, in the same order, as one of the dataset's."""

    def __init__(
        self, store: StreamStore, wanted: Iterable[ShardRecord], after_commit: Callable[[], None] = lambda: None
    ) -> None:
        super().__init__(store, after_commit)
        self._wanted: set[Alignment] = {alignment(record) for record in wanted}

    def commit(self, record: ShardRecord | None, skipped: Sequence[Skip], end: int | None) -> None:
        """Check the shard, then commit it."""
        if record is not None and alignment(record) not in self._wanted:
            raise Damaged(
                f"{record.name} holds other rows than the dataset's own shard of the same samples",
                expected="the same samples, tokens and roles in the same order",
            )
        super().commit(record, skipped, end)


def add_taps(spec: BackfillSpec, *, progress: Progress | None = None, stop: threading.Event | None = None) -> Summary:
    """Compute taps for every row of a finished dataset, and store them next to it, shard for shard."""
    progress, stop = progress or Progress(), stop or threading.Event()
    configure_jax(spec.device)
    progress.phase(Phase.LOOKING, "at the dataset and the model")
    root = open_folder(spec.root)
    for warning in preflight(root):
        progress.log(warning)
    plan = _plan(spec, root)
    left = sum(shard.count for stream in plan.streams for shard in _remaining_shards(stream, plan))
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
            finish_addition(stream, plan.join(stream))
    return _summary(plan, progress, interrupted=not finished, device=device)


@dataclass(frozen=True)
class _Plan:
    """What is added to which streams, and by which model. Nothing is written yet."""

    spec: BackfillSpec
    root: Folder
    run: RunIdentity
    streams: Sequence[Stream]
    files: ModelFiles
    backend: str
    rows: tuple[TapRows, ...]
    steering: Steering | None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(map(str, self.spec.taps))

    @property
    def extraction(self) -> ExtractSpec:
        """The run spec that the producer and the sizes are derived from."""
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
            device=asked.device,
            positions=run.positions,
        )

    @property
    def sizes(self) -> Sizes:
        config = None if self.backend == "torch" else self.files.config
        return choose_sizes(self.extraction, row_bytes(self.rows), config)

    def producer(self, progress: Progress) -> Any:
        """Load the model onto its devices."""
        spec, taps = self.extraction, self.spec.taps
        if self.backend == "torch":
            return torch_producer(self.files, taps, spec, self.sizes.batch_tokens, progress)

        def prepare(producer: DeviceProducer) -> None:
            todo = (task for stream in self.streams for task in self.tasks(stream, producer.groups))
            first = next((task for task in todo if task.batches), None)
            if first is not None:
                producer.prepare(first.batches[0])

        return place_model(self.files, taps, spec, row_bytes(self.rows), progress, prepare, self.steering)

    def tasks(self, stream: Stream, groups: int) -> Iterator[ShardTask]:
        return shard_tasks(stream, _remaining_shards(stream, self), self.sizes, groups, some=self.run.positions != ALL)

    def join(self, stream: Stream) -> StreamStore:
        """Join the store of the added taps of a stream."""
        shapes = {row.name: row.shape for row in self.rows if row.shape != (self.run.d_model,)}
        identity = replace(stream.record.identity, taps=self.spec.taps, shapes=shapes)
        store = join_addition(stream.folder, stream.record, identity, self.run)
        store.statistics = wants_statistics(self.spec.statistics)
        return store


def _plan(spec: BackfillSpec, root: Folder) -> _Plan:
    """Check everything that can be checked before the weights are loaded."""
    run = refuse_other_numbers(spec, root)
    streams = finished_streams(spec, root, open_streams(root, run))
    refuse_taps_there(spec.taps, streams)
    files, backend = dataset_model(spec, run, root)
    rows = rows_of(files, spec.taps, run.store_dtype, backend)
    return _Plan(spec, root, run, streams, files, backend, rows, steering_of_run(run, files.config))


def _remaining_shards(stream: Stream, plan: _Plan) -> list[ShardRecord]:
    """Return the shards of a stream for which these taps are not stored yet."""
    begun = next((added for added in stream.all_additions if added.taps == plan.names), None)
    return list(stream.shards) if begun is None else begun.remaining(stream.shards)


def _add_to(stream: Stream, plan: _Plan, producer: Any, progress: Progress, stop: threading.Event) -> bool:
    """Add the taps to one stream. Return False if stopped early."""
    store, left = plan.join(stream), _remaining_shards(stream, plan)
    remove_remains(store.folder)
    expected = sum(shard.count for shard in left)
    progress.phase(Phase.RUNNING)
    with StatusFiles(plan.extraction, store, progress, pulse=True, expected=expected) as status:
        finished = add_to_stream(
            stream,
            store,
            left,
            producer,
            plan.sizes,
            control=Control(stop),
            progress=progress,
            after_commit=status.committed,
        )
        progress.phase(Phase.DONE if finished else Phase.STOPPED)  # for the last heartbeat
    if finished:
        write_entry(plan.root, stream.number)
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
        progress=now,
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
