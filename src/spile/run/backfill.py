"""``--add-taps``: compute more taps for a finished dataset and store them in shards parallel to its own.

The same pipeline runs. A task is one shard of the dataset, with the same samples in the same order; it is committed
with all its batches or not at all.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, fields, replace

import numpy as np

from spile.compute.batches import Sizes, batches_in_order
from spile.compute.device import DeviceProducer, configure_jax, place_model
from spile.compute.producer import Control, Producer
from spile.compute.progress import Progress, StatusFiles, Summary, summarize
from spile.compute.sizes import choose_sizes
from spile.compute.torch_producers import make_torch_producer
from spile.errors import Damaged, RunMismatch, SpecError, UserError
from spile.models.model_files import ModelFiles
from spile.objects import Folder, open_folder
from spile.objects.preflight import preflight
from spile.run.pipeline import Pipeline, ShardTask, Sink
from spile.run.resolve import model_of_run, steering_of_run, tap_rows_of, use_device, wants_statistics
from spile.spec.identity import RunIdentity
from spile.spec.phase import Phase
from spile.spec.positions import ALL, refuse_mean_of_ids
from spile.spec.ranges import Ranges
from spile.spec.run import BackfillSpec, DataSpec, RunSpec
from spile.spec.sample import Sample, Skip
from spile.spec.taps import Tap, TapRows, row_bytes
from spile.store.cleanup import remove_unfinished
from spile.store.index import write_entry
from spile.store.layout import RUN
from spile.store.ledger import Ledger, ShardRecord
from spile.store.run import differences, mismatch, read_run
from spile.store.shard import CONTEXT, CONTEXT_OFFSETS
from spile.store.shard_reader import ShardReader
from spile.store.stored_stream import (
    Alignment,
    Stream,
    alignment,
    expected_streams,
    join_addition,
    open_streams,
    read_ledgers,
)
from spile.store.writer import StreamWriter


def add_taps(spec: BackfillSpec, *, progress: Progress | None = None, stop: threading.Event | None = None) -> Summary:
    """Compute taps for every row of a finished dataset, and store them next to it, shard for shard."""
    progress, control = progress or Progress(), Control(stop)
    configure_jax(spec.device)
    progress.phase(Phase.LOOKING, "at the dataset and the model")
    root = open_folder(spec.root)
    backfill = _check(spec, root)
    for warning in preflight(root):
        progress.log(warning)
    streams = backfill.streams
    progress.total_samples = sum(shard.count for stream in streams for shard in backfill.remaining(stream))
    ledgers, finished, device = list[Ledger](), True, "none: nothing was left to do"
    with ExitStack() as stack:
        producer = None
        if progress.total_samples:
            progress.phase(Phase.LOADING, "the model")
            producer = stack.enter_context(closing(backfill.load_model(progress)))
            device = producer.describe()
        for stream in streams:
            store = backfill.join(stream)
            if producer is None:
                finish_addition(stream, store)
            else:
                finished = backfill.add_to(stream, store, producer, progress, control)
            ledgers.append(store.ledger)
            if not finished:
                break
    place = streams[0].folder.url if len(streams) == 1 else root.url
    return summarize(
        root,
        ledgers,
        progress,
        stream=f"{place}: {', '.join(backfill.names)}",
        complete=finished,
        interrupted=not finished,
        skipped=0,
        device=device,
    )


def _read_matching_run(spec: BackfillSpec, root: Folder) -> RunIdentity:
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


def _choose_finished_streams(spec: BackfillSpec, root: Folder, streams: Sequence[Stream]) -> list[Stream]:
    """Return the streams to add to; refuse streams that are not finished."""
    chosen = [stream for stream in streams if spec.worker_id in (None, stream.number)]
    if not chosen:
        which = "" if spec.worker_id is None else f" {spec.worker_id}"
        raise SpecError("--add-taps", expected="a finished dataset", found=f"no stream{which} in {root.url}")
    split = expected_streams([stream.record for stream in streams])
    absent = set(range(split or 0)) - {stream.number for stream in streams}
    if absent and spec.worker_id is None:
        raise _unfinished(root, f"streams {Ranges.of(absent).text()} were never begun")
    read_ledgers(chosen)
    for stream in chosen:
        ledger = Ledger().plus(stream.commits)
        total = stream.record.identity.samples
        expected = ledger.required(total) if spec.max_samples is None else ledger.expected(total, spec.max_samples)
        if expected is None or Ranges([(0, expected)]) - ledger.done:
            of = "" if expected is None else f" of {expected}"
            raise _unfinished(root, f"{len(ledger.done)}{of} samples in stream {stream.number}")
    return chosen


def _unfinished(root: Folder, found: str) -> SpecError:
    return SpecError(
        "--add-taps",
        expected=f"a finished dataset in {root.url}",
        found=found,
        fix="finish it with the command that started it",
    )


def _refuse_existing_taps(taps: Sequence[Tap], streams: Sequence[Stream]) -> None:
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


def add_to_stream(
    stream: Stream,
    store: StreamWriter,
    remaining: Sequence[ShardRecord],
    producer: Producer,
    sizes: Sizes,
    *,
    control: Control,
    progress: Progress,
    after_commit: Callable[[], None] = lambda: None,
) -> bool:
    """Compute the added taps for the remaining shards.

    Returns:
        False if the control stopped it; incomplete shards are dropped.

    """
    tasks = _shard_tasks(stream, remaining, replace(sizes, groups=producer.groups))
    sink = _AlignedSink(store, after_commit, remaining)
    finished = Pipeline(producer, sink, control, progress, sizes).run(tasks)
    if finished:
        finish_addition(stream, store)
    return finished


def finish_addition(stream: Stream, store: StreamWriter) -> None:
    """Commit the samples that the stream skipped, so that both ledgers cover the same samples."""
    skips = [skip for commit in stream.commits for skip in commit.skipped if skip.index not in store.ledger.done]
    ends = [commit.end for commit in stream.commits if commit.end is not None]
    end = ends[-1] if ends and store.ledger.end is None else None
    if skips or end is not None:
        store.commit([], skips, end=end)
    store.finish()


def _shard_tasks(stream: Stream, shards: Iterable[ShardRecord], sizes: Sizes) -> Iterator[ShardTask]:
    """Yield a task for each shard, with the same samples in the same order."""
    known: list[int] = []
    for record in shards:
        samples = _read_samples(stream.open(record))
        yield ShardTask(tuple(batches_in_order(samples, sizes, known)), undivided=True)


def _read_samples(shard: ShardReader) -> list[Sample]:
    """Read the samples of a stored shard as they were computed."""
    names = (CONTEXT, CONTEXT_OFFSETS) if CONTEXT in shard.header.places else ("tokens", "offsets")
    all_tokens, starts = map(shard.read_tensor, names)
    found = []
    for place, note in enumerate(shard.notes):
        start, stop = shard.bounds(place)
        tokens, positions = all_tokens[starts[place] : starts[place + 1]], shard.positions(start, stop)
        roles = np.zeros(len(tokens), np.uint8)
        roles[positions] = shard.read_tensor("roles")[start:stop]
        known = {each.name: note[each.name] for each in fields(Sample) if each.name in note}
        found.append(Sample(**{**known, "tokens": tokens, "roles": roles, "positions": positions}))
    return found


class _AlignedSink(Sink):
    """A sink that commits a shard only if it holds the same rows, in the same order, as one of the dataset's."""

    def __init__(
        self, store: StreamWriter, after_commit: Callable[[], None], shards_of_dataset: Iterable[ShardRecord]
    ) -> None:
        super().__init__(store, after_commit)
        self._alignments: set[Alignment] = {alignment(record) for record in shards_of_dataset}

    def commit(self, record: ShardRecord | None, skipped: Sequence[Skip] = (), end: int | None = None) -> None:
        """Check the shard, then commit it."""
        if record is not None and alignment(record) not in self._alignments:
            raise Damaged(
                f"{record.name} holds other rows than the dataset's own shard of the same samples",
                expected="the same samples, tokens and roles in the same order",
            )
        super().commit(record, skipped, end)


