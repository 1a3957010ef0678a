"""``--engine``: run all streams of a dataset, or verify and inspect its parts, on many workers at once."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, redirect_stdout
from itertools import islice
from typing import TYPE_CHECKING, Any

from spile.cli.flags import log
from spile.errors import Failure, SpecError, UserError, untrusted
from spile.objects import open_folder
from spile.spec.run import no_model

if TYPE_CHECKING:
    from spile.cli.flags import RunFlags
    from spile.engines.registry import EngineOptions, WorkerOptions
    from spile.engines.supervisor import ClusterCheck, Engine, WorkerEnd
    from spile.store.parts import DatasetPart, RunParts


def extract_on_engine(flags: RunFlags, engine: EngineOptions) -> int:
    """Run every stream and return the exit code of the run."""
    from spile.engines.run import run_on_engine
    from spile.store.layout import find_streams
    from spile.view.engine import engine_display

    if flags.worker_id is not None:
        raise SpecError("--worker-id with an engine", expected="all streams", fix="leave out --worker-id or --engine")
    if engine.hosts_per_worker > 1 and flags.model is None:
        raise no_model("a pod")
    spec = flags.spec()
    root = open_folder(spec.output)
    clear = flags.streams_to_clear(root, find_streams(root))
    return run_on_engine(spec, engine, engine_display, log=log, clear=clear).exit_code


@contextmanager
def part_workers(command: str, root: str, flags: WorkerOptions) -> Iterator[RunParts | None]:
    """Yield a function that runs ``spile COMMAND ROOT --part PART`` on an engine; None if the flags ask for none."""
    from spile.engines.registry import make_engine
    from spile.store.parts import divide
    from spile.store.run import absolute_path

    if not flags.requested:
        yield None
        return
    place = absolute_path(root)
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
