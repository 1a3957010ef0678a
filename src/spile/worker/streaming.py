"""Train without storing: the rows of a running model as shuffled batches.

The pipeline of ``extract`` computes the samples in the order of the data. Its rows go to a feed, which collects them in
groups of consecutive samples and gives each group to the shuffled reader as if it were a shard in memory. So the
selection, the windows, the shuffle buffer and the state are those of a stored dataset that is read with
``order="data"``, and so are the batches.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, chain
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes  # noqa: F401  registers bfloat16
import numpy as np
import numpy.typing as npt

from spile.data.stream import SampleReader
from spile.errors import Failure, SpecError, SpileError, UserError, printable
from spile.objects.folder import iterate_ahead
from spile.reading.blocks import MemoryShard, StoredBlocks
from spile.reading.dataset import Dataset
from spile.reading.dataset import open as open_dataset
from spile.reading.readers import ShuffledReaders
from spile.reading.rows import BlockOptions, BlockSource, Read, ReaderClosed, RowGroup
from spile.reading.samples import no_tap
from spile.reading.shuffle import RowOrder, ShufflePlan
from spile.spec.ranges import Ranges
from spile.spec.run import ExtractSpec
from spile.spec.sample import Sample, Skip
from spile.spec.taps import Tap, TapRows, row_bytes
from spile.store.ledger import ShardRecord
from spile.store.shard import decode, split
from spile.store.stream import StreamStore, join_run, write_spec
from spile.worker.batches import Batch
from spile.worker.device import configure_jax, place_model
from spile.worker.extract import end_of_stream, join, make_producer
from spile.worker.pipeline import Sink, run_pipeline
from spile.worker.producer import Control, Producer, RowBlock, with_positions
from spile.worker.progress import Progress
from spile.worker.resolve import ResolvedRun, find_model, read_steering, resolve
from spile.worker.sizes import sizes_for_stream
from spile.worker.torch_producers import torch_producer

_Array = npt.NDArray[Any]
_Rows = dict[str, _Array]

_POLL = 0.5
"""Seconds between checks whether a waiting thread should end."""
_LEAST_WINDOW = 4
"""Batches whose samples are packed together, at least: fewer would waste computation on padding."""
_SHARD_BYTES = 64e6
"""Bytes of rows that the pipeline plans at once if nothing is stored."""


# -- the feed ---------------------------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Group:
    """Consecutive samples, and their rows as far as they are computed."""

    samples: list[Sample] = field(default_factory=list)
    rows: dict[int, _Rows] = field(default_factory=dict)
    """The rows of each sample, by its index and tap."""
    closed: bool = False
    last: bool = False

    @property
    def complete(self) -> bool:
        return self.closed and len(self.rows) == len(self.samples)


class Feed:
    """Collects the rows of a pass over the data in groups, and holds the model up while the reader has enough."""

    def __init__(self, plan: ShufflePlan, stored: Callable[[Sample], _Rows | None]) -> None:
        self._plan, self._stored = plan, stored
        """``stored``: returns the rows of a sample if an earlier run stored them."""
        self._groups: deque[_Group] = deque()
        self._of: dict[int, _Group] = {}
        self._open = _Group()
        self._filled = 0
        self._held = 0
        self._starving, self._ended = False, False
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    @property
    def buffer_rows(self) -> int:
        """The size of the shuffle buffer."""
        return self._plan.buffer_rows

    def watch(self, items: Iterable[Sample | Skip], first: int, done: Ranges) -> Iterator[Sample | Skip]:
        """Yield the items that must be computed, and note the samples that will be given, in groups."""
        parts, part = self._plan.parts, self._plan.part
        for item in items:
            mine = isinstance(item, Skip) or item.index % parts == part
            if mine and isinstance(item, Sample) and item.index >= first:
                self._add(item, stored=item.index in done)
            if mine and item.index not in done:
                yield item
        with self._changed:
            if self._open.samples:
                self._close(last=True)
            self._ended = True
            self._changed.notify_all()

    def _add(self, sample: Sample, *, stored: bool) -> None:
        with self._changed:
            if self._filled >= self._plan.group_rows:
                self._close(last=False)
            self._open.samples.append(sample)
            self._of[sample.index] = self._open
            self._filled += sample.rows
            if stored or not sample.rows:
                self._open.rows[sample.index] = {}

    def _close(self, *, last: bool) -> None:
        self._open.closed, self._open.last = True, last
        self._groups.append(self._open)
        self._open, self._filled = _Group(), 0
        self._changed.notify_all()

    def put(self, samples: Sequence[Sample], rows: _Rows) -> None:
        """Add the rows of some samples. Wait while the reader has enough, and does not wait for rows itself."""
        with self._changed:
            while self._held > self._plan.group_rows and not self._starving and self._error is None:
                self._changed.wait(_POLL)
            start = 0
            for sample in samples:
                stop = start + sample.rows
                if sample.rows and sample.index in self._of:
                    self._of[sample.index].rows[sample.index] = {tap: each[start:stop] for tap, each in rows.items()}
                    self._held += sample.rows
                start = stop
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """End the feed: the reader gets this error, and nothing waits any more."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def groups(self, taps: Sequence[str]) -> Iterator[tuple[list[Sample], bool, _Rows]]:
        """Yield the samples of each group, whether it is the last, and its rows by tap."""
        while (group := self._next()) is not None:
            samples = group.samples
            rows = [group.rows.get(sample.index) or self._stored(sample) for sample in samples if sample.rows]
            joined = {tap: np.concatenate([each[tap] for each in rows if each is not None]) for tap in taps if rows}
            with self._changed:
                self._held -= sum(len(next(iter(each.values()))) for each in group.rows.values() if each)
                self._changed.notify_all()
            yield samples, group.last, joined

    def _next(self) -> _Group | None:
        with self._changed:
            self._starving = True
            try:
                while not (self._groups and self._groups[0].complete):
                    if self._error is not None:
                        raise self._error
                    if self._ended and not self._groups:
                        return None
                    self._changed.wait(_POLL)
            finally:
                self._starving = False
            group = self._groups.popleft()
            for sample in group.samples:
                del self._of[sample.index]
            return group