@dataclass(frozen=True)
class _Backfill:
    """What is added to which streams, and by which model."""

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
    def extraction(self) -> RunSpec:
        """The spec of an extraction from which the producer and the sizes are derived."""
        run, asked = self.run, self.spec
        answer = 0 if run.generation is None else run.generation.max_new_tokens
        return RunSpec(
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

    def remaining(self, stream: Stream) -> list[ShardRecord]:
        """Return the shards of a stream for which these taps are not stored yet."""
        begun = next((added for added in stream.all_additions if added.taps == self.names), None)
        return list(stream.shards) if begun is None else begun.remaining(stream.shards)

    def load_model(self, progress: Progress) -> Producer:
        spec, taps = self.extraction, self.spec.taps
        if self.backend == "torch":
            return make_torch_producer(self.files, taps, spec, self.sizes.batch_tokens, progress)

        def prepare(producer: DeviceProducer) -> None:
            stream = next(stream for stream in self.streams if self.remaining(stream))
            sizes = replace(self.sizes, groups=producer.groups)
            producer.prepare(next(_shard_tasks(stream, self.remaining(stream), sizes)).batches[0])

        steering = steering_of_run(self.run, self.files.config)
        return place_model(self.files, taps, spec, row_bytes(self.rows), progress, prepare, steering)

    def join(self, stream: Stream) -> StreamWriter:
        """Join the store of the added taps of a stream."""
        shapes = {row.name: row.shape for row in self.rows if row.shape != (self.run.d_model,)}
        identity = replace(stream.record.identity, taps=self.spec.taps, shapes=shapes)
        store = join_addition(stream.folder, stream.record, identity, self.run)
        store.statistics = wants_statistics(self.spec.statistics)
        return store

    def add_to(
        self, stream: Stream, store: StreamWriter, producer: Producer, progress: Progress, control: Control
    ) -> bool:
        """Add the taps to one stream. Return False if stopped early."""
        remaining = self.remaining(stream)
        remove_unfinished(store.folder)
        progress.phase(Phase.RUNNING)
        expected = sum(shard.count for shard in remaining)
        with StatusFiles(self.extraction, store, progress, writes=True, expected=expected) as status:
            finished = add_to_stream(
                stream, store, remaining, producer, self.sizes, control=control, progress=progress,
                after_commit=status.committed,
            )  # fmt: skip
            progress.phase(Phase.DONE if finished else Phase.STOPPED)  # for the last heartbeat
        if finished:
            write_entry(self.root, stream.number)
        return finished


def _check(spec: BackfillSpec, root: Folder) -> _Backfill:
    """Check everything that can be checked before the weights are loaded. Nothing is written."""
    run = _read_matching_run(spec, root)
    streams = _choose_finished_streams(spec, root, open_streams(root, run))
    _refuse_existing_taps(spec.taps, streams)
    files, backend = model_of_run(run, root.url, spec.model, spec.revision, tokenizer=True)
    use_device(spec.device, backend)
    refuse_mean_of_ids(run.positions, spec.taps)
    last = files.config.n_layers - 1
    beyond = [str(tap) for tap in spec.taps if (tap.layer or 0) > last]
    if beyond:
        raise SpecError("--add-taps", expected=f"layers 0 to {last}, as the model has", found=", ".join(beyond))
    rows = tap_rows_of(files, spec.taps, run.store_dtype, backend)
    return _Backfill(spec, root, run, streams, files, backend, rows)
