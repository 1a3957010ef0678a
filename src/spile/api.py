"""The functions of ``import spile``: one call for each thing that the command line does, with Python objects as data.

Heavy modules are imported inside the functions, so that ``import spile`` stays fast.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from spile.errors import Failure, SpecError, SpileError, UserError, name_arguments
from spile.spec.run import (
    Automatic,
    Backend,
    BadRows,
    Capture,
    ComputeDtype,
    Device,
    FolderNames,
    Gradients,
    LongPolicy,
    PromptKind,
    PromptVersion,
    RunSpec,
    StoreDtype,
    make_spec,
)

if TYPE_CHECKING:
    from spile.compute.progress import Progress, Summary
    from spile.data.arc.answers import Score
    from spile.live.tapping import Activations, Model, TapOptions
    from spile.live.training_rows import ActivationStream
    from spile.planning.forecast import Forecast
    from spile.proof.report import Report
    from spile.reading.dataset import Dataset
    from spile.reading.export import ExportDtype, Exported, ExportFormat
    from spile.reading.inspection import Comparison, Inspection
    from spile.reading.push import Pushed
    from spile.run.pod.pod import WorkerGroup
    from spile.store.predictions import Decode

Data = Any
"""A path or a name as for ``--dataset``, or the rows themselves: a sequence of strings, dicts, chats or lists of token
ids, a ``datasets.Dataset``, or a frame of pandas, polars or pyarrow."""


class RunOptions(TypedDict, total=False):
    """The options of :func:`extract` and :func:`plan`: the flags of ``spile extract``, by their names in Python."""

    revision: str | None
    adapter: str | None
    backend: Backend
    device: Device
    same_numbers: bool
    dataset_dir: str | None
    worker_id: int
    prompt: PromptKind
    grid_encoder: str
    prompt_version: PromptVersion
    predictions_per_task: int
    column: str
    template_from: str | None
    pack: bool
    max_seq_length: int | Automatic
    long: LongPolicy
    max_samples: int | None
    max_samples_per_stream: int | None
    max_tokens: int | str | None
    max_bytes: int | str | None
    seed: int
    expect_split: str | None
    bad_rows: BadRows
    split: str | None
    config_name: str | None
    dataset_revision: str | None
    of_streams: int | None
    keep: Sequence[str] | str
    stream_names: FolderNames
    local_copy: str | None
    layers: Sequence[int] | str | int | None
    heads: Sequence[int] | str | int | None
    top_k: int
    attention_top: int
    gradients: Gradients
    steer: Sequence[str]
    dtype: ComputeDtype
    store_dtype: StoreDtype
    positions: str
    batch_size: int | None
    batch_tokens: int | None
    mesh_shape: tuple[int, int] | str | None
    shard_size_gb: float
    commit_every: float | None
    statistics: bool | None
    checkpoint_dir: str | None
    answers_dir: str | None


class InferOptions(RunOptions, total=False):
    """The options of :func:`infer`: the flags of ``spile infer``, by their names in Python."""

    max_new_tokens: int
    temperature: float
    top_p: float
    stop_tokens: Sequence[int]
    capture: Capture


class LoadOptions(TypedDict, total=False):
    """The options of :func:`load`: which weights are loaded, and how they are computed."""

    revision: str | None
    adapter: str | None
    backend: Backend
    device: Device
    dtype: ComputeDtype
    mesh_shape: tuple[int, int] | str | None


# -- run a model ------------------------------------------------------------------------------------------------------


@name_arguments("spile.load")
def load(model: str = "embedded", **options: Unpack[LoadOptions]) -> Model:
    """Load a model and keep it in memory, for repeated calls of its method ``tap``.

    Args:
        model: A model on the Hugging Face hub, a folder, a folder in a bucket, or ``embedded``.
        options: Which revision or adapter, and how it is computed.
    """
    from spile.live.tapping import load_tapped

    return load_tapped(make_spec({"model": model, **_plain_values(options)}, source="spile.load()"))


_last_model: list[tuple[object, Any]] = []
"""The arguments and the model of the last call of :func:`tap`."""


@name_arguments("spile.tap")
def tap(
    model: str | Model,
    data: Data,
    *,
    taps: Sequence[str] | str = "residual",
    revision: str | None = None,
    adapter: str | None = None,
    dtype: ComputeDtype = "auto",
    device: Device = "auto",
    **options: Unpack[TapOptions],
) -> Activations:
    """Return the activations of a few texts in memory. The model of the last call stays loaded.

    Args:
        model: The name of a model, or the result of :func:`load`.
        data: A list of strings, dicts, chats or lists of token ids, a frame, or the name of a dataset.
        taps: What to compute, such as ``["residual.12", "mlp.3-5"]``.
        revision: The branch, tag or commit of a hub model.
        adapter: A LoRA adapter to merge into the weights.
        dtype: The precision of the computation.
        device: The kind of device that runs the model: ``auto``, ``cpu``, ``cuda`` or ``tpu``.
        options: Which tokens are returned, and how rows become prompts.

    Returns:
        One :class:`~spile.live.tapping.TappedSample` per row, in the order of the data.

    """
    if isinstance(model, str):
        key = (model, revision, adapter, dtype, device)
        if not _last_model or _last_model[0][0] != key:
            _last_model.clear()  # before the next model is loaded, so that both need not fit into memory
            _last_model.append((key, load(model, revision=revision, adapter=adapter, dtype=dtype, device=device)))
        loaded: Model = _last_model[0][1]
    else:
        given = {"revision": revision, "adapter": adapter, "dtype": dtype, "device": device}
        for name, value in given.items():
            if value not in (None, "auto"):
                fix = f"pass it to spile.load({name}={value!r})"
                raise SpecError(name, expected="a model by its name", found="a loaded model", fix=fix)
        loaded = model
    return loaded.tap(data, taps=taps, **options)


@name_arguments("spile.extract")
def extract(
    model: str | RunSpec | None = None,
    data: Data = None,
    output: str | os.PathLike[str] | None = None,
    *,
    taps: Sequence[str] | str | None = None,
    num_workers: int | None = None,
    progress: Progress | bool | None = None,
    stop: threading.Event | None = None,
    hosts: WorkerGroup | None = None,
    **options: Unpack[RunOptions],
) -> Summary:
    """Run a model over a dataset and store its activations. The same call resumes an interrupted run.

    Args:
        model: A model on the Hugging Face hub, a folder, or ``embedded``, which is the default of an output on this
            machine; or a run spec and no other argument.
        data: A file, a folder or a name as for ``--dataset``; or the rows themselves: a list of strings or dicts, a
            ``datasets.Dataset``, or a frame of pandas or polars.
        output: Where the activations are stored: a folder, ``gs://…``, ``s3://…`` or ``az://…``.
        taps: What to store, such as ``["residual.12", "mlp.3-5"]``.
        num_workers: Compute in this many processes of this machine. The data is then given by its name.
        progress: True shows the progress, False does not; None shows it in a notebook. Or counters for a display of
            your own.
        stop: Set it to commit what is done and return.
        hosts: The pod that this process is part of. Every process of the pod makes this call.
        options: The flags of ``spile extract``, with underscores.

    Returns:
        What the stream, or with ``num_workers`` the dataset, holds afterwards.

    Raises:
        spile.errors.UserError: An argument is wrong; nothing was changed.

    """
    from spile.engines.run import has_streams
    from spile.run.worker import run_stream

    spec = _run_spec("extract", model, data, output, taps, options)
    if num_workers is None and hosts is None and has_streams(spec):
        num_workers = 1
    if num_workers is not None:
        return _extract_with_workers(spec, num_workers, progress, stop, hosts)
    with _progress_display(progress, stop) as (counters, ended):
        return run_stream(spec, progress=counters, stop=ended, hosts=hosts)


@name_arguments("spile.stream")
def stream(
    model: str | RunSpec | None = None,
    data: Data = None,
    taps: Sequence[str] | str | None = None,
    *,
    store: str | os.PathLike[str] | None = None,
    workers: int | str | Sequence[Mapping[str, str]] | None = None,
    **options: Unpack[RunOptions],
) -> ActivationStream:
    """Run a model and give its activations to a training loop, without storing them.

    The result has the readers of a dataset: ``shuffled``, ``torch``, ``jax`` and ``grain``. They give the batches that
    :meth:`spile.Dataset.shuffled` gives with ``order="data"`` after :func:`extract` of the same data.

    Args:
        model: As for :func:`extract`.
        data: As for :func:`extract`.
        taps: As for :func:`extract`.
        store: Also store what is computed: the dataset of :func:`extract`. What it already holds is read, not computed.
        workers: Compute in other processes: their number, a list with the environment variables of each, such as
            ``[{"CUDA_VISIBLE_DEVICES": "1"}, …]``, or ``ray:4`` for actors on a Ray cluster.
        options: The flags of ``spile extract``, with underscores.

    """
    from spile.live.training_rows import ActivationStream

    spec = _run_spec("stream", model, data, store, taps, options)
    return ActivationStream(spec, store=store is not None, workers=workers)


@name_arguments("spile.infer")
def infer(
    model: str | RunSpec | None = None,
    data: Data = None,
    output: str | os.PathLike[str] | None = None,
    *,
    taps: Sequence[str] | str | None = None,
    stop: Sequence[str] | threading.Event | None = None,
    progress: Progress | bool | None = None,
    hosts: WorkerGroup | None = None,
    **options: Unpack[InferOptions],
) -> Summary:
    """Answer every prompt of a dataset, and store the activations of prompts and answers.

    Args:
        model: As for :func:`extract`.
        data: As for :func:`extract`.
        output: As for :func:`extract`.
        taps: As for :func:`extract`.
        stop: Tokens that end an answer, in addition to the model's own; or an event, which ends the run when it is set.
        progress: As for :func:`extract`.
        hosts: As for :func:`extract`.
        options: The flags of ``spile infer``, with underscores.
    """
    from spile.run.worker import run_stream

    event = stop if isinstance(stop, threading.Event) else None
    words: dict[str, Any] = {} if stop is None or event is not None else {"stop": stop}
    spec = _run_spec("infer", model, data, output, taps, {**options, **words})
    with _progress_display(progress, event) as (counters, ended):
        return run_stream(spec, progress=counters, stop=ended, hosts=hosts)


@name_arguments("spile.plan")
def plan(
    model: str | RunSpec | None = None,
    data: Data = None,
    *,
    taps: Sequence[str] | str | None = None,
    machine: str | None = None,
    workers: int = 1,
    count: int = 1000,
    **options: Unpack[RunOptions],
) -> Forecast:
    """Forecast the tokens and bytes of a run and, for a machine, its hours and dollars.

    Args:
        model: A model as for :func:`extract`, or a run spec. No weights are fetched.
        data: The data as for :func:`extract`.
        taps: The taps as for :func:`extract`.
        machine: The machine type, such as ``v5e-64`` or ``H100-8``; None forecasts sizes only.
        workers: The number of such machines.
        count: The number of samples to tokenize, evenly spread over the data or, if it is large, over its beginning.
        options: The flags of ``spile extract``, with underscores.
    """
    from spile.planning.cost import Rates
    from spile.planning.forecast import plan as forecast
    from spile.planning.machines import list_prices, parse_planned

    if count < 1:
        raise SpecError("--count", expected="at least 1", found=count)
    spec = _run_spec("plan", model, data, None, taps, options)
    kind = None if machine is None else parse_planned(machine)
    found = forecast(spec, count)
    if kind is None:
        return found
    return replace(found, estimate=found.on(kind, list_prices(), rates=Rates(), workers=workers))


# -- examine what was stored ------------------------------------------------------------------------------------------


@name_arguments("spile.verify")
def verify(
    root: str | os.PathLike[str],
    *,
    recompute: int = 0,
    streams: Collection[int] | None = None,
    max_samples: int | None = None,
    seed: int = 0,
    gc: bool = False,
    remove: bool = False,
    repair: bool = False,
    older_than: float = 3600.0,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Report:
    """Prove that every sample of a dataset is stored exactly once, and every byte as it was committed.

    Args:
        root: The dataset: a folder, ``gs://…``, ``s3://…`` or ``az://…``.
        recompute: The number of random samples to compute again and compare.
        streams: Only these streams; None verifies all, and reports those that were never started.
        max_samples: The number of samples to expect in each stream; None expects those of the data, or of the limits
            that ended the run.
        seed: Chooses the samples that are recomputed.
        gc: Search for orphaned shards and unfinished uploads.
        remove: Remove those that are older than ``older_than`` seconds.
        repair: Replace commits of an earlier life of a stream, and keep copies of them.
        older_than: The least age, in seconds, of what ``gc`` finds and ``remove`` removes.
        progress: Called with the checked and the total number of bytes.

    Returns:
        The report: ``report.ok``, and ``report.all_problems``.

    """
    if isinstance(recompute, bool) or not isinstance(recompute, int) or recompute < 0:
        raise SpecError("--recompute", expected="the number of samples to compute again", found=repr(recompute))
    return verify_with_model(
        str(root),
        recompute=recompute,
        streams=streams,
        max_samples=max_samples,
        seed=seed,
        gc=gc,
        remove=remove,
        repair=repair,
        older_than=older_than,
        progress=progress,
    )


def verify_with_model(root: str, *, recompute: int, **options: Any) -> Report:
    """Verify a dataset with the tokenizer of its run and, if samples are recomputed, with its model.

    The options are those of :func:`spile.proof.verification.verify`.
    """
    from spile.proof.verification import verify as check

    again = None
    if recompute:
        from spile.proof.rerun import recomputer

        again = recomputer(root)
    decode, unchecked = answer_decoder(root)
    report = check(root, recompute=again, k=recompute, decode=decode, **options)
    return replace(report, unchecked=tuple(dict.fromkeys((*unchecked, *report.unchecked))))


def answer_decoder(root: str) -> tuple[Decode | None, tuple[str, ...]]:
    """Return the tokenizer's function for texts of answers, or why they cannot be compared."""
    from spile.objects import open_folder
    from spile.reading.dataset import run_tokenizer
    from spile.store.run import read_run

    run = read_run(open_folder(root))
    if run is None or run.generation is None:
        return None, ()
    try:
        return run_tokenizer(run).decode, ()
    except SpileError as error:
        return None, (f"the texts of answers, which need the tokenizer: {error}",)


