"""Rows in torch, jax and Grain: each row once, resumable, nothing copied that need not be; and reading without jax."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spile.objects import open_folder
from spile.reading.dataset import Dataset
from spile.reading.dataset import open as open_dataset
from spile.spec.sample import Role
from world import produce

# A loader's workers are forked, and another test of this process may have started jax.
pytestmark = pytest.mark.filterwarnings("ignore:os.fork")


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    produce(open_folder(str(tmp_path)), 45, cut=2)
    return open_dataset(str(tmp_path))


def counted(arrays: Any) -> Counter[bytes]:
    return Counter(row.tobytes() for rows in arrays for row in rows)


def everything(dataset: Dataset, **wanted: Any) -> Counter[bytes]:
    return counted(dataset.rows("attn.1", **wanted))


def bits(tensors: Any) -> list[np.ndarray]:
    import torch

    return [tensor.view(torch.int16).numpy() for tensor in tensors]


@pytest.mark.torch
def test_torch_gives_each_row_once_over_ranks_and_workers(dataset: Dataset) -> None:
    torch = pytest.importorskip("torch")
    from torch.utils.data import DataLoader

    found: Counter[bytes] = Counter()
    for rank in range(2):
        rows = dataset.torch("attn.1", batch_rows=32, rank=rank, world=2, exclude=Role.FIRST)
        for workers in (0, 2):
            given = list(DataLoader(rows, batch_size=None, num_workers=workers))
            assert {tensor.dtype for tensor in given} == {torch.bfloat16}
            assert {tensor.shape[1] for tensor in given} == {8}
            found.update(counted(bits(given)))
    assert found == Counter({row: 2 * n for row, n in everything(dataset, exclude=Role.FIRST).items()})


@pytest.mark.torch
@pytest.mark.parametrize("workers", [0, 2])
def test_a_plain_loader_continues_after_any_batch(dataset: Dataset, workers: int) -> None:
    pytest.importorskip("torch")
    from torch.utils.data import DataLoader

    def given(after: int) -> list[bytes]:
        rows = dataset.torch("attn.1", batch_rows=100, seed=3, epochs=2, exclude=Role.FIRST, after=after)
        return [rows.tobytes() for rows in bits(DataLoader(rows, batch_size=None, num_workers=workers))]

    whole = given(0)
    for after in (1, 5, len(whole) // 2) if workers else range(1, len(whole)):
        assert given(after) == whole[after:]


def test_an_endless_reader_continues_after_any_batch(dataset: Dataset) -> None:
    def given(after: int, count: int) -> list[bytes]:
        with dataset.shuffled("attn.1", 100, epochs=None, memory=5000, exclude=Role.FIRST, after=after) as reader:
            return [next(reader).tobytes() for _ in range(count)]

    whole = given(0, 30)
    for after in (1, 7, 13, 29):
        assert given(after, 30 - after) == whole[after:]


@pytest.mark.torch
def test_torch_states_and_context(dataset: Dataset) -> None:
    torch = pytest.importorskip("torch")
    rows = dataset.torch(["attn.1", "residual.0"], batch_rows=64, context=True)
    iterator = iter(rows)
    first = next(iterator)
    assert set(first) == {"rows", "tokens", "roles", "streams", "samples", "places", "positions"}
    assert first["rows"]["attn.1"].dtype == torch.bfloat16
    again = dataset.torch(["attn.1", "residual.0"], batch_rows=64, context=True)
    again.load_state_dict(rows.state_dict())
    expected, found = list(iterator), list(again)
    assert len(expected) == len(found) > 1
    assert all(torch.equal(a["rows"]["attn.1"], b["rows"]["attn.1"]) for a, b in zip(expected, found, strict=True))


@pytest.mark.torch
def test_bf16_tensors_share_the_rows_memory() -> None:
    pytest.importorskip("torch")
    import ml_dtypes

    from spile.reading.torch_rows import tensor_of

    for dtype in (ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, np.float32, np.int8):
        array = np.ones((3, 4), dtype)
        tensor = tensor_of(array)
        assert tensor.data_ptr() == array.ctypes.data
        assert tensor.float().tolist() == [[1.0] * 4] * 3


def test_jax_batches_are_on_the_device_and_resumable(dataset: Dataset) -> None:
    import jax

    given = list(dataset.jax("attn.1", batch_rows=64, seed=1))
    assert all(isinstance(batch, jax.Array) for batch in given)
    assert counted(np.asarray(batch) for batch in given) == everything(dataset)
    reader = dataset.jax("attn.1", batch_rows=64, seed=1)
    next(reader), next(reader)
    rest = list(dataset.jax("attn.1", batch_rows=64, seed=1, state=reader.state()))
    reader.close()
    assert [np.asarray(batch).tobytes() for batch in rest] == [np.asarray(batch).tobytes() for batch in given[2:]]
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    both = next(dataset.jax(["attn.1", "residual.0"], batch_rows=8, sharding=sharding))
    assert both["attn.1"].shape == both["residual.0"].shape == (8, 8)


def test_grain_saves_and_restores_it(dataset: Dataset) -> None:
    pytest.importorskip("grain")
    rows = dataset.grain("attn.1", batch_rows=64, seed=2).map(lambda batch: batch.astype(np.float32))
    iterator = iter(rows)
    given = [next(iterator).tobytes() for _ in range(3)]
    state = iterator.get_state()
    rest = [batch.tobytes() for batch in iterator]
    iterator.set_state(state)
    assert [batch.tobytes() for batch in iterator] == rest
    whole = [batch.astype(np.float32).tobytes() for batch in dataset.shuffled("attn.1", 64, seed=2)]
    assert given + rest == whole


def test_a_machine_without_jax_reads_and_trains(dataset: Dataset, tmp_path: Path) -> None:
    """An environment in which jax, transformers and tokenizers cannot be imported."""
    absent = tmp_path / "absent"
    for name in ("jax", "jaxlib", "transformers", "tokenizers"):
        (absent / name).mkdir(parents=True)
        (absent / name / "__init__.py").write_text(f"raise ImportError('no {name} here')")
    torch = "for batch in dataset.torch('attn.1', batch_rows=64): pass" if _has("torch") else ""
    code = f"""
import spile
dataset = spile.open({str(tmp_path)!r})
assert sum(len(rows) for rows in dataset.rows("attn.1")) == sum(len(rows) for rows in dataset.shuffled("attn.1", 64))
assert dataset.samples[3].task_id
{torch}
"""
    environment = {**os.environ, "PYTHONPATH": str(absent)}
    command = [sys.executable, "-W", "error", "-c", code]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def _has(package: str) -> bool:
    import importlib.util

    return importlib.util.find_spec(package) is not None
