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
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, Literal, get_args

import numpy as np
import numpy.typing as npt
from numpy.lib.format import dtype_to_descr, write_array_header_1_0

from spile.data.manifest import put_file
from spile.errors import DataError, SpecError, UserError
from spile.objects import is_remote, open_folder
from spile.objects.local import sync_folder, write_errors
from spile.reading.dataset import Dataset
from spile.reading.rows import context_of
from spile.spec.options import at_least
from spile.spec.positions import ALL
from spile.spec.safetensors import encode_header
from spile.spec.sample import Role
from spile.spec.taps import Tap
from spile.store.layout import METADATA
from spile.store.shard_reader import ShardReader

_HOOKS = {"residual": "hook_resid_post", "attn": "hook_attn_out", "mlp": "hook_mlp_out"}
_SLICE = 16_384
"""Rows that are converted at a time."""
_UNFINISHED = ".spile-export"

_Array = npt.NDArray[Any]
ExportFormat = Literal["pickle", "saelens", "npy", "parquet", "hf", "speculators", "specforge"]
ExportDtype = Literal["float32", "float16", "bfloat16"]
Seen = Callable[[int, int], None]
"""A function that is called with the finished and the total amount."""


def ignore_progress(_done: int, _total: int) -> None:
    """Ignore progress."""


@dataclass(frozen=True)
class Block:
    """One shard of an export."""

    stream: int
    number: int
    """Number of the shard in its stream, from 1."""
    shard: ShardReader
    taps: tuple[str, ...]
    dtype: str
    """The dtype to convert rows to."""

    @property
    def length(self) -> int:
        """Number of rows."""
        return self.shard.record.tokens

    def rows(self, tap: str, start: int = 0, stop: int | None = None) -> _Array:
        """Return rows of a tap in the dtype of the export.

        Raises:
            DataError: A value is too large for the dtype.
        """
        rows = self.shard.rows(tap, start, self.length if stop is None else stop)
        return _converted(rows, self.dtype, f"{tap} in {self.shard.where}")

    def columns(self) -> dict[str, _Array]:
        """Return stream, sample, position, token and role of each row."""
        known = context_of(self.stream, self.shard, 0, self.length)
        names = ("stream", "sample", "position", "token", "role")
        return {name: np.asarray(getattr(known, f"{name}s")) for name in names}

    def task_ids(self) -> list[str]:
        """Return the task id of each row."""
        lengths = np.diff(self.shard.read_tensor("offsets"))
        return [note["task_id"] for note, count in zip(self.shard.notes, lengths, strict=True) for _ in range(count)]


def _converted(rows: _Array, dtype: str, where: str) -> _Array:
    with np.errstate(over="ignore"):
        converted = rows.astype(dtype)
    lost = 0 if dtype == "float32" else int(np.count_nonzero(np.isinf(converted) & np.isfinite(rows)))
    if lost:
        largest = {"float16": 65504.0, "bfloat16": 3.38953e38}[dtype]
        raise DataError(
            f"--dtype {dtype}: {lost} values of {where}",
            expected=f"at most {largest:g}",
            found=f"up to {np.abs(rows.astype(np.float32)).max():.4g}",
            fix="use --dtype float32",
        )
    return converted


@dataclass(frozen=True)
class Exported:
    """What was written."""

    files: int
    rows: int


@dataclass(frozen=True)
class Export:
    """What is exported: taps of a dataset, and the dtype of the numbers."""

    dataset: Dataset
    taps: tuple[str, ...]
    dtype: str = "float32"
    streams: Sequence[int] | None = None
    """None: all streams that have these taps."""
    seen: Seen = ignore_progress

    @property
    def rows(self) -> int:
        """Number of rows of all streams that have these taps."""
        return sum(stream.tokens for stream in self.dataset.streams_with(self.taps, self.streams))

    def blocks(self) -> Iterator[Block]:
        """Yield the shards that have these taps, in the order of streams and commits."""
        total, done = self.rows, 0
        for stream in self.dataset.streams_with(self.taps, self.streams):
            for number, record in enumerate(stream.shards, 1):
                yield Block(stream.number, number, stream.open(record), self.taps, self.dtype)
                done += record.tokens
                self.seen(done, total)


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
        inside = final.is_dir() and (final.is_symlink() or final.is_mount())  # such a folder cannot be replaced
        folder = final / _UNFINISHED if inside else final.with_name(f".{final.name}{_UNFINISHED}")
        lock = _locked(folder, path)
    try:
        with write_errors(final):
            _clear(folder)
            yield folder
            _publish(folder, final, inside=inside)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    finally:
        os.close(lock)


