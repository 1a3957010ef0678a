"""What the visits to a stream have in common, and where they differ."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any, NamedTuple, Protocol

from spile.data.stream import SampleReader
from spile.errors import SpecError
from spile.objects import is_remote, open_folder
from spile.objects.preflight import preflight
from spile.spec.amounts import counted, size
from spile.spec.phase import Phase
from spile.spec.ranges import Ranges
from spile.spec.run import ExtractSpec
from spile.store.cleanup import clear_stream, remove_remains, stream_has_commits, stream_is_begun
from spile.store.layout import stream_folder
from spile.store.stream import StreamStore, join_run, join_stream, read_stream, write_spec
from spile.worker.device import configure_jax
from spile.worker.parts import Parts, find, sizes_for, torch_producer, wants_statistics
from spile.worker.pipeline import Control, Sink
from spile.worker.pod.group import SingleProcess, WorkerGroup, same_command
from spile.worker.producer import Producer, with_positions
from spile.worker.progress import Progress, StatusFiles, Summary, peak_memory, write_checkpoint_file
from spile.worker.startup import make_producer
from spile.worker.worker import LocalControl, run_worker

__all__ = [
    "OnDevices",
    "Visit",
    "VisitKind",
    "expected_samples",
    "extract",
    "stream_end",
    "visit",
]


class OnDevices(Protocol):
    """A model on its devices, whatever it does there."""

    def describe(self) -> str:
        """For people."""

    def close(self) -> None:
        """It is not needed any more."""


class Visit(NamedTuple):
    """What the work of one visit is done with."""

    parts: Parts
    stream: StreamStore
    done: Ranges
    """What earlier visits committed, the same on every process of a pod."""
    reader: SampleReader
    """Everything else."""
    status: StatusFiles
    stop: threading.Event
    hosts: WorkerGroup

    def control(self) -> Control:
        """When to commit and when to stop, agreed with the pod's other processes."""
        return self.hosts.control(LocalControl(self.stop, self.parts.spec.commit_every))

    def sink(self) -> Sink:
        """Where finished shards go."""
        return self.hosts.sink(self.stream, self.status.committed)


class VisitKind(NamedTuple):
    """What one kind of visit to a stream does where others do something else."""

    make: Callable[[Parts, Progress, SampleReader], Any]
    """Puts the model on the devices, with a look at the samples that come: an :class:`OnDevices`."""
    work: Callable[[Visit, Any], bool]
    """Works off what is left; False: told to stop."""
    finish: Callable[[Parts, StreamStore], None]
    """What is written beside the ledger when nothing is left."""


def extract(
    spec: ExtractSpec,
    *,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
    hosts: WorkerGroup | None = None,
) -> Summary:
    """Run a model over a stream and store its activations; what an earlier visit committed is not done again.

    ``hosts``: the pod that this process is part of, every one of whose processes makes this call.
    """
    kind = VisitKind(_make, _work, lambda _parts, _stream: None)
    return visit(spec, kind, progress=progress, stop=stop, hosts=hosts)


def visit(
    spec: ExtractSpec,
    kind: VisitKind,
    *,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
    hosts: WorkerGroup | None = None,
) -> Summary:
    """One visit to a stream: find everything, join the ledger, do what is left of it, say what it came to."""
    progress, hosts = progress or Progress(), (hosts or SingleProcess()).visit()
    configure_jax()
    progress.phase(Phase.LOOKING, "at the model and the data")
    same_command(hosts, spec)
    for place in filter(None, (spec.output, spec.local_copy)):  # first: find reads the run that is there
        for warning in preflight(open_folder(place)):
            progress.log(warning)
    if hosts.name and hosts.first and not is_remote(spec.output):
        progress.log(
            f"{spec.output} is on each host's own disk: each keeps its own part of the stream, unless they share it; "
            "spile collect brings the parts together, and spile verify proves them then"
        )
    parts = find(spec, progress.timeline)
    again = hosts.first and _starts_over(parts)
    stream = _known_stream(parts) if hosts.first and not again else None
    if not hosts.agree("left", stream is None or _left(parts, stream)):
        return _nothing_left(parts, stream or _joined(parts), kind, progress, hosts)
    progress.phase(Phase.LOADING, "the model")
    with ExitStack() as stack:
        status = None if stream is None else stack.enter_context(_status_files(parts, stream, progress, hosts))
        done = Ranges() if stream is None else stream.ledger.done
        reader = parts.samples.read(done)
        stack.callback(lambda: reader.close())
        worker: OnDevices = kind.make(parts, progress, reader)
        hosts.barrier("model_loaded")
        if again:
            clear_stream(parts.root, spec.data.worker_id)  # not before the model is known to be whole
        stream, agreed = _agreed(parts, stream, hosts)
        if agreed != done:
            reader.close()
            done, reader = agreed, parts.samples.read(agreed)
        if hosts.first:
            write_spec(parts.root, spec)
            _tidy(stream, progress)
        hosts.barrier("extraction_start")
        status = status or stack.enter_context(_status_files(parts, stream, progress, hosts))
        stack.enter_context(closing(worker))
        expected = expected_samples(parts, stream)
        progress.total_samples = None if expected is None else len(Ranges([(0, expected)]) - done)
        finished = kind.work(Visit(parts, stream, done, reader, status, stop or threading.Event(), hosts), worker)
        progress.phase(Phase.DONE if finished else Phase.STOPPED)
    hosts.barrier("final_checkpoint")
    if finished and hosts.first:
        stream.finish()
        kind.finish(parts, stream)
        write_checkpoint_file(spec, stream, "completed", progress.log)
    hosts.barrier("complete")
    ledger = stream if hosts.first else _joined(parts)
    return _summary(parts, ledger, progress, interrupted=not finished, device=worker.describe())


