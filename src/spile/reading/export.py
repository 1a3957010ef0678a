"""``spile export``: a dataset in the formats of other programs.

Every export is written to a hidden folder next to its output and renamed at the end. So an output folder is complete or
does not exist, however the export ends; the next export to the same output removes what a killed one left behind.
"""

from __future__ import annotations

import fcntl
import gzip
import json
import os
import pickle
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from itertools import chain
from pathlib import Path
from typing import IO, Any, Literal, get_args

import ml_dtypes
import numpy as np
import numpy.typing as npt
from numpy.lib.format import dtype_to_descr, write_array_header_1_0

from spile.data.manifest import put_file
from spile.errors import DataError, SpecError, UserError
from spile.objects import is_remote, open_folder
from spile.objects.local import sync_folder, write_errors
from spile.reading.blocks import StoredBlocks
from spile.reading.dataset import Dataset
from spile.reading.dataset import open as open_dataset
from spile.reading.rows import BlockOptions, OrderedRows, Selection
from spile.spec.options import check_number
from spile.spec.positions import ALL
from spile.spec.safetensors import encode_header
from spile.spec.sample import Role
from spile.spec.taps import STORED_TYPES, Tap
from spile.store.layout import METADATA

HOOKS = {"residual": "hook_resid_post", "attn": "hook_attn_out", "mlp": "hook_mlp_out"}
"""What TransformerLens calls tap kinds."""
_SLICE = 16_384  # rows that are converted at a time
_NOTES = 1 << 14  # samples whose notes are read at a time
_FILE_BYTES = 512 << 20
"""Bytes after which a new pickle or Parquet file is begun. A pickle is held in memory."""
_UNFINISHED = ".spile-export"

_Array = npt.NDArray[Any]
ExportFormat = Literal["pickle", "saelens", "npy", "parquet", "hf", "speculators", "specforge"]
ExportDtype = Literal["float32", "float16", "bfloat16"]


@dataclass(frozen=True)
class Exported:
    """What was written."""

    files: int
    rows: int
    taps: tuple[str, ...]


@dataclass(frozen=True)
class Export:
    """What is exported: taps of a dataset, and the dtype of the numbers."""

    dataset: Dataset
    taps: tuple[str, ...]
    dtype: str
    streams: Sequence[int] | None
    """None: all streams that have these taps."""
    context_size: int
    hook_name: str | None
    progress: Callable[[int, int], None]
    """Is called with the number of finished rows or samples, and the total."""

    @cached_property
    def source(self) -> StoredBlocks:
        """The rows of the samples that have these taps."""
        return self.dataset._source(self.taps, BlockOptions(Selection(), True, 1, self.streams))

    @property
    def rows(self) -> int:
        return self.source.rows

    def blocks(self) -> Iterator[ExportedBlock]:
        """Yield the rows in the order of the data, as many at a time as memory allows."""
        done = 0
        for ordered in self.source.in_order():
            yield ExportedBlock(self, ordered, self.source.notes(ordered.samples))
            done += 0 if ordered.chunk is None else len(ordered.chunk.keys)
            self.progress(done, self.rows)

    def samples(self) -> Iterator[tuple[dict[str, Any], dict[str, _Array]]]:
        """Yield the note and the rows of each sample in the order of the data."""
        parts: list[dict[str, _Array]] = []
        for block in self.blocks():
            bounds = np.searchsorted(block.sample_of_row, np.arange(len(block.notes) + 1))
            rows = {tap: block.rows(tap) for tap in self.taps}
            for place, note in enumerate(block.notes):
                parts.append({tap: each[slice(*bounds[place : place + 2])] for tap, each in rows.items()})
                if block.ordered.last:
                    joined = {tap: np.concatenate([part[tap] for part in parts]) for tap in self.taps}
                    parts = []
                    yield note, joined

    @cached_property
    def kept_fields(self) -> dict[str, set[type]]:
        """The types of the values of each field that was kept, in the headers of all shards."""
        found: dict[str, set[type]] = {}
        for first in range(0, self.source.samples, _NOTES):
            samples = np.arange(first, min(first + _NOTES, self.source.samples))
            for note in self.source.notes(samples):
                for name, value in note.get("kept", {}).items():
                    found.setdefault(name, set()).add(type(value))
        return found

    def convert(self, rows: _Array, what: str) -> _Array:
        """Return rows in the dtype of the export.

        Raises:
            DataError: A value is too large for the dtype.
        """
        with np.errstate(over="ignore"):
            converted = rows.astype(self.dtype)
        lost = 0 if self.dtype == "float32" else int(np.count_nonzero(np.isinf(converted) & np.isfinite(rows)))
        if lost:
            largest = float(ml_dtypes.finfo(self.dtype).max)  # type: ignore[no-untyped-call]
            raise DataError(
                f"--dtype {self.dtype}: {lost} values of {what}",
                expected=f"at most {largest:g}",
                found=f"up to {np.abs(rows.astype(np.float32)).max():.4g}",
                fix="use --dtype float32",
            )
        return converted


