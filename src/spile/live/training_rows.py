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
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate, chain
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16
import numpy as np
import numpy.typing as npt

from spile.compute.batches import Batch, Sizes
from spile.compute.device import configure_jax, place_model
from spile.compute.producer import Control, Producer, RowBlock, with_positions
from spile.compute.progress import Progress, hang_limit
from spile.compute.resolved import ResolvedRun
from spile.compute.sizes import sizes_for_stream
from spile.compute.torch_producers import make_torch_producer
from spile.data.samples import SampleReader
from spile.errors import Failure, SpecError, SpileError, UserError, printable
from spile.reading.blocks import MemoryShard, StoredBlocks
from spile.reading.dataset import open as open_dataset
from spile.reading.readers import ShuffledReaders
from spile.reading.rows import BlockOptions, BlockSource, Read, ReaderClosed, RowGroup
from spile.reading.samples import no_tap
from spile.reading.shuffle import RowOrder, ShufflePlan
from spile.run.pipeline import Sink, run_pipeline
from spile.run.resolve import find_model, read_steering, resolve
from spile.run.worker import commit_end, commit_limit, join, make_producer
from spile.spec.amounts import duration
from spile.spec.ranges import Ranges
from spile.spec.run import RunSpec
from spile.spec.sample import Sample, Skip
from spile.spec.taps import Tap, TapRows, row_bytes
from spile.store.ledger import ShardRecord
from spile.store.run import join_run, write_spec
from spile.store.shard import decode, split
from spile.store.writer import StreamWriter

_Array = npt.NDArray[Any]
_Rows = dict[str, _Array]

_END_SECONDS = 30.0
"""Seconds to wait for the exit code of a worker whose connection has ended."""
_CLOSE_SECONDS = 5.0
"""Seconds that a pass and each worker have to end when the stream is closed; then the workers are killed."""
_LEAST_CHUNK = 4
"""Batches whose samples are packed together, at least: fewer would waste computation on padding."""
_SHARD_BYTES = 64e6
"""Bytes of rows that the pipeline plans at once if nothing is stored."""


# -- the feed ---------------------------------------------------------------------------------------------------------