def _locked(folder: Path, path: str) -> int:
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


def _publish(folder: Path, final: Path, *, inside: bool) -> None:
    """Make every file durable, then give the folder its name."""
    for parent, _, names in os.walk(folder):
        for name in names:
            with (Path(parent) / name).open("rb") as file:
                os.fsync(file.fileno())
        sync_folder(Path(parent))
    if inside:
        for each in sorted(folder.iterdir()):
            each.rename(final / each.name)
        folder.rmdir()
        sync_folder(final)
    else:
        folder.rename(final)
        sync_folder(final.parent)


def _per_shard(export: Export, write: Callable[[Block], None]) -> Exported:
    files = rows = 0
    for block in export.blocks():
        write(block)
        files, rows = files + 1, rows + block.length
    return Exported(files, rows)


def write_pickles(export: Export, output: str) -> Exported:
    """Write one ``tpu_N/shard_NNNN.pkl.gz`` for each stored shard, as the loaders of earlier scripts read them.

    Each is ``{layer: [{"sample_idx", "activation", "shape", "text_preview"}, …]}``. ``tpu_N/metadata.json`` lists them;
    it is written last. ``output`` may be a bucket.
    """
    parsed = [Tap.parse(tap) for tap in export.taps]
    if len({tap.layer for tap in parsed}) != len(parsed):
        raise UserError(
            "--to pickle", expected="one tap per layer, since it has one list per layer", found=", ".join(export.taps)
        )
    shards: dict[int, list[dict[str, Any]]] = {}
    with _pickle_folder(output) as (folder, send):

        def write(block: Block) -> None:
            path = folder / f"tpu_{block.stream}" / f"shard_{block.number:04d}.pkl.gz"
            path.parent.mkdir(exist_ok=True)
            with gzip.open(path, "wb", compresslevel=1) as file:
                pickle.dump({tap.layer: _pickled_samples(block, str(tap)) for tap in parsed}, file, protocol=4)
            facts = {"shard_id": block.number, "file": path.name, "samples": len(block.shard.notes)}
            size = path.stat().st_size
            shards.setdefault(block.stream, []).append({**facts, "tokens": block.length, "size": size})
            send(path)

        done = _per_shard(export, write)
        for stream, listed in shards.items():
            path = folder / f"tpu_{stream}" / METADATA
            path.write_text(json.dumps(_pickle_metadata(export, stream, listed), indent=1) + "\n", encoding="utf-8")
            send(path)
    return done


@contextmanager
def _pickle_folder(output: str) -> Iterator[tuple[Path, Callable[[Path], None]]]:
    """Give a folder to write to, and a function to call for each finished file.

    Files for a bucket are uploaded one by one. The folder is then temporary and holds one file at a time.
    """
    if not is_remote(output):
        with new_folder(output) as folder:
            yield folder, lambda _: None
        return
    target = open_folder(output)
    remains = [info.key for info in target.list()]
    if any(not re.fullmatch(r"tpu_\d+/shard_\d+\.pkl\.gz", key) for key in remains):
        raise UserError(f"--output {output}", expected="a new or an empty folder", found="something there already")
    for key in remains:  # An export that was killed left them: it writes metadata.json last.
        target.delete(key)
    with tempfile.TemporaryDirectory(prefix="spile-export-") as name:

        def send(path: Path) -> None:
            put_file(target, path.relative_to(name).as_posix(), path)
            path.unlink()

        yield Path(name), send


