"""Run a stream: resolve the spec, load the model, join the ledger, run the pipeline, finish the stream.

``spile extract`` and ``spile infer`` differ only in their producer and in what is written at the end.
"""

from __future__ import annotations

import os
import signal
import threading
from contextlib import ExitStack, closing, nullcontext, suppress
from dataclasses import replace
from itertools import islice
from typing import Any

from spile.compute.answers import check_generation, write_answers
from spile.compute.batches import Batch, batches
from spile.compute.device import DeviceProducer, configure_jax, place_model
from spile.compute.generator import make_generator
from spile.compute.producer import Control, OutOfDeviceMemory, Producer, TokenLimit, with_positions
from spile.compute.progress import Progress, StatusFiles, Summary, summarize, watch_for_hangs, write_checkpoint_file
from spile.compute.resolved import ResolvedRun
from spile.compute.sizes import sizes_for_stream
from spile.compute.torch_producers import TorchGenerator, load_torch_models, make_torch_producer
from spile.data.samples import SampleReader
from spile.errors import Failure, Fenced, RunMismatch, SpileError, found_late
from spile.objects import is_remote, open_folder
from spile.objects.preflight import preflight
from spile.run.pipeline import Sink, run_pipeline
from spile.run.pod.pod import WorkerGroup, check_same_command
from spile.run.resolve import resolve, wants_statistics
from spile.spec.amounts import counted, duration, size
from spile.spec.lengths import cut_text
from spile.spec.phase import Phase
from spile.spec.positions import ALL, ANSWER
from spile.spec.ranges import Ranges
from spile.spec.run import AUTO, RunSpec
from spile.spec.sample import QUARANTINED, Sample, Skip
from spile.store.cleanup import clear_stream, remove_unfinished, stream_version
from spile.store.index import write_entry
from spile.store.layout import stream_folder
from spile.store.ledger import Ledger, Limit, commit_numbers
from spile.store.quarantine import (
    MAX_QUARANTINED,
    Step,
    Supervision,
    Trials,
    read_trials,
    resume_trials,
    section_size,
    write_trials,
)
from spile.store.run import claim_answers, join_run, read_run, refuse_other_answers, write_spec
from spile.store.writer import StreamWriter, join_stream, read_stream

_CONTROLS = 64
"""Stored samples of which one is computed again, as a control, before a suspect is tried alone. Some may be skipped."""
_MOST_FAILURES = 4
"""Steps in a row that may run out of memory without a commit: if more do, no single sample is at fault."""
_LAST_WRITE = 10.0
"""Seconds for the last record of a worker that hangs."""


def run_stream(
    spec: RunSpec,
    *,
    clear: str | None = None,
    progress: Progress | None = None,
    stop: threading.Event | None = None,
    hosts: WorkerGroup | None = None,
) -> Summary:
    """Run a model over a stream and store its activations, and its answers if the spec has generation settings.

    Samples in the ledger are not computed again.

    Args:
        spec: The run spec.
        clear: First remove what the stream holds, if this is still its version: see :func:`streams_to_clear`.
        progress: Counters and messages for a display.
        stop: Set it to commit what is done and return.
        hosts: The pod that this process is part of. Every process of the pod makes this call.

    Returns:
        What the stream holds afterwards.

    """
    progress, hosts = progress or Progress(), (hosts or WorkerGroup()).begin_run()
    check_generation(spec)
    stop = stop or threading.Event()
    try:
        return _run_stream(spec, clear, progress, stop, hosts)
    except _OtherLength as error:
        progress.log(str(error))
        return _run_stream(spec, clear, progress, stop, hosts)