@name_arguments("spile.inspect")
def inspect(
    root: str | os.PathLike[str] | Dataset,
    *,
    tap: str | None = None,
    samples: int = 3,
    html: str | os.PathLike[str] | None = None,
) -> Inspection:
    """Return the statistics of each tap, the similarity of taps, and the main directions of one tap.

    Args:
        root: A dataset, or where it is stored.
        tap: The tap whose main directions are computed; None takes one in the middle.
        samples: The number of samples in the page.
        html: A file that gets a page with plots.
    """
    from spile.reading.inspection import inspect_dataset

    dataset = _open_dataset(root)
    if not len(dataset):
        raise UserError(f"{dataset.root.url} has no samples yet", fix="inspect it after the first commit")
    found = inspect_dataset(dataset, tap=tap)
    if html is not None:
        from spile.view.web.export import inspection_page, write_page

        write_page(inspection_page(dataset, tap=tap, samples=samples), Path(html))
    return found


@name_arguments("spile.export")
def export(
    root: str | os.PathLike[str] | Dataset,
    output: str | os.PathLike[str],
    *,
    to: ExportFormat = "npy",
    taps: Sequence[str] | None = None,
    streams: Sequence[int] | None = None,
    dtype: ExportDtype | None = None,
    context_size: int = 128,
    hook_name: str | None = None,
) -> Exported:
    """Write taps of a dataset in the format of another program. The dataset is not changed.

    Args:
        root: A dataset, or where it is stored.
        output: A new folder on this machine.
        to: ``npy``, ``parquet``, ``hf``, ``saelens``, ``pickle``, ``speculators`` or ``specforge``.
        taps: The taps; None takes the residual stream of all layers.
        streams: Only these streams.
        dtype: The dtype of the numbers; None takes float32, or bfloat16 for ``speculators`` and ``specforge``.
        context_size: The length of a context in the cache of SAELens.
        hook_name: The name of the tap in the cache of SAELens; None takes that of TransformerLens.
    """
    from spile.reading.export import export_dataset

    return export_dataset(
        root,
        str(output),
        to=to,
        taps=taps,
        streams=streams,
        dtype=dtype,
        context_size=context_size,
        hook_name=hook_name,
    )