def _pickle_metadata(export: Export, number: int, shards: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the content of ``metadata.json``, with the names that a stream's own one has."""
    (stream,) = export.dataset.streams_with(export.taps, [number])
    run = export.dataset.run
    return {
        "worker_id": number,
        "total_samples": sum(shard["samples"] for shard in shards),
        "total_shards": len(shards),
        "shards": shards,
        "dataset_path": stream.record.identity.data,
        "model_path": run.model,
        "layers": sorted(layer for tap in export.taps if (layer := Tap.parse(tap).layer) is not None),
        "taps": list(export.taps),
        "d_model": run.d_model,
        "dtype": export.dtype,
        "total_tokens": sum(shard["tokens"] for shard in shards),
        "total_bytes": sum(shard["size"] for shard in shards),
    }


def _pickled_samples(block: Block, tap: str) -> list[dict[str, Any]]:
    offsets, found = block.shard.read_tensor("offsets").tolist(), []
    for place, note in enumerate(block.shard.notes):
        rows = block.rows(tap, offsets[place], offsets[place + 1])
        known = {"sample_idx": int(note["index"]), "activation": rows, "shape": rows.shape}
        found.append({**known, "text_preview": note["preview"]})
    return found


def write_npy(export: Export, output: str) -> Exported:
    """Write ``<tap>.npy`` [rows, d]; stream, sample, position, token and role of each row; and ``samples.jsonl``."""
    total = export.rows
    files: dict[str, IO[bytes]] = {}
    with new_folder(output) as folder, ExitStack() as stack:
        notes = stack.enter_context((folder / "samples.jsonl").open("w", encoding="utf-8"))
        for block in export.blocks():
            columns = {**block.columns(), **{tap: block.rows(tap) for tap in export.taps}}
            for name, column in columns.items():
                if name not in files:
                    # Not a memory map: a disk that fills up would end the process with SIGBUS.
                    files[name] = stack.enter_context((folder / f"{name}.npy").open("wb"))
                    shape = (total, *column.shape[1:])
                    layout = {"descr": dtype_to_descr(column.dtype), "fortran_order": False, "shape": shape}
                    write_array_header_1_0(files[name], layout)
                files[name].write(np.ascontiguousarray(column).data)
            for note in block.shard.notes:
                notes.write(json.dumps({"stream": block.stream, **note}, ensure_ascii=False) + "\n")
        stack.close()  # here, so that an error of the last write is reported before the folder is published
    return Exported(len(files) + 1, total)


def _arrow() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise UserError("this export needs pyarrow", fix="run: pip install 'spile[data]'") from error
    return pyarrow


def _hub_datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise UserError("this export needs datasets", fix="run: pip install 'spile[data]'") from error
    return datasets


def _record_batches(block: Block) -> Iterator[Any]:
    """Yield a shard as Arrow record batches: what is known of each row, then a list of fixed size for each tap."""
    arrow = _arrow()
    columns, task_ids = block.columns(), block.task_ids()
    for start in range(0, block.length, _SLICE):
        stop = min(start + _SLICE, block.length)
        arrays = {name: arrow.array(column[start:stop]) for name, column in columns.items()}
        arrays["task_id"] = arrow.array(task_ids[start:stop], arrow.string())
        for tap in block.taps:
            rows = block.rows(tap, start, stop)
            arrays[tap] = arrow.FixedSizeListArray.from_arrays(arrow.array(rows.reshape(-1)), rows.shape[1])
        yield arrow.record_batch(list(arrays.values()), names=list(arrays))


def write_parquet(export: Export, output: str) -> Exported:
    """Write ``stream_N-NNNN.parquet`` for each stored shard, one row per token."""
    _arrow()
    from pyarrow import parquet

    with new_folder(output) as folder:

        def write(block: Block) -> None:
            writer = None
            for batch in _record_batches(block):
                path = folder / f"stream_{block.stream}-{block.number:04d}.parquet"
                # Activations do not compress, and trying costs more than writing them.
                writer = writer or parquet.ParquetWriter(
                    path, batch.schema, compression="none", use_dictionary=["task_id"]
                )
                writer.write_batch(batch)
            if writer is not None:
                writer.close()

        return _per_shard(export, write)


def write_hf(export: Export, output: str) -> Exported:
    """Write a folder that ``datasets.load_from_disk`` opens, one row per token."""
    return _save_dataset(lambda _: (batch for block in export.blocks() for batch in _record_batches(block)), output)


def write_saelens(export: Export, output: str, *, context_size: int = 128, name: str | None = None) -> Exported:
    """Write a cache that SAELens' ``cached_activations_path`` opens: rows in order, divided into contexts.

    SAELens has one hook in a cache, in float32, and contexts of one length: last rows that fill no context are left
    out.
    """
    hub, (tap,) = _hub_datasets(), export.taps
    source = replace(export, dtype="float32").blocks()
    first = next(source, None)
    if first is None:
        raise UserError(f"{export.dataset.root.url} has no rows", expected="a dataset with samples")
    width = first.shard.place(tap).shape[1]
    features = hub.Features(
        {
            name or hook_name(tap): hub.Array2D(shape=(context_size, width), dtype="float32"),
            "token_ids": hub.Sequence(hub.Value("int32"), length=context_size),
        }
    )

    def all_blocks() -> Iterator[Block]:
        yield first
        yield from source

    return _save_dataset(lambda _: _contexts(all_blocks(), tap, context_size, features.arrow_schema), output, features)


def _contexts(source: Iterator[Block], tap: str, size: int, schema: Any) -> Iterator[Any]:
    arrow = _arrow()
    rest, rest_tokens = None, None
    for block in source:
        tokens = block.shard.read_tensor("tokens")
        for start in range(0, block.length, _SLICE):
            stop = min(start + _SLICE, block.length)
            rows, ids = block.rows(tap, start, stop), tokens[start:stop]
            rows = rows if rest is None else np.concatenate([rest, rows])
            ids = ids if rest_tokens is None else np.concatenate([rest_tokens, ids])
            count = len(rows) // size
            rest, rest_tokens = rows[count * size :], ids[count * size :]
            if count:
                # Array2D is stored as lists of lists, with offsets that say where each begins.
                inner = arrow.ListArray.from_arrays(
                    np.arange(0, (count * size + 1) * rows.shape[1], rows.shape[1], dtype=np.int32),
                    arrow.array(rows[: count * size].reshape(-1)),
                )
                outer = arrow.ListArray.from_arrays(np.arange(0, count * size + 1, size, dtype=np.int32), inner)
                activations = arrow.ExtensionArray.from_storage(schema.types[0], outer)
                ids_column = arrow.FixedSizeListArray.from_arrays(arrow.array(ids[: count * size]), size)
                yield arrow.record_batch([activations, ids_column.cast(schema.types[1])], schema=schema)


def _save_dataset(
    batches: Callable[[Path], Iterator[Any]], output: str, features: Any = None, form: str | None = None
) -> Exported:
    """Write one Arrow file, which ``datasets`` maps and saves, so that nothing is held in memory.

    Args:
        batches: A function that is given the folder and yields record batches. It may write files of its own there.
        output: The folder.
        features: What ``datasets`` must find in the file; None accepts anything.
        form: What ``datasets`` returns columns as. ``Dataset.set_format`` would need torch for "torch".
    """
    hub, arrow = _hub_datasets(), _arrow()
    rows = 0
    with new_folder(output) as folder:
        path = folder / "unsaved" / "rows.arrow"  # datasets refuses to save a dataset to the folder it was read from
        path.parent.mkdir()
        writer = None
        with path.open("wb") as file:
            for batch in batches(folder):
                writer = writer or arrow.ipc.new_stream(file, batch.schema)
                writer.write_batch(batch)
                rows += batch.num_rows
            if writer is None:
                raise UserError("nothing to export", expected="a dataset with rows", found="none")
            writer.close()
        hub.disable_progress_bars()
        found = hub.Dataset.from_file(str(path))
        found.save_to_disk(str(folder))
        if features is not None and found.features != features:
            raise AssertionError(f"datasets read other features: {found.features}")
        shutil.rmtree(path.parent)
        if form is not None:
            state = json.loads((folder / "state.json").read_bytes())
            (folder / "state.json").write_text(json.dumps({**state, "_format_type": form}))
        files = sum(each.is_file() for each in folder.rglob("*"))
    return Exported(files, rows)


def _draft_samples(export: Export, last: str) -> Iterator[tuple[int, _Array, _Array, _Array]]:
    """Yield number, tokens, loss mask and rows [tokens, taps, d] of each sample, in the order of the data.

    ``last`` is the tap that the trainer of draft models takes for the end of the model. The loss mask selects the
    assistant's tokens, or all tokens of a sample that has no turns.
    """
    run, dataset = export.dataset.run, export.dataset
    if len(export.taps) < 2 or export.taps[-1] != last:
        raise SpecError("--taps", expected=f"some layers, then {last}", found=" ".join(export.taps))
    if run.positions != ALL:
        raise UserError(
            "the dataset has not all tokens", expected="--positions all", found=f"--positions {run.positions}"
        )
    streams = {stream.number for stream in dataset.streams_with(export.taps, export.streams)}
    chosen = [address for place in range(len(dataset)) if (address := dataset.samples.address(place))[0] in streams]
    trained = 0
    for number, (stream, index) in enumerate(chosen):
        sample = dataset.sample(stream, index)
        found = sample.all_rows(export.taps)
        rows = [_converted(each, export.dtype, f"{tap} of sample {index}") for tap, each in found.items()]
        turns = sample.roles & (Role.SYSTEM | Role.USER | Role.ASSISTANT)
        mask = (sample.roles & Role.ASSISTANT != 0) | (not turns.any())
        yield number, sample.tokens.astype(np.int64), mask.astype(np.int64), np.stack(rows, axis=1)
        trained += int(mask.sum())
        export.seen(number + 1, len(chosen))
    if not trained:
        raise UserError(
            f"the loss mask of {dataset.root.url} selects no token",
            expected="answers of an assistant",
            found="prompts only",
            fix="store chats with answers, or run spile infer",
        )


def write_speculators(export: Export, output: str) -> Exported:
    """Write what speculators trains draft models on: a dataset of tokens, and a file of hidden states per sample.

    The last tap is the residual stream after the last layer; speculators applies the final norm itself.
    """
    arrow = _arrow()

    def batches(folder: Path) -> Iterator[Any]:
        states = folder / "hidden_states"
        states.mkdir()
        for number, tokens, mask, rows in _draft_samples(export, f"residual.{export.dataset.run.n_layers - 1}"):
            arrays = {"token_ids": tokens, "hidden_states": rows}
            code = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[export.dtype]
            shapes = [("token_ids", "I64", tokens.shape), ("hidden_states", code, rows.shape)]
            header, _ = encode_header(shapes, {})
            parts = [header, *(np.ascontiguousarray(each).tobytes() for each in arrays.values())]
            (states / f"hs_{number}.safetensors").write_bytes(b"".join(parts))
            columns = {"input_ids": [tokens], "loss_mask": [mask], "seq_len": [len(tokens)]}
            yield arrow.record_batch([arrow.array(column) for column in columns.values()], names=list(columns))

    return _save_dataset(batches, output, form="torch")


def write_specforge(export: Export, output: str) -> Exported:
    """Write what SpecForge's offline training of draft models reads: ``data_N.ckpt`` for each sample.

    The last tap is the output of the final norm, since SpecForge applies only the LM head to it.
    """
    try:
        import torch
    except ImportError as error:
        raise UserError("--to specforge needs torch", fix="run: pip install torch") from error
    count = 0
    with new_folder(output) as folder:
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
    return Exported(count, count)


def hook_name(tap: str) -> str:
    """Return what TransformerLens calls a tap: ``residual.12`` is ``blocks.12.hook_resid_post``."""
    parsed = Tap.parse(tap)
    if parsed.site not in _HOOKS:
        raise UserError(f"the hook name of {tap} is unknown", fix="give one with --hook-name")
    return f"blocks.{parsed.layer}.{_HOOKS[parsed.site]}"


def export_dataset(
    dataset: Dataset,
    output: str,
    *,
    to: ExportFormat,
    taps: Sequence[str] | None = None,
    streams: Sequence[int] | None = None,
    dtype: ExportDtype | None = None,
    context_size: int = 128,
    hook_name: str | None = None,
    seen: Seen = ignore_progress,
) -> Exported:
    """Write taps of a dataset in one of the formats; without ``taps``, the residual stream of all layers."""
    if to not in get_args(ExportFormat):
        raise SpecError("--to", expected=f"one of {', '.join(get_args(ExportFormat))}", found=repr(to))
    drafts = to in ("speculators", "specforge")
    known = get_args(ExportDtype) if drafts else ("float32", "float16")
    if dtype is not None and dtype not in known:
        raise SpecError("--dtype", expected=" or ".join(known), found=repr(dtype))
    wanted = Export(dataset, chosen_taps(dataset, taps), dtype or known[-1 if drafts else 0], streams, seen)
    if to == "saelens":
        if len(wanted.taps) != 1:
            raise SpecError("--to saelens", expected="one tap, such as --taps residual.3", found=len(wanted.taps))
        at_least("--context-size", context_size, 1)
        return write_saelens(wanted, output, context_size=context_size, name=hook_name)
    return _WRITERS[to](wanted, output)


_WRITERS = {
    "pickle": write_pickles,
    "npy": write_npy,
    "parquet": write_parquet,
    "hf": write_hf,
    "speculators": write_speculators,
    "specforge": write_specforge,
}


def check_output(to: ExportFormat, output: str) -> None:
    """Raise an error if the output is in a bucket and the format cannot be written there."""
    if to != "pickle" and is_remote(output):
        raise SpecError("--output", expected="a path on this machine", found=output)


def chosen_taps(dataset: Dataset, given: Sequence[str] | None) -> tuple[str, ...]:
    """Return the given taps, or those of the residual stream: exporting all tap kinds at once is rarely intended."""
    texts = [given] if isinstance(given, str) else given or []
    words = [word for text in texts for word in text.replace(",", " ").split()]
    chosen = tuple(words) or tuple(tap for tap in dataset.taps if tap.startswith("residual."))
    if not chosen:
        raise UserError("--taps", expected=f"some of {', '.join(dataset.taps)}", found="none")
    return chosen
