"""``spile data convert``, ``spile data streams``, ``spile data upload``."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter
from rich.console import Console

from spile.cli.aliases import GUIDES_DATASET
from spile.cli.flags import parse_numbers
from spile.data.convert import ItemTally, RowSelection
from spile.data.manifest import MANIFEST, StreamsManifest, read_manifest
from spile.data.split import make_streams, refuse_others
from spile.errors import DataError, SpecError
from spile.objects import bucket_url, is_remote, open_folder
from spile.view.table import output as output_console
from spile.view.table import progress_bar


@Parameter(name="*")
@dataclass(frozen=True)
class SourceFlags:
    """The rows to take, and from which dataset."""

    dataset: Annotated[
        str,
        Parameter(
            help="owner/name on the hub, a .jsonl, .json or .parquet file, a folder of ARC tasks, or gs://….jsonl"
        ),
    ] = GUIDES_DATASET
    column: Annotated[
        str,
        Parameter(help="The field with a list of [input, output] pairs (the last is the test), or with the text."),
    ] = "examples"
    split: Annotated[
        str | None, Parameter(help="The hub dataset's split, or a folder's subfolder. [default: train]")
    ] = None
    config_name: Annotated[str | None, Parameter(help="The hub dataset's configuration.")] = None
    dataset_revision: Annotated[
        str | None, Parameter(help="The branch, tag or commit of the hub dataset. [default: the newest commit]")
    ] = None
    start_index: Annotated[int, Parameter(help="The first row, from 0.")] = 0
    end_index: Annotated[int | None, Parameter(help="The row to stop before.")] = None
    max_samples: Annotated[int | None, Parameter(help="The largest number of samples.")] = None
    max_train_examples: Annotated[int | None, Parameter(help="Keep at most this many training pairs of each task.")] = (
        None
    )

    bad_rows: Annotated[
        Literal["error", "skip"],
        Parameter(help="Whether a row that cannot be used is an error, or is counted and skipped."),
    ] = "error"

    def selection(self, keep: tuple[str, ...] = ()) -> RowSelection:
        """Return the rows to take from the dataset."""
        return RowSelection(
            self.column,
            self.start_index,
            self.end_index,
            self.max_samples,
            self.max_train_examples,
            keep,
            self.bad_rows,
        )


def convert(
    *,
    source: SourceFlags | None = None,
    output: Annotated[str | None, Parameter(help="The JSONL file to write, here or in a bucket.")] = None,
    output_dir: Annotated[str | None, Parameter(help="The folder for --format arc-json, here or in a bucket.")] = None,
    format: Annotated[  # noqa: A002  the flag's name
        Literal["arc-jsonl", "arc-json"] | None,
        Parameter(help="One task per line, or the challenge pair of JSON files. [default: arc-json with --output-dir]"),
    ] = None,
    test_outputs: Annotated[bool, Parameter(help="Keep the test outputs in the JSONL file.", negative="")] = False,
) -> int:
    """Turn a dataset of the Hugging Face hub, or local files, into ARC tasks."""
    from spile.data.convert import convert as run

    chosen = format or ("arc-json" if output_dir is not None and output is None else "arc-jsonl")
    target = output if chosen == "arc-jsonl" else output_dir
    if target is None or (output is not None and output_dir is not None):
        expected = "--output tasks.jsonl, or --output-dir DIR for the JSON pair"
        if format is not None:
            expected = f"{'--output FILE' if format == 'arc-jsonl' else '--output-dir DIR'} with --format {format}"
        found = (
            "both" if output is not None and output_dir is not None else "the other" if output or output_dir else "none"
        )
        raise SpecError("the output", expected=expected, found=found)
    source = source or SourceFlags()
    selection = source.selection()
    console = output_console(soft_wrap=True)
    with progress_bar("reading", "samples") as seen, written(target, file=chosen == "arc-jsonl") as place:
        done = run(
            source.dataset,
            place,
            selection=selection,
            split=source.split,
            config_name=source.config_name,
            revision=source.dataset_revision,
            format=chosen,
            test_outputs=test_outputs,
            progress=lambda tally: seen(tally.samples, selection.max_samples),
        )
        sizes = [file.stat().st_size for file in done.files]
    _print_tally(console, done.tally)
    folder = target.rstrip("/").rpartition("/")[0] if chosen == "arc-jsonl" else target.rstrip("/")
    shown = [f"{folder}/{file.name}" if is_remote(target) else str(file) for file in done.files]
    for name, count in zip(shown, sizes, strict=True):
        console.print(f"wrote {name} ({count:,} bytes)", markup=False)
    console.print(
        f"next: spile data streams --dataset {shown[0]} --num-streams 32 --output-dir data/streams", markup=False
    )
    return 0


def streams(
    *,
    num_streams: Annotated[int, Parameter(help="The number of streams, at least one per worker.")],
    output_dir: Annotated[
        str, Parameter(help="The folder for stream_000.jsonl … and streams.json, here or in a bucket.")
    ] = "data/streams",
    source: SourceFlags | None = None,
    keep: Annotated[
        str | None, Parameter(help="Columns of a table that lines keep too, for extract --keep: label,source.")
    ] = None,
    seed: Annotated[int, Parameter(help="Which sample goes to which stream.")] = 0,
    streams: Annotated[str | None, Parameter(help="Make only these streams again, such as 5-9 or 0,3.")] = None,
    overwrite: Annotated[bool, Parameter(help="Replace streams of another split.", negative="")] = False,
) -> int:
    """Split a dataset into independent streams, balanced to one sample, the same bytes each time."""
    source = source or SourceFlags()
    selection = source.selection(tuple((keep or "").replace(",", " ").split()))
    console = output_console(soft_wrap=True)
    there = None
    if is_remote(output_dir):
        there = _streams_there(output_dir, num_streams, seed, some=streams is not None, overwrite=overwrite)
    with progress_bar("reading", "samples") as seen, written(output_dir) as place:
        made = make_streams(
            source.dataset,
            place,
            num_streams,
            selection=selection,
            split=source.split,
            config_name=source.config_name,
            revision=source.dataset_revision,
            seed=seed,
            only=None if streams is None else parse_numbers("--streams", streams),
            overwrite=overwrite,
            progress=lambda tally: seen(tally.samples, selection.max_samples),
        )
        if there is not None:
            refuse_others(there, made.manifest, f"{output_dir}/{MANIFEST}")
    _print_tally(console, made.tally)
    counts = sorted({entry.samples for entry in made.manifest.streams})
    each = f"{counts[0]:,} samples each" if len(counts) == 1 else f"{counts[0]:,} or {counts[-1]:,} samples each"
    total = sum(entry.bytes for entry in made.manifest.streams if entry.name in made.written)
    console.print(
        f"wrote {len(made.written)} of {num_streams} streams to {output_dir}, {each}, {total:,} bytes", markup=False
    )
    console.print(f"next: spile extract --dataset-dir {output_dir} --worker-id 0 --model MODEL", markup=False)
    return 0


def upload(
    *,
    bucket: Annotated[str, Parameter(help="The bucket: a name, gs://… or s3://…")],
    prefix: Annotated[str, Parameter(help="The folder in the bucket.")] = "datasets",
    local_dir: Annotated[Path, Parameter(help="The folder of streams.")] = Path("data/streams"),
) -> int:
    """Upload streams to a bucket. Identical files are skipped."""
    from spile.data.manifest import upload as run

    if not bucket.rpartition("://")[2].strip("/"):
        raise SpecError("--bucket", expected="a bucket's name, or gs://… or s3://…", found=repr(bucket))
    root = bucket_url(bucket)
    console = output_console(soft_wrap=True)

    def tell(name: str, put: bool, done: int, total: int) -> None:
        console.print(f"{done}/{total} {name} {'uploaded' if put else 'there already'}", markup=False)

    done = run(local_dir, open_folder("/".join(part for part in (root.rstrip("/"), prefix.strip("/")) if part)), tell)
    console.print(
        f"{len(done.uploaded)} uploaded ({done.bytes:,} bytes), {len(done.skipped)} there already, in {done.url}",
        markup=False,
    )
    console.print(f"next: spile extract --dataset-dir {done.url} --worker-id 0 --model MODEL", markup=False)
    return 0


@contextmanager
def written(target: str, *, file: bool = False) -> Iterator[Path]:
    """Yield where to write: the target itself, or a temporary folder that is uploaded to the bucket at the end."""
    if not is_remote(target):
        yield Path(target)
        return
    from spile.data.manifest import upload as run

    folder, _, name = target.rstrip("/").rpartition("/") if file else (target, "", "")
    with tempfile.TemporaryDirectory(prefix="spile-data-") as here:
        yield Path(here) / name
        run(Path(here), open_folder(folder))


def _streams_there(url: str, count: int, seed: int, *, some: bool, overwrite: bool) -> StreamsManifest | None:
    """Return the manifest of existing streams unless they are to be replaced; refuse another number or seed."""
    if some:
        raise SpecError("--streams with a bucket", expected="all streams", fix="make them here, then spile data upload")
    there = None if overwrite else read_manifest(open_folder(url))
    if there is not None and (len(there.streams), there.seed) != (count, seed):
        raise DataError(
            f"{url} holds streams of another split",
            expected=f"{len(there.streams)} streams of seed {there.seed}",
            found=f"{count} of seed {seed}",
            fix="use another --output-dir, or --overwrite",
        )
    return there


def _print_tally(console: Console, tally: ItemTally) -> None:
    rejected = sum(tally.rejected.values())
    unused = f", {rejected:,} could not be used:" if rejected else ""
    console.print(f"{tally.rows:,} rows read, {tally.samples:,} samples{unused}", markup=False)
    for reason, count in tally.rejected.most_common():
        console.print(f"  {count:,} × {reason}", markup=False)
    for shown in tally.shown:
        console.print(f"  first seen at {shown}", markup=False)
