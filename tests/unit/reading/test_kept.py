"""What ``--keep`` named: stored once with each sample, proven, and read back beside its rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spile.cli.main import main
from spile.objects import Folder, open_folder
from spile.proof.verification import verify
from spile.reading.dataset import Dataset
from spile.reading.dataset import open as open_dataset
from spile.store.run import join_run
from spile.store.writer import StreamWriter, join_stream
from world import run_identity, sample_of, stream_identity, write_shard

KEEP = ("label", "mixed", "source")


def fields(index: int) -> dict[str, Any]:
    return {"label": index % 3, "mixed": None if index % 2 else index, "source": {"site": ["a", "“b”"][index % 2]}}


def written(root: Folder, *, keep: tuple[str, ...] = KEEP, lacking: int | None = None) -> StreamWriter:
    """Two shards of six samples; ``lacking`` is without what it should have."""
    run = run_identity(keep=keep)
    join_run(root, run)
    store = join_stream(root, 0, stream_identity(12), run)
    for first in (0, 6):
        samples = [sample_of(index) for index in range(first, first + 6)]
        samples = [replace(s, kept=None if s.index == lacking else fields(s.index)) for s in samples]
        builder = store.begin(samples)
        write_shard(builder, samples)
        store.commit([builder.finish()], [])
    store.finish()
    return store


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    written(open_folder(str(tmp_path)))
    return open_dataset(str(tmp_path))


def test_samples_and_filters_have_them(dataset: Dataset) -> None:
    assert [ref.kept for ref in dataset.samples] == [fields(index) for index in range(12)]
    assert dataset.sample(0, 7).ref.kept == fields(7)
    wanted = [index for index in range(12) if fields(index)["label"] == 2]
    found = dataset.shuffled("attn.1", 64, samples=lambda ref: ref.kept["label"] == 2, context=True)
    assert {int(index) for batch in found for index in batch.samples} == set(wanted)


@pytest.mark.parametrize("memory", [2000, 1 << 30])
def test_rows_come_with_the_fields_of_their_sample(dataset: Dataset, memory: int) -> None:
    total = 0
    shuffled = dataset.shuffled("attn.1", 50, memory=memory, context=True)
    for batch in (*shuffled, *dataset.batches("attn.1", 50)):
        total += len(batch)
        assert batch.kept is not None
        assert batch.kept["label"].dtype == np.int64
        assert batch.kept["label"].tolist() == [fields(int(index))["label"] for index in batch.samples]
        assert batch.kept["mixed"].tolist() == [fields(int(index))["mixed"] for index in batch.samples]
        assert batch.kept["source"].tolist() == [fields(int(index))["source"] for index in batch.samples]
    assert total == 2 * dataset.streams[0].tokens


@pytest.mark.torch
def test_in_torch_numbers_are_tensors_and_the_rest_stays(dataset: Dataset) -> None:
    torch = pytest.importorskip("torch")
    batch = next(iter(dataset.torch("attn.1", batch_rows=50, context=True)))
    assert torch.equal(batch["kept"]["label"], batch["samples"] % 3)
    assert batch["kept"]["source"].dtype == object


def test_on_the_device_numbers_are_arrays_and_the_rest_stays(dataset: Dataset) -> None:
    batch = next(dataset.jax("attn.1", batch_rows=50, context=True))
    assert (np.asarray(batch["kept"]["label"]) == np.asarray(batch["samples"]) % 3).all()
    assert isinstance(batch["kept"]["source"], np.ndarray)


def test_they_are_proven(tmp_path: Path) -> None:
    written(open_folder(str(tmp_path / "whole")))
    assert not [p for stream in verify(str(tmp_path / "whole")).streams for p in stream.problems]
    written(open_folder(str(tmp_path / "lacking")), lacking=8)
    (problem,) = (p for stream in verify(str(tmp_path / "lacking")).streams for p in stream.problems)
    assert "samples 8 do not have the kept fields label, mixed, source" in str(problem)


def test_a_run_keeps_its_fields_over_a_resume_and_refuses_others(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, root = tmp_path / "rows.jsonl", tmp_path / "out"
    data.write_text("".join(f'{{"text": "number {n}", "label": {n}, "source": "s{n}"}}\n' for n in range(6)))

    def extract(keep: str, *more: str) -> int:
        with pytest.raises(SystemExit) as ended:
            main(["extract", "--dataset", str(data), "--output", str(root), "--layers", "1", "--keep", keep, *more])
        assert isinstance(ended.value.code, int)
        return ended.value.code

    assert extract("label,source", "--max-samples", "2") == 0
    capsys.readouterr()
    assert extract("label") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "was created with keep label, source, but this command asks for keep label. Give the same" in line
    assert extract("source,label") == 0  # in any order
    kept = {ref.index: ref.kept for ref in open_dataset(str(root)).samples}
    assert kept == {n: {"label": n, "source": f"s{n}"} for n in range(6)}
    assert not [problem for stream in verify(str(root)).streams for problem in stream.problems]
