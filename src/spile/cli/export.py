"""``spile export``, ``push`` and ``import``: other formats, the hub, and the pickles of the old guides."""

from __future__ import annotations

from typing import Annotated, Literal

from spile.cli.flags import MANY, log, stream_numbers
from spile.objects import open_folder
from spile.reading.dataset import open as open_dataset
from spile.reading.export import ExportDtype, ExportFormat, export_dataset
from spile.reading.importing import import_pickles
from spile.reading.push import push_dataset
from spile.spec.amounts import counted, size
from spile.spec.run import StoreDtype
from spile.view.card import dataset_card
from spile.view.table import progress_bar

_MOST_NAMED = 10
"""The number of files that were not uploaded and are named."""


def export(
    root: str = "./activations",
    *,
    to: ExportFormat,
    output: str,
    taps: Annotated[list[str] | None, MANY] = None,
    streams: str | None = None,
    dtype: ExportDtype | None = None,
    context_size: int = 128,
    hook_name: str | None = None,
) -> int:
    """Export a dataset to a format that other programs read. The dataset is not changed.

    Args:
        root: A dataset: a folder, gs://…, s3://… or az://…
        to: The format: the pickles of the old guides, SAELens' cache, NumPy, Parquet, Hugging Face, or the training
            data of speculators or SpecForge.
        output: A new folder on this machine, or for pickles in a bucket.
        taps: Such as residual.3; [default: residual of all layers]
        streams: Only these streams, such as 0-3,7. [default: all]
        dtype: Of the numbers written. [default: float32; bfloat16 for speculators and specforge]
        context_size: The context size of SAELens' cache.
        hook_name: The name of the tap in SAELens. [default: TransformerLens']
    """
    with progress_bar("exporting", "rows") as progress:
        done = export_dataset(
            root,
            output,
            to=to,
            taps=taps,
            streams=stream_numbers(streams),
            dtype=dtype,
            context_size=context_size,
            hook_name=hook_name,
            progress=progress,
        )
    unit = {"saelens": "context", "speculators": "sample", "specforge": "sample"}.get(to, "row")
    log(f"wrote {counted(done.rows, unit)} of {', '.join(done.taps)} to {output} ({counted(done.files, 'file')})")
    return 0


def push(root: str, target: str, *, private: bool = False) -> int:
    """Upload a dataset to the Hugging Face hub, with a dataset card. The same command continues an interrupted push.

    The token is that of HF_TOKEN or of hf auth login.

    Args:
        root: A dataset: a folder, gs://…, s3://… or az://…
        target: hf://datasets/OWNER/NAME; it is created if it does not exist.
        private: Make a new repository private.
    """
    dataset = open_dataset(root)
    with progress_bar("pushing", "bytes") as progress:
        done = push_dataset(dataset, target, dataset_card(dataset, target), private=private, progress=progress)
    log(
        f"{done.url} has {counted(done.files, 'file')}, {size(done.size)}, at commit {done.commit[:10]}; "
        f'read it: spile.open("{done.url}")'
    )
    if done.left_out:
        more = f" and {len(done.left_out) - _MOST_NAMED} more" if len(done.left_out) > _MOST_NAMED else ""
        names = ", ".join(done.left_out[:_MOST_NAMED])
        log(f"not uploaded, because not part of the dataset: {counted(len(done.left_out), 'file')}: {names}{more}")
    return 0


def import_(
    source: str,
    *,
    output: str = "./activations",
    worker_id: int = 0,
    site: Literal["residual", "attn", "mlp"] = "residual",
    model: str = "unknown",
    store_dtype: StoreDtype = "bfloat16",
) -> int:
    """Import the pickles of the old guides as a dataset.

    Code in them is not run. They contain no tokens, so each token of the dataset is -1.

    Args:
        source: shard_0001.pkl.gz, or a folder of such files.
        output: Where the dataset is stored: a folder, gs://…, s3://… or az://…
        worker_id: The stream's number: writes stream_5/.
        site: The tap kind of the pickled activations.
        model: The model's name, for display.
        store_dtype: What rows are stored as.
    """
    with progress_bar("importing", "files") as progress:
        store = import_pickles(
            source,
            open_folder(output),
            worker_id=worker_id,
            site=site,
            model=model,
            store_dtype=store_dtype,
            progress=progress,
        )
    ledger = store.ledger
    log(
        f"{store.folder.url} has {counted(ledger.samples, 'sample')}, {counted(ledger.tokens, 'row')} per tap; "
        f"check it with: spile verify {output}"
    )
    return 0
