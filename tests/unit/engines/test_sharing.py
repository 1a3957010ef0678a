"""Cores and chips are divided among workers; none is used twice if there are enough."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spile.engines.local import divide_machine
from spile.errors import SpecError


@given(st.integers(1, 40), st.integers(1, 64))
def test_cores_are_apart_while_there_are_enough(workers: int, cores: int) -> None:
    found = divide_machine(workers, range(cores), {}, {})
    assert len(found) == workers
    sizes = {len(share.cores) for share in found}
    assert sizes == {max(1, cores // workers)}
    used = [core for share in found for core in share.cores]
    assert set(used) <= set(range(cores))
    if workers <= cores:
        assert len(used) == len(set(used))
    else:
        assert max(used.count(core) for core in set(used)) - min(used.count(core) for core in range(cores)) <= 1
    assert {share.env["OMP_NUM_THREADS"] for share in found} == {str(max(1, cores // workers))}


def test_gpus_are_never_shared() -> None:
    chips = {"GPU": ("0", "1", "2", "5"), "TPU": ()}
    found = divide_machine(2, range(8), chips, {})
    assert [share.env["CUDA_VISIBLE_DEVICES"] for share in found] == ["0,1", "2,5"]
    found = divide_machine(3, range(8), chips, {"GPU": 1.0})
    assert [share.env["CUDA_VISIBLE_DEVICES"] for share in found] == ["0", "1", "2"]
    with pytest.raises(SpecError, match=r"at most 4 GPU in all, found 5\. Use --num-workers 4"):
        divide_machine(5, range(8), chips, {})


def test_tpu_chips_have_bounds() -> None:
    chips = {"TPU": tuple("01234567")}
    (share, *_) = divide_machine(2, range(8), chips, {"TPU": 4.0})
    assert share.env["TPU_VISIBLE_CHIPS"] == "0,1,2,3"
    assert (share.env["TPU_CHIPS_PER_PROCESS_BOUNDS"], share.env["TPU_PROCESS_BOUNDS"]) == ("2,2,1", "1,1,1")
    with pytest.raises(SpecError, match="expected 1, 2, 4 or 8 chips for each worker, found 3"):
        divide_machine(2, range(8), chips, {"TPU": 3.0})


def test_a_missing_machine_is_reported() -> None:
    with pytest.raises(SpecError, match=r"--resources GPU: expected a machine with GPUs, found none here"):
        divide_machine(1, range(2), {"GPU": ()}, {"GPU": 1.0})
    with pytest.raises(SpecError, match="expected GPU=N or TPU=N with --engine local, found gold"):
        divide_machine(1, range(2), {}, {"gold": 1.0})