def _nothing_left(
    parts: Parts, stream: StreamStore, kind: VisitKind, progress: Progress, hosts: WorkerGroup
) -> Summary:
    if hosts.first:
        stream.finish()
        kind.finish(parts, stream)
    hosts.barrier("complete")
    return _summary(parts, stream, progress, interrupted=False, device="none: nothing was left to do")


def _joined(parts: Parts, attempt: str | None = None, life: str | None = None) -> StreamStore:
    stream = join_stream(parts.root, parts.spec.data.worker_id, parts.stream_identity, parts.identity, attempt, life)
    stream.statistics = wants_statistics(parts.spec.statistics)
    return stream


def _tidy(stream: StreamStore, progress: Progress) -> None:
    """Take away what killed lives of this stream left on the disk, and say so."""
    count, taken = remove_remains(stream.folder)
    if count:
        files = counted(count, "unfinished shard")
        progress.log(f"removed {files} ({size(taken)}) that killed runs of this stream left behind")


def _agreed(parts: Parts, stream: StreamStore | None, hosts: WorkerGroup) -> tuple[StreamStore, Ranges]:
    """The stream and what of it is done, the same on every process: the first one's ledger counts, and its attempt."""
    plan: dict[str, Any] = {}
    if hosts.first:
        join_run(parts.root, parts.identity)
        stream = stream or _joined(parts)
        plan = {"attempt": stream.attempt, "stream": stream.record.id, "done": stream.ledger.done.pairs()}
    plan = hosts.agree("plan", plan)
    if stream is None:
        join_run(parts.root, parts.identity)  # compares: a host with another model or data says so, and all end
        stream = _joined(parts, plan["attempt"], plan["stream"])
    return stream, Ranges((start, stop) for start, stop in plan["done"])


def _starts_over(parts: Parts) -> bool:
    """``--no-checkpointing``: as if nothing were there, but never over somebody's work unasked."""
    worker_id = parts.spec.data.worker_id
    if parts.spec.checkpointing or not stream_is_begun(parts.root, worker_id):
        return False
    if parts.spec.overwrite:
        return True
    if stream_has_commits(parts.root, worker_id):
        raise SpecError(
            "--no-checkpointing",
            expected="a stream without commits",
            found=f"commits in {parts.root.url}/{stream_folder(worker_id)}",
            fix="add --overwrite to remove them, or leave --no-checkpointing out to resume",
        )
    return False


def _known_stream(parts: Parts) -> StreamStore | None:
    """The stream, if an earlier visit began it."""
    worker_id = parts.spec.data.worker_id
    return None if read_stream(parts.root.child(stream_folder(worker_id))) is None else _joined(parts)


def expected_samples(parts: Parts, stream: StreamStore) -> int | None:
    """How many samples there are to do, where that is known before all was read."""
    total = parts.samples.samples if parts.samples.samples is not None else stream.ledger.end
    limits = [count for count in (total, parts.spec.data.max_samples) if count is not None]
    return min(limits) if limits else None


def stream_end(parts: Parts, stream: StreamStore, reader: SampleReader) -> int | None:
    """For a stream whose number of samples only reading it all tells: that number, once, when it has been read."""
    if parts.stream_identity.samples is not None or stream.ledger.end is not None:
        return None
    return reader.total


def _left(parts: Parts, stream: StreamStore) -> bool:
    expected = expected_samples(parts, stream)
    return expected is None or bool(len(Ranges([(0, expected)]) - stream.ledger.done))


def _make(parts: Parts, progress: Progress, reader: SampleReader) -> OnDevices:
    """Whatever turns this run's batches into rows."""
    if parts.spec.backend == "torch":
        return torch_producer(parts.files, parts.taps, parts.spec, sizes_for(parts).batch_tokens, progress)
    return make_producer(parts, progress, reader)


def _status_files(parts: Parts, stream: StreamStore, progress: Progress, hosts: WorkerGroup) -> StatusFiles:
    return StatusFiles(parts.spec, stream, progress, pulse=hosts.first, expected=expected_samples(parts, stream))


def _work(visit: Visit, producer: Producer) -> bool:
    parts, stream = visit.parts, visit.stream
    return run_worker(
        with_positions(visit.reader, parts.spec),
        producer,
        stream,
        sizes_for(parts),
        progress=visit.status.progress,
        control=visit.control(),
        end=lambda: stream_end(parts, stream, visit.reader),
        sink=visit.sink(),
    )


def _summary(parts: Parts, stream: StreamStore, progress: Progress, *, interrupted: bool, device: str) -> Summary:
    ledger = stream.ledger
    return Summary(
        root=parts.root.url,
        stream=stream.folder.url,
        complete=not _left(parts, stream),
        interrupted=interrupted,
        visit=progress.snapshot(),
        samples=ledger.samples,
        tokens=ledger.tokens,
        bytes=ledger.bytes,
        shards=ledger.shards,
        skipped=ledger.skipped,
        device=device,
        sink="bucket" if parts.root.local_path is None else "disk",
        peak_memory=peak_memory(),
        retries=parts.root.stats.retries,
    )
