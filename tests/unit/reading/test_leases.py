"""Memory of batches comes back with the last that uses it, and not before."""

from __future__ import annotations

import gc

import ml_dtypes
import numpy as np

from spile.reading.leases import BatchMemory

BF16 = np.dtype(ml_dtypes.bfloat16)


def test_memory_is_given_again_when_nobody_has_it() -> None:
    memory = BatchMemory()
    first = memory.array((4, 8), BF16)
    first[:] = 1
    address, part = first.ctypes.data, first[1:3]
    del first
    gc.collect()
    second = memory.array((4, 8), BF16)
    second[:] = 2
    assert (part == 1).all()  # a view holds it
    assert second.ctypes.data != address
    del part
    third = memory.array((4, 8), BF16)
    assert third.ctypes.data == address
    assert third.shape == (4, 8)
    assert third.dtype == BF16
    assert third.flags.writeable


def test_sizes_do_not_mix_and_few_blocks_wait() -> None:
    memory = BatchMemory()
    held = [memory.array((2, count), BF16) for count in (1, 2, 3, 3, 0)]
    assert [each.shape for each in held] == [(2, 1), (2, 2), (2, 3), (2, 3), (2, 0)]
    del held
    many = [memory.array((2, 3), BF16) for _ in range(30)]
    addresses = {each.ctypes.data for each in many}
    assert len(addresses) == 30
    del many
    assert len(memory._free[12]) == 8