class FeedSink(Sink):
    """A sink that gives rows to a feed, and to the store of a stream if there is one."""

    def __init__(self, feed: Feed, kinds: Sequence[TapRows], store: Sink | None) -> None:
        self._feed, self._kinds, self._store = feed, kinds, store
        self.remote, self.bytes_per_token = False, row_bytes(kinds)

    def begin(self, samples: Sequence[Sample]) -> Any:
        """Return what takes the rows of these samples."""
        builder = None if self._store is None else self._store.begin(samples)
        return _FeedBuilder(self._feed, self._kinds, samples, builder)

    def add_predictions(self, record: ShardRecord, predictions: Any) -> ShardRecord:
        """Answers are not streamed."""
        raise NotImplementedError

    def commit(self, record: ShardRecord | None, skipped: Sequence[Skip], end: int | None) -> None:
        """Commit to the store, if there is one."""
        if self._store is not None:
            self._store.commit(record, skipped, end)


class _FeedBuilder:
    """Passes rows to the feed as soon as all taps of a batch are there."""

    def __init__(self, feed: Feed, kinds: Sequence[TapRows], samples: Sequence[Sample], builder: Any) -> None:
        self._feed, self._kinds, self._samples, self._builder = feed, kinds, samples, builder
        self._offsets = np.concatenate([[0], np.cumsum([sample.rows for sample in samples])])
        self._held: dict[int, _Rows] = {}

    def write(self, tap: int, row: int, rows: npt.NDArray[np.generic]) -> None:
        """Take the rows of some samples at one tap; the taps of the same rows follow each other."""
        if self._builder is not None:
            self._builder.write(tap, row, rows)
        kind, held = self._kinds[tap], self._held.setdefault(row, {})
        # The memory of the rows is used again after this call.
        held[kind.name] = decode(*split(rows.view(np.int8), kind.dtype)) if kind.scaled else np.array(rows)
        if tap + 1 == len(self._kinds):
            first, last = np.searchsorted(self._offsets, [row, row + len(rows)])
            self._feed.put(self._samples[first:last], self._held.pop(row))

    def finish(self, samples: int | None = None) -> Any:
        """Return the record of the shard, or the size of the rows."""
        return (
            ShardRecord("", 0, 0, (0, 0), {}, Ranges(), 0, 0)
            if self._builder is None
            else self._builder.finish(samples)
        )

    def abort(self) -> None:
        """Discard an unfinished shard."""
        if self._builder is not None:
            self._builder.abort()