@dataclass(frozen=True)
class ExportedBlock:
    """Consecutive rows of an export."""

    export: Export
    ordered: OrderedRows
    notes: list[dict[str, Any]]
    """The note of each sample, with its stream and its number in the input."""

    @cached_property
    def sample_of_row(self) -> npt.NDArray[np.int64]:
        return self.ordered.sample_of_row

    def rows(self, tap: str) -> _Array:
        """Return the rows of a tap in the dtype of the export."""
        chunk = self.ordered.chunk
        if chunk is None:
            return np.zeros((0, self.export.source.types()[tap][1]), self.export.dtype)
        return self.export.convert(chunk.rows[tap][0], f"{tap} in {self.export.dataset.root.url}")

    def columns(self) -> dict[str, _Array]:
        """Return the context of each row, the number of its sample, and the row at each tap."""
        known = None if self.ordered.chunk is None else self.ordered.chunk.context
        assert known is not None  # noqa: S101  callers leave out blocks without rows
        names = ("stream", "sample", "place", "position", "token", "role")
        columns = {name: np.asarray(getattr(known, f"{name}s")) for name in names}
        columns["number"] = self.ordered.samples[self.sample_of_row]
        return columns | {tap: self.rows(tap) for tap in self.export.taps}


def export_dataset(
    root: str | os.PathLike[str] | Dataset,
    output: str,
    *,
    to: ExportFormat,
    taps: Sequence[str] | None = None,
    streams: Sequence[int] | None = None,
    dtype: ExportDtype | None = None,
    context_size: int = 128,
    hook_name: str | None = None,
    progress: Callable[[int, int], None] = lambda _done, _total: None,
) -> Exported:
    """Write taps of a dataset in one of the formats; without ``taps``, the residual stream of all layers."""
    if to not in _WRITERS:
        raise SpecError("--to", expected=f"one of {', '.join(_WRITERS)}", found=repr(to))
    if to != "pickle" and is_remote(output):
        raise SpecError("--output", expected="a path on this machine", found=output)
    for_draft_models = to in ("speculators", "specforge")
    dtypes = get_args(ExportDtype) if for_draft_models else ("float32", "float16")
    if dtype is not None and dtype not in dtypes:
        raise SpecError("--dtype", expected=" or ".join(dtypes), found=repr(dtype))
    dataset = root if isinstance(root, Dataset) else open_dataset(root)
    chosen = _chosen_taps(dataset, taps)
    if to == "saelens":
        check_number("--context-size", context_size, 1)
        if len(chosen) != 1:
            raise SpecError("--to saelens", expected="one tap, such as --taps residual.3", found=len(chosen))
    number_type = "float32" if to == "saelens" else dtype or dtypes[-1 if for_draft_models else 0]
    export = Export(dataset, chosen, number_type, streams, context_size, hook_name, progress)
    if is_remote(output):
        return _export_to_bucket(export, output)
    with new_folder(output) as folder:
        rows = _WRITERS[to](export, folder)
        files = sum(path.is_file() for path in folder.rglob("*"))
    return Exported(files, rows, chosen)


