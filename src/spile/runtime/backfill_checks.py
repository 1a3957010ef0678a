"""Whether taps can be added to a dataset: it is finished, its model is the same, and they are not there yet."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from spile.errors import ModelError, RunMismatch, SpecError, UserError
from spile.objects import Folder
from spile.planning.ranges import Ranges
from spile.runtime.backends import find_model
from spile.spec.backfill import BackfillSpec
from spile.spec.identity import RunIdentity
from spile.spec.positions import ALL
from spile.spec.run import ExtractSpec
from spile.spec.taps import Tap
from spile.store.layout import RUN
from spile.store.ledger import Ledger
from spile.store.run import differences, mismatch, read_run
from spile.store.splits import expected_streams
from spile.store.streams import Stream, read_ledgers
from spile.weights.files import ModelFiles

__all__ = ["dataset_model", "finished_streams", "refuse_other_numbers", "refuse_taps_there"]


def refuse_other_numbers(spec: BackfillSpec, root: Folder) -> RunIdentity:
    """The dataset's run, which what was asked for must not differ from."""
    run = read_run(root)
    if run is None:
        raise UserError(f"no dataset at {root.url}", expected=f"a folder with {RUN}", found="none")
    if run.unknown:
        raise RunMismatch(
            f"{root.url} is of a newer version of spile",
            expected="a run whose every setting is known",
            found=", ".join(sorted(run.unknown)),
            fix="upgrade spile to add to it",
        )
    asked = {
        "dtype": None if spec.dtype == "auto" else spec.dtype,
        "store_dtype": spec.store_dtype,
        "positions": spec.positions,
    }
    given = {name: value for name, value in asked.items() if value is not None}
    differing = differences({name: getattr(run, name) for name in given}, given)
    if differing:
        raise mismatch(f"{root.url} holds another run", differing, "leave them out: added rows are as those there")
    capture = None if run.generation is None else run.generation.capture
    if capture == "none" or (capture == "answer" and run.positions == ALL):
        raise SpecError(
            "--add-taps",
            expected="a dataset that holds all tokens of its samples",
            found=f"answers made with --capture {capture}",
        )
    return run


def finished_streams(spec: BackfillSpec, root: Folder, streams: Sequence[Stream]) -> list[Stream]:
    """Those to add to, every sample of each done."""
    chosen = [stream for stream in streams if spec.worker_id in (None, stream.number)]
    if not chosen:
        which = "" if spec.worker_id is None else f" {spec.worker_id}"
        raise SpecError("--add-taps", expected="a finished dataset", found=f"no stream{which} in {root.url}")
    expected = expected_streams([stream.record for stream in streams])
    absent = set(range(expected or 0)) - {stream.number for stream in streams}
    if absent and spec.worker_id is None:
        raise _unfinished(root, f"streams {Ranges.of(absent).text()} were never begun")
    read_ledgers(chosen)
    for stream in chosen:
        ledger = Ledger().plus(stream.commits)
        samples = stream.record.identity.samples
        total = ledger.end if samples is None else samples
        bounds = [count for count in (total, spec.max_samples) if count is not None]
        if not bounds or Ranges([(0, min(bounds))]) - ledger.done:
            of = f" of {min(bounds)}" if bounds else ""
            raise _unfinished(root, f"{len(ledger.done)}{of} samples in stream {stream.number}")
    return chosen


def _unfinished(root: Folder, found: str) -> SpecError:
    return SpecError(
        "--add-taps",
        expected=f"a finished dataset in {root.url}",
        found=found,
        fix="finish it with the command that began it, or give the --max-samples that it was made with",
    )


def refuse_taps_there(taps: Sequence[Tap], streams: Sequence[Stream]) -> None:
    """A tap is there once; taps that somebody began to add are finished as they were begun."""
    names = tuple(map(str, taps))
    for stream in streams:
        own = set(names) & {str(tap) for tap in stream.record.identity.taps}
        if own:
            raise _there(own, f"they are in {stream.folder.url} already")
        for added in stream.begun:
            if added.taps != names and set(names) & set(added.taps):
                words = " ".join(added.taps)
                state = "added already" if added in stream.additions else f"begun: --add-taps {words} finishes them"
                raise _there(set(names) & set(added.taps), f"in {stream.folder.url} {words} are {state}")


def _there(taps: set[str], found: str) -> SpecError:
    return SpecError(
        f"--add-taps {' '.join(sorted(taps))}", expected="taps that the dataset does not have", found=found
    )


def dataset_model(spec: BackfillSpec, run: RunIdentity, root: Folder) -> tuple[ModelFiles, Literal["jax", "torch"]]:
    """The model that made the dataset, proven to have the same weights and the same tokenizer."""
    again = ExtractSpec(
        model=spec.model or run.model,
        revision=spec.revision or (run.revision if spec.model is None else None),
        adapter=run.adapter,
    )
    files, backend = find_model(again, run, root.url)
    beyond = [str(tap) for tap in spec.taps if (tap.layer or 0) >= files.config.n_layers]
    if beyond:
        raise SpecError(
            "--add-taps", expected=f"layers 0 to {files.config.n_layers - 1}, as the model has", found=", ".join(beyond)
        )
    for what, wanted, found in (
        ("weights", run.weights, files.weights_hash()),
        ("tokenizer", run.tokenizer, files.tokenizer_hash() if run.tokenizer != "none" else "none"),
    ):
        if found != wanted:
            raise ModelError(
                f"{files.name} is not the model of {root.url}",
                expected=f"{what} {wanted}",
                found=f"{what} {found}",
                fix=f"give the model that made it: {run.model}" + (f" at {run.revision}" if run.revision else ""),
            )
    return files, backend
