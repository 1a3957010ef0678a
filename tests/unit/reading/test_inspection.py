"""``spile inspect`` and the statistics survive huge values and malformed records."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spile.cli.inspect import inspect
from spile.objects import open_folder
from spile.reading.dataset import Dataset
from spile.reading.dataset import open as open_dataset
from spile.reading.importing import import_pickles
from spile.reading.inspection import inspect_dataset, known_stats, main_plane, mean_cosine
from spile.store.ledger import Commit
from spile.store.statistics import TapAccumulator, TapStatistics

TAP = "residual.0"
MALFORMED: list[Any] = [
    None,
    [],
    "text",
    {},
    {"count": "many", "norms": {}, "top": []},
    {"count": 4, "norms": [], "top": []},
    {"count": 4, "norms": {"x": 1}, "top": []},
    {"count": 4, "norms": {"99999999": 4}, "top": []},
    {"count": 4, "norms": {"3": -4}, "top": []},
    {"count": 4, "norms": {"3": 10**40}, "top": []},
    {"count": -1, "norms": {}, "top": []},
    {"count": 4, "norms": {"3": 4}, "top": [[1.0]]},
    {"count": 4, "norms": {"3": 4}, "top": [["inf", 1, 2, 3]]},
    {"count": 4, "norms": {"3": 4}, "top": [["nan", 1, 2, 3]]},
    {"count": 1e300, "norms": {}, "top": []},
]


def huge(folder: Path) -> Dataset:
    """Values at the end of what float32 holds, and ordinary ones."""
    source = np.random.default_rng(0)
    samples = []
    for index in range(6):
        rows = source.standard_normal((9, 5)).astype(np.float32)
        rows[index % 3] *= np.float32(1e38) if index % 2 else np.float32(1)
        rows[0, 0] = np.float32(-3e38)
        samples.append({"sample_idx": index, "activation": rows, "shape": rows.shape, "text_preview": "x"})
    copies = [{**each, "activation": each["activation"].copy()} for each in samples]
    (folder / "a.pkl").write_bytes(pickle.dumps({0: samples, 1: copies}))
    import_pickles(str(folder / "a.pkl"), open_folder(str(folder / "root")), store_dtype="float32")
    return open_dataset(str(folder / "root"))


def test_huge_values_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    dataset = huge(tmp_path)
    found = inspect_dataset(dataset)
    assert np.isfinite(found.plane).all()
    assert np.isfinite(found.cosine).all()
    assert np.allclose(np.diag(found.cosine), 1)
    assert np.isfinite(found.explained).all()
    assert inspect(str(tmp_path / "root"), html=tmp_path / "page.html") == 0
    assert "e+38" in capsys.readouterr().out
    data = (tmp_path / "page.html").read_text().partition('id="data">')[2].partition("</script>")[0]
    assert not [answer for answer in json.loads(data)["answers"].values() if "error" in answer]


def test_rows_that_are_not_finite_have_directions_too() -> None:
    rows = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
    rows[2, 1], rows[3, 0] = np.inf, np.nan
    plane, explained = main_plane(rows)
    assert np.isfinite(plane).all()
    assert np.isfinite(explained).all()
    assert np.isfinite(mean_cosine([rows, rows])).all()


@pytest.mark.parametrize("number", range(len(MALFORMED)))
def test_malformed_statistics_are_replaced_by_the_rows_own(tmp_path: Path, number: int) -> None:
    dataset = huge(tmp_path)
    wanted = dataset.stats(TAP)
    (stream,) = dataset.streams
    paths = sorted(Path(str(stream.folder.local_path), "commits").glob("*.json"))
    commit = Commit.from_bytes(paths[0].read_bytes(), "it")
    shards = tuple(replace(shard, statistics={TAP: MALFORMED[number]}) for shard in commit.shards)
    paths[0].write_bytes(replace(commit, shards=shards).to_bytes())
    again = open_dataset(str(tmp_path / "root"))
    assert TapStatistics.from_json(MALFORMED[number]) is None
    assert not known_stats(again, TAP)
    found = again.stats(TAP)
    assert (found.count, found.norms, found.top) == (wanted.count, wanted.norms, wanted.top)
    assert inspect(str(tmp_path / "root"), html=tmp_path / "page.html", stats=True) == 0


@pytest.mark.parametrize("scale", [1e-3, 1.0, 2.9, 3e38])
def test_a_quantile_never_exceeds_the_largest_norm(scale: float) -> None:
    for seed in range(20):
        taken = TapAccumulator(3)
        rows = (np.random.default_rng(seed).random((40, 3)) * scale).astype(np.float32)
        numbers = np.arange(40)
        taken.add(rows, numbers, numbers, numbers)
        found = TapStatistics.from_json(taken.result().to_json())
        assert found is not None
        norms = np.linalg.norm(rows.astype(np.float64), axis=1)
        assert found.norm_quantile(1.0) <= norms.max() * (1 + 1e-5)
        for q in (0.0, 0.25, 0.5, 0.99, 1.0):
            assert found.norm_quantile(q) <= found.top[0].norm
            assert found.norm_quantile(q) == pytest.approx(np.quantile(norms, q, method="inverted_cdf"), rel=0.021)