def _chosen_taps(dataset: Dataset, given: Sequence[str] | None) -> tuple[str, ...]:
    """Return the given taps, or those of the residual stream: exporting all tap kinds at once is rarely intended."""
    texts = [given] if isinstance(given, str) else given or []
    words = [word for text in texts for word in text.replace(",", " ").split()]
    chosen = tuple(words) or tuple(tap for tap in dataset.taps if tap.startswith("residual."))
    if not chosen:
        raise UserError("--taps", expected=f"some of {', '.join(dataset.taps)}", found="none")
    return chosen


# -- the output folder -------------------------------------------------------------------------------------------------


@contextmanager
def new_folder(path: str) -> Iterator[Path]:
    """Give a folder to write to, which becomes ``path`` at the end; after an error it is removed.

    Raises:
        UserError: ``path`` exists and is not an empty folder, or another export is writing it.
    """
    final = Path(path).expanduser().absolute()
    if final.exists() and (not final.is_dir() or any(each.name != _UNFINISHED for each in final.iterdir())):
        raise UserError(f"--output {path}", expected="a new or an empty folder", found="something there already")
    with write_errors(final):
        final.parent.mkdir(parents=True, exist_ok=True)
        in_place = final.is_dir() and (final.is_symlink() or final.is_mount())  # such a folder cannot be replaced
        folder = final / _UNFINISHED if in_place else final.with_name(f".{final.name}{_UNFINISHED}")
        lock = _lock_folder(folder, path)
    try:
        with write_errors(final):
            _clear(folder)
            yield folder
            _publish(folder, final, in_place=in_place)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _lock_folder(folder: Path, path: str) -> int:
    """Create a folder and lock it for as long as this process lives; the system releases the lock of a killed one."""
    for _ in range(10):
        folder.mkdir(exist_ok=True)
        try:
            handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        except NotADirectoryError as error:  # What is in this folder is removed, so a link to another one is refused.
            raise UserError(f"{folder} is a link", expected="a folder of spile's own", fix="remove it") from error
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if folder.exists() and os.path.samestat(os.fstat(handle), folder.stat()):
                return handle  # otherwise another export has just published or removed the folder
        except BlockingIOError:
            os.close(handle)
            break
        os.close(handle)
    raise UserError(f"--output {path}", expected="one export at a time", found="another export that is writing it")


def _clear(folder: Path) -> None:
    """Remove what a killed export left behind."""
    for each in folder.iterdir():
        if each.is_dir() and not each.is_symlink():
            shutil.rmtree(each)
        else:
            each.unlink()


