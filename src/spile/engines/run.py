"""Run all streams of a dataset on an engine: split the data, check the run, start and supervise the workers."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import islice
from typing import Protocol

from spile.data.manifest import StreamsManifest, read_manifest
from spile.data.samples import is_large
from spile.data.sources import RowRange, open_input, open_source
from spile.data.split import prepare_streams, refuse_changed_source, refuse_other_rows
from spile.engines.registry import EngineOptions, make_engine
from spile.engines.supervisor import (
    Engine,
    EngineOutcome,
    StreamTask,
    Supervisor,
    WorkerEnd,
    cluster_check,
    stream_tasks,
)
from spile.errors import DataError, Failure, SpecError, UserError
from spile.objects import open_folder
from spile.reading.dataset import stored_tokens
from spile.spec.amounts import counted
from spile.spec.run import EMBEDDED, STORED, DataSpec, RunSpec
from spile.store.layout import SPLIT
from spile.store.run import (
    absolute_name,
    absolute_path,
    absolute_paths,
    is_location,
    refuse_other_spec,
    stored_spec,
    write_spec,
)
from spile.store.snapshot import SnapshotReader, StreamView

Log = Callable[[str], None]

_STREAMS_PER_WORKER = 4
"""There are more streams than workers, so that all workers can share the streams of a slow or lost one."""
_ROWS_PER_STREAM = 16
"""With fewer rows there is one stream per worker: the start of a worker costs more than the rows of a small stream."""


class Display(Protocol):
    """Shows a run on an engine, and counts how often the user has asked to stop it."""

    @property
    def stop_requests(self) -> int: ...

    def log(self, line: str) -> None:
        """Show an event."""
        ...

    def observe(self, supervisor: Supervisor) -> Mapping[int, StreamView]:
        """Show the state of the dataset and return that of its streams."""
        ...

    def finish(self, outcome: EngineOutcome, streams: int, root: str, *, cleared: bool = False) -> None:
        """Show the result."""
        ...


def run_on_engine(
    spec: RunSpec,
    engine: EngineOptions,
    display: Callable[[SnapshotReader], AbstractContextManager[Display]],
    *,
    log: Log,
    clear: Mapping[int, str] | None = None,
) -> EngineOutcome:
    """Run every stream of the data of a run on an engine.

    Args:
        spec: The run, as for one worker.
        engine: Where workers run, and how many.
        display: Shows the run.
        log: Receives one line per event before that.
        clear: The versions of the streams that are removed first.

    Raises:
        SpileError: What one worker would report before it loads the model. Nothing was written.
    """
    clear, output = clear or {}, spec.output
    runner = make_engine(engine, output)
    try:
        typed = _for_workers(spec)
        data = typed.data.dataset_dir or typed.data.dataset.removeprefix(STORED)
        inputs = tuple(filter(is_location, (data, typed.model)))
        with cluster_check(typed.output, inputs) as asked:
            runner.check(asked)
        if lengths := _check_run(runner, typed, clear):
            log(lengths)
        spec = _for_workers(_with_streams(spec, runner, engine.num_streams, log))
        root = open_folder(spec.output)
        refuse_other_spec(root, replace(spec, data=stored_tokens(spec.data)))
        url = write_spec(root, spec)
        tasks = _tasks(spec.data, url, clear)
        if runner.room < runner.workers:
            log(f"the cluster has room for {runner.room} of {runner.workers} workers now; the others wait for nodes")
        with display(SnapshotReader(root)) as view:
            supervisor = Supervisor(runner, tasks, log=view.log, observe=view.observe)
            outcome = supervisor.run(lambda: view.stop_requests)
        # Name the output as the user wrote it; the spec of the workers has its absolute path.
        view.finish(outcome, len(tasks), open_folder(output).url, cleared=bool(clear))
        return outcome
    finally:
        runner.close()


def has_streams(spec: RunSpec) -> bool:
    """Return whether a run of a whole dataset continues streams that several workers began."""
    data = spec.data
    if data.dataset_dir is not None or data.of_streams is not None or data.rows is not None or data.worker_id:
        return False
    stored = stored_spec(open_folder(spec.output))
    if stored is None:
        return False
    return stored.data.of_streams is not None or stored.data.dataset_dir == absolute_path(_split_of(spec))


def _split_of(spec: RunSpec) -> str:
    """Return the folder for the streams that are made of the dataset of a run."""
    return f"{spec.output.rstrip('/')}/{SPLIT}"


def _check_run(runner: Engine, spec: RunSpec, clear: Mapping[int, str]) -> str:
    """Let one worker check the run as if it were the only one, before anything is written.

    Returns:
        What the limit of length does to the prompts.

    Raises:
        SpileError: What a run of one worker would report, with the same exit code.
    """
    folder = spec.data.dataset_dir
    number = spec.data.worker_id if folder is None else min(task.stream for task in stream_tasks(folder, lambda _: ()))
    words = ("worker", "--spec", json.dumps(spec.to_dict()), "--stream", str(number), "--check")
    runner.start(StreamTask(number, (*words, *(("--clear", clear[number]) if number in clear else ()))))
    ends: Sequence[WorkerEnd] = ()
    while not ends:
        ends = runner.wait(0.2)
    end = ends[0]
    if end.code:
        kind = UserError if end.code == UserError.exit_code else Failure
        raise kind(end.last_line.removeprefix("spile: ") or f"the check of the run ended with exit code {end.code}")
    return end.last_line


def _tasks(data: DataSpec, url: str, clear: Mapping[int, str]) -> list[StreamTask]:
    def words(stream: int) -> tuple[str, ...]:
        first = ("--clear", clear[stream]) if stream in clear else ()
        return ("worker", "--spec", url, "--stream", str(stream), *first)

    if data.dataset_dir is not None:
        return stream_tasks(data.dataset_dir, words)
    numbers = [data.worker_id] if data.of_streams is None else range(data.of_streams)
    return [StreamTask(stream, words(stream)) for stream in numbers]


def _for_workers(spec: RunSpec) -> RunSpec:
    """Return the spec that every worker gets, with absolute paths: workers start in other folders."""
    if spec.data.dataset_dir is not None:
        spec = replace(spec, data=replace(spec.data, dataset=EMBEDDED, split=None, config_name=None))
    return absolute_paths(spec)


def _stream_count(dataset: str, spec: RunSpec, workers: int) -> int:
    """Return how many streams to make of a dataset: up to four per worker, and no more than it has rows."""
    part, most = RowRange.parse(spec.data.split), _STREAMS_PER_WORKER * workers
    source = open_source(dataset, column=spec.data.prompt.column, split=part.split, config_name=spec.data.config_name)
    usable = (row for row in part.rows(source) if row.problem is None)
    rows = sum(1 for _ in islice(usable, most * _ROWS_PER_STREAM))
    return max(1, min(most, rows, max(workers, rows // _ROWS_PER_STREAM)))


def _with_streams(spec: RunSpec, runner: Engine, num_streams: int | None, log: Log) -> RunSpec:
    """Return the spec with the data as streams: those of an earlier run, or new ones.

    A small dataset is split into files in the output folder. The workers read a large one directly, each the rows of
    its stream, so that the first batch does not wait for a pass over all rows.
    """
    if spec.data.dataset_dir is not None:
        return spec
    place = _split_of(spec)
    files = replace(spec, data=replace(spec.data, dataset_dir=place, dataset_revision=None))
    known = read_manifest(open_folder(place))
    if known is not None:
        _refuse_other_split(known, spec, num_streams, place, log)
        return files
    in_turn = _continue_without_split(spec, num_streams, log)
    stored = spec.data.dataset.startswith(STORED)
    if in_turn is None and (
        stored or not runner.elsewhere or "://" in spec.data.dataset or not is_location(spec.data.dataset)
    ):
        in_turn = _with_rows_in_turn(spec, num_streams or runner.workers, log)
    if in_turn is not None:
        return in_turn
    count = num_streams or _stream_count(spec.data.dataset, spec, runner.workers)
    prepare_streams(spec.data.dataset, place, count, data=spec.data, log=log)
    return files


def _with_rows_in_turn(spec: RunSpec, count: int, log: Log) -> RunSpec | None:
    """Return the spec with streams that read the rows in turn of a large or a stored dataset; None for others."""
    data = stored_tokens(spec.data)
    file = open_input(data)
    try:
        if data.rows is not None:
            count = min(count, len(data.rows))
        elif not is_large(file, spec.data.prompt, count):
            return None
    except DataError:  # the split converts more kinds of rows, or says what is wrong with them
        return None
    log(f"{spec.data.dataset} is read during the run, its rows by {counted(count, 'stream')} in turn")
    return replace(spec, data=replace(spec.data, worker_id=0, of_streams=count, dataset_revision=file.revision))


def _continue_without_split(spec: RunSpec, num_streams: int | None, log: Log) -> RunSpec | None:
    """Return the spec of an existing run that reads its dataset directly: with one stream, or its rows in turn."""
    stored = stored_spec(open_folder(spec.output))
    if stored is None:
        return None
    old = stored.data
    requested = (None, absolute_name(spec.data.dataset), spec.data.split, spec.data.config_name)
    stored_flags = (old.dataset_dir, absolute_name(old.dataset), old.split, old.config_name)
    if requested != stored_flags:
        raise DataError(
            f"{spec.output} holds streams of another dataset",
            expected=_data_flags(*stored_flags),
            found=_data_flags(*requested),
            fix="give the same flags, or another --output",
        )
    count = old.of_streams or 1
    if num_streams is not None and num_streams != count:
        raise SpecError("--num-streams", expected=f"{count}, as at the start of the run", found=str(num_streams))
    log(f"{counted(count, 'stream')} of {spec.data.dataset}, as at the start of the run")
    pinned = spec.data.dataset_revision or old.dataset_revision
    data = replace(spec.data, worker_id=old.worker_id, of_streams=old.of_streams, dataset_revision=pinned)
    return replace(spec, data=data)


def _data_flags(folder: str | None, dataset: str, split: str | None, config_name: str | None) -> str:
    words = {"--dataset": dataset, "--split": split, "--config-name": config_name}
    words = words if folder is None else {"--dataset-dir": folder}
    return " ".join(f"{flag} {value}" for flag, value in words.items() if value is not None)


def _refuse_other_split(known: StreamsManifest, spec: RunSpec, num_streams: int | None, place: str, log: Log) -> None:
    """Raise if the streams that an earlier run made are not those that are asked for."""
    dataset, source = spec.data.dataset, str(known.source.get("dataset"))
    if source != dataset:
        raise DataError(
            f"{place} holds streams of another dataset",
            expected=source,
            found=dataset,
            fix=f"continue with --dataset {source}, name other streams with --dataset-dir, or give another --output",
        )
    refuse_other_rows(known, spec.data, place)
    if num_streams is not None and num_streams != len(known.streams):
        raise SpecError("--num-streams", expected=f"{len(known.streams)}, as in {place}", found=str(num_streams))
    refuse_changed_source(known, dataset, spec.data)
    log(f"{counted(len(known.streams), 'stream')} of {source}, made by an earlier run: {place}")