@name_arguments("spile.push")
def push(root: str | os.PathLike[str] | Dataset, target: str, *, private: bool = False) -> Pushed:
    """Upload a dataset to the Hugging Face hub, with a dataset card. A second call continues an interrupted push.

    Args:
        root: A dataset, or where it is stored.
        target: ``hf://datasets/OWNER/NAME``; it is created if it does not exist.
        private: Whether a new repository is private.
    """
    from spile.reading.push import push_dataset
    from spile.view.card import dataset_card

    dataset = _open_dataset(root)
    return push_dataset(dataset, target, dataset_card(dataset, target), private=private)


@name_arguments("spile.compare")
def compare(
    a: str | os.PathLike[str] | Dataset, b: str | os.PathLike[str] | Dataset, *, taps: Sequence[str] | None = None
) -> Comparison:
    """Compare the activations of the same samples in two datasets, such as of two dtypes, adapters or checkpoints.

    Args:
        a: A dataset, or where it is stored. Distances are relative to its norms.
        b: The other dataset. Samples are matched by their order in the data, and must have the same tokens.
        taps: The taps to compare; None compares all that both have.
    """
    from spile.reading.inspection import compare_datasets

    return compare_datasets(_open_dataset(a), _open_dataset(b), taps)


@name_arguments("spile.score")
def score(root: str | os.PathLike[str], *, reference: str | None = None, dataset: str | None = None) -> Score:
    """Compare the answers of :func:`infer` to ARC tasks with the expected outputs.

    Variants of a task vote, after their changes are undone. An answer without a grid counts as wrong.

    Args:
        root: What :func:`infer` wrote.
        reference: A file with the expected outputs; None takes those of the tasks.
        dataset: The tasks; None takes the data of the run.
    """
    from spile.reading.scoring import score_run

    return score_run(str(root), reference, dataset)