def _publish(folder: Path, final: Path, *, in_place: bool) -> None:
    """Make every file durable, then give the folder its name."""
    for parent, _, names in os.walk(folder):
        for name in names:
            with (Path(parent) / name).open("rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(parent))
    if in_place:
        for each in sorted(folder.iterdir()):
            each.rename(final / each.name)
        folder.rmdir()
        sync_folder(final)
    else:
        folder.rename(final)
        sync_folder(final.parent)


# -- formats -----------------------------------------------------------------------------------------------------------


def _write_pickles(export: Export, folder: Path, finished: Callable[[Path], None] = lambda _: None) -> int:
    """Write ``tpu_N/shard_NNNN.pkl.gz`` as the loaders of earlier scripts read them, in the order of the data.

    Each is ``{layer: [{"sample_idx", "activation", "shape", "text_preview"}, …]}``. N is the number of a prepared
    stream; streams that are parts of one input are written as one, ``tpu_0``, with the numbers of the input.
    ``tpu_N/metadata.json`` lists the files; it is written last. ``finished`` is called with each file.
    """
    taps = {Tap.parse(tap).layer: tap for tap in export.taps}
    if len(taps) != len(export.taps):
        expected = "one tap per layer, since it has one list per layer"
        raise UserError("--to pickle", expected=expected, found=", ".join(export.taps))
    listed: dict[int, list[dict[str, Any]]] = {}
    for number, samples in _pickle_groups(export):
        path = folder / f"tpu_{number}" / f"shard_{len(listed.get(number, ())) + 1:04d}.pkl.gz"
        path.parent.mkdir(exist_ok=True)
        with gzip.open(path, "wb", compresslevel=1) as file:
            layers = {layer: [sample[tap] for sample in samples] for layer, tap in taps.items()}
            pickle.dump(layers, file, protocol=4)
        facts = {"shard_id": len(listed.get(number, ())) + 1, "file": path.name, "samples": len(samples)}
        facts |= {"tokens": sum(len(each[export.taps[0]]["activation"]) for each in samples)}
        listed.setdefault(number, []).append({**facts, "size": path.stat().st_size})
        finished(path)
    for number, shards in listed.items():
        path = folder / f"tpu_{number}" / METADATA
        path.write_text(json.dumps(_pickle_metadata(export, number, shards), indent=1) + "\n", encoding="utf-8")
        finished(path)
    return export.rows


def _pickle_groups(export: Export) -> Iterator[tuple[int, list[dict[str, dict[str, Any]]]]]:
    """Yield for each file the number of its folder and its samples: by tap, what the file holds of each."""
    streams = {stream.number: stream for stream in export.dataset.streams}
    group: list[dict[str, dict[str, Any]]] = []
    held = before = 0
    for note, rows in export.samples():
        number, place = streams[note["stream"]].key(int(note["index"]))
        if group and (held >= _FILE_BYTES or number != before):
            yield before, group
            group, held = [], 0
        known = {"sample_idx": place, "text_preview": note["preview"]}
        group.append({tap: {**known, "activation": each, "shape": each.shape} for tap, each in rows.items()})
        held, before = held + sum(each.nbytes for each in rows.values()), number
    if group:
        yield before, group


def _pickle_metadata(export: Export, number: int, shards: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the content of ``metadata.json``, with the names of a stream's ``metadata.json``."""
    run = export.dataset.run
    return {
        "worker_id": number,
        "total_samples": sum(shard["samples"] for shard in shards),
        "total_shards": len(shards),
        "shards": shards,
        "dataset_path": export.dataset.streams[0].record.identity.data,
        "model_path": run.model,
        "layers": sorted(layer for tap in export.taps if (layer := Tap.parse(tap).layer) is not None),
        "taps": list(export.taps),
        "d_model": run.d_model,
        "dtype": export.dtype,
        "total_tokens": sum(shard["tokens"] for shard in shards),
        "total_bytes": sum(shard["size"] for shard in shards),
    }


def _export_to_bucket(export: Export, output: str) -> Exported:
    """Write pickles to a bucket, one by one through a temporary folder."""
    target = open_folder(output)
    leftovers = [info.key for info in target.list()]
    if any(not re.fullmatch(r"tpu_\d+/shard_\d+\.pkl\.gz", key) for key in leftovers):
        raise UserError(f"--output {output}", expected="a new or an empty folder", found="something there already")
    for key in leftovers:  # An export that was killed left them: it writes metadata.json last.
        target.delete(key)
    sent = []
    with tempfile.TemporaryDirectory(prefix="spile-export-") as folder:

        def send(path: Path) -> None:
            put_file(target, path.relative_to(folder).as_posix(), path)
            path.unlink()
            sent.append(path)

        rows = _write_pickles(export, Path(folder), send)
    return Exported(len(sent), rows, export.taps)


def _write_npy(export: Export, folder: Path) -> int:
    """Write ``<tap>.npy`` [rows, d]; the context of each row; ``offsets.npy``, the first row of each sample and the
    number of all rows; and ``samples.jsonl`` with a line for each sample.
    """
    files: dict[str, IO[bytes]] = {}

    def append(name: str, column: _Array, length: int) -> None:
        if name not in files:
            # Not a memory map: a disk that fills up would end the process with SIGBUS.
            files[name] = stack.enter_context((folder / f"{name}.npy").open("wb"))
            shape = (length, *column.shape[1:])
            layout = {"descr": dtype_to_descr(column.dtype), "fortran_order": False, "shape": shape}
            write_array_header_1_0(files[name], layout)
        files[name].write(np.ascontiguousarray(column).data)

    with ExitStack() as stack:
        notes = stack.enter_context((folder / "samples.jsonl").open("w", encoding="utf-8"))
        done = 0
        append("offsets", np.zeros(1, np.int64), export.source.samples + 1)
        for block in export.blocks():
            if len(block.sample_of_row):
                for name, column in block.columns().items():
                    append(name, column, export.rows)
            done += len(block.sample_of_row)
            if not block.ordered.last:
                continue
            ends = np.searchsorted(block.sample_of_row, np.arange(len(block.notes)), side="right")
            append("offsets", done - len(block.sample_of_row) + ends, export.source.samples + 1)
            notes.writelines(json.dumps(note, ensure_ascii=False) + "\n" for note in block.notes)
    return export.rows


def _package(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        extra = "torch" if name == "torch" else "'spile[data]'"
        raise UserError(f"this export needs {name}", fix=f"run: pip install {extra}") from error


def _record_batches(export: Export) -> Iterator[Any]:
    """Yield Arrow record batches: the context of each row, the kept fields of its sample, and a list for each tap."""
    arrow = _package("pyarrow")
    for block in export.blocks():
        if not len(block.sample_of_row):
            continue
        columns, rows = block.columns(), arrow.array(block.sample_of_row)
        arrays = {name: arrow.array(column.reshape(-1)) for name, column in columns.items()}
        for tap in export.taps:
            arrays[tap] = arrow.FixedSizeListArray.from_arrays(arrays[tap], columns[tap].shape[1])
        fields = {"task_id": arrow.array([note["task_id"] for note in block.notes], arrow.string()).take(rows)}
        for name, kinds in export.kept_fields.items():
            values = [note.get("kept", {}).get(name) for note in block.notes]
            column = f"kept.{name}" if name in arrays or name in fields else name
            fields[column] = _kept_column(values, kinds - {type(None)}).take(rows)
        arrays = {**{name: arrays.pop(name) for name in [*arrays] if name not in export.taps}, **fields, **arrays}
        yield arrow.record_batch(list(arrays.values()), names=list(arrays))


def _kept_column(values: list[Any], kinds: set[type]) -> Any:
    """Return a column of numbers or texts; values of several types, lists and objects as JSON."""
    arrow = _package("pyarrow")
    whole = all(not isinstance(value, int) or abs(value) < 1 << 63 for value in values)
    plain = {frozenset({bool}): arrow.bool_(), frozenset({int}): arrow.int64(), frozenset({float}): arrow.float64()}
    found = {**plain, frozenset({int, float}): arrow.float64(), frozenset({str}): arrow.string()}.get(frozenset(kinds))
    if found is not None and whole:
        return arrow.array(values, found)
    return arrow.array([None if value is None else json.dumps(value) for value in values], arrow.string())


def _write_parquet(export: Export, folder: Path) -> int:
    """Write ``rows-00000.parquet``, …, one row per token; the names of the files have the order of the data."""
    parquet, writer, held, count = _package("pyarrow.parquet"), None, 0, 0
    with ExitStack() as stack:
        for batch in _record_batches(export):
            if writer is None or held >= _FILE_BYTES:
                stack.close()
                path = folder / f"rows-{count:05d}.parquet"
                # Activations do not compress, and trying costs more than writing them.
                opened = parquet.ParquetWriter(path, batch.schema, compression="none", use_dictionary=["task_id"])
                writer, held, count = stack.enter_context(opened), 0, count + 1
            writer.write_batch(batch)
            held += batch.nbytes
    return export.rows


def _write_hf(export: Export, folder: Path) -> int:
    """Write a folder that ``datasets.load_from_disk`` opens, one row per token."""
    return _save_dataset(_record_batches(export), folder)


def _write_saelens(export: Export, folder: Path) -> int:
    """Write a cache that SAELens' ``cached_activations_path`` opens: rows in order, divided into contexts.

    SAELens has one hook in a cache, in float32, and contexts of one length. The last rows are left
    out if they do not fill a context.
    """
    hub, arrow, (tap,), size = _package("datasets"), _package("pyarrow"), export.taps, export.context_size

    def contexts() -> Iterator[Any]:
        done = 0
        for batch in export.dataset.batches(tap, max(1, _SLICE // size) * size, streams=export.streams):
            count = len(batch) // size
            rows, width = export.convert(batch.rows[: count * size], tap), batch.rows.shape[1]
            features = hub.Features(
                {
                    export.hook_name or hook_name(tap): hub.Array2D(shape=(size, width), dtype="float32"),
                    "token_ids": hub.Sequence(hub.Value("int32"), length=size),
                }
            )
            schema = features.arrow_schema
            # Array2D is stored as lists of lists, with the offset of each.
            inner = arrow.ListArray.from_arrays(
                np.arange(0, rows.size + 1, width, dtype=np.int32), arrow.array(rows.reshape(-1))
            )
            outer = arrow.ListArray.from_arrays(np.arange(0, len(rows) + 1, size, dtype=np.int32), inner)
            activations = arrow.ExtensionArray.from_storage(schema.types[0], outer)
            tokens = arrow.array(np.asarray(batch.tokens)[: count * size])
            ids = arrow.FixedSizeListArray.from_arrays(tokens, size).cast(schema.types[1])
            if count:
                yield arrow.record_batch([activations, ids], schema=schema)
            done += len(batch)
            export.progress(done, export.rows)

    return _save_dataset(contexts(), folder)


def _save_dataset(batches: Iterable[Any], folder: Path, form: str | None = None) -> int:
    """Write one Arrow file, which ``datasets`` maps and saves, so that nothing is held in memory.

    Args:
        batches: Record batches.
        folder: Where the dataset is saved.
        form: What ``datasets`` returns columns as. ``Dataset.set_format`` would need torch for "torch".

    Returns:
        The number of rows.
    """
    hub, arrow = _package("datasets"), _package("pyarrow")
    path = folder / "unsaved" / "rows.arrow"  # datasets refuses to save a dataset to the folder it was read from
    path.parent.mkdir()
    source = iter(batches)
    first = next(source, None)
    if first is None:
        raise UserError("nothing to export", expected="a dataset with rows", found="none")
    with path.open("wb") as file, arrow.ipc.new_stream(file, first.schema) as writer:
        for batch in chain([first], source):
            writer.write_batch(batch)
    hub.disable_progress_bars()
    found = hub.Dataset.from_file(str(path))
    found.save_to_disk(str(folder))
    shutil.rmtree(path.parent)
    if form is not None:
        state = json.loads((folder / "state.json").read_bytes())
        (folder / "state.json").write_text(json.dumps({**state, "_format_type": form}))
    return len(found)


def _draft_samples(export: Export, last: str) -> Iterator[tuple[int, _Array, _Array, _Array]]:
    """Yield number, tokens, loss mask and rows [tokens, taps, d] of each sample, in the order of the data.

    ``last`` is the tap that the trainer of draft models expects at the end. The loss mask selects the
    assistant's tokens, or all tokens of a sample that has no turns.
    """
    run, dataset = export.dataset.run, export.dataset
    if len(export.taps) < 2 or export.taps[-1] != last:
        raise SpecError("--taps", expected=f"some layers, then {last}", found=" ".join(export.taps))
    if run.positions != ALL:
        raise UserError(
            "the dataset has not all tokens", expected="--positions all", found=f"--positions {run.positions}"
        )
    streams = {stream.number for stream, _ in dataset._shards(export.taps, export.streams)}
    chosen = [address for address in dataset.samples.addresses() if address[0] in streams]
    trained = 0
    for number, (stream, index) in enumerate(chosen):
        sample = dataset.sample(stream, index)
        found = sample.all_rows(export.taps)
        rows = [export.convert(each, f"{tap} of sample {index}") for tap, each in found.items()]
        turns = sample.roles & (Role.SYSTEM | Role.USER | Role.ASSISTANT)
        mask = (sample.roles & Role.ASSISTANT != 0) | (not turns.any())
        yield number, sample.tokens.astype(np.int64), mask.astype(np.int64), np.stack(rows, axis=1)
        trained += int(mask.sum())
        export.progress(number + 1, len(chosen))
    if not trained:
        raise UserError(
            f"the loss mask of {dataset.root.url} selects no token",
            expected="answers of an assistant",
            found="prompts only",
            fix="store chats with answers, or run spile infer",
        )


def _write_speculators(export: Export, folder: Path) -> int:
    """Write what speculators trains draft models on: a dataset of tokens, and a file of hidden states per sample.

    The last tap is the residual stream after the last layer; speculators applies the final norm itself.
    """
    arrow, states = _package("pyarrow"), folder / "hidden_states"
    states.mkdir()

    def batches() -> Iterator[Any]:
        code = STORED_TYPES[export.dtype].code
        for number, tokens, mask, rows in _draft_samples(export, f"residual.{export.dataset.run.n_layers - 1}"):
            header, _ = encode_header([("token_ids", "I64", tokens.shape), ("hidden_states", code, rows.shape)], {})
            content = header + tokens.tobytes() + rows.tobytes()
            (states / f"hs_{number}.safetensors").write_bytes(content)
            columns = {"input_ids": [tokens], "loss_mask": [mask], "seq_len": [len(tokens)]}
            yield arrow.record_batch([arrow.array(column) for column in columns.values()], names=list(columns))

    return _save_dataset(batches(), folder, form="torch")


def _write_specforge(export: Export, folder: Path) -> int:
    """Write what SpecForge's offline training of draft models reads: ``data_N.ckpt`` for each sample.

    The last tap is the output of the final norm, since SpecForge applies only the LM head to it.
    """
    torch, count = _package("torch"), 0
    for number, tokens, mask, rows in _draft_samples(export, "final_norm"):
        states = torch.from_numpy(rows.astype(np.float32)).to(getattr(torch, export.dtype))[None]
        content = {
            "input_ids": torch.from_numpy(tokens),
            "loss_mask": torch.from_numpy(mask),
            "hidden_state": states[:, :, -1].clone(),
            "aux_hidden_state": states[:, :, :-1].flatten(2),
        }
        torch.save(content, folder / f"data_{number}.ckpt")
        count = number + 1
    return count


def hook_name(tap: str) -> str:
    """Return what TransformerLens calls a tap: ``residual.12`` is ``blocks.12.hook_resid_post``."""
    parsed = Tap.parse(tap)
    if parsed.kind not in HOOKS:
        raise UserError(f"the hook name of {tap} is unknown", fix="give one with --hook-name")
    return f"blocks.{parsed.layer}.{HOOKS[parsed.kind]}"


_WRITERS: dict[str, Callable[[Export, Path], int]] = {
    "pickle": _write_pickles,
    "saelens": _write_saelens,
    "npy": _write_npy,
    "parquet": _write_parquet,
    "hf": _write_hf,
    "speculators": _write_speculators,
    "specforge": _write_specforge,
}
"""Each writes to a folder and returns the number of rows, contexts or samples."""
