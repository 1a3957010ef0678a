"""``--engine``: run all streams of a dataset, or verify and inspect its parts, on many workers at once."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, redirect_stdout
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spile.cli.flags import log
from spile.errors import DataError, Failure, SpecError, UserError, untrusted
from spile.objects import open_folder
from spile.spec.amounts import counted
from spile.spec.run import EMBEDDED, no_model

if TYPE_CHECKING:
    from spile.cli.flags import RunFlags
    from spile.data.manifest import StreamsManifest
    from spile.engines.registry import EngineOptions, WorkerOptions
    from spile.engines.supervisor import ClusterCheck, Engine, StreamTask, WorkerEnd
    from spile.spec.run import DataSpec, RunSpec
    from spile.store.parts import DatasetPart, RunParts

_STREAMS_PER_WORKER = 4
"""There are more streams than workers, so that all workers can share the streams of a slow or lost one."""
_ROWS_PER_STREAM = 16
"""With fewer rows there is one stream per worker: the start of a worker costs more than the rows of a small stream."""


def extract_on_engine(flags: RunFlags, engine: EngineOptions) -> int:
    """Run every stream and return the exit code of the run."""
    from spile.engines.registry import make_engine
    from spile.engines.supervisor import Supervisor, cluster_check
    from spile.store.layout import find_streams
    from spile.store.run import refuse_other_spec, write_spec
    from spile.store.snapshot import SnapshotReader
    from spile.view.engine import engine_display

    if flags.worker_id is not None:
        raise SpecError("--worker-id with an engine", expected="all streams", fix="leave out --worker-id or --engine")
    if engine.hosts_per_worker > 1 and flags.model is None:
        raise no_model("a pod")
    spec = flags.spec()
    output = spec.output
    clear = flags.streams_to_clear(open_folder(output), find_streams(open_folder(output)))
    runner = make_engine(engine, output)
    try:
        spec = _with_absolute_paths(_with_streams(flags, spec, runner, engine.num_streams))
        inputs = tuple(filter(_is_location, (spec.data.dataset_dir or spec.data.dataset, spec.model)))
        with cluster_check(spec.output, inputs) as asked:
            runner.check(asked)
        root = open_folder(spec.output)
        refuse_other_spec(root, spec)
        url = write_spec(root, spec)
        tasks = _tasks(spec.data, url, clear)
        if runner.room < runner.workers:
            log(f"the cluster has room for {runner.room} of {runner.workers} workers now; the others wait for nodes")
        with engine_display(SnapshotReader(root)) as view:
            supervisor = Supervisor(runner, tasks, log=view.log, observe=view.observe)
            outcome = supervisor.run(lambda: view.stop_requests)
        # Name the output as the user wrote it; the spec of the workers has its absolute path.
        view.finish(outcome, len(tasks), open_folder(output).url, cleared=bool(clear))
        return outcome.exit_code
    finally:
        runner.close()


@contextmanager
def part_workers(command: str, root: str, flags: WorkerOptions) -> Iterator[RunParts | None]:
    """Yield a function that runs ``spile COMMAND ROOT --part PART`` on an engine; None if the flags ask for none."""
    from spile.engines.registry import make_engine
    from spile.store.parts import divide

    if not flags.requested:
        yield None
        return
    place = _absolute_folder(root)
    # Only the report belongs to stdout, but Ray prints there when it loses a node.
    with redirect_stdout(sys.stderr), closing(make_engine(flags, root)) as runner:
        if runner.elsewhere:
            runner.check(_reading_check(place))

        yield lambda sizes: _run_parts(runner, (command, place), divide(sizes, runner.workers))


def _reading_check(place: str) -> ClusterCheck:
    """Return the check that a machine sees the dataset. Nothing is written: the dataset may be read-only."""
    from spile.engines.supervisor import ClusterCheck

    inputs = [f"{place.rstrip('/')}/{info.key}" for info in islice(open_folder(place).list(), 1)]
    return ClusterCheck(inputs=tuple(inputs))


def _run_parts(runner: Engine, words: tuple[str, ...], parts: Sequence[DatasetPart]) -> list[Mapping[str, Any]]:
    from spile.engines.supervisor import StreamTask, Supervisor
    from spile.view.table import SafeConsole

    results: list[Mapping[str, Any]] = []

    def finished(end: WorkerEnd) -> None:
        with untrusted(Failure, f"the result of the worker for part {parts[end.stream]} cannot be read"):
            results.append(dict(json.loads(end.last_line)))

    tasks = [
        StreamTask(number, (*words, "--part", str(part)), part.size, name=f"part {part}")
        for number, part in enumerate(parts)
    ]
    errors = SafeConsole(stderr=True, soft_wrap=True)
    outcome = Supervisor(runner, tasks, log=errors.print, finished=finished).run(lambda: 0)
    for place, problem in outcome.failed.items():
        kind = UserError if outcome.refused else Failure
        raise kind(f"{words[0]} failed for part {parts[place]} of {words[1]}", found=problem)
    return results


def _tasks(data: DataSpec, url: str, clear: Mapping[int, str]) -> list[StreamTask]:
    from spile.engines.supervisor import StreamTask, stream_tasks

    def words(stream: int) -> tuple[str, ...]:
        first = ("--clear", clear[stream]) if stream in clear else ()
        return ("worker", "--spec", url, "--stream", str(stream), *first)

    if data.dataset_dir is not None:
        return stream_tasks(data.dataset_dir, words)
    return [StreamTask(stream, words(stream)) for stream in range(data.of_streams or 1)]


def _with_absolute_paths(spec: RunSpec) -> RunSpec:
    """Return the spec that every worker gets. Paths are absolute, because workers start in other folders."""
    folder = spec.data.dataset_dir
    data = replace(spec.data, dataset=_absolute(spec.data.dataset))
    if folder is not None:
        data = replace(data, dataset=EMBEDDED, dataset_dir=_absolute_folder(folder), split=None, config_name=None)
    copy = None if spec.local_copy is None else _absolute_folder(spec.local_copy)
    return replace(spec, model=_absolute(spec.model), data=data, output=_absolute_folder(spec.output), local_copy=copy)


def _is_location(name: str) -> bool:
    """Return whether the name is a path or a URL and not a name on the hub."""
    return "://" in name or name.startswith((".", "/", "~")) or (name != EMBEDDED and Path(name).exists())


def _absolute_folder(place: str) -> str:
    return place if "://" in place else str(Path(place).expanduser().absolute())


def _absolute(name: str) -> str:
    """Return a path as an absolute path; names on the hub and URLs stay."""
    return _absolute_folder(name) if _is_location(name) else name


def _stream_count(dataset: str, spec: RunSpec, workers: int) -> int:
    """Return how many streams to make of a dataset: up to four per worker, and no more than it has rows."""
    from spile.data.sources import RowRange, open_source

    part, most = RowRange.parse(spec.data.split), _STREAMS_PER_WORKER * workers
    source = open_source(dataset, column=spec.data.prompt.column, split=part.split, config_name=spec.data.config_name)
    usable = (row for row in part.rows(source) if row.problem is None)
    rows = sum(1 for _ in islice(usable, most * _ROWS_PER_STREAM))
    return max(1, min(most, rows, max(workers, rows // _ROWS_PER_STREAM)))


def _with_streams(flags: RunFlags, spec: RunSpec, runner: Engine, num_streams: int | None) -> RunSpec:
    """Return the spec with the data as streams: those of an earlier run, or new ones.

    A small dataset is split into files in the output folder. The workers read a large one directly, each the rows of
    its stream, so that the first batch does not wait for a pass over all rows.
    """
    from spile.data.manifest import read_manifest
    from spile.data.split import prepare_streams
    from spile.store.layout import SPLIT

    if flags.dataset_dir is not None:
        return spec
    place = f"{spec.output.rstrip('/')}/{SPLIT}"
    files = replace(spec, data=replace(spec.data, dataset_dir=place, dataset_revision=None))
    known = read_manifest(open_folder(place))
    if known is not None:
        _refuse_other_split(known, flags, spec, num_streams, place)
        return files
    in_turn = _continue_without_split(spec, num_streams)
    if in_turn is None and (not runner.elsewhere or "://" in spec.data.dataset or not _is_location(spec.data.dataset)):
        in_turn = _with_rows_in_turn(spec, num_streams or runner.workers)
    if in_turn is not None:
        return in_turn
    count = num_streams or _stream_count(spec.data.dataset, spec, runner.workers)
    prepare_streams(spec.data.dataset, place, count, data=spec.data, log=log)
    return files


def _with_rows_in_turn(spec: RunSpec, count: int) -> RunSpec | None:
    """Return the spec with streams that read the rows of a large dataset in turn; None if it is not large."""
    from spile.data.samples import is_large
    from spile.data.sources import open_input

    file = open_input(spec.data)
    try:
        if not is_large(file, spec.data.prompt, count):
            return None
    except DataError:  # the split converts more kinds of rows, or says what is wrong with them
        return None
    log(f"{spec.data.dataset} is read during the run, its rows by {counted(count, 'stream')} in turn")
    return replace(spec, data=replace(spec.data, worker_id=0, of_streams=count, dataset_revision=file.revision))


def _continue_without_split(spec: RunSpec, num_streams: int | None) -> RunSpec | None:
    """Return the spec of an existing run that reads its dataset directly: with one stream, or its rows in turn."""
    from spile.store.run import stored_spec

    stored = stored_spec(open_folder(spec.output))
    if stored is None:
        return None
    old = stored.data
    requested = (None, _absolute(spec.data.dataset), spec.data.split, spec.data.config_name)
    stored_flags = (old.dataset_dir, _absolute(old.dataset), old.split, old.config_name)
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
    return replace(spec, data=replace(spec.data, worker_id=0, of_streams=old.of_streams, dataset_revision=pinned))


def _data_flags(folder: str | None, dataset: str, split: str | None, config_name: str | None) -> str:
    words = {"--dataset": dataset, "--split": split, "--config-name": config_name}
    words = words if folder is None else {"--dataset-dir": folder}
    return " ".join(f"{flag} {value}" for flag, value in words.items() if value is not None)


def _refuse_other_split(
    known: StreamsManifest, flags: RunFlags, spec: RunSpec, num_streams: int | None, place: str
) -> None:
    """Raise if the streams that an earlier run made are not those that are asked for."""
    from spile.data.split import refuse_other_rows

    dataset, source = spec.data.dataset, str(known.source.get("dataset"))
    if source != dataset:
        raise DataError(
            f"{place} holds streams of another dataset",
            expected=source,
            found=dataset if flags.dataset is not None else f"no --dataset, which is {EMBEDDED} with its model",
            fix=f"continue with --dataset {source}, name other streams with --dataset-dir, or give another --output",
        )
    refuse_other_rows(known, spec.data, place)
    if num_streams is not None and num_streams != len(known.streams):
        raise SpecError("--num-streams", expected=f"{len(known.streams)}, as in {place}", found=str(num_streams))
    log(f"{counted(len(known.streams), 'stream')} of {source}, made by an earlier run: {place}")
