"""``spile data convert``, ``spile data streams``, ``spile data upload``."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from spile.cli.aliases import GUIDE_DATASET
from spile.cli.flags import log, stream_numbers
from spile.data.convert import RowSelection, RowTally
from spile.data.convert import convert as convert_dataset
from spile.data.manifest import MANIFEST, StreamsManifest, read_manifest
from spile.data.manifest import upload as upload_streams
from spile.data.split import make_streams, refuse_other_split
from spile.errors import DataError, SpecError
from spile.objects import bucket_url, is_remote, open_folder
from spile.spec.options import split_names
from spile.spec.run import BadRows  # noqa: F401  (cyclopts evaluates the types of inherited fields here)
from spile.view.table import progress_bar


@Parameter(name="*")
@dataclass(frozen=True)
class RowFlags(RowSelection):
    """The rows to take from the dataset."""

    keep: Annotated[tuple[str, ...], Parameter(parse=False)] = ()
    """Only ``spile data streams`` has this flag."""


def convert(
    *,
    dataset: str = GUIDE_DATASET,
    rows: RowFlags = RowFlags(),
    output: str | None = None,
    output_dir: str | None = None,
    format: Literal["arc-jsonl", "arc-json"] | None = None,  # noqa: A002  the flag's name
    test_outputs: bool = False,
) -> int:
    """Turn a dataset of the Hugging Face hub, or local files, into ARC tasks.

    Args:
        dataset: owner/name on the hub, a .jsonl, .json or .parquet file, a folder of ARC tasks, or gs://….jsonl
        output: The JSONL file to write, here or in a bucket.
        output_dir: The folder for --format arc-json, here or in a bucket.
        format: One task per line, or the challenge pair of JSON files. [default: arc-json with --output-dir]
        test_outputs: Keep the test outputs in the JSONL file.
    """
    chosen = format or ("arc-json" if output_dir is not None and output is None else "arc-jsonl")
    target = output if chosen == "arc-jsonl" else output_dir
    if target is None or (output is not None and output_dir is not None):
        expected = "--output tasks.jsonl, or --output-dir DIR for the JSON pair"
        if format is not None:
            expected = f"{'--output FILE' if format == 'arc-jsonl' else '--output-dir DIR'} with --format {format}"
        found = "both" if output and output_dir else "the other" if output or output_dir else "none"
        raise SpecError("the output", expected=expected, found=found)
    with progress_bar("reading", "samples") as seen, upload_after(target, file=chosen == "arc-jsonl") as place:
        done = convert_dataset(
            dataset,
            place,
            format=chosen,
            test_outputs=test_outputs,
            progress=lambda tally: seen(tally.samples, rows.max_samples),
            selection=rows,
        )
        sizes = [file.stat().st_size for file in done.files]
    _print_tally(done.tally)
    folder = target.rstrip("/").rpartition("/")[0] if chosen == "arc-jsonl" else target.rstrip("/")
    shown = [f"{folder}/{file.name}" if is_remote(target) else str(file) for file in done.files]
    for name, count in zip(shown, sizes, strict=True):
        log(f"wrote {name} ({count:,} bytes)")
    log(f"next: spile data streams --dataset {shown[0]} --num-streams 32 --output-dir data/streams")
    return 0


def streams(
    *,
    num_streams: int,
    output_dir: str = "data/streams",
    dataset: str = GUIDE_DATASET,
    rows: RowFlags = RowFlags(),
    keep: str | None = None,
    seed: int = 0,
    streams: str | None = None,
    overwrite: bool = False,
) -> int:
    """Split a dataset into independent streams, balanced to one sample, the same bytes each time.

    Args:
        num_streams: The number of streams, at least one per worker.
        output_dir: The folder for stream_000.jsonl … and streams.json, here or in a bucket.
        dataset: owner/name on the hub, a .jsonl, .json or .parquet file, a folder of ARC tasks, or gs://….jsonl
        keep: Columns of a table that lines keep too, for extract --keep: label,source.
        seed: Which sample goes to which stream.
        streams: Make only these streams again, such as 5-9 or 0,3.
        overwrite: Replace streams of another split.
    """
    existing = None
    if is_remote(output_dir):
        existing = _existing_streams(output_dir, num_streams, seed, some=streams is not None, overwrite=overwrite)
    with progress_bar("reading", "samples") as seen, upload_after(output_dir) as place:
        made = make_streams(
            dataset,
            place,
            num_streams,
            seed=seed,
            only=stream_numbers(streams),
            overwrite=overwrite,
            progress=lambda tally: seen(tally.samples, rows.max_samples),
            selection=replace(rows, keep=split_names(keep or "")),
        )
        if existing is not None:
            refuse_other_split(existing, made.manifest, f"{output_dir}/{MANIFEST}")
    _print_tally(made.tally)
    counts = sorted({entry.samples for entry in made.manifest.streams})
    each = f"{counts[0]:,} samples each" if len(counts) == 1 else f"{counts[0]:,} or {counts[-1]:,} samples each"
    total = sum(entry.bytes for entry in made.manifest.streams if entry.name in made.written)
    log(f"wrote {len(made.written)} of {num_streams} streams to {output_dir}, {each}, {total:,} bytes")
    log(f"next: spile extract --dataset-dir {output_dir} --worker-id 0 --model MODEL")
    return 0


def upload(*, bucket: str, prefix: str = "datasets", local_dir: Path = Path("data/streams")) -> int:
    """Upload streams to a bucket. Identical files are skipped.

    Args:
        bucket: The bucket: a name, gs://… or s3://…
        prefix: The folder in the bucket.
        local_dir: The folder of streams.
    """
    if not bucket.rpartition("://")[2].strip("/"):
        raise SpecError("--bucket", expected="a bucket's name, or gs://… or s3://…", found=repr(bucket))
    url = "/".join(part for part in (bucket_url(bucket).rstrip("/"), prefix.strip("/")) if part)

    def report(name: str, put: bool, done: int, total: int) -> None:
        log(f"{done}/{total} {name} {'uploaded' if put else 'already there'}")

    done = upload_streams(local_dir, open_folder(url), report)
    log(f"{len(done.uploaded)} uploaded ({done.bytes:,} bytes), {len(done.skipped)} already there, in {done.url}")
    if done.left_out:
        log(f"not uploaded, because they are no streams: {', '.join(done.left_out)}")
    log(f"next: spile extract --dataset-dir {done.url} --worker-id 0 --model MODEL")
    return 0


@contextmanager
def upload_after(target: str, *, file: bool = False) -> Iterator[Path]:
    """Yield where to write: the target itself, or a temporary folder that is uploaded to the bucket at the end."""
    if not is_remote(target):
        yield Path(target)
        return
    folder, _, name = target.rstrip("/").rpartition("/") if file else (target, "", "")
    with tempfile.TemporaryDirectory(prefix="spile-data-") as here:
        yield Path(here) / name
        upload_streams(Path(here), open_folder(folder))


def _existing_streams(url: str, count: int, seed: int, *, some: bool, overwrite: bool) -> StreamsManifest | None:
    """Return the manifest of existing streams unless they are to be replaced; refuse another number or seed."""
    if some:
        raise SpecError("--streams with a bucket", expected="all streams", fix="make them here, then spile data upload")
    existing = None if overwrite else read_manifest(open_folder(url))
    if existing is not None and (len(existing.streams), existing.seed) != (count, seed):
        raise DataError(
            f"{url} holds streams of another split",
            expected=f"{len(existing.streams)} streams of seed {existing.seed}",
            found=f"{count} of seed {seed}",
            fix="use another --output-dir, or --overwrite",
        )
    return existing


def _print_tally(tally: RowTally) -> None:
    rejected = sum(tally.rejected.values())
    unused = f", {rejected:,} could not be used:" if rejected else ""
    log(f"{tally.rows:,} rows read, {tally.samples:,} samples{unused}")
    for reason, count in tally.rejected.most_common():
        log(f"  {count:,} × {reason}")
    for shown in tally.shown:
        log(f"  first seen at {shown}")
