"""Run a stream: resolve the spec, load the model, join the ledger, run the pipeline, finish the stream.

``extract`` and ``infer`` differ only in their producer and in what is written at the end.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

from spile.data.stream import SampleReader
from spile.errors import SpecError
from spile.objects import is_remote, open_folder
from spile.objects.preflight import preflight
from spile.spec.amounts import counted, size
from spile.spec.phase import Phase
from spile.spec.positions import ALL
from spile.spec.ranges import Ranges
from spile.spec.run import ExtractSpec
from spile.spec.sample import Sample
from spile.store.cleanup import clear_stream, remove_remains, stream_exists, stream_has_commits
from spile.store.layout import stream_folder
from spile.store.stream import StreamStore, join_run, join_stream, read_stream, write_spec
from spile.worker.batches import Batch, batches
from spile.worker.device import DeviceProducer, configure_jax, place_model
from spile.worker.pipeline import LocalControl, run_pipeline
from spile.worker.pod.pod import SingleProcess, WorkerGroup, check_same_command
from spile.worker.producer import Producer, TokenLimit, with_positions
from spile.worker.progress import Progress, StatusFiles, Summary, peak_memory, write_checkpoint_file
from spile.worker.resolve import ResolvedRun, resolve, wants_statistics
from spile.worker.sizes import sizes_for_stream
from spile.worker.torch_producers import torch_producer

MakeProducer = Callable[[ResolvedRun, Progress, SampleReader], Producer]
"""Loads the model onto its devices; may look at the samples that come next."""
Finish = Callable[[ResolvedRun, StreamStore], None]
"""Writes what is derived from the ledger once nothing is left to do."""


def extract(
    spec: ExtractSpec,
    *,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
    hosts: WorkerGroup | None = None,
) -> Summary:
    """Run a model over a stream and store its activations. Samples in the ledger are not done again.

    Args:
        spec: The run spec.
        progress: Counters and messages for a display.
        stop: Set it to commit what is done and return.
        hosts: The pod that this process is part of. Every process of the pod makes this call.

    Returns:
        What the stream holds afterwards.

    """
    return run_stream(spec, make_producer, progress=progress, stop=stop, hosts=hosts)


def run_stream(
    spec: ExtractSpec,
    make: MakeProducer,
    *,
    finish: Finish = lambda _run, _stream: None,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
    hosts: WorkerGroup | None = None,
) -> Summary:
    """Do what is left of a stream with the producer that ``make`` returns."""
    progress, hosts = progress or Progress(), (hosts or SingleProcess()).begin_run()
    configure_jax()
    progress.phase(Phase.LOOKING, "at the model and the data")
    _check(spec, progress, hosts)
    run = resolve(spec, progress.timeline)
    if run.spec.data.max_seq_length != spec.data.max_seq_length:
        progress.log(f"--max-seq-length {run.spec.data.max_seq_length}: {spec.model} has no positions beyond")
    start_over = hosts.first and _starts_over(run)
    stream = _known_stream(run) if hosts.first and not start_over else None
    if not hosts.agree("left", stream is None or _has_work(run, stream)):
        stream = stream or _join(run)
        return _finish(run, stream, finish, progress, hosts, device="none: nothing was left to do")
    progress.phase(Phase.LOADING, "the model")
    with ExitStack() as stack:
        status = None if stream is None else stack.enter_context(_status_files(run, stream, progress, hosts))
        done = Ranges() if stream is None else stream.ledger.done
        reader = run.samples.read(done)
        stack.callback(lambda: reader.close())
        producer = make(run, progress, reader)
        hosts.barrier("model_loaded")
        if start_over:
            clear_stream(run.root, spec.data.worker_id)  # only now: the model is known to be complete
        stream, agreed, stored = _agree_on_stream(run, stream, hosts)
        if agreed != done:
            reader.close()
            done, reader = agreed, run.samples.read(agreed)
        if hosts.first:
            write_spec(run.root, spec)
            _remove_remains(stream, progress)
        hosts.barrier("extraction_start")
        status = status or stack.enter_context(_status_files(run, stream, progress, hosts))
        stack.enter_context(closing(producer))
        expected, most = run.expected_samples(stream.ledger), run.token_limit
        known = expected is not None and most is None
        progress.total_samples = len(Ranges([(0, expected or 0)]) - done) if known else None
        limit = None if most is None else TokenLimit(most, stored, done)
        finished = _run_pipeline(run, stream, reader, producer, status, stop or threading.Event(), hosts, limit)
        status.expected = run.expected_samples(stream.ledger)
        progress.phase(Phase.DONE if finished else Phase.STOPPED)
    hosts.barrier("final_checkpoint")
    if not finished:
        hosts.barrier("complete")
        ledger = stream if hosts.first else _join(run)
        return _summary(run, ledger, progress, interrupted=True, device=producer.describe())
    return _finish(run, stream, finish, progress, hosts, device=producer.describe())


def _check(spec: ExtractSpec, progress: Progress, hosts: WorkerGroup) -> None:
    """Check the command and the output before anything is read."""
    check_same_command(hosts, spec)
    for place in filter(None, (spec.output, spec.local_copy)):  # before resolve, which reads the existing run
        for warning in preflight(open_folder(place)):
            progress.log(warning)
    if hosts.name and hosts.first and not is_remote(spec.output):
        progress.log(
            f"{spec.output} is on each host's own disk: each keeps its own part of the stream, unless they share it; "
            "spile collect brings the parts together, and spile verify proves them then"
        )


def _run_pipeline(
    run: ResolvedRun,
    stream: StreamStore,
    reader: SampleReader,
    producer: Producer,
    status: StatusFiles,
    stop: threading.Event,
    hosts: WorkerGroup,
    limit: TokenLimit | None,
) -> bool:
    def end() -> int | None:
        """Return the number of samples of a stream that only reading it tells, unless the ledger has it."""
        known = run.stream_identity.samples is not None or stream.ledger.end is not None
        return None if known else reader.total

    infer = run.spec.generation is not None  # its samples get their positions once the answers are known
    return run_pipeline(
        reader if infer else with_positions(reader, run.spec),
        producer,
        stream,
        run.sizes if infer else sizes_for_stream(run.sizes, run.spec, reader, producer.groups),
        progress=status.progress,
        control=hosts.control(LocalControl(stop, run.spec.commit_every)),
        end=end,
        sink=hosts.sink(stream, status.committed),
        limit=limit,
    )


def _finish(
    run: ResolvedRun, stream: StreamStore, finish: Finish, progress: Progress, hosts: WorkerGroup, *, device: str
) -> Summary:
    if hosts.first:
        stream.finish()
        finish(run, stream)
        write_checkpoint_file(run.spec, stream, "completed", progress.log)
    hosts.barrier("complete")
    ledger = stream if hosts.first else _join(run)
    return _summary(run, ledger, progress, interrupted=False, device=device)


# -- the producer of extract ------------------------------------------------------------------------------------------


def make_producer(run: ResolvedRun, progress: Progress, reader: SampleReader) -> Producer:
    """Load the model in JAX or in PyTorch."""
    if run.spec.backend == "torch":
        return torch_producer(run.files, run.taps, run.spec, run.sizes.batch_tokens, progress)
    return make_device_producer(run, progress, reader)


def make_device_producer(run: ResolvedRun, progress: Progress, reader: SampleReader) -> DeviceProducer:
    """Load the model in JAX, and compile for the batch that the first samples will form."""

    def prepare(producer: DeviceProducer) -> None:
        plan = sizes_for_stream(run.sizes, run.spec, reader, producer.groups).batch_plan(producer.groups)
        if run.samples.prompt.pack and run.spec.positions == ALL:  # every packed sample but the last is full
            length = plan.row_length(plan.longest)
            producer.prepare(Batch((), plan.rows(length), length))
            return
        items = with_positions(reader.look(), run.spec)
        first = next(batches((item for item in items if isinstance(item, Sample)), plan), None)
        if first is not None:
            producer.prepare(first)

    return place_model(run.files, run.taps, run.spec, run.bytes_per_token, progress, prepare)


# -- the stream -------------------------------------------------------------------------------------------------------


def _join(run: ResolvedRun, attempt: str | None = None, stream_id: str | None = None) -> StreamStore:
    stream = join_stream(run.root, run.spec.data.worker_id, run.stream_identity, run.identity, attempt, stream_id)
    stream.statistics = wants_statistics(run.spec.statistics)
    return stream


def _known_stream(run: ResolvedRun) -> StreamStore | None:
    """Return the stream if an earlier worker began it."""
    record = read_stream(run.root.child(stream_folder(run.spec.data.worker_id)))
    return None if record is None else _join(run)


def _has_work(run: ResolvedRun, stream: StreamStore) -> bool:
    expected = run.expected_samples(stream.ledger)
    return expected is None or bool(len(Ranges([(0, expected)]) - stream.ledger.done))


def _starts_over(run: ResolvedRun) -> bool:
    """Return whether ``--no-checkpointing`` discards an existing stream; commits need ``--overwrite`` too."""
    worker_id = run.spec.data.worker_id
    if run.spec.checkpointing or not stream_exists(run.root, worker_id):
        return False
    if run.spec.overwrite:
        return True
    if stream_has_commits(run.root, worker_id):
        raise SpecError(
            "--no-checkpointing",
            expected="a stream without commits",
            found=f"commits in {run.root.url}/{stream_folder(worker_id)}",
            fix="add --overwrite to remove them, or leave --no-checkpointing out to resume",
        )
    return False


def _agree_on_stream(
    run: ResolvedRun, stream: StreamStore | None, hosts: WorkerGroup
) -> tuple[StreamStore, Ranges, int]:
    """Return the stream, its done samples and its stored tokens: on every process those of process 0's ledger."""
    plan: dict[str, Any] = {}
    if hosts.first:
        join_run(run.root, run.identity)
        stream = stream or _join(run)
        plan = {"attempt": stream.attempt, "stream": stream.record.id, "done": stream.ledger.done.pairs()}
        plan["tokens"] = stream.ledger.tokens
    plan = hosts.agree("plan", plan)
    if stream is None:
        join_run(run.root, run.identity)  # compares: a host with another model or data fails, and all end
        stream = _join(run, plan["attempt"], plan["stream"])
    return stream, Ranges((start, stop) for start, stop in plan["done"]), int(plan["tokens"])


def _remove_remains(stream: StreamStore, progress: Progress) -> None:
    """Remove unfinished shards of killed workers from the disk, and log it."""
    count, removed = remove_remains(stream.folder)
    if count:
        files = counted(count, "unfinished shard")
        progress.log(f"removed {files} ({size(removed)}) that killed runs of this stream left behind")


def _status_files(run: ResolvedRun, stream: StreamStore, progress: Progress, hosts: WorkerGroup) -> StatusFiles:
    expected = run.expected_samples(stream.ledger)
    return StatusFiles(run.spec, stream, progress, pulse=hosts.first, expected=expected)


def _summary(run: ResolvedRun, stream: StreamStore, progress: Progress, *, interrupted: bool, device: str) -> Summary:
    ledger = stream.ledger
    return Summary(
        root=run.root.url,
        stream=stream.folder.url,
        complete=not _has_work(run, stream),
        interrupted=interrupted,
        progress=progress.snapshot(),
        samples=ledger.samples,
        tokens=ledger.tokens,
        bytes=ledger.bytes,
        shards=ledger.shards,
        skipped=ledger.skipped,
        device=device,
        sink="bucket" if run.root.local_path is None else "disk",
        peak_memory=peak_memory(),
        retries=run.root.stats.retries,
    )