def _run_stream(
    spec: RunSpec, clear: str | None, progress: Progress, stop: threading.Event, hosts: WorkerGroup
) -> Summary:
    configure_jax(spec.device)
    progress.phase(Phase.LOOKING, "at the model and the data")
    _check_command_and_output(spec, progress, hosts)
    if spec.answers_dir is not None:
        refuse_other_answers(open_folder(spec.answers_dir), open_folder(spec.output))
    clear = hosts.agree("clear", clear if clear and _version(spec) == clear else "")
    run = resolve(spec, progress, start_over=bool(clear), agree=hosts.agree)
    stream = _existing_stream(run) if hosts.first and not clear else None
    if not hosts.agree("left", stream is None or _has_work(run, stream)):
        stream = stream or join(run)
        run.samples.check_unchanged(stream.ledger.parts, stream.ledger.end)
        return _finish(run, stream, progress, hosts, finished=True, device="none: nothing was left to do")
    if hosts.first and run.lengths is not None:
        progress.log(run.lengths.sentence())
    progress.phase(Phase.LOADING, "the model")
    before = _state(run)
    with found_late(lambda: _state(run) != before):
        stream, finished, device = _load_and_work(spec, run, stream, clear, progress, stop, hosts)
    hosts.barrier("final_checkpoint")
    return _finish(run, stream, progress, hosts, finished=finished, device=device)


def check_run(spec: RunSpec, *, start_over: bool = False) -> str:
    """Raise what :func:`run_stream` would raise before it loads the model. Nothing is written.

    Returns:
        What the limit of length does to the prompts; empty for packed sequences.

    """
    check_generation(spec)
    configure_jax(spec.device)
    lengths = resolve(spec, start_over=start_over).lengths
    return "" if lengths is None else lengths.sentence()


def _load_and_work(
    spec: RunSpec,
    run: ResolvedRun,
    stream: StreamWriter | None,
    clear: str,
    progress: Progress,
    stop: threading.Event,
    hosts: WorkerGroup,
) -> tuple[StreamWriter, bool, str]:
    """Load the model and compute what is left. Return the stream, whether it is finished, and the devices."""
    with ExitStack() as stack:
        status = None if stream is None else stack.enter_context(_status_files(run, stream, progress, hosts))
        done = Ranges() if stream is None else stream.ledger.done
        reader = _read(run, stream, done)
        stack.callback(lambda: reader.close())
        producer = make_producer(run, progress, reader)
        if hosts.first:
            progress.log(f"{spec.model} on {producer.describe()}")
        hosts.barrier("model_loaded")
        if hosts.first and clear and _version(spec) == clear:  # else another worker has just cleared it
            clear_stream(run.root, spec.data.worker_id)  # only now: the model is known to be complete
            progress.log(f"cleared stream {spec.data.worker_id}")
        stream, agreed = _agree_on_stream(run, stream, hosts)
        if agreed != done:
            reader.close()
            done, reader = agreed, _read(run, stream, agreed)
        if hosts.first:
            write_spec(run.root, spec)
            if spec.answers_dir is not None:  # before the first answer, so that no work is lost
                claim_answers(open_folder(spec.answers_dir), run.root)
            _remove_remains(stream, progress)
        hosts.barrier("extraction_start")
        status = status or stack.enter_context(_status_files(run, stream, progress, hosts))
        stack.enter_context(closing(producer))
        expected = run.expected_samples(stream.ledger)
        known = expected is not None and run.token_limit is None
        progress.total_samples = len(Ranges([(0, expected or 0)]) - done) if known else None
        finished = StreamWork(run, stream, producer, status, stop, hosts).run(reader)
        status.expected = run.expected_samples(stream.ledger)
        progress.phase(Phase.DONE if finished else Phase.STOPPED)
    return stream, finished, producer.describe()


def _check_command_and_output(spec: RunSpec, progress: Progress, hosts: WorkerGroup) -> None:
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


