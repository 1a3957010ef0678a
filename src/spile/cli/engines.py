"""``spile extract --engine``: run all streams of a dataset on many workers at once."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from spile.cli.flags import log
from spile.errors import DataError, SpecError
from spile.spec.amounts import counted
from spile.spec.run import EMBEDDED

if TYPE_CHECKING:
    from spile.cli.flags import EngineFlags, RunFlags
    from spile.spec.run import RunSpec

_STREAMS = "streams"
"""The folder in the output that contains the streams of ``--dataset``."""
_STREAMS_PER_WORKER = 4
"""There are more streams than workers, so that all workers can share the streams of a slow or lost one."""
_ROWS_PER_STREAM = 16
"""With fewer rows there is one stream per worker: the start of a worker costs more than the rows of a small stream."""


def extract_on_engine(flags: RunFlags, engine: EngineFlags) -> int:
    """Run every stream and return the exit code of the run."""
    from spile.launch.engines import make_engine
    from spile.launch.supervisor import Supervisor, cluster_check, stream_tasks
    from spile.objects import open_folder
    from spile.store.snapshot import SnapshotReader
    from spile.store.stream import refuse_other_spec, write_spec
    from spile.view.engine import watched_engine

    engine.check()
    if flags.worker_id is not None:
        raise SpecError("--worker-id with an engine", expected="all streams", fix="leave out --worker-id or --engine")
    spec = flags.spec()
    output = spec.output
    runner = make_engine(engine.name, engine.request(output))
    try:
        streams = flags.dataset_dir or _split(flags, spec, runner.workers, engine.num_streams)
        spec = _with_absolute_paths(spec, streams)
        inputs = tuple(map(_absolute, filter(_is_place, (streams, spec.model))))
        with cluster_check(spec.output, inputs) as asked:
            runner.check(asked)
        root = open_folder(spec.output)
        refuse_other_spec(root, spec)
        url = write_spec(root, spec)
        tasks = stream_tasks(streams, lambda stream: ("worker", "--spec", url, "--stream", str(stream)))
        if runner.room < runner.workers:
            log(f"the cluster has room for {runner.room} of {runner.workers} workers now; the others wait for nodes")
        with watched_engine(SnapshotReader(root)) as view:
            supervisor = Supervisor(runner, tasks, log=view.log, observe=view.observe)
            outcome = supervisor.run(lambda: view.asked)
        # Name the output as the user wrote it; the spec of the workers has its absolute path.
        view.finish(outcome, len(tasks), open_folder(output).url, spec.data.max_samples)
        return outcome.exit_code
    finally:
        runner.close()


def _with_absolute_paths(spec: RunSpec, streams: str) -> RunSpec:
    """Return the spec that every worker gets. Paths are absolute, because workers start in other folders."""
    data = replace(spec.data, dataset=EMBEDDED, dataset_dir=_absolute_folder(streams), split=None, config_name=None)
    copy = None if spec.local_copy is None else _absolute_folder(spec.local_copy)
    return replace(spec, model=_absolute(spec.model), data=data, output=_absolute_folder(spec.output), local_copy=copy)


def _is_place(name: str) -> bool:
    """Return whether the name is a path or a URL and not a name on the hub."""
    return "://" in name or name.startswith((".", "/", "~")) or (name != EMBEDDED and Path(name).exists())


def _absolute_folder(place: str) -> str:
    """Return a local folder as an absolute path."""
    return place if "://" in place else str(Path(place).expanduser().absolute())


def _absolute(name: str) -> str:
    """Return a path as an absolute path; names on the hub and URLs stay."""
    return _absolute_folder(name) if _is_place(name) else name


def _stream_count(dataset: str, spec: RunSpec, workers: int) -> int:
    """Return how many streams to make of a dataset: up to four per worker, and no more than it has rows."""
    from spile.data.sources import RowRange, open_source

    part, most = RowRange.parse(spec.data.split), _STREAMS_PER_WORKER * workers
    source = open_source(dataset, column=spec.data.prompt.column, split=part.split, config_name=spec.data.config_name)
    usable = (row for row in source.rows(part.start, part.stop) if row.problem is None)
    rows = sum(1 for _ in islice(usable, most * _ROWS_PER_STREAM))
    return max(1, min(most, rows, max(workers, rows // _ROWS_PER_STREAM)))


def _split(flags: RunFlags, spec: RunSpec, workers: int, asked: int | None) -> str:
    """Split ``--dataset`` into streams in the output folder, or reuse those of an earlier run; return their folder."""
    from spile.data.manifest import MANIFEST, StreamsManifest
    from spile.fleet.deploy import prepare_streams, refuse_other_rows
    from spile.objects import open_folder
    from spile.objects.folder import NotFound

    place = f"{spec.output.rstrip('/')}/{_STREAMS}"
    dataset = flags.dataset or EMBEDDED
    try:
        known = StreamsManifest.from_json(open_folder(place).get(MANIFEST), f"{place}/{MANIFEST}")
    except NotFound:
        count = asked or _stream_count(dataset, spec, workers)
        prepare_streams(dataset, place, count, data=spec.data, log=log)
        return place
    source = str(known.source.get("dataset"))
    if source != dataset:
        raise DataError(
            f"{place} holds streams of another dataset",
            expected=source,
            found=dataset if flags.dataset is not None else f"no --dataset, which is {EMBEDDED} with its model",
            fix=f"continue with --dataset {source}, name other streams with --dataset-dir, or give another --output",
        )
    refuse_other_rows(known, spec.data, place)
    if asked is not None and asked != len(known.streams):
        raise SpecError("--num-streams", expected=f"{len(known.streams)}, as in {place}", found=str(asked))
    log(f"{counted(len(known.streams), 'stream')} of {source}, as made before: {place}")
    return place
