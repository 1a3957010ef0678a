"""Rows in one byte per number: int8, or float8 (e4m3), with one float32 scale per row. The only place that decodes.

Between what makes rows and the shard an encoded row is one array of bytes, its numbers and then its scale, so that
one transfer carries both. In the shard they are two tensors: the tap's own, and its name with ``.scale``.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from spile.spec.taps import SCALE_BYTES, SCALED

__all__ = ["SCALE", "as_stored", "decode", "encode", "rounding", "split"]

SCALE = ".scale"
"""What a shard calls a tap's scales, after the tap's own name."""
_LARGEST = {"int8": 127.0, "float8_e4m3": 448.0}
_NUMBERS: dict[str, np.dtype[Any]] = {"int8": np.dtype(np.int8), "float8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn)}
_FLOAT8 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
_RELATIVE = {"float32": 0.0, "int32": 0.0, "float16": 2.0**-10, "bfloat16": 2.0**-7}

_Array = npt.NDArray[Any]


def as_stored(rows: _Array, dtype: str) -> _Array:
    """Numbers as a shard's builder takes them."""
    return encode(rows, dtype) if dtype in SCALED else rows.astype(dtype, copy=False)


def encode(rows: _Array, dtype: str) -> npt.NDArray[np.int8]:
    """``[n, width]`` numbers → ``[n, width + 4]`` bytes. A row that is not finite gets a scale that is not.

    The same arithmetic as :func:`spile.models.encoding.encode`, which devices do.
    """
    wide = rows.astype(np.float32)
    largest = np.abs(wide).max(axis=1, initial=0.0, keepdims=True)
    scale = _scale(largest, dtype)
    with np.errstate(all="ignore"):
        part = np.where(scale > 0, wide / scale, np.float32(0))
        if dtype == "int8":
            part = np.clip(np.rint(part), -127, 127)
        numbers = part.astype(_NUMBERS[dtype])
    return np.concatenate([numbers.view(np.int8), scale.astype("<f4").view(np.int8)], axis=1)


def _scale(largest: npt.NDArray[np.float32], dtype: str) -> npt.NDArray[np.float32]:
    with np.errstate(all="ignore"):
        scale = largest / np.float32(_LARGEST[dtype])
    if dtype == "float8_e4m3":  # the next power of two: dividing by it loses nothing
        exponent = np.maximum((scale.view(np.int32) + 0x7FFFFF) >> 23, 1)
        scale = (exponent << 23).astype(np.int32).view(np.float32)
    scale = np.where(scale < np.finfo(np.float32).tiny, np.float32(0), scale)
    return np.where(np.isfinite(largest), scale, np.float32(np.nan))


def split(rows: npt.NDArray[np.int8], dtype: str) -> tuple[_Array, npt.NDArray[np.float32]]:
    """What :func:`encode` gave as a shard's two tensors: numbers ``[n, width]`` and scales ``[n]``."""
    numbers = np.ascontiguousarray(rows[:, :-SCALE_BYTES]).view(_NUMBERS[dtype])
    return numbers, np.ascontiguousarray(rows[:, -SCALE_BYTES:]).view("<f4")[:, 0]


def decode(
    numbers: _Array, scales: npt.NDArray[np.float32], out: npt.NDArray[np.float32] | None = None
) -> npt.NDArray[np.float32]:
    """A shard's two tensors as the rows that they stand for."""
    wide = np.empty(numbers.shape, np.float32) if out is None else out
    if numbers.dtype == np.int8:
        wide[:] = numbers
    else:
        np.take(_FLOAT8, numbers.view(np.uint8), out=wide, mode="clip")
    wide *= scales[:, None]
    return wide


def rounding(rows: npt.NDArray[np.float64], dtype: str) -> npt.NDArray[np.float64]:
    """By how much each number may differ when it is stored: what ``docs/format.md`` promises, and no more."""
    if dtype not in SCALED:
        return np.asarray(_RELATIVE[dtype] * np.abs(rows))
    largest = np.abs(rows).max(axis=-1, initial=0.0, keepdims=True)
    if dtype == "int8":  # half a step, and float32's own rounding of the quotient and the product
        return np.broadcast_to(largest / 254 * (1 + 2.0**-15), rows.shape)
    # Half of a last bit of four, at the worst just above a power of two; below 2^-6 of the scale, half of 2^-9 of it.
    return np.asarray(np.maximum(np.abs(rows) / 17, largest / 224 / 1024) * (1 + 2.0**-40))