# -- arguments --------------------------------------------------------------------------------------------------------


def _run_spec(
    function: str,
    model: str | RunSpec | None,
    data: Data,
    output: str | os.PathLike[str] | None,
    taps: Sequence[str] | str | None,
    options: Mapping[str, Any],
) -> RunSpec:
    given = {"data": data, "output": output, "taps": taps, **options}
    if isinstance(model, RunSpec):
        more = [name for name, value in given.items() if value is not None]
        if more:
            raise SpecError(more[0], expected="a run spec and no other argument", found="both")
        return model
    values = _plain_values(options) | ({} if model is None else {"model": model})
    values |= {} if output is None else {"output": str(output)}
    values |= {} if taps is None else {"taps": _plain_values({"taps": taps})["taps"]}
    by_name = data is None or isinstance(data, str | os.PathLike)
    values |= {"dataset": str(data)} if by_name and data is not None else {}
    spec = make_spec(values, infer=function == "infer", source=f"spile.{function}()")
    if by_name:
        return spec
    from spile.data.sources import with_rows

    return replace(spec, data=with_rows(spec.data, data))


def _extract_with_workers(
    spec: RunSpec,
    workers: int,
    progress: Progress | bool | None,
    stop: threading.Event | None,
    hosts: WorkerGroup | None,
) -> Summary:
    from spile.compute.progress import Progress, summarize
    from spile.engines.registry import EngineOptions
    from spile.engines.run import run_on_engine
    from spile.objects import open_folder
    from spile.store.ledger import Ledger
    from spile.store.run import read_run
    from spile.store.stored_stream import open_streams
    from spile.view.engine import engine_display

    options = EngineOptions(num_workers=workers)
    if spec.data.rows is not None:
        raise SpecError("num_workers", expected="data by its name", found=spec.data.dataset, fix="write it to a file")
    if hosts is not None or isinstance(progress, Progress):
        raise SpecError("num_workers", expected="progress=True or False, and no hosts", found="counters or a pod")
    display = partial(engine_display, quiet=not progress, event=stop)
    outcome = run_on_engine(spec, options, display, log=print if progress else lambda _line: None)
    if outcome.failed:
        number, problem = next(iter(outcome.failed.items()))
        kind = UserError if outcome.refused else Failure
        raise kind(f"stream {number} of {spec.output} failed", found=problem)
    root = open_folder(spec.output)
    run = read_run(root)
    ledgers = [] if run is None else [Ledger().plus(stream.commits) for stream in open_streams(root, run)]
    return summarize(
        root,
        ledgers,
        Progress(),
        stream=root.url,
        complete=not outcome.interrupted,
        interrupted=outcome.interrupted,
        skipped=sum(ledger.skipped for ledger in ledgers),
        quarantined=tuple(skip for ledger in ledgers for skip in ledger.quarantined),
        device=f"{workers} workers",
    )


def _plain_values(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options in the forms that the run spec accepts: any sequence as a list, a path as a text."""
    found: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, os.PathLike):
            found[name] = str(value)
        elif isinstance(value, str | tuple) or not hasattr(value, "__iter__"):
            found[name] = value
        else:
            found[name] = [each.item() if hasattr(each, "item") else each for each in value]
    return found


def _open_dataset(root: str | os.PathLike[str] | Dataset) -> Dataset:
    from spile.reading.dataset import Dataset
    from spile.reading.dataset import open as open_dataset

    return root if isinstance(root, Dataset) else open_dataset(str(root))


@contextmanager
def _progress_display(
    progress: Progress | bool | None, stop: threading.Event | None
) -> Iterator[tuple[Progress | None, threading.Event | None]]:
    """Yield the counters of a run and what ends it, and show them if that is asked for, or in a notebook."""
    if progress is not None and not isinstance(progress, bool):
        yield progress, stop
        return
    from spile.view.worker import in_notebook, notebook_bar, worker_display

    if not (in_notebook() if progress is None else progress):
        yield None, stop
    elif in_notebook():
        with notebook_bar() as counters:
            yield counters, stop
    else:
        with worker_display() as watch:
            yield watch.progress, stop or watch.stop
