"""The old guides' ``shard_0001.pkl.gz``: written for the loaders that people have, read without trusting them.

Each is ``{layer: [{"sample_idx", "activation", "shape", "text_preview"}, …]}``. A pickle is a program, so what is read
goes through an unpickler that knows six names, all of NumPy's arrays and numbers, and calls nothing else.
"""

from __future__ import annotations

import gzip
import pickle
from io import BytesIO
from pathlib import Path
from typing import Any, NoReturn

import ml_dtypes
import numpy as np

from spile.errors import DataError, UserError
from spile.reading.export.blocks import Block, Export, Exported, new_folder, per_shard
from spile.spec.taps import Tap

__all__ = ["read_pickle", "write_pickles"]


def write_pickles(export: Export, output: str) -> Exported:
    """One ``tpu_N/shard_NNNN.pkl.gz`` for each stored shard."""
    parsed = [Tap.parse(tap) for tap in export.taps]
    if len({tap.layer for tap in parsed}) != len(parsed):
        raise UserError(
            "--to pickle", expected="one tap per layer, since it has one list per layer", found=", ".join(export.taps)
        )
    folder = new_folder(output)

    def write(block: Block) -> None:
        path = folder / f"tpu_{block.stream}" / f"shard_{block.number:04d}.pkl.gz"
        path.parent.mkdir(exist_ok=True)
        with gzip.open(path, "wb", compresslevel=1) as file:
            pickle.dump({tap.layer: _samples(block, str(tap)) for tap in parsed}, file, protocol=4)

    return per_shard(export, write)


def _samples(block: Block, tap: str) -> list[dict[str, Any]]:
    offsets, found = block.shard.whole("offsets").tolist(), []
    for place, note in enumerate(block.shard.notes):
        rows = block.rows(tap, offsets[place], offsets[place + 1])
        found.append(
            {
                "sample_idx": int(note["index"]),
                "activation": rows,
                "shape": rows.shape,
                "text_preview": note["preview"],
            }
        )
    return found


def _latin1(text: str, encoding: str) -> bytes:
    """How old protocols write bytes; ``_codecs.encode`` with any other codec is not called."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise pickle.UnpicklingError(f"bytes in {encoding!r}")
    return text.encode("latin1")


_multiarray = np._core.multiarray  # type: ignore[attr-defined]
_KNOWN: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("ml_dtypes", "bfloat16"): ml_dtypes.bfloat16,
    ("_codecs", "encode"): _latin1,
    **{
        (f"numpy.{core}.multiarray", name): getattr(_multiarray, name)
        for core in ("core", "_core")
        for name in ("_reconstruct", "scalar")
    },
    **{
        (f"numpy.{core}.numeric", "_frombuffer"): np._core.numeric._frombuffer  # type: ignore[attr-defined]
        for core in ("core", "_core")
    },
}


class _Restricted(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        known = _KNOWN.get((module, name))
        if known is None:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return known

    def persistent_load(self, _: Any) -> NoReturn:
        raise pickle.UnpicklingError("it refers to something outside itself")


def read_pickle(path: Path) -> dict[int, list[dict[str, Any]]]:
    """The content of one file; :class:`DataError` for anything that is not such a file, and nothing of it is run."""
    where = str(path)
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
        content = _Restricted(BytesIO(data)).load()
    except OSError as error:
        raise DataError(f"{where} cannot be read", found=str(error)) from error
    except pickle.UnpicklingError as error:
        raise DataError(
            f"{where} is refused",
            expected="a pickle of dicts, lists, tuples, strings, numbers and arrays",
            found=str(error),
        ) from error
    except Exception as error:  # a broken pickle raises whatever its broken part happens to
        raise DataError(f"{where} is no pickle", found=f"{type(error).__name__}: {error}") from error
    return _checked(content, where)


def _checked(content: Any, where: str) -> dict[int, list[dict[str, Any]]]:
    expected = "{layer: [{sample_idx, activation, shape, text_preview}, …]}"
    if not isinstance(content, dict) or not content:
        raise DataError(where, expected=expected, found=type(content).__name__)
    for layer, samples in content.items():
        if type(layer) is not int or layer < 0 or not isinstance(samples, list):
            raise DataError(where, expected=expected, found=f"{layer!r}: {type(samples).__name__}")
        for sample in samples:
            rows = sample.get("activation") if isinstance(sample, dict) else None
            index = sample.get("sample_idx") if isinstance(sample, dict) else None
            if not isinstance(rows, np.ndarray) or not isinstance(index, int | np.integer) or index < 0:
                raise DataError(f"{where}, layer {layer}", expected=expected, found=f"a sample {str(sample)[:60]!r}")
            flat = rows[0] if rows.ndim == 3 and len(rows) == 1 else rows
            numbers = flat.dtype.kind == "f" or flat.dtype == ml_dtypes.bfloat16
            if flat.ndim != 2 or not numbers:
                found = f"{rows.dtype} {rows.shape}"
                raise DataError(f"{where}, layer {layer}", expected="an activation [tokens, d] of floats", found=found)
            sample["activation"] = flat
    return content