class _Group:
    """Consecutive samples, and their rows as far as they are computed."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.rows: dict[int, _Rows] = {}
        """The rows of each sample, by its index and tap; none for a sample that is stored."""
        self.count = 0
        """The rows of all samples."""
        self.last = False


class Feed(Sink):
    """A sink that collects the rows of a pass over the data in groups, and makes the model wait if the reader is slow.

    Args:
        plan: The plan of the reader.
        kinds: The rows of each tap.
        store: Also gets the rows, if they are stored.
        read_stored: Returns the rows of a sample that an earlier run stored.

    """

    def __init__(
        self,
        plan: ShufflePlan,
        kinds: Sequence[TapRows],
        store: Sink | None = None,
        read_stored: Callable[[Sample], _Rows] = lambda _: {},
    ) -> None:
        self._plan, self._kinds, self._store, self._read_stored = plan, kinds, store, read_stored
        self.remote, self.bytes_per_token = False, row_bytes(kinds)
        self._groups: deque[_Group] = deque()
        self._group_of: dict[int, _Group] = {}
        """The group of each sample, by its index."""
        self._open = _Group()
        self._held = 0
        """Computed rows in all groups."""
        self._reader_waits, self._ended = False, False
        self._error: BaseException | None = None
        self._changed = threading.Condition()

    @property
    def buffer_rows(self) -> int:
        """The size of the shuffle buffer."""
        return self._plan.buffer_rows

    def select(self, items: Iterable[Sample | Skip], first: int, done: Ranges) -> Iterator[Sample | Skip]:
        """Yield the items that must be computed, and add the samples that the reader gets to groups."""
        for item in items:
            mine = isinstance(item, Skip) or item.index % self._plan.parts == self._plan.part
            if mine and isinstance(item, Sample) and item.index >= first:
                self._add(item, stored=item.index in done)
            if mine and item.index not in done:
                yield item
        with self._changed:
            self._open.last = True
            if self._open.samples:
                self._groups.append(self._open)
            self._ended = True
            self._changed.notify_all()

    def _add(self, sample: Sample, *, stored: bool) -> None:
        with self._changed:
            if self._open.count >= self._plan.group_rows:
                self._groups.append(self._open)
                self._open = _Group()
                self._changed.notify_all()
            self._open.samples.append(sample)
            self._open.count += sample.rows
            self._group_of[sample.index] = self._open
            if stored or not sample.rows:
                self._open.rows[sample.index] = {}

    def put(self, samples: Sequence[Sample], rows: _Rows) -> None:
        """Add the rows of some samples. Wait while the reader has enough rows, unless it waits itself."""
        with self._changed:
            while self._held > self._plan.group_rows and not self._reader_waits and self._error is None:
                self._changed.wait()
            start = 0
            for sample in samples:
                stop = start + sample.rows
                group = self._group_of.get(sample.index)
                if sample.rows and group is not None:
                    group.rows[sample.index] = {tap: each[start:stop] for tap, each in rows.items()}
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
            rows = [group.rows[sample.index] or self._read_stored(sample) for sample in group.samples if sample.rows]
            joined = {tap: np.concatenate([each[tap] for each in rows]) for tap in taps if rows}
            with self._changed:
                self._held -= sum(sample.rows for sample in group.samples if group.rows[sample.index])
                self._changed.notify_all()
            yield group.samples, group.last, joined

    def _next(self) -> _Group | None:
        with self._changed:
            self._reader_waits = True
            self._changed.notify_all()
            try:
                while not (self._groups and len(self._groups[0].rows) == len(self._groups[0].samples)):
                    if self._error is not None:
                        raise self._error
                    if self._ended and not self._groups:
                        return None
                    self._changed.wait()
            finally:
                self._reader_waits = False
            group = self._groups.popleft()
            for sample in group.samples:
                del self._group_of[sample.index]
            return group

    def begin(self, samples: Sequence[Sample]) -> Any:
        return _FeedBuilder(self, self._kinds, samples, None if self._store is None else self._store.begin(samples))

    def commit(self, record: ShardRecord | None, skipped: Sequence[Skip] = (), end: int | None = None) -> None:
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

    def finish(self, samples: int | None = None) -> ShardRecord:
        if self._builder is None:
            return ShardRecord("", 0, 0, (0, 0), {}, Ranges(), 0, 0)
        record: ShardRecord = self._builder.finish(samples)
        return record

    def abort(self) -> None:
        if self._builder is not None:
            self._builder.abort()


# -- workers ----------------------------------------------------------------------------------------------------------


class BatchComputer:
    """A model in a worker: computes the batches that it is sent.

    Args:
        spec: The resolved spec without its data.
        taps: The taps to compute.
        bytes_per_token: What one token takes in a shard.
        batch_tokens: Tokens of a batch, for PyTorch.

    """

    def __init__(self, spec: RunSpec, taps: tuple[Tap, ...], bytes_per_token: int, batch_tokens: int) -> None:
        configure_jax()
        files, backend = find_model(spec, None, spec.output)
        self._producer: Producer
        if backend == "torch":
            self._producer = make_torch_producer(files, taps, spec, batch_tokens, Progress())
        else:
            steering = read_steering(spec.steer, files.config)
            self._producer = place_model(files, taps, spec, bytes_per_token, Progress(), lambda _: None, steering)

    def groups(self) -> int:
        """Return the number of groups that its devices compute at once."""
        return self._producer.groups

    def compute(self, batch: Batch) -> list[list[RowBlock]]:
        """Return the rows of each tap, for each group that has samples."""
        found = self._producer.fetch(self._producer.start(batch))
        return [
            [RowBlock(group, np.array(rows[: batch.stored_rows_of(group)])) for group, rows in blocks]
            for blocks in found
        ]


_Job = tuple[RunSpec, tuple[Tap, ...], int, int]
"""The arguments of :class:`BatchComputer`."""


class ProcessWorker:
    """A process on this machine, connected by a pipe that only it inherits."""

    def __init__(self, job: _Job, environment: Mapping[str, str]) -> None:
        self._connection, child_end = Pipe()
        with child_end:
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                [sys.executable, "-m", "spile.live.training_rows", str(child_end.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[child_end.fileno()],
                env={**os.environ, **environment},
            )
        self.close = weakref.finalize(self, _end_process, self._process, self._connection)
        self._longest: float | None = None
        """The longest time that a batch took, in seconds."""
        self._silence = 0.0
        """The seconds after which it was killed because it did not answer."""
        self.groups = 0
        self._connection.send(job)

    def load(self) -> None:
        """Wait until the model is loaded."""
        with self._limited():
            self.groups = int(self._receive())

    def start(self, batch: Batch) -> None:
        """Send a batch."""
        with self._limited():
            self._connection.send(batch)

    def fetch(self, pending: Any) -> list[list[RowBlock]]:  # noqa: ARG002 - batches come back in their order
        """Wait for the rows of the oldest batch that was sent."""
        began = time.monotonic()
        with self._limited():
            found = [[self._block(*each) for each in blocks] for blocks in self._receive()]
        self._longest = max(self._longest or 0.0, time.monotonic() - began)
        return found

    @contextmanager
    def _limited(self) -> Iterator[None]:
        """Kill the worker if the wait in the context takes too long, and raise an error if it ended."""
        limit = hang_limit(self._longest)
        timer = threading.Timer(limit, self._give_up, [limit])
        timer.daemon = True
        timer.start()
        try:
            yield
        except (EOFError, OSError) as error:
            raise self._failure() from error
        finally:
            timer.cancel()

    def _give_up(self, limit: float) -> None:
        self._silence = limit
        self._process.kill()

    def _block(self, group: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> RowBlock:
        rows = np.empty(shape, dtype)
        if rows.nbytes:
            self._connection.recv_bytes_into(rows.view(np.uint8).reshape(-1).data)
        return RowBlock(group, rows)

    def _receive(self) -> Any:
        found = self._connection.recv()
        if isinstance(found, SpileError):
            raise found
        return found

    def _failure(self) -> Failure:
        with suppress(subprocess.TimeoutExpired):  # it ends when its connection does
            self._process.wait(_END_SECONDS)
        if self._silence:
            return _worker_silent(f"process {self._process.pid}", self._silence)
        return _worker_ended(f"exit code {self._process.returncode}")


def _end_process(process: subprocess.Popen[bytes], connection: Connection) -> None:
    process.terminate()
    try:
        process.wait(_CLOSE_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    connection.close()


_CONTINUE = "continue from the last state_dict()"


def _worker_ended(how: str) -> Failure:
    return Failure("a worker of the stream ended", found=how, fix=_CONTINUE)


def _worker_silent(name: str, seconds: float) -> Failure:
    problem = f"a worker of the stream ({name}) does not answer"
    return Failure(problem, found=f"nothing for {duration(seconds)}", fix=f"look at its machine, then {_CONTINUE}")


def serve(connection: Connection) -> None:
    """Be a worker: load the model that the other end names, and compute what it sends."""
    with connection, suppress(EOFError, OSError):  # the other end is gone
        try:
            computer = BatchComputer(*connection.recv())
            connection.send(computer.groups())
            while True:
                taps = computer.compute(connection.recv())
                # Arrays as bytes: pickling them would be eight times as slow.
                connection.send([[(group, rows.shape, rows.dtype) for group, rows in blocks] for blocks in taps])
                for block in chain.from_iterable(taps):
                    if block.rows.nbytes:
                        connection.send_bytes(block.rows.view(np.uint8).reshape(-1).data)
        except SpileError as error:
            connection.send(error)


class RayWorker:
    """An actor on a Ray cluster, with a GPU of its own if the cluster has GPUs."""

    def __init__(self, job: _Job) -> None:
        import ray

        self._ray = ray
        if not ray.is_initialized():
            raise UserError("workers", expected="a connection to Ray", found="none", fix="call ray.init() first")
        options = {"num_gpus": 1} if ray.cluster_resources().get("GPU") else {"num_cpus": 1}
        self._actor = ray.remote(**options)(BatchComputer).remote(*job)
        self._longest: float | None = None
        self.groups = 0

    def load(self) -> None:
        self.groups = int(self._get(self._actor.groups.remote()))

    def start(self, batch: Batch) -> Any:
        return self._actor.compute.remote(batch)

    def fetch(self, pending: Any) -> list[list[RowBlock]]:
        began = time.monotonic()
        found = list(self._get(pending))
        self._longest = max(self._longest or 0.0, time.monotonic() - began)
        return found

    def _get(self, pending: Any) -> Any:
        limit = hang_limit(self._longest)
        try:
            return self._ray.get(pending, timeout=limit)
        except self._ray.exceptions.RayActorError as error:
            raise _worker_ended(str(error).splitlines()[0]) from error
        except self._ray.exceptions.GetTimeoutError as error:
            self.close()
            raise _worker_silent(str(self._actor), limit) from error

    def close(self) -> None:
        self._ray.kill(self._actor)


Workers = int | str | Sequence[Mapping[str, str]]
"""The number of processes, ``ray:4`` for actors, or the environment variables of each process."""


class WorkerProducer(Producer):
    """The models of several workers as one producer: each worker computes some groups of every batch."""

    def __init__(self, job: _Job, workers: Workers) -> None:
        make: list[Callable[[], ProcessWorker | RayWorker]]
        if isinstance(workers, str):
            kind, _, count = workers.partition(":")
            if kind != "ray" or not count.isdecimal():
                raise SpecError("workers", expected="a number, ray:4, or a list of variables", found=repr(workers))
            make = [partial(RayWorker, job)] * int(count)
        else:
            each = [{}] * workers if isinstance(workers, int) else workers
            make = [partial(ProcessWorker, job, variables) for variables in each]
        if not make:
            raise SpecError("workers", expected="at least one", found=workers)
        self._workers = [call() for call in make]

    def load(self) -> None:
        """Wait until all models are loaded, which they do at the same time."""
        with ThreadPoolExecutor(len(self._workers)) as pool:
            list(pool.map(lambda worker: worker.load(), self._workers))
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
        return f"{len(self._workers)} workers"

    def close(self) -> None:
        with ThreadPoolExecutor(len(self._workers)) as pool:
            list(pool.map(lambda worker: worker.close(), self._workers))


# -- the stream -------------------------------------------------------------------------------------------------------


class LiveBlocks(BlockSource):
    """Taps of a running model, which are computed in the order of the data only."""

    def __init__(self, stream: ActivationStream, taps: tuple[str, ...], options: BlockOptions) -> None:
        self._stream, self._taps, self._options = stream, taps, options
        self.selection, self.window = options.selection, options.window
        data = stream.run.stream_identity.compared()
        text = f"{stream.run.identity.fingerprint()} {sorted(data.items())}"
        self.identity = hashlib.sha256(text.encode()).hexdigest()[:16]
        self._feed: Feed | None = None

    def types(self) -> dict[str, tuple[np.dtype[Any], int]]:
        kinds = {kind.name: kind for kind in self._stream.run.rows}
        types = {tap: np.dtype("float32" if kinds[tap].scaled else kinds[tap].dtype) for tap in self._taps}
        return {tap: (dtype, self.window * kinds[tap].width) for tap, dtype in types.items()}

    def groups(self, plan: ShufflePlan, first: int) -> Iterator[RowGroup]:
        """Compute the samples in the order of the data, from sample ``first`` on, and yield them in groups."""
        with self._stream._computing(plan, first) as self._feed:
            for samples, last, rows in self._feed.groups(self._taps):
                shard = MemoryShard(self._stream.run.spec.data.worker_id, samples, rows)
                yield RowGroup(samples[0].index, last, self._reads(shard))

    def cancel(self) -> None:
        """End the wait for rows: the reader was closed."""
        if self._feed is not None:
            self._feed.fail(ReaderClosed())

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

    def __init__(self, spec: RunSpec, *, store: bool, workers: Workers | None = None) -> None:
        if spec.data.max_tokens is not None or spec.data.max_bytes is not None:
            raise SpecError("max_tokens and max_bytes", expected="max_samples, or the number of batches you take")
        self._progress, self._store, self._workers = Progress(), store, workers
        self._spec = spec
        if not store:  # a folder that does not exist: nothing is read from it or written to it
            missing = Path(tempfile.gettempdir()) / f"spile-stream-{secrets.token_hex(8)}"
            self._spec = replace(spec, output=str(missing))
        configure_jax()
        self.run: ResolvedRun = resolve(self._spec, self._progress)
        self._producer: Producer | None = None
        self._lock = threading.Lock()
        self._current: tuple[Feed, threading.Event, threading.Thread] | None = None

    def __repr__(self) -> str:
        return f"<stream of {printable(self.place)}: {', '.join(self.taps)}>"

    @property
    def place(self) -> str:
        """The model and the data."""
        return f"{self.run.identity.model} on {self.run.stream_identity.data}"

    @property
    def taps(self) -> tuple[str, ...]:
        """The taps that are computed."""
        return tuple(kind.name for kind in self.run.rows)

    def shuffled(self, tap: Any, batch_rows: int = 4096, *, order: RowOrder = "data", **options: Any) -> Any:
        """Return shuffled batches as :meth:`spile.Dataset.shuffled` does it, in the order of the data."""
        if order != "data":
            raise UserError("order", expected="data: samples are computed in their order", found=repr(order))
        return super().shuffled(tap, batch_rows, order=order, **options)

    def _source(self, taps: tuple[str, ...], options: BlockOptions) -> LiveBlocks:
        for tap in taps:
            if tap not in self.taps:
                raise no_tap(tap, self.taps)
        if options.streams is not None:
            raise UserError("streams", expected="a stored dataset", found=options.streams)
        return LiveBlocks(self, taps, options)

    @contextmanager
    def _computing(self, plan: ShufflePlan, first: int) -> Iterator[Feed]:
        """Compute the samples from number ``first`` on in a thread, while the context is open; yield their feed."""
        if self._store and plan.parts > 1:
            raise UserError("part", expected="one reader if rows are stored", found=f"{plan.parts} readers")
        with self._lock:
            self._end_pass(UserError("a reader of this stream was used again", found="another one began after it"))
            stream = self._join() if self._store else None
            done = Ranges() if stream is None else stream.ledger.done
            store = None if stream is None else Sink(stream)
            dataset = open_dataset(self._spec.output) if len(done) else None
            feed = Feed(plan, self.run.rows, store, partial(self._read_stored, dataset))
            stop = threading.Event()
            work = partial(self._compute, feed, first, stream, done, stop)
            thread = threading.Thread(target=work, name="spile-stream", daemon=True)
            self._current = feed, stop, thread
            thread.start()
        try:
            yield feed
        finally:
            with self._lock:
                if self._current is not None and self._current[0] is feed:
                    self._end_pass(ReaderClosed())

    def _end_pass(self, why: BaseException, kill: Callable[[], None] | None = None) -> None:
        """End the pass that is running, if any: its reader gets this error if it is used again.

        ``kill`` ends the workers of a pass that does not end by itself.
        """
        if self._current is not None:
            feed, stop, thread = self._current
            stop.set()
            feed.fail(why)
            thread.join(None if kill is None else _CLOSE_SECONDS)
            if kill is not None and thread.is_alive():
                kill()
                thread.join()
            self._current = None

    def _join(self) -> StreamWriter:
        join_run(self.run.root, self.run.identity)
        stream = join(self.run)
        write_spec(self.run.root, self._spec)
        return stream

    def _read_stored(self, dataset: Any, sample: Sample) -> _Rows:
        stored = dataset.sample(self.run.spec.data.worker_id, sample.index)
        return {tap: stored.rows(tap) for tap in self.taps}

    def _compute(
        self, feed: Feed, first: int, stream: StreamWriter | None, done: Ranges, stop: threading.Event
    ) -> None:
        """Run the pipeline over the data, in a thread. Its errors are raised in the reader."""
        run = self.run
        try:
            before = Ranges([(0, first)]) if first else Ranges()
            # With a store, also what was given before a crash and not stored is computed.
            known = before if stream is None else before - (before - done)
            with closing(run.samples.read(known, () if stream is None else stream.ledger.parts, None)) as reader:
                if stream is not None:
                    stream.read_parts = lambda: reader.parts
                producer = self._producer = self._producer or self._load(reader)
                finished = run_pipeline(
                    feed.select(with_positions(reader, run.spec), first, done),
                    producer,
                    feed,
                    self._sizes(feed, reader, producer.groups),
                    progress=self._progress,
                    control=Control(stop, run.spec.commit_every),
                )
            if finished and stream is not None:
                commit_end(run, stream, Sink(stream), reader)
                commit_limit(run, stream)
                stream.finish()
        except BaseException as error:  # noqa: BLE001 - raised in the reader
            feed.fail(error)

    def _load(self, reader: SampleReader) -> Producer:
        if self._workers is None:
            return make_producer(self.run, self._progress, reader)
        spec = replace(self.run.spec, data=replace(self.run.spec.data, rows=None))
        job = spec, self.run.taps, self.run.bytes_per_token, self.run.sizes.batch_tokens
        made = self._producer = WorkerProducer(job, self._workers)  # before it loads, so that close() ends it
        try:
            made.load()
        except BaseException:
            made.close()
            self._producer = None
            raise
        return made

    def _sizes(self, feed: Feed, reader: SampleReader, groups: int) -> Sizes:
        sizes = sizes_for_stream(self.run.sizes, self.run.spec, reader, groups)
        # Samples of a chunk are computed in any order, so its rows are held: at most about as many as the buffer's.
        most = feed.buffer_rows // (sizes.batch_tokens * groups)
        shard_bytes = sizes.shard_bytes if self._store else _SHARD_BYTES
        return replace(sizes, chunk_batches=max(_LEAST_CHUNK, min(sizes.chunk_batches, most)), shard_bytes=shard_bytes)

    def close(self) -> None:
        """End the reader, and release the model."""
        with self._lock:
            kill = None if self._workers is None else self._close_producer
            self._end_pass(UserError("the stream was closed"), kill)
        self._close_producer()

    def _close_producer(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.close()


if __name__ == "__main__":
    from spile.live import training_rows as streaming  # under its own name: what it receives names its classes

    streaming.serve(Connection(int(sys.argv[1])))