class StreamWork:
    """Computes what is left of a stream: at once, or in trials if earlier workers were killed.

    :mod:`spile.store.quarantine` has the rules. Every process of a pod takes the steps that the first one chooses.
    """

    def __init__(
        self,
        run: ResolvedRun,
        stream: StreamWriter,
        producer: Producer,
        status: StatusFiles,
        stop: threading.Event,
        hosts: WorkerGroup,
    ) -> None:
        self._run, self._stream, self._producer, self._hosts = run, stream, producer, hosts
        self._progress = status.progress
        self._control = hosts.control(Control(stop, run.spec.commit_every))
        self._sink = hosts.sink(stream, status.committed)
        self._trials = Trials(stream.record.id)
        self._writes_trials = False
        """Whether this worker writes ``suspects.json``."""
        self._rest_done = False
        self._steps = 0
        self._limit: TokenLimit | None = None
        self._last_step_stored = False
        """Whether the last step of this process stored samples; then no control is needed."""
        self._failures = 0
        """Steps in a row that ran out of memory before anything was committed."""

    def run(self, reader: SampleReader) -> bool:
        """Take steps until nothing is left. Return False if stopped early; then what was computed is committed.

        Args:
            reader: All samples that are left, for the case that they are computed at once.

        """
        self._resume()
        with watch_for_hangs(self._progress, self._end_hung_worker) if not self._hosts.name else nullcontext():
            while (step := self._agree_on_step()).kind != "done":
                if step.kind == "quarantine":
                    self._quarantine(next(iter(step.samples)))
                    continue
                try:
                    if not self._run_step(step, reader if step.all_remaining else None):
                        self._record(replace(self._trials, trial=Ranges()))
                        return False
                except (OutOfDeviceMemory, MemoryError) as error:
                    self._handle_out_of_memory(error)
        self._record(self._trials)
        return True

    def _resume(self) -> None:
        """Read the trials of the last worker, and log them if it was killed."""
        if not self._hosts.first:
            return
        stored, supervision = read_trials(self._stream.folder), Supervision.from_environment(os.environ)
        self._trials = resume_trials(stored, supervision, self._stream.record.id, self._stream.ledger.done)
        if stored is not None or supervision.kills:
            self._writes_trials = True
            self._record(self._trials)
        if self._trials.groups:
            suspects = counted(len(self._trials.suspects), "sample")
            self._progress.log(f"workers ended while they computed {suspects}: trying them in smaller groups, last")
        elif self._trials.careful:
            self._progress.log("the last worker was killed: computing in trials, to find out whether a sample did it")

    def _agree_on_step(self) -> Step:
        """Return the next step, the same on every process."""
        plan: dict[str, Any] = {}
        if self._hosts.first:
            ledger, expected = self._stream.ledger, self._run.expected_samples(self._stream.ledger)
            self._trials = self._trials.without(ledger.done)
            left = Step("rest").others if expected is None else Ranges([(0, expected)])
            left = self._trials.suspects if self._rest_done else left - ledger.done
            step = self._trials.choose(left, section_size(ledger.samples, ledger.shards))
            stored = ledger.done - Ranges.of(skip.index for skip in ledger.quarantined)
            plan = {
                "kind": step.kind,
                "samples": step.samples.pairs(),
                "whole": self._steps == 0 and step.kind == "rest" and not self._trials.groups,
                "control": Ranges.of(islice(stored, 0 if self._last_step_stored else _CONTROLS)).pairs(),
                "tokens": ledger.tokens,
                "done": [] if self._run.token_limit is None else ledger.done.pairs(),
            }
        self._steps += 1
        plan = self._hosts.agree(f"step {self._steps}", plan)
        if self._run.token_limit is not None:
            done = Ranges((start, stop) for start, stop in plan["done"])
            self._limit = TokenLimit(self._run.token_limit, plan["tokens"], done)
        samples, control = (Ranges((start, stop) for start, stop in plan[name]) for name in ("samples", "control"))
        return Step(plan["kind"], samples, plan["whole"], control)

    def _run_step(self, step: Step, given: SampleReader | None) -> bool:
        """Compute and commit the samples of a step; return False if stopped."""
        committed, stored = self._stream.ledger.commits, self._stream.ledger.samples
        if step.kind == "trial":
            alone = len(step.samples) == 1
            controlled = self._last_step_stored or (alone and self._compute_control(step.control_samples))
            self._writes_trials = True
            self._record(self._trials.with_trial(step.samples, controlled=controlled))
        reader = given or _read(self._run, self._stream, step.others)
        self._stream.read_parts = lambda: reader.parts
        try:
            finished = self._run_pipeline(reader)
        except BaseException as error:
            # The process was not killed: the error says what is wrong. The caller handles running out of memory.
            if self._trials.trial and not isinstance(error, Fenced | OutOfDeviceMemory | MemoryError):
                with suppress(SpileError):
                    self._record(replace(self._trials, trial=Ranges()))
            raise
        finally:
            self._failures = 0 if self._stream.ledger.commits > committed else self._failures
            if given is None:
                reader.close()
        self._last_step_stored = self._stream.ledger.samples > stored
        if finished and step.kind == "trial":
            self._record(self._trials.after_success())
        self._rest_done = self._rest_done or (finished and step.kind == "rest")
        return finished

    def _run_pipeline(self, reader: SampleReader) -> bool:
        run, producer = self._run, self._producer
        infer = run.spec.generation is not None  # its samples get their positions once the answers are known
        finished = run_pipeline(
            reader if infer else with_positions(reader, run.spec),
            producer,
            self._sink,
            run.sizes if infer else sizes_for_stream(run.sizes, run.spec, reader, producer.groups),
            progress=self._progress,
            control=self._control,
            limit=self._limit,
        )
        if finished:
            commit_end(run, self._stream, self._sink, reader)
        return finished

    def _compute_control(self, stored: Ranges) -> bool:
        """Compute one of these stored samples again, without storing it; return False if there is none."""
        if not stored:
            return False
        reader = _read(self._run, self._stream, Step("trial", stored).others)
        try:
            sample = next((item for item in reader if isinstance(item, Sample)), None)
        finally:
            reader.close()
        if sample is None:
            return False
        sizes = self._run.sizes.for_samples([len(sample)], self._producer.groups)
        for batch in self._producer.batches(iter([sample]), sizes, Control()):
            if isinstance(batch, Batch):
                self._producer.await_program(batch, lambda: False)  # not part of the wait that may be a hang
                with self._progress.computing():
                    for _ in self._producer.fetch(self._producer.start(batch)):
                        pass
        return True

    def _quarantine(self, index: int) -> None:
        """Commit a sample as skipped because workers end when they compute it."""
        plan: list[Any] = []
        if self._hosts.first:
            ledger = self._stream.ledger
            if len(ledger.quarantined) >= MAX_QUARANTINED:
                raise Failure(
                    f"{len(ledger.quarantined)} samples of {self._stream.folder.url} ended their workers and are "
                    "quarantined, and there are more",
                    fix="look for the fault in the machine, its memory or the model; see the workers' logs",
                )
            why = next(group.causes_text for group in self._trials.groups if index in group.samples)
            task_id, read = self._run.samples.find_task_id(index, ledger.parts, ledger.end)
            self._stream.read_parts = lambda: read
            plan = [task_id, why]
            self._progress.log(f"quarantined {plan[0]} (sample {index} of the stream): {why}")
        task_id, why = self._hosts.agree(f"quarantine {self._steps}", plan)
        skip = Skip(index, task_id, QUARANTINED, {"cause": why})
        self._sink.commit(None, [skip])
        self._progress.skip(skip)

    def _handle_out_of_memory(self, error: OutOfDeviceMemory | MemoryError) -> None:
        """Count running out of memory against the samples on trial; raise it again if it is not about samples."""
        proven = len(self._trials.trial) == 1 and self._trials.controlled  # another sample was computed right before
        self._failures += not proven
        if self._hosts.name or self._failures > _MOST_FAILURES:
            self._record(replace(self._trials, trial=Ranges()))
            raise error
        self._progress.log(f"{str(error) or 'host memory ran out'}: computing in trials, to find the sample at fault")
        self._writes_trials, self._rest_done, self._last_step_stored = True, False, False
        self._record(self._trials.after_failure("out of memory"))

    def _end_hung_worker(self, seconds: float) -> None:
        """End this worker, and leave a record of what it was working on. No thread can be asked to end."""
        self._progress.log(
            f"no result from the device for {duration(seconds)}: this worker ends, another one continues"
        )
        trials = replace(self._trials, ended="worker hung")
        writer = threading.Thread(target=write_trials, args=(self._stream.folder, trials), daemon=True)
        writer.start()
        writer.join(_LAST_WRITE)
        os.kill(os.getpid(), signal.SIGKILL)

    def _record(self, trials: Trials) -> None:
        self._trials = trials
        if self._hosts.first and self._writes_trials:
            write_trials(self._stream.folder, trials)