# -- workers ----------------------------------------------------------------------------------------------------------


class WorkerJob(NamedTuple):
    """What a worker needs to load the model: the resolved spec without its data."""

    spec: ExtractSpec
    taps: tuple[Tap, ...]
    bytes_per_token: int
    batch_tokens: int

    def load(self) -> Producer:
        """Load the model onto the devices of this process."""
        configure_jax()
        progress = Progress()
        files, backend = find_model(self.spec, None, self.spec.output)
        if backend == "torch":
            return torch_producer(files, self.taps, self.spec, self.batch_tokens, progress)
        steering = read_steering(self.spec.steer, files.config)
        return place_model(
            files, self.taps, self.spec, self.bytes_per_token, progress, lambda _producer: None, steering
        )


class BatchComputer:
    """A model in a worker: computes the batches that it is sent."""

    def __init__(self, job: WorkerJob) -> None:
        self._producer = job.load()

    def groups(self) -> int:
        """Return the number of groups that its devices compute at once."""
        return self._producer.groups

    def compute(self, batch: Batch) -> list[list[RowBlock]]:
        """Return the rows of each tap, for each group that has samples."""
        self._producer.prepare(batch)
        self._producer.await_program(batch, lambda: False)
        found = self._producer.fetch(self._producer.start(batch))
        stored = [sum(sample.rows for sample in batch.of(group)) for group in range(len(batch.groups))]
        return [[RowBlock(group, np.array(rows[: stored[group]])) for group, rows in of_tap] for of_tap in found]


