"""Datasets of the hub: pinned by their commit, streamed, and continued from the right row group."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.hub import COMMIT, DatasetHub

from spile.data import samples as stream_module
from spile.data.samples import open_stream
from spile.data.sources import open_input
from spile.data.tables import Columns, Hub
from spile.data.tokens import Tokenizer
from spile.errors import RunMismatch, SpecError
from spile.spec.identity import StreamIdentity
from spile.spec.ranges import Ranges
from spile.spec.run import DataSpec
from spile.spec.sample import Sample

pytest.importorskip("datasets")
pytest.importorskip("pyarrow")
COLUMNS = Columns(frozenset({"text", "id"}))


def write_files(folder: Path, files: int, rows: int, groups: int) -> Path:
    import pyarrow as arrow
    from pyarrow import parquet

    folder.mkdir(exist_ok=True)
    for number in range(files):
        numbers = range(number * rows, (number + 1) * rows)
        table = arrow.table(
            {"label": [0] * rows, "text": [f"text {n}" for n in numbers], "id": [str(n) for n in numbers]}
        )
        parquet.write_table(table, folder / f"train-{number}.parquet", row_group_size=groups)
    return folder


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The files of a pinned dataset, three of 100 rows; the list gets the name of each file that is opened."""
    import fsspec
    import huggingface_hub

    names: list[str] = []
    local = fsspec.filesystem("file")

    class Files:
        def open(self, address: str) -> Any:
            names.append(Path(address).name)
            return local.open(address)

    folder = write_files(tmp_path / "hub", 3, 100, 10)
    monkeypatch.setattr(huggingface_hub, "HfFileSystem", Files)
    monkeypatch.setattr(Hub, "_parquet_files", sorted(map(str, folder.iterdir())))
    monkeypatch.setattr("spile.data.tables._check_connection", lambda: None)
    monkeypatch.setattr("spile.data.tables.resolve_commit", lambda *_: "abc")
    return names


def test_rows_from_any_row_on(opened: list[str]) -> None:
    hub = Hub("someone/rows", "train", None, COLUMNS, revision="abc")
    every = list(hub.rows())
    assert [row.data for row in every] == [{"text": f"text {n}", "id": str(n)} for n in range(300)]
    for start in (0, 5, 99, 100, 105, 250, 299, 300):
        assert list(hub.rows(start)) == every[start:]
    opened.clear()
    assert next(hub.rows(299)).data["id"] == "299"
    assert opened.count("train-0.parquet") == opened.count("train-1.parquet") == 1, "only their footers are read"


def test_a_run_continues_with_the_commit_that_it_began_with(opened: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    spec = DataSpec(dataset="someone/rows")
    assert open_input(spec).revision == "abc"
    monkeypatch.setattr("spile.data.tables.resolve_commit", lambda *_: "newer")
    stored = StreamIdentity("someone/rows", "0", None, None, (), head=3, revision="abc")
    assert open_input(spec, stored).revision == "abc"
    assert open_input(spec).revision == "newer"


def test_a_revision_is_resolved_to_its_commit(opened: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    commits = {"v1": "abc", "v2": "def", None: "def"}
    monkeypatch.setattr("spile.data.tables.resolve_commit", lambda _, revision: commits[revision])
    old = DataSpec(dataset="someone/rows", dataset_revision="v1")
    assert open_input(old).revision == "abc"
    assert open_input(DataSpec(dataset="someone/rows", dataset_revision=COMMIT)).revision == COMMIT
    stored = StreamIdentity("someone/rows", "0", None, None, (), head=3, revision="abc")
    assert (
        open_input(old, stored).revision == open_input(replace(old, dataset_revision="abc"), stored).revision == "abc"
    )
    with pytest.raises(RunMismatch, match=r"expected --dataset-revision abc, found v2, which is def. Leave out"):
        open_input(replace(old, dataset_revision="v2"), stored)
    with pytest.raises(SpecError, match="--dataset-revision: expected a dataset of the hub, found embedded"):
        open_input(DataSpec(dataset_revision="v1"))


def test_finished_parts_of_a_pinned_dataset_are_not_read_again(
    opened: list[str], chatml: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream_module, "HEAD_ROWS", 10)
    monkeypatch.setattr("spile.data.lines._PART_ROWS", 20)
    stream = open_stream(DataSpec(dataset="someone/rows"), chatml)
    assert (stream.identity.head, stream.identity.lines, stream.identity.revision) == (10, None, "abc")
    reader = stream.read(Ranges())
    assert len(list(reader)) == reader.total == 300
    stream = open_stream(DataSpec(dataset="someone/rows"), chatml)  # the next run, without a copy of the rows
    opened.clear()
    left = list(stream.read(Ranges([(0, 265), (270, 300)]), reader.parts, 300))
    assert [item.task_id for item in left if isinstance(item, Sample)] == [str(n) for n in range(265, 270)]
    assert opened.count("train-0.parquet") == 1, "only its footer is read"
    stream.check_unchanged(reader.parts, 300)  # nothing to read: a commit of the hub does not change


READ = """
import json, sys
from spile.data.samples import open_stream
from spile.errors import DataError
from spile.data.tokens import load_tokenizer
from spile.models import model_files
from spile.spec.ranges import Ranges
from spile.spec.run import DataSpec

data = DataSpec(dataset="someone/rows", dataset_revision="main")
try:
    open_stream(DataSpec(dataset="someone/rows", dataset_revision="v9"), None)
except DataError as error:
    print(error)
stream = open_stream(data, load_tokenizer(model_files.find("embedded").tokenizer_folder))
rows = stream.read(Ranges())
first = next(rows)
rows.close()
print(json.dumps([stream.identity.head, stream.identity.revision, first.index, first.task_id, len(rows.parts)]))
"""


@pytest.mark.slow
def test_the_first_sample_of_a_large_dataset_needs_a_part_of_it(tmp_path: Path) -> None:
    """Against a server with the API of the hub, with the libraries of the hub: 200,000 rows."""
    with DatasetHub(write_files(tmp_path / "data", 4, 50_000, 5_000)) as hub:
        environment = {**os.environ, **hub.environment(tmp_path / "cache")}
        done = subprocess.run(
            [sys.executable, "-c", READ], env=environment, check=True, stdout=subprocess.PIPE, text=True, timeout=120
        )
        head, revision, index, name, parts = json.loads(done.stdout.splitlines()[-1])
        assert (head, revision, index, name) == (50_000, COMMIT, 0, "0")
        assert "--dataset-revision of someone/rows: expected a branch, tag or commit" in done.stdout
        assert parts < 25, "of 25 parts"