def _finish(
    run: ResolvedRun, stream: StreamWriter, progress: Progress, hosts: WorkerGroup, *, finished: bool, device: str
) -> Summary:
    """Write what is derived from the ledger if the stream is finished, and return what the stream holds."""
    if hosts.first and finished:
        commit_limit(run, stream)
        stream.finish()
        write_entry(run.root, stream.record.worker_id)
        if run.spec.generation is not None:
            write_answers(run, stream)
        write_checkpoint_file(run.spec, stream, "completed", progress.log)
    hosts.barrier("complete")
    stream = stream if hosts.first else join(run)
    ledger = stream.ledger
    return summarize(
        run.root,
        [ledger],
        progress,
        stream=stream.folder.url,
        complete=not _has_work(run, stream),
        interrupted=not finished,
        skipped=ledger.skipped,
        quarantined=ledger.quarantined,
        cut=_cut(run, ledger),
        device=device,
    )


def _cut(run: ResolvedRun, ledger: Ledger) -> str:
    """Return what the limit of length did, and what was expected if that was said before this run."""
    prompts = ledger.samples + ledger.skipped
    text, said = cut_text(ledger.cut, ledger.too_long, prompts, run.identity.max_seq_length), vars(run).get("lengths")
    return f"{text} (expected: {said.share_text})" if text and said is not None else text