class ProcessWorker:
    """A process on this machine, over a local socket that only it can use."""

    def __init__(self, job: WorkerJob, environment: Mapping[str, str]) -> None:
        folder, key = tempfile.mkdtemp(prefix="spile-worker-"), secrets.token_bytes(32)
        with Listener(str(Path(folder) / "socket"), "AF_UNIX", authkey=key) as listener:
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-m", "spile.worker.streaming", str(listener.address)],
                stdin=subprocess.PIPE,
                env={**os.environ, **environment},
            )
            self._end = weakref.finalize(self, _end_process, self._process, folder)
            assert self._process.stdin is not None  # noqa: S101 - it is a pipe
            self._process.stdin.write(key.hex().encode() + b"\n")
            self._process.stdin.flush()  # the pipe stays open: its end tells the worker that this process ended
            self._connection = self._accept(listener)
        self._connection.send(job)
        self.groups = int(self._receive())

    def _accept(self, listener: Listener) -> Any:
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(listener.accept()), daemon=True)
        thread.start()
        while thread.is_alive():
            if self._process.poll() is not None:
                raise self._failure()
            thread.join(_POLL)
        return found[0]

    def start(self, batch: Batch) -> None:
        """Send a batch and return at once; the worker reads it while it computes the one before."""
        try:
            self._connection.send(batch)
        except OSError as error:
            raise self._failure() from error

    def fetch(self, pending: Any) -> list[list[RowBlock]]:  # noqa: ARG002 - batches come back in their order
        """Wait for the rows of the oldest batch that was sent."""
        layout = self._receive()
        return [[self._block(*each) for each in of_tap] for of_tap in layout]

    def _block(self, group: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> RowBlock:
        rows = np.empty(shape, dtype)
        if rows.nbytes:
            self._connection.recv_bytes_into(rows.view(np.uint8).reshape(-1).data)
        return RowBlock(group, rows)

    def _receive(self) -> Any:
        try:
            found = self._connection.recv()
        except (EOFError, OSError) as error:
            raise self._failure() from error
        if isinstance(found, SpileError):
            raise found
        return found

    def _failure(self) -> Failure:
        code = self._process.poll()
        return _worker_ended("" if code is None else f"exit code {code}")

    def close(self) -> None:
        """End the process."""
        self._end()


def _end_process(process: subprocess.Popen[bytes], folder: str) -> None:
    process.terminate()
    process.communicate()  # closes the pipe, too
    shutil.rmtree(folder, ignore_errors=True)


def _worker_ended(how: str) -> Failure:
    return Failure("a worker of the stream ended", found=how, fix="continue from the last state_dict()")


class RayWorker:
    """An actor on a Ray cluster, with a GPU of its own if the cluster has GPUs."""

    def __init__(self, job: WorkerJob) -> None:
        import ray

        self._ray = ray
        if not ray.is_initialized():
            raise UserError("workers", expected="a connection to Ray", found="none", fix="call ray.init() first")
        options = {"num_gpus": 1} if ray.cluster_resources().get("GPU") else {"num_cpus": 1}
        self._actor = ray.remote(**options)(BatchComputer).remote(job)
        self.groups = int(ray.get(self._actor.groups.remote()))

    def start(self, batch: Batch) -> Any:
        """Send a batch and return at once."""
        return self._actor.compute.remote(batch)

    def fetch(self, pending: Any) -> list[list[RowBlock]]:
        """Wait for the rows of a batch."""
        try:
            return list(self._ray.get(pending))
        except self._ray.exceptions.RayActorError as error:
            raise _worker_ended(str(error).splitlines()[0]) from error

    def close(self) -> None:
        """End the actor."""
        self._ray.kill(self._actor)


Workers = int | str | Sequence[Mapping[str, str]]
"""The number of processes, ``ray:4`` for actors, or the environment variables of each process."""


class WorkerProducer(Producer):
    """The models of several workers as one producer: each worker computes some groups of every batch."""

    def __init__(self, job: WorkerJob, workers: Workers) -> None:
        make: list[Callable[[], ProcessWorker | RayWorker]]
        if isinstance(workers, str):
            kind, _, count = workers.partition(":")
            if kind != "ray" or not count.isdecimal() or not int(count):
                raise SpecError("workers", expected="a number, ray:4, or a list of variables", found=repr(workers))
            make = [partial(RayWorker, job)] * int(count)
        else:
            each = [{}] * workers if isinstance(workers, int) else workers
            make = [partial(ProcessWorker, job, variables) for variables in each]
        if not make:
            raise SpecError("workers", expected="at least one", found=workers)
        with ThreadPoolExecutor(len(make)) as pool:  # models load at the same time
            self._workers = list(pool.map(lambda call: call(), make))
        ends = list(accumulate(worker.groups for worker in self._workers))
        self._first = [0, *ends]
        self.groups, self.owned = ends[-1], range(ends[-1])

    def start(self, batch: Batch) -> list[tuple[int, object]]:
        """Send each worker its groups."""
        found = []
        for number, worker in enumerate(self._workers):
            groups = batch.groups[self._first[number] : self._first[number + 1]]
            if any(groups):
                found.append((number, worker.start(Batch(groups, batch.rows, batch.length))))
        return found

    def fetch(self, pending: object) -> Iterable[Sequence[RowBlock]]:
        """Wait for all workers; return, for each tap, the rows of all groups."""
        assert isinstance(pending, list)  # noqa: S101 - start returned it
        parts = [(self._first[number], self._workers[number].fetch(each)) for number, each in pending]
        return [
            [RowBlock(first + group, rows) for first, taps in parts for group, rows in taps[tap]]
            for tap in range(len(parts[0][1]))
        ]

    def describe(self) -> str:
        """Return one line for people."""
        return f"{len(self._workers)} workers"

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.close()


def serve(address: str, key: bytes) -> None:
    """Be a worker: load the model that the other end names, and compute what it sends."""
    with Client(address, authkey=key) as connection:
        try:
            computing = BatchComputer(connection.recv())
            connection.send(computing.groups())
            for batch in iterate_ahead(iter(connection.recv, None), 2):
                blocks = computing.compute(batch)
                connection.send([[(group, rows.shape, rows.dtype) for group, rows in of_tap] for of_tap in blocks])
                for block in chain.from_iterable(blocks):
                    if block.rows.nbytes:
                        connection.send_bytes(np.ascontiguousarray(block.rows).view(np.uint8).reshape(-1).data)
        except SpileError as error:
            connection.send(error)
        except (EOFError, OSError):
            return  # the other end is gone


# -- the stream -------------------------------------------------------------------------------------------------------


class LiveBlocks(BlockSource):
    """Taps of a running model, which are computed in the order of the data only."""

    def __init__(self, stream: ActivationStream, taps: tuple[str, ...], options: BlockOptions) -> None:
        self._stream, self._taps, self._options = stream, taps, options
        self.selection, self.window = options.selection, options.window
        self._feeds: deque[Feed] = deque(maxlen=1)

    def types(self) -> dict[str, tuple[np.dtype[Any], int]]:
        """Return the dtype and the number of columns of each tap."""
        kinds = {kind.name: kind for kind in self._stream.run.rows}
        types = {tap: np.dtype("float32" if kinds[tap].scaled else kinds[tap].dtype) for tap in self._taps}
        return {tap: (dtype, self.window * kinds[tap].width) for tap, dtype in types.items()}

    def groups(self, plan: ShufflePlan, first: int) -> Iterator[RowGroup]:
        """Compute the samples in the order of the data, from sample ``first`` on, and yield them in groups."""
        for samples, last, rows in self._stream.compute(plan, first, self._taps, self._feeds.append):
            shard = MemoryShard(self._stream.run.spec.data.worker_id, samples, rows)
            yield RowGroup(samples[0].index, last, self._reads(shard))

    def cancel(self) -> None:
        """End the wait for rows: the reader was closed."""
        for feed in self._feeds:
            feed.fail(ReaderClosed())

    def _reads(self, shard: MemoryShard) -> Iterator[Read]:
        if not shard.record.tokens:
            return
        blocks = StoredBlocks(self._taps, [(shard, shard.record)], self._options)
        places = np.arange(shard.record.count)
        yield from blocks.reads(places, np.zeros_like(places), 1)


class ActivationStream(ShuffledReaders):
    """The activations of a running model, with the readers of a dataset: nothing is stored unless that is asked for.

    Each iteration computes the data again, except what is stored. A new reader ends the one before it.
    """

    def __init__(
        self, spec: ExtractSpec, *, store: bool, workers: Workers | None = None, progress: Progress | None = None
    ) -> None:
        if spec.data.max_tokens is not None or spec.data.max_bytes is not None:
            raise SpecError("max_tokens and max_bytes", expected="max_samples, or the number of batches you take")
        self._progress, self._store, self._workers = progress or Progress(), store, workers
        self._spec = spec
        if not store:  # a folder that does not exist: nothing is read from it or written to it
            nowhere = Path(tempfile.gettempdir()) / f"spile-stream-{secrets.token_hex(8)}"
            self._spec = replace(spec, output=str(nowhere))
        configure_jax()
        self.run: ResolvedRun = resolve(self._spec, self._progress.timeline)
        self._producer: Producer | None = None
        self._lock = threading.Lock()
        self._current: tuple[Feed, threading.Event, threading.Thread] | None = None

    def __repr__(self) -> str:
        return f"<stream of {printable(self.place)}: {', '.join(self.taps)}>"

    @property
    def place(self) -> str:
        """The model and the data."""
        return f"{self.run.identity.model} on {self.run.samples.location}"

    @property
    def taps(self) -> tuple[str, ...]:
        """The taps that are computed."""
        return tuple(kind.name for kind in self.run.rows)

    def shuffled(self, tap: Any, batch_rows: int = 4096, *, order: RowOrder = "data", **how: Any) -> Any:
        """Return shuffled batches as :meth:`spile.Dataset.shuffled` does it, in the order of the data."""
        if order != "data":
            raise UserError("order", expected="data: samples are computed in their order", found=repr(order))
        return super().shuffled(tap, batch_rows, order=order, **how)

    def _source(self, taps: tuple[str, ...], options: BlockOptions) -> Any:
        for tap in taps:
            if tap not in self.taps:
                raise no_tap(tap, self.taps)
        if options.streams is not None:
            raise UserError("streams", expected="a stored dataset", found=options.streams)
        return LiveBlocks(self, taps, options)

    def _identify(self, source: Any) -> str:  # noqa: ARG002
        data = self.run.stream_identity.compared()
        text = f"{self.run.identity.fingerprint()} {sorted(data.items())}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def compute(
        self, plan: ShufflePlan, first: int, taps: Sequence[str], begun: Callable[[Feed], None]
    ) -> Iterator[tuple[list[Sample], bool, _Rows]]:
        """Compute the samples from number ``first`` on, in a thread, and yield them in groups with their rows.

        ``begun`` gets the feed of the rows before the first group.
        """
        if self._store and plan.parts > 1:
            raise UserError("part", expected="one reader if rows are stored", found=f"{plan.parts} readers")
        with self._lock:
            self._end(UserError("a reader of this stream was used again", found="another one began after it"))
            stop = threading.Event()
            stream, done = self._join() if self._store else (None, Ranges())
            feed = Feed(plan, partial(self._stored_rows, open_dataset(self._spec.output) if len(done) else None))
            work = partial(self._run, feed, first, stream, done, stop)
            thread = threading.Thread(target=work, name="spile-stream", daemon=True)
            mine = self._current = feed, stop, thread
            thread.start()
        begun(feed)
        try:
            yield from feed.groups(taps)
        finally:
            with self._lock:
                if self._current is mine:
                    self._end(ReaderClosed())

    def _end(self, why: BaseException) -> None:
        """End the pass that is running, if any: its reader gets this error if it is used again."""
        if self._current is not None:
            feed, stop, thread = self._current
            stop.set()
            feed.fail(why)
            thread.join()
            self._current = None

    def _run(self, feed: Feed, first: int, stream: StreamStore | None, done: Ranges, stop: threading.Event) -> None:
        try:
            before = Ranges([(0, first)]) if first else Ranges()
            # With a store, also what was given before a crash and not stored is computed.
            known = before if stream is None else before - (before - done)
            ledger = None if stream is None else stream.ledger
            reader = self.run.samples.read(known, () if ledger is None else ledger.parts, None)
            try:
                if self._pass(feed, reader, first, stream, done, stop) and stream is not None:
                    stream.finish()
            finally:
                reader.close()
        except BaseException as error:  # noqa: BLE001  raised in the reader
            feed.fail(error)

    def _pass(
        self,
        feed: Feed,
        reader: SampleReader,
        first: int,
        stream: StreamStore | None,
        done: Ranges,
        stop: threading.Event,
    ) -> bool:
        run = self.run
        producer = self._producer = self._producer or self._load(reader)
        sizes = sizes_for_stream(run.sizes, run.spec, reader, producer.groups)
        # Samples of a window are computed in any order, so its rows are held: at most about as many as the buffer's.
        most = feed.buffer_rows // (sizes.batch_tokens * producer.groups)
        sizes = replace(sizes, window=max(_LEAST_WINDOW, min(sizes.window, most)))
        sink = None
        if stream is not None:
            stream.read_parts = lambda: reader.parts
            sink = Sink(stream)
        else:
            sizes = replace(sizes, shard_bytes=_SHARD_BYTES)
        return run_pipeline(
            feed.watch(with_positions(reader, run.spec), first, done),
            producer,
            FeedSink(feed, run.rows, sink),
            sizes,
            progress=self._progress,
            control=Control(stop, run.spec.commit_every),
            end=partial(end_of_stream, run, stream, reader),
        )

    def _load(self, reader: SampleReader) -> Producer:
        if self._workers is None:
            return make_producer(self.run, self._progress, reader)
        spec = replace(self.run.spec, data=replace(self.run.spec.data, rows=None))
        job = WorkerJob(spec, self.run.taps, self.run.bytes_per_token, self.run.sizes.batch_tokens)
        return WorkerProducer(job, self._workers)

    def _join(self) -> tuple[StreamStore, Ranges]:
        join_run(self.run.root, self.run.identity)
        stream = join(self.run)
        write_spec(self.run.root, self._spec)
        return stream, stream.ledger.done

    def _stored_rows(self, dataset: Dataset | None, sample: Sample) -> _Rows | None:
        if dataset is None:
            return None
        stored = dataset.sample(self.run.spec.data.worker_id, sample.index)
        return {tap: stored.rows(tap) for tap in self.taps}

    def close(self) -> None:
        """End the reader, and release the model."""
        with self._lock:
            self._end(UserError("the stream was closed"))
        if self._producer is not None:
            self._producer.close()
            self._producer = None


if __name__ == "__main__":
    from spile.worker import streaming  # under its own name: what it receives names its classes

    streaming.serve(sys.argv[1], bytes.fromhex(sys.stdin.readline().strip()))
