"""Exports that hold one row per token: NumPy files, Parquet, Hugging Face datasets, and SAELens' cache."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from spile.errors import UserError
from spile.reading.export.blocks import Block, Export, Exported, new_folder, per_shard
from spile.spec.taps import Tap

__all__ = ["hook_name", "write_hf", "write_npy", "write_parquet", "write_saelens"]

_HOOKS = {"residual": "hook_resid_post", "attn": "hook_attn_out", "mlp": "hook_mlp_out"}
_SLICE = 16_384
"""Rows that are converted at a time."""


def write_npy(export: Export, output: str) -> Exported:
    """``<tap>.npy`` [rows, d]; ``stream.npy``, ``sample``, ``position``, ``token`` and ``role``; ``samples.jsonl``."""
    folder, at, total = new_folder(output), 0, export.rows
    files: dict[str, Any] = {}
    with (folder / "samples.jsonl").open("w", encoding="utf-8") as notes:
        for block in export.blocks():
            columns: dict[str, Any] = block.columns()
            columns.update({tap: block.rows(tap) for tap in export.taps})
            for name, column in columns.items():
                if name not in files:
                    shape = (total, *column.shape[1:])
                    files[name] = np.lib.format.open_memmap(folder / f"{name}.npy", "w+", column.dtype, shape)
                files[name][at : at + block.length] = column
            for note in block.shard.notes:
                notes.write(json.dumps({"stream": block.stream, **note}, ensure_ascii=False) + "\n")
            at += block.length
    for file in files.values():
        file.flush()
    return Exported(len(files) + 1, total)


def _arrow() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise UserError("this export needs pyarrow", fix="pip install 'spile[data]'") from error
    return pyarrow


def _hub_datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        raise UserError("this export needs datasets", fix="pip install 'spile[data]'") from error
    return datasets


def _record_batches(block: Block) -> Iterator[Any]:
    """A shard as arrow's record batches: what is known of each row, then a list of fixed size for each tap."""
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
    """``tpu_N-NNNN.parquet`` for each stored shard, one row per token."""
    _arrow()
    from pyarrow import parquet

    folder = new_folder(output)

    def write(block: Block) -> None:
        writer = None
        for batch in _record_batches(block):
            path = folder / f"tpu_{block.stream}-{block.number:04d}.parquet"
            # Activations do not compress, and trying costs more than writing them.
            writer = writer or parquet.ParquetWriter(path, batch.schema, compression="none", use_dictionary=["task_id"])
            writer.write_batch(batch)
        if writer is not None:
            writer.close()

    return per_shard(export, write)


def write_hf(export: Export, output: str) -> Exported:
    """A folder that ``datasets.load_from_disk`` opens, one row per token."""
    found = (batch for block in export.blocks() for batch in _record_batches(block))
    return _saved(found, None, output)


def write_saelens(export: Export, output: str, *, context_size: int = 128, name: str | None = None) -> Exported:
    """A cache that SAELens' ``cached_activations_path`` opens: rows one after another, cut into contexts.

    SAELens has one hook in a cache, in float32, and contexts of one length: the last rows that fill none are left out.
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

    return _saved(_contexts(all_blocks(), tap, context_size, features.arrow_schema), features, output)


def _contexts(source: Iterator[Block], tap: str, size: int, schema: Any) -> Iterator[Any]:
    arrow = _arrow()
    rest, rest_tokens = None, None
    for block in source:
        tokens = block.shard.whole("tokens")
        for start in range(0, block.length, _SLICE):
            stop = min(start + _SLICE, block.length)
            rows, ids = block.rows(tap, start, stop), tokens[start:stop]
            rows = rows if rest is None else np.concatenate([rest, rows])
            ids = ids if rest_tokens is None else np.concatenate([rest_tokens, ids])
            count = len(rows) // size
            rest, rest_tokens = rows[count * size :], ids[count * size :]
            if count:
                # Array2D is stored as lists of lists; offsets say where each begins.
                inner = arrow.ListArray.from_arrays(
                    np.arange(0, (count * size + 1) * rows.shape[1], rows.shape[1], dtype=np.int32),
                    arrow.array(rows[: count * size].reshape(-1)),
                )
                outer = arrow.ListArray.from_arrays(np.arange(0, count * size + 1, size, dtype=np.int32), inner)
                activations = arrow.ExtensionArray.from_storage(schema.types[0], outer)
                ids_column = arrow.FixedSizeListArray.from_arrays(arrow.array(ids[: count * size]), size)
                yield arrow.record_batch([activations, ids_column.cast(schema.types[1])], schema=schema)


def _saved(batches: Iterator[Any], features: Any, output: str) -> Exported:
    """Through one arrow file, which datasets maps and saves: nothing is held in memory."""
    hub, arrow = _hub_datasets(), _arrow()
    folder, rows = new_folder(output), 0
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".spile-export-") as aside:
        path = Path(aside) / "rows.arrow"
        writer = None
        with path.open("wb") as file:
            for batch in batches:
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
    return Exported(len(list(folder.iterdir())), rows)


def hook_name(tap: str) -> str:
    """What TransformerLens calls a tap: ``residual.12`` is ``blocks.12.hook_resid_post``."""
    parsed = Tap.parse(tap)
    if parsed.site not in _HOOKS:
        raise UserError(f"no hook's name is known for {tap}", fix="give one with --hook-name")
    return f"blocks.{parsed.layer}.{_HOOKS[parsed.site]}"