# -- the producer ------------------------------------------------------------------------------------------


def make_producer(run: ResolvedRun, progress: Progress, reader: SampleReader) -> Producer:
    """Load the model onto its devices. The producer may look at the samples that come next."""
    generation, torch = run.identity.generation, run.spec.backend == "torch"
    if generation is not None:
        if run.spec.positions == ANSWER:  # no row of a prompt is stored, so none leaves the device
            generation = replace(generation, capture="answer")
        if not torch:
            return make_generator(run, generation, progress, reader)
        models, tokenizer = load_torch_models(run.files, run.spec, progress), run.tokenizer
        return TorchGenerator(
            models, run.taps, generation=generation, spec=run.spec, tokenizer=tokenizer, progress=progress
        )
    if torch:
        return make_torch_producer(run.files, run.taps, run.spec, run.sizes.batch_tokens, progress)
    return make_device_producer(run, progress, reader)


def make_device_producer(run: ResolvedRun, progress: Progress, reader: SampleReader) -> DeviceProducer:
    """Load the model in JAX, and compile for the batch that the first samples will form."""

    def prepare(producer: DeviceProducer) -> None:
        sizes = sizes_for_stream(run.sizes, run.spec, reader, producer.groups)
        if run.samples.prompt.pack and run.spec.positions == ALL:  # every packed sample but the last is full
            length = sizes.row_length(sizes.longest)
            producer.prepare(Batch((), sizes.rows(length), length))
            return
        items = with_positions(reader.peek(), run.spec)
        first = next(batches((item for item in items if isinstance(item, Sample)), sizes), None)
        if first is not None:
            producer.prepare(first)

    return place_model(run.files, run.taps, run.spec, run.bytes_per_token, progress, prepare, run.steering)


# -- the stream -------------------------------------------------------------------------------------------------------


def join(run: ResolvedRun, attempt: str | None = None, stream_id: str | None = None) -> StreamWriter:
    """Open the stream of a run, and begin it if it does not exist."""
    stream = join_stream(run.root, run.spec.data.worker_id, run.stream_identity, run.identity, attempt, stream_id)
    stream.statistics = wants_statistics(run.spec.statistics)
    return stream


def _read(run: ResolvedRun, stream: StreamWriter | None, done: Ranges) -> SampleReader:
    """Read the samples that are not done; compare the rows of a streamed dataset with what earlier runs read."""
    ledger = Ledger() if stream is None else stream.ledger
    return run.samples.read(done, ledger.parts, ledger.end)


