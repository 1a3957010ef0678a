"""``spile extract``, ``spile infer`` and ``spile worker``: run a model over a dataset."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from spile.cli.aliases import with_guide_defaults, with_worker_number
from spile.cli.flags import ENGINE, MANY, ExtractFlags, InferFlags, PodFlags, RunFlags, given_flags, log
from spile.engines.registry import EngineOptions
from spile.errors import Interrupted, SpecError
from spile.objects import is_remote, open_folder
from spile.spec.options import check_number
from spile.spec.phase import Phase
from spile.spec.run import BackfillSpec, RunSpec, no_model, parse_mesh_shape
from spile.spec.taps import parse_taps

if TYPE_CHECKING:
    from spile.compute.progress import Summary
    from spile.run.pod.identity import Identity
    from spile.run.pod.pod import WorkerGroup


@Parameter(name="*", group=Group("Add to a finished dataset", sort_key=7))
@dataclass(frozen=True)
class BackfillFlags:
    """The taps to add, and the dataset to add them to."""

    add_taps: Annotated[list[str] | None, MANY] = None
    """Compute these taps for every stored row of --to and add them to that dataset: mlp.12 residual.0"""
    to: str | None = None
    """The finished dataset: a folder, gs://…, s3://… or az://…"""

    @property
    def requested(self) -> bool:
        return self.add_taps is not None or self.to is not None

    def spec(self, flags: ExtractFlags) -> BackfillSpec:
        """Return the spec from these flags and those of extract."""
        if self.to is None or self.add_taps is None:
            found = "one of them"
            raise SpecError("--add-taps and --to", expected="both: the taps, and the finished dataset", found=found)
        values, known = given_flags(flags), {each.name for each in fields(BackfillSpec)} - {"taps"}
        for name, value in values.items():
            if name not in known:
                raise SpecError(
                    f"--{name.replace('_', '-')} cannot be used with --add-taps",
                    expected="the value that the dataset was created with",
                    found=value,
                    fix="leave it out",
                )
        if "mesh_shape" in values:
            values["mesh_shape"] = parse_mesh_shape(values["mesh_shape"])
        return BackfillSpec(root=self.to, taps=parse_taps(self.add_taps), **values)


def extract(
    *,
    flags: ExtractFlags = ExtractFlags(),
    pod: PodFlags = PodFlags(),
    engine: Annotated[EngineOptions, ENGINE] = EngineOptions(),
    backfill: BackfillFlags = BackfillFlags(),
    web: bool = False,
    verbose: bool = False,
) -> int:
    """Run a model over a dataset and store its layers' activations, each sample exactly once.

    Without flags: the embedded model on the embedded ARC tasks, into ./activations. The same command resumes an
    interrupted run. Every flag can also come from --config run.toml or a SPILE_* variable.

    Args:
        web: Also show the run in the browser while it runs; its address is printed.
        verbose: Log more: devices, shapes, each commit.
    """
    if backfill.requested:
        return add_taps(backfill, flags, pod, verbose)
    if engine.requested or _continues_streams(flags, pod):
        from spile.cli.engines import extract_on_engine

        chosen = engine if engine.requested else replace(engine, num_workers=1)
        return extract_on_engine(with_guide_defaults(flags, os.environ, log), chosen)
    return run_flags(flags, pod, verbose, web)


def _continues_streams(flags: ExtractFlags, pod: PodFlags) -> bool:
    """Return whether one worker is to continue, or to begin again, what several workers stored."""
    from spile.engines.run import has_streams

    if flags.worker_id is not None or flags.guide_script is not None:
        return False
    return has_streams(flags.spec()) and pod.identity().count == 1


def infer(
    *, flags: InferFlags = InferFlags(), pod: PodFlags = PodFlags(), web: bool = False, verbose: bool = False
) -> int:
    """Answer every prompt of a dataset, and store the activations of prompts and answers, each sample exactly once.

    Without flags: the embedded model on the embedded ARC tasks, into ./inference. The same command resumes an
    interrupted run. spile score shows how many answers to ARC tasks are right. Every flag can also come from --config
    run.toml or a SPILE_* variable.

    Args:
        web: Also show the run in the browser while it runs; its address is printed.
        verbose: Log more: devices, shapes, each commit.
    """
    return run_flags(flags, pod, verbose, web)


