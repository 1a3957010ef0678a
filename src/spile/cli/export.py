"""``spile export``, ``push`` and ``import``: other formats, the hub, and the pickles of the old guides."""

from __future__ import annotations

from typing import Annotated, Literal

from cyclopts import Parameter

from spile.cli.flags import parse_numbers
from spile.objects import open_folder
from spile.reading.dataset import open as open_dataset
from spile.reading.export import check_output, chosen_taps, export_dataset
from spile.reading.importing import import_pickles
from spile.reading.push import push_dataset
from spile.spec.amounts import counted, size
from spile.spec.run import StoreDtype
from spile.view.card import dataset_card
from spile.view.table import output as console
from spile.view.table import progress_bar

Form = Literal["pickle", "saelens", "npy", "parquet", "hf", "speculators", "specforge"]


def export(
    root: Annotated[str, Parameter(help="A dataset: a folder, gs://…, s3://… or az://…")] = "./activations",
    *,
    to: Annotated[
        Form,
        Parameter(
            help="The format: the pickles of the old guides, SAELens' cache, NumPy, Parquet, Hugging Face, or the "
            "training data of speculators or SpecForge."
        ),
    ],
    output: Annotated[str, Parameter(help="A new folder on this machine, or for pickles in a bucket.")],
    taps: Annotated[
        list[str] | None,
        Parameter(consume_multiple=True, negative="", help="Such as residual.3; [default: residual of all layers]"),
    ] = None,
    streams: Annotated[str | None, Parameter(help="Only these streams, such as 0-3,7. [default: all]")] = None,
    dtype: Annotated[
        Literal["float32", "float16", "bfloat16"] | None,
        Parameter(help="Of the numbers written. [default: float32; bfloat16 for speculators and specforge]"),
    ] = None,
    context_size: Annotated[int, Parameter(help="The context size of SAELens' cache.")] = 128,
    hook_name: Annotated[
        str | None, Parameter(help="The name of the tap in SAELens. [default: TransformerLens']")
    ] = None,
) -> int:
    """Export a dataset to a format that other programs read. The dataset is not changed."""
    check_output(to, output)
    dataset = open_dataset(root)
    chosen = chosen_taps(dataset, taps)
    numbers = None if streams is None else sorted(parse_numbers("--streams", streams))
    with progress_bar("exporting", "rows") as seen:
        done = export_dataset(
            dataset,
            str(output),
            to=to,
            taps=chosen,
            streams=numbers,
            dtype=dtype,
            context_size=context_size,
            hook_name=hook_name,
            seen=seen,
        )
    unit = {"saelens": "context", "speculators": "sample", "specforge": "sample"}.get(to, "row")
    console().print(
        f"wrote {counted(done.rows, unit)} of {', '.join(chosen)} to {output} ({counted(done.files, 'file')})",
        soft_wrap=True,
    )
    return 0


def push(
    root: Annotated[str, Parameter(help="A dataset: a folder, gs://…, s3://… or az://…")],
    target: Annotated[str, Parameter(help="hf://datasets/OWNER/NAME; it is created if it does not exist.")],
    *,
    private: Annotated[bool, Parameter(negative="", help="Make a new repository private.")] = False,
) -> int:
    """Upload a dataset to the Hugging Face hub, with a dataset card. The same command continues an interrupted push.

    The token is that of HF_TOKEN or of hf auth login.
    """
    dataset = open_dataset(root)
    with progress_bar("pushing", "bytes") as seen:
        done = push_dataset(dataset, target, dataset_card(dataset, target), private=private, seen=seen)
    console().print(
        f"{done.url} has {counted(done.files, 'file')}, {size(done.size)}, at commit {done.commit[:10]}; "
        f'read it: spile.open("{done.url}")',
        soft_wrap=True,
    )
    return 0


def import_(
    source: Annotated[str, Parameter(help="shard_0001.pkl.gz, or a folder of such files.")],
    *,
    output: Annotated[
        str, Parameter(help="Where the dataset is stored: a folder, gs://…, s3://… or az://…")
    ] = "./activations",
    worker_id: Annotated[int, Parameter(help="The stream's number: writes stream_5/.")] = 0,
    site: Annotated[Literal["residual", "attn", "mlp"], Parameter(help="The tap kind of the pickled activations.")] = (
        "residual"
    ),
    model: Annotated[str, Parameter(help="The model's name, for people.")] = "unknown",
    store_dtype: Annotated[StoreDtype, Parameter(help="What rows are stored as.")] = "bfloat16",
) -> int:
    """Import the pickles of the old guides as a dataset.

    Code in them is not run. They contain no tokens, so each token of the dataset is -1.
    """
    with progress_bar("importing", "files") as seen:
        store = import_pickles(
            source,
            open_folder(output),
            worker_id=worker_id,
            site=site,
            model=model,
            store_dtype=store_dtype,
            seen=seen,
        )
    ledger = store.ledger
    console().print(
        f"{store.folder.url} has {counted(ledger.samples, 'sample')}, {counted(ledger.tokens, 'row')} per tap; "
        f"prove it: spile verify {output}",
        soft_wrap=True,
    )
    return 0