def commit_end(run: ResolvedRun, stream: StreamWriter, sink: Sink, reader: SampleReader) -> None:
    """Commit the number of samples of a stream that only reading it tells, unless the ledger has it."""
    if run.stream_identity.samples is None and stream.ledger.end is None and reader.total is not None:
        sink.commit(None, end=reader.total)


def commit_limit(run: ResolvedRun, stream: StreamWriter) -> None:
    """Commit the limits that ended a finished stream before the end of its data, unless the ledger has them."""
    ledger = stream.ledger
    expected, total = run.expected_samples(ledger), ledger.expected(run.stream_identity.samples)
    recorded = -1 if ledger.limit is None else ledger.limit.samples
    if expected is not None and expected != total and recorded < expected and not _has_work(run, stream):
        stream.commit([], limit=Limit(expected, run.spec.data.limits))


def _state(run: ResolvedRun) -> object:
    """Return what changes if a stream is begun, cleared or gets a commit."""
    folder = run.root.child(stream_folder(run.spec.data.worker_id, run.identity.folders))
    record = read_stream(folder)
    return None if record is None else (record.id, commit_numbers(folder))


def _existing_stream(run: ResolvedRun) -> StreamWriter | None:
    """Return the stream if an earlier worker began it."""
    record = read_stream(run.root.child(stream_folder(run.spec.data.worker_id, run.identity.folders)))
    return None if record is None else join(run)


def _version(spec: RunSpec) -> str | None:
    return stream_version(open_folder(spec.output), spec.data.worker_id)


def _has_work(run: ResolvedRun, stream: StreamWriter) -> bool:
    expected = run.expected_samples(stream.ledger)
    return expected is None or bool(len(Ranges([(0, expected)]) - stream.ledger.done))


def _agree_on_stream(run: ResolvedRun, stream: StreamWriter | None, hosts: WorkerGroup) -> tuple[StreamWriter, Ranges]:
    """Return the stream and its done samples: on every process those of process 0's ledger."""
    plan: dict[str, Any] = {}
    if hosts.first:
        _join_run(run, hosts)
        stream = stream or join(run)
        plan = {"attempt": stream.attempt, "stream": stream.record.id, "done": stream.ledger.done.pairs()}
        plan["folders"] = run.identity.folders
    plan = hosts.agree("plan", plan)
    if plan["folders"] != run.identity.folders:
        raise RunMismatch(
            f"{run.root.url} on this host was begun with other names of folders than on worker 0",
            expected=f"{plan['folders']}_N",
            found=f"{run.identity.folders}_N",
            fix=f"add --stream-names {plan['folders']}, or give all hosts another --output",
        )
    if stream is None:
        join_run(run.root, run.identity)  # compares: a host with another model or data fails, and all end
        stream = join(run, plan["attempt"], plan["stream"])
    return stream, Ranges((start, stop) for start, stop in plan["done"])


class _OtherLength(Exception):
    """Another worker has just created the run with another automatic limit of length, which counts for all workers."""


def _join_run(run: ResolvedRun, hosts: WorkerGroup) -> None:
    """Create the run, or compare with it."""
    try:
        join_run(run.root, run.identity)
    except RunMismatch:
        stored = read_run(run.root)
        if hosts.name or run.spec.data.max_seq_length != AUTO or stored is None:
            raise
        if stored.max_seq_length == run.identity.max_seq_length:
            raise
        raise _OtherLength(f"{run.root.url} was just created with --max-seq-length {stored.max_seq_length}") from None


def _remove_remains(stream: StreamWriter, progress: Progress) -> None:
    """Remove unfinished shards of killed workers from the disk, and log it."""
    count, removed = remove_unfinished(stream.folder)
    if count:
        files = counted(count, "unfinished shard")
        progress.log(f"removed {files} ({size(removed)}) that killed runs of this stream left behind")


def _status_files(run: ResolvedRun, stream: StreamWriter, progress: Progress, hosts: WorkerGroup) -> StatusFiles:
    expected = run.expected_samples(stream.ledger)
    return StatusFiles(run.spec, stream, progress, writes=hosts.first, expected=expected)
