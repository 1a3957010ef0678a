"""Exports hold the dataset's own rows; the old guides' pickles come back; a hostile one runs nothing."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from spile.errors import DataError, UserError
from spile.objects import open_folder
from spile.reading.dataset import Dataset
from spile.reading.dataset import open as open_dataset
from spile.reading.export.blocks import Export
from spile.reading.export.importing import import_pickles
from spile.reading.export.pickles import read_pickle, write_pickles
from spile.reading.export.tables import hook_name, write_hf, write_npy, write_parquet, write_saelens
from spile.store.verification import verify
from world import produce

TAPS = ("residual.0", "residual.1")


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    produce(open_folder(str(tmp_path / "root")), 30)
    produce(open_folder(str(tmp_path / "root")), 9, worker_id=3)
    return open_dataset(str(tmp_path / "root"))


def rows(dataset: Dataset, tap: str) -> np.ndarray:
    return np.concatenate(list(dataset.rows(tap))).astype(np.float32)


def test_a_pickle_is_what_the_old_loader_expects_and_comes_back(dataset: Dataset, tmp_path: Path) -> None:
    done = write_pickles(Export(dataset, TAPS), str(tmp_path / "old"))
    assert done.rows == sum(stream.tokens for stream in dataset.streams)
    with gzip.open(tmp_path / "old/tpu_0/shard_0001.pkl.gz", "rb") as file:
        data = pickle.load(file)
    assert list(data) == [0, 1]
    first = data[1][0]
    assert set(first) == {"sample_idx", "activation", "shape", "text_preview"}
    stored = dataset.sample(0, first["sample_idx"])
    assert first["shape"] == first["activation"].shape
    assert first["activation"].dtype == np.float32
    assert np.array_equal(first["activation"], stored.rows("residual.1").astype(np.float32))
    assert first["text_preview"] == stored.ref.preview
    again = open_folder(str(tmp_path / "again"))
    for worker in (0, 3):
        import_pickles(str(tmp_path / f"old/tpu_{worker}"), again, worker_id=worker)
        import_pickles(str(tmp_path / f"old/tpu_{worker}"), again, worker_id=worker)  # once is enough
    assert verify(again).ok
    back = open_dataset(again)
    assert back.taps == TAPS
    for ref in dataset.samples:
        assert np.array_equal(
            back.sample(ref.stream, ref.index).rows("residual.1"),
            dataset.sample(ref.stream, ref.index).rows("residual.1"),
        )
    with pytest.raises(UserError, match="expected one tap per layer"):
        write_pickles(Export(dataset, ("residual.1", "attn.1")), str(tmp_path / "both"))
    with pytest.raises(UserError, match="expected a new or an empty folder"):
        write_pickles(Export(dataset, TAPS), str(tmp_path / "old"))


class _Evil:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", range(6))
@pytest.mark.parametrize(
    "content",
    [
        _Evil(os.system, "touch ran"),
        {0: [{"sample_idx": 0, "activation": _Evil(eval, "open('ran', 'w')")}]},
        {0: [_Evil(np.load, "ran")]},
        _Evil(getattr, dict, "fromkeys"),
        _Evil(np.fromfile, "ran"),
    ],
    ids=["system", "eval in a sample", "load", "getattr", "fromfile"],
)
def test_a_hostile_pickle_is_refused_and_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: Any, protocol: int
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("evil.pkl.gz").write_bytes(gzip.compress(pickle.dumps(content, protocol)))
    with pytest.raises(DataError, match=r"evil\.pkl\.gz is refused: expected a pickle of dicts, lists"):
        read_pickle(Path("evil.pkl.gz"))
    assert not Path("ran").exists()
    command = [sys.executable, "-m", "spile.cli.main", "import", "evil.pkl.gz", "--output", "out"]
    if protocol == 4:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert (ended.returncode, "is refused" in ended.stderr, "Traceback" in ended.stderr) == (2, True, False)
        assert not Path("ran").exists()
        assert not Path("out").exists()


@pytest.mark.parametrize("protocol", range(6))
def test_every_protocol_of_an_honest_pickle_is_read(tmp_path: Path, protocol: int) -> None:
    arrays = [np.ones((2, 3), kind) for kind in (np.float32, np.float16, np.float64, ml_dtypes.bfloat16)]
    content = {
        3: [
            {"sample_idx": np.int64(n), "activation": array, "shape": array.shape, "text_preview": "é\x00"}
            for n, array in enumerate(arrays)
        ]
    }
    path = tmp_path / "a.pkl"
    path.write_bytes(pickle.dumps(content, protocol))
    for found, array in zip(read_pickle(path)[3], arrays, strict=True):
        assert np.array_equal(found["activation"], array)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([], "found list"),
        ({"a": []}, "'a': list"),
        ({0: [{"sample_idx": 0}]}, "a sample"),
        ({0: [{"sample_idx": 0, "activation": np.array([object()])}]}, "refused|floats"),
        ({0: [{"sample_idx": 0, "activation": np.ones(3)}]}, "an activation"),
    ],
)
def test_a_strange_pickle_is_refused(tmp_path: Path, content: Any, text: str) -> None:
    path = tmp_path / "a.pkl"
    path.write_bytes(pickle.dumps(content))
    with pytest.raises(DataError, match=text):
        read_pickle(path)
    path.write_bytes(pickle.dumps(content)[:-3])
    with pytest.raises(DataError, match=r"a\.pkl"):
        read_pickle(path)


def test_npy(dataset: Dataset, tmp_path: Path) -> None:
    write_npy(Export(dataset, TAPS, "float16"), str(tmp_path / "npy"))
    for tap in TAPS:
        assert np.array_equal(np.load(tmp_path / f"npy/{tap}.npy"), rows(dataset, tap).astype(np.float16))
    notes = [json.loads(line) for line in (tmp_path / "npy/samples.jsonl").read_text().splitlines()]
    assert len(notes) == len(dataset.samples)
    at, positions = np.load(tmp_path / "npy/sample.npy"), np.load(tmp_path / "npy/position.npy")
    assert at[0] == dataset.samples[0].index
    assert positions[dataset.samples[0].length - 1] == dataset.samples[0].length - 1


def test_parquet_and_hf_are_read_by_their_own_packages(dataset: Dataset, tmp_path: Path) -> None:
    pandas, hub = pytest.importorskip("pandas"), pytest.importorskip("datasets")
    write_parquet(Export(dataset, TAPS), str(tmp_path / "parquet"))
    table = pandas.concat([pandas.read_parquet(path) for path in sorted((tmp_path / "parquet").iterdir())])
    assert np.array_equal(np.stack(table["residual.1"].to_list()), rows(dataset, "residual.1"))
    assert list(table["task_id"].iloc[:2]) == [dataset.samples[0].task_id] * 2
    write_hf(Export(dataset, TAPS), str(tmp_path / "hf"))
    loaded = hub.load_from_disk(str(tmp_path / "hf")).with_format("numpy")
    assert np.array_equal(loaded["residual.0"][:], rows(dataset, "residual.0"))
    assert not list(tmp_path.glob(".spile-export-*"))


def test_the_saelens_cache_has_contexts(dataset: Dataset, tmp_path: Path) -> None:
    hub = pytest.importorskip("datasets")
    done = write_saelens(Export(dataset, ("residual.1",)), str(tmp_path / "sae"), context_size=16)
    loaded = hub.load_from_disk(str(tmp_path / "sae")).with_format("numpy")
    wanted = rows(dataset, "residual.1")
    count = len(wanted) // 16
    assert done.rows == count == len(loaded)
    assert loaded.features["blocks.1.hook_resid_post"].shape == (16, 8)
    assert np.array_equal(np.stack(list(loaded["blocks.1.hook_resid_post"])), wanted[: count * 16].reshape(-1, 16, 8))
    assert hook_name("mlp.3") == "blocks.3.hook_mlp_out"