def worker(
    *,
    spec: Annotated[str, Parameter(allow_leading_hyphen=True)],
    stream: int | None = None,
    clear: str | None = None,
    check: bool = False,
    claim: bool = False,
    worker_name: str | None = None,
    claim_seconds: float = 90.0,
    pod: PodFlags = PodFlags(),
    verbose: bool = False,
) -> int:
    """Run one stream of a run spec, or claim streams until none is left. Launchers start this.

    The spec is the spec.json that spile extract or spile infer wrote. It contains all other settings.

    Its exit code says whether it has to be started again. Finished work is committed, and the same command resumes.

    Args:
        spec: The run spec: a file, an object of a bucket, its JSON text, or - for standard input.
        stream: The number of the stream. [default: that of a spec whose data is one stream]
        clear: With --stream: first remove what the stream holds, if its stream.json still has this hash. spile extract
            --overwrite passes it; a worker that is started again resumes.
        check: With --stream: only check the spec, the model and the data, and write nothing.
        claim: Instead of --stream: claim one unfinished stream after another.
        worker_name: With --claim: a name that no other running worker has. [default: host and process]
        claim_seconds: With --claim: seconds without a renewal after which another worker's stream is taken over.
        verbose: Log more: devices, shapes, each commit.
    """
    found = _read_spec(spec)
    if claim:
        for flag, value in (("--stream", stream), ("--clear", clear)):
            if value is not None:
                raise SpecError("--claim", expected=f"no {flag}", found=f"{flag} {value}")
        return _run_claimed_streams(found, pod, worker_name, claim_seconds, verbose)
    stream = found.one_stream if stream is None else stream
    if stream is None:
        raise SpecError("--stream", expected="the number of a stream, or --claim", found="neither")
    if check:
        from spile.run.worker import check_run

        log(check_run(found.for_stream(stream), start_over=clear is not None))
        return 0
    return run_stream(found.for_stream(stream), pod, pod.identity(), verbose, clear=clear)


def _run_claimed_streams(spec: RunSpec, pod: PodFlags, name: str | None, seconds: float, verbose: bool) -> int:
    from spile.run.claiming import work_on_claims
    from spile.run.pod.check import check_before_work
    from spile.run.signals import exit_handler, handle_signals

    check_number("--claim-seconds", seconds, 1, 86400)
    identity = pod.identity()
    # Between streams nothing is to be committed, and the first process of a container ignores SIGTERM by default.
    between = handle_signals(exit_handler(Interrupted.exit_code), signal.SIGTERM)
    with pod.join(identity) as hosts, between:
        check_before_work(spec, hosts, log)
        return work_on_claims(
            spec.data,
            spec.output,
            lambda stream: run_stream(spec.for_stream(stream), pod, identity, verbose, hosts),
            worker=name,
            expiry=seconds,
            hosts=hosts,
            log=log,
        )


def _read_spec(location: str) -> RunSpec:
    from spile.store.run import read_spec

    if location.lstrip().startswith("{"):
        return RunSpec.from_json(location, "--spec")
    if location == "-":
        return RunSpec.from_json(sys.stdin.read(), "the spec on standard input")
    return read_spec(location)


def run_flags(flags: RunFlags, pod: PodFlags, verbose: bool, web: bool = False) -> int:
    """Run the stream that the flags of extract or infer name, and return the exit code."""
    flags = with_guide_defaults(flags, os.environ, log)
    flags.spec()  # Report a mistake before looking for a pod or waiting for its other hosts.
    identity = pod.identity()
    if identity.count == 1:
        flags = with_worker_number(flags, os.environ, log)
    elif flags.model is None:
        raise no_model("a pod")
    spec = flags.spec()
    _check_local_run(spec)
    from spile.cli.view import serve_page

    number = spec.data.worker_id
    clear = flags.streams_to_clear(open_folder(spec.output), [number]).get(number)
    with serve_page(spec.output, web and identity.process == 0):
        return run_stream(spec, pod, identity, verbose, clear=clear)


def _check_local_run(spec: RunSpec) -> None:
    """Say that a run into a bucket does not continue the same run that was stored on this machine before.

    Raises:
        SpecError: The bucket's local copy would go where that run is stored.

    """
    from spile.store.cleanup import stream_has_commits
    from spile.store.layout import existing_folder
    from spile.store.run import read_run
    from spile.store.stored_stream import copy_command
    from spile.store.writer import read_stream

    local = spec.local_copy or ("./activations" if spec.generation is None else "./inference")
    if not is_remote(spec.output) or not Path(local).is_dir():
        return
    root, number = open_folder(local), spec.data.worker_id
    run, stream = read_run(root), read_stream(root.child(existing_folder(root, number)))
    if run is None or stream is None or not stream_has_commits(root, number):
        return
    if (run.model, stream.identity.data) != (spec.model, spec.data.location):
        return
    if stream_has_commits(open_folder(spec.output), number):
        return
    continues = f"to continue it in the bucket, copy it there first: {copy_command(local, spec.output)}"
    if spec.local_copy is not None:
        raise SpecError(
            f"--output-dir {local} already holds stream {number} of a run that was stored only there",
            expected=f"a copy of {spec.output}, which has nothing of this stream",
            fix=f"{continues}; to begin again, choose another --output-dir",
        )
    log(f"{local} has stream {number} of a run of this model, which {spec.output} does not continue; {continues}")


def run_stream(
    spec: RunSpec,
    pod: PodFlags,
    identity: Identity,
    verbose: bool,
    hosts: WorkerGroup | None = None,
    *,
    clear: str | None = None,
) -> int:
    """Run one stream with a progress display, and return the exit code.

    Args:
        spec: The run spec.
        pod: The flags of the pod.
        identity: The place of this process in the pod.
        verbose: Whether to log more.
        hosts: The pod, if it was joined before.
        clear: The version of the stream that is removed first, or None.

    """
    from spile.run import worker
    from spile.run.pod.pod import log_devices
    from spile.run.signals import exit_soon
    from spile.view.worker import worker_display

    joined = pod.join(identity) if hosts is None else nullcontext(hosts)
    with joined as hosts, worker_display(verbose) as watch:
        if verbose:
            watch.progress.phase(Phase.LOOKING, "at the devices")
            log_devices(hosts, log)
        summary = worker.run_stream(spec, clear=clear, progress=watch.progress, stop=watch.stop, hosts=hosts)
        if hosts.first:
            if verbose:
                for began, ended, name in sorted(watch.progress.spans):
                    log(f"{began:6.2f} to {ended:6.2f} s  {name}")
            scattered = bool(hosts.name) and not is_remote(spec.output)
            summary = replace(summary, scattered=scattered, cleared=clear is not None)
            watch.finish(summary, _answer_facts(spec, summary))
            _warn_of_incomplete_copy(spec, summary.stream)
        else:
            log(f"{hosts.name}: done; worker 0 has the summary")
    if summary.interrupted:
        exit_soon(summary.exit_code)  # Do not wait for programs that are still being compiled.
    return summary.exit_code


def _answer_facts(spec: RunSpec, summary: Summary) -> list[tuple[str, str]]:
    """Return the path of the answers, if all of them are there, and how to score those of ARC tasks."""
    from spile.store.run import read_run

    if spec.generation is None or not summary.complete or summary.interrupted:
        return []
    rows = [("answers", f"{spec.answers_dir or summary.stream}/predictions.jsonl")]
    run = read_run(open_folder(summary.root))
    if run is not None and run.answers_are_grids:
        rows.append(("score", f"spile score {summary.root}"))
    return rows


def _warn_of_incomplete_copy(spec: RunSpec, home: str) -> None:
    """Warn that a local copy started after the first commit and is therefore incomplete."""
    if spec.local_copy is None:
        return
    from spile.store.stored_stream import missing_from_copy

    if found := missing_from_copy(open_folder(spec.local_copy), home, spec.data.worker_id):
        log(found)


def add_taps(backfill: BackfillFlags, flags: ExtractFlags, pod: PodFlags, verbose: bool) -> int:
    """Add taps to a finished dataset with a progress display, and return the exit code."""
    from spile.run.backfill import add_taps as run
    from spile.run.signals import exit_soon
    from spile.view.worker import worker_display

    spec = backfill.spec(flags)
    hosts = pod.identity().count
    if hosts > 1:
        raise SpecError("--add-taps", expected="one process, with all of its devices", found=f"a pod of {hosts} hosts")
    with worker_display(verbose) as watch:
        summary = run(spec, progress=watch.progress, stop=watch.stop)
        watch.finish(summary)
    if summary.interrupted:
        exit_soon(summary.exit_code)
    return summary.exit_code


def check(
    *, spec: Annotated[str | None, Parameter(allow_leading_hyphen=True)] = None, flags: PodFlags = PodFlags()
) -> int:
    """Test a slice in a minute without a dataset: hosts, barriers, devices and one small forward pass on all devices.

    Run it on every host: gcloud compute tpus tpu-vm ssh $TPU --worker=all --command="spile pod check".

    Args:
        spec: Also compile the program of this run spec and run it on a small batch: a file, an object of a bucket, its
            JSON text, or - for standard input. The weights of the model are not fetched.
    """
    from spile.run.pod.check import check_pod

    found = None if spec is None else _read_spec(spec)
    with flags.join() as hosts:
        check_pod(hosts, log, found)
    return 0
