"""The order of the data is that of the input, whatever the number of streams: labels are joined by position."""

from __future__ import annotations

import gzip
import json
import pickle
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spile
from spile.data.lines import embedded_tasks
from spile.data.split import prepare_streams
from spile.engines.local import LocalEngine
from spile.engines.supervisor import StreamTask, WorkerEnd
from spile.errors import Damaged
from spile.objects import open_folder
from spile.proof.verification import verify
from spile.reading.blocks import SampleTable
from spile.reading.dataset import Dataset, TokenRows
from spile.reading.export import export_dataset
from spile.spec.run import DataSpec
from spile.store.ledger import seal
from spile.store.writer import parse_stream
from spile.view.web.pages import Viewer
from spile.view.web.roots import Root
from unit.cli.refusals import SMALL
from unit.cli.refusals import spile as command

ROWS = 200
TAP = "residual.0"
_random = random.Random(5)
LABELS = [_random.randrange(2) for _ in range(ROWS)]
TEXTS = [
    f"{' '.join(str(_random.randrange(99)) if label else _random.choice(['fox', 'dog']) for _ in range(9))} {n}"
    for n, label in enumerate(LABELS)
]


class InProcess(LocalEngine):
    """Runs each worker in the process of the test, one after the other; the streams end in another order."""

    def start(self, task: StreamTask, avoid: Collection[str] = ()) -> None:
        self.ends = [WorkerEnd(task.stream, command(*task.words), "", ""), *getattr(self, "ends", ())]

    def wait(self, seconds: float) -> Sequence[WorkerEnd]:
        ends, self.ends = self.ends, []
        return ends


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows without an id: the number of a row is its id."""
    file = tmp_path_factory.mktemp("texts") / "texts.csv"
    rows = (f"{text},{label},s{n}\n" for n, (text, label) in enumerate(zip(TEXTS, LABELS, strict=True)))
    file.write_text("text,label,name\n" + "".join(rows))
    return file


@pytest.fixture(scope="module")
def extract(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., str]]:
    def run(*words: object, output: Path | None = None) -> str:
        output = output or tmp_path_factory.mktemp("run") / "out"
        assert (
            command("extract", "--model", "embedded", "--output", output, *SMALL, "--shard-size-gb", "0.0001", *words)
            == 0
        )
        return str(output)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("spile.engines.local.LocalEngine", InProcess)
        yield run


ENGINE = ("--engine", "local", "--num-workers", "2", "--num-streams", "3")


@pytest.fixture(scope="module")
def one(texts: Path, extract: Callable[..., str]) -> Dataset:
    return spile.open(extract("--dataset", texts))


@pytest.fixture(scope="module", params=["files", "rows in turn"])
def several(request: pytest.FixtureRequest, texts: Path, extract: Callable[..., str]) -> Dataset:
    """Three streams: from files that the launcher makes, or from the dataset itself, as if it were large."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "rows in turn":
            patch.setattr("spile.data.samples.HEAD_ROWS", 60)
        found: Dataset = spile.open(extract("--dataset", texts, *ENGINE))
    assert len(found.streams) == 3
    assert verify(open_folder(found.root.url)).ok
    return found


def accuracy(x: np.ndarray, labels: Sequence[int]) -> float:
    """Train a linear probe on one half of the rows, and return the share of the other half that it gets right."""
    y, half = np.array(labels) * 2.0 - 1, len(labels) // 2
    x = np.concatenate([x.astype(np.float64), np.ones((len(x), 1))], axis=1)
    weights = np.linalg.solve(x[:half].T @ x[:half] + 1e-3 * np.eye(x.shape[1]), x[:half].T @ y[:half])
    return float(np.mean((x[half:] @ weights > 0) == (y[half:] > 0)))


def test_a_probe_on_labels_that_are_joined_by_position(one: Dataset, several: Dataset) -> None:
    for dataset in (one, several):
        assert accuracy(dataset.numpy(TAP, positions="mean"), LABELS) >= 0.98
    assert np.allclose(one.numpy(TAP), several.numpy(TAP), atol=0.02, rtol=0.02)


def test_every_reader_has_the_order_of_the_input(one: Dataset, several: Dataset) -> None:
    ids, previews = [f"line-{n}" for n in range(ROWS)], [text[:96] for text in TEXTS]
    for dataset in (one, several):
        assert [sample.task_id for sample in dataset] == ids
        assert [ref.preview for ref in dataset.samples] == previews
        assert [dataset[n].labels["name"] for n in (0, 7, -1)] == ["s0", "s7", f"s{ROWS - 1}"]
        assert dataset["line-7"].ref.preview == previews[7]
        assert dataset.labels("label").tolist() == list(map(str, LABELS))
        assert [row["task_id"] for row in TokenRows(dataset)] == ids
        tokens = np.concatenate([sample.tokens for sample in dataset])
        assert np.array_equal(np.concatenate([batch.tokens for batch in dataset.batches(TAP, 100)]), tokens)
        rows = np.concatenate([sample.rows(TAP) for sample in dataset])
        assert np.array_equal(np.concatenate([*dataset.rows(TAP, 77)]), rows)
        parts = [rows for k in range(3) for rows in dataset.rows(TAP, 77, part=(k, 3))]
        assert np.array_equal(np.concatenate(parts), rows)
        for batch in dataset.shuffled(TAP, 64, context=True):
            assert [LABELS[place] for place in batch.places.tolist()] == batch.kept["label"].astype(int).tolist()
        in_order = dataset.shuffled(TAP, 64, order="data", buffer_rows=1, context=True)
        assert np.array_equal(np.sort(np.concatenate([batch.tokens for batch in in_order])), np.sort(tokens))
    assert np.array_equal(
        np.concatenate([batch.tokens for batch in one.shuffled(TAP, 64, seed=3, context=True)]),
        np.concatenate([batch.tokens for batch in several.shuffled(TAP, 64, seed=3, context=True)]),
    )


def test_two_extractions_of_the_same_data_are_compared_and_joined(one: Dataset, several: Dataset) -> None:
    found = spile.compare(one.root.url, several.root.url)
    assert (found.samples, found.different) == (ROWS, ())
    assert found.taps[TAP].largest < 0.05
    joint = spile.open({"one": one.root.url, "several": several.root.url})
    for batch in joint.shuffled(TAP, 64):
        assert np.allclose(
            batch[f"one/{TAP}"].astype(float), batch[f"several/{TAP}"].astype(float), atol=0.05, rtol=0.05
        )


def test_the_pages_list_and_search_in_the_order(several: Dataset, one: Dataset) -> None:
    viewer = Viewer([Root(several.root.url), Root(one.root.url)])
    listed = viewer.answer("samples", {"count": "500"})["rows"]
    assert [row[2] for row in listed] == [f"line-{n}" for n in range(ROWS)]
    found = viewer.answer("samples", {"label": "label=1"})["rows"]
    assert [row[2] for row in found] == [f"line-{n}" for n in range(ROWS) if LABELS[n]]
    stream, index = map(str, listed[7][:2])
    assert viewer.answer("difference", {"stream": stream, "index": index, "other": "1"})["task_id"] == "line-7"


def test_every_export_has_the_order_of_the_input(one: Dataset, several: Dataset, tmp_path: Path) -> None:
    for name, dataset in (("one", one), ("several", several)):
        rows = np.concatenate([sample.rows(TAP) for sample in dataset]).astype(np.float32)
        lengths = [len(sample) for sample in dataset]
        number = np.repeat(np.arange(ROWS), lengths)

        folder = tmp_path / name / "npy"
        export_dataset(dataset, str(folder), to="npy", taps=[TAP])
        notes = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
        assert [note["task_id"] for note in notes] == [f"line-{n}" for n in range(ROWS)]
        assert [note["kept"]["label"] for note in notes] == list(map(str, LABELS))
        offsets, stored = np.load(folder / "offsets.npy"), np.load(folder / f"{TAP}.npy")
        assert np.array_equal(np.diff(offsets), lengths)
        assert np.array_equal(stored, rows)
        assert np.array_equal(np.load(folder / "number.npy"), number)
        assert accuracy(stored[offsets[1:] - 1], LABELS) >= 0.98

        export_dataset(dataset, str(tmp_path / name / "pickle"), to="pickle", taps=[TAP])
        files = sorted((tmp_path / name / "pickle").glob("tpu_0/shard_*.pkl.gz"))
        samples = [sample for file in files for sample in pickle.loads(gzip.decompress(file.read_bytes()))[0]]
        assert [sample["sample_idx"] for sample in samples] == list(range(ROWS))
        assert np.array_equal(np.concatenate([sample["activation"] for sample in samples]), rows)
        assert not [*(tmp_path / name / "pickle").glob("tpu_[1-9]")]


@pytest.mark.parametrize("held", [600, 5000, 60_000])
def test_readers_and_exports_hold_little(
    several: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, held: int
) -> None:
    """Groups of a few rows and windows of a few samples: samples come in parts, and the streams are merged."""
    monkeypatch.setattr("spile.reading.blocks._MOST_GROUP_BYTES", held)
    monkeypatch.setattr("spile.reading.blocks._WINDOW", 7)
    monkeypatch.setattr("spile.reading.export._NOTES", 9)
    monkeypatch.setattr("spile.reading.export._FILE_BYTES", 40_000)
    dataset = spile.open(several.root.url)
    rows = np.concatenate([sample.rows(TAP) for sample in dataset])
    assert np.array_equal(np.concatenate([*dataset.rows(TAP, 50)]), rows)
    export_dataset(dataset, str(tmp_path / "npy"), to="npy", taps=[TAP])
    export_dataset(dataset, str(tmp_path / "old"), to="pickle", taps=[TAP])
    assert np.array_equal(np.load(tmp_path / "npy" / f"{TAP}.npy"), rows.astype(np.float32))
    assert np.array_equal(np.diff(np.load(tmp_path / "npy/offsets.npy")), [len(sample) for sample in dataset])
    assert len((tmp_path / "npy/samples.jsonl").read_text().splitlines()) == ROWS
    files = sorted((tmp_path / "old").glob("tpu_0/shard_*.pkl.gz"))
    samples = [sample for file in files for sample in pickle.loads(gzip.decompress(file.read_bytes()))[0]]
    assert len(files) > 20
    assert np.array_equal(np.concatenate([sample["activation"] for sample in samples]), rows.astype(np.float32))
    assert [sample["sample_idx"] for sample in samples] == list(range(ROWS))


def test_tables_have_the_order_and_the_kept_fields(one: Dataset, several: Dataset, tmp_path: Path) -> None:
    parquet, hub = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("datasets")
    for name, dataset in (("one", one), ("several", several)):
        rows = np.concatenate([sample.rows(TAP) for sample in dataset]).astype(np.float32)
        number = np.repeat(np.arange(ROWS), [len(sample) for sample in dataset])
        export_dataset(dataset, str(tmp_path / name / "parquet"), to="parquet", taps=[TAP])
        export_dataset(dataset, str(tmp_path / name / "hf"), to="hf", taps=[TAP])
        export_dataset(dataset, str(tmp_path / name / "saelens"), to="saelens", taps=[TAP], context_size=4)
        table = parquet.read_table(tmp_path / name / "parquet")
        for found in (table, hub.load_from_disk(str(tmp_path / name / "hf")).data.table):
            assert np.array_equal(np.stack(found[TAP].to_pylist()), rows)
            assert found["number"].to_pylist() == number.tolist()
            assert found["label"].to_pylist() == [str(LABELS[n]) for n in number]
            assert found["task_id"].to_pylist() == [f"line-{n}" for n in number]
        contexts = hub.load_from_disk(str(tmp_path / name / "saelens")).with_format("numpy")
        found = np.concatenate([each["blocks.0.hook_resid_post"] for each in contexts])
        assert np.array_equal(found, rows[: len(found)])


def test_what_is_drawn_for_a_sample_does_not_depend_on_the_streams(texts: Path, extract: Callable[..., str]) -> None:
    words = ("--dataset", texts, "--positions", "random:2")
    roots = [extract(*words), extract(*words, *ENGINE)]
    one, several = map(spile.open, roots)
    assert [sample.positions.tolist() for sample in one] == [sample.positions.tolist() for sample in several]
    assert verify(open_folder(roots[1])).ok


def test_the_order_of_a_run_that_is_not_finished(texts: Path, extract: Callable[..., str], tmp_path: Path) -> None:
    """Streams have some samples each, a bad row is skipped, and one stream has not begun."""
    rows = [{"text": text} if n != 4 else {"text": 7} for n, text in enumerate(TEXTS[:30])]
    data = tmp_path / "texts.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    root = Path(extract("--dataset", data, "--bad-rows", "skip", *ENGINE))
    dataset = spile.open(str(root))
    left = [n for n in range(30) if n != 4]
    assert [sample.task_id for sample in dataset] == [f"line-{n}" for n in left]
    assert [sample.ref.place for sample in dataset] == left
    export_dataset(dataset, str(tmp_path / "npy"), to="npy", taps=[TAP])
    assert list(dict.fromkeys(np.load(tmp_path / "npy/place.npy").tolist())) == left
    assert [skip.task_id for stream in dataset.streams for commit in stream.commits for skip in commit.skipped] == [
        "line-4"
    ]
    for file in (root / "stream_1").iterdir():
        if file.is_file():
            file.unlink()
    for file in (root / "stream_1" / "commits").iterdir():
        file.unlink()
    assert [sample.task_id for sample in spile.open(str(root))] == [f"line-{n}" for n in left if n % 3 != 1]


def test_prepared_streams_follow_one_another(texts: Path, extract: Callable[..., str], tmp_path: Path) -> None:
    folder = tmp_path / "streams"
    assert command("data", "streams", "--dataset", texts, "--num-streams", 2, "--output-dir", folder) == 0
    dataset = spile.open(extract("--dataset-dir", folder, "--engine", "local", "--num-workers", 2))
    wanted = [json.loads(line) for n in range(2) for line in (folder / f"stream_00{n}.jsonl").read_text().splitlines()]
    assert [sample.task_id for sample in dataset] == [row["task_id"] for row in wanted]
    assert {row["task_id"] for row in wanted} == {f"line-{n}" for n in range(ROWS)}


class _Turns:
    def __init__(self, number: int, turns: tuple[int, int] | None) -> None:
        self.number, self.input_turns = number, turns


class _Record:
    def __init__(self, *pairs: tuple[int, int]) -> None:
        self.samples = self
        self._pairs = list(pairs)

    def pairs(self) -> list[tuple[int, int]]:
        return self._pairs


def test_the_variants_of_a_row_stay_together() -> None:
    """Two streams with rows in turn, three variants of each row; the second shard of stream 0 has the later ones."""
    streams = [_Turns(0, (2, 3)), _Turns(0, (2, 3)), _Turns(1, (2, 3))]
    records = [_Record((0, 4)), _Record((5, 9)), _Record((1, 6))]
    shards: Any = list(zip(streams, records, strict=True))
    table = SampleTable.of(shards)
    every = np.arange(table.start[-1])
    shard, index = table.find(every)
    assert list(zip(shard.tolist(), index.tolist(), strict=True)) == [
        *[(0, 0), (0, 1), (0, 2)],
        *[(2, 1), (2, 2)],
        *[(0, 3), (1, 5)],
        *[(2, 3), (2, 4), (2, 5)],
        *[(1, 6), (1, 7), (1, 8)],
    ]
    assert table.places(every).tolist() == [0, 1, 2, 4, 5, 6, 8, 9, 10, 11, 12, 13, 14]


def test_answers_have_the_order_of_the_input(tmp_path: Path) -> None:
    """Two variants of each task, in one file for all streams, as the workers of a deployment write it."""
    rows, tasks = embedded_tasks().read_text().splitlines()[:5], tmp_path / "tasks.jsonl"
    tasks.write_text("\n".join(rows) + "\n")
    prepare_streams(str(tasks), str(tmp_path / "split"), 2, data=DataSpec(dataset=str(tasks)), log=lambda _: None)
    words = ("--model", "embedded", "--predictions-per-task", 2, "--layers", 0, "--max-new-tokens", 3)
    streams = [("--dataset-dir", tmp_path / "split", "--worker-id", number) for number in (1, 0)]
    found, submitted = [], []
    for name, inputs in (("one", [("--dataset", tasks)]), ("several", streams)):
        answers = tmp_path / f"{name}-answers"
        where = ("--output", tmp_path / name, "--output-dir", answers, "--temperature", 1)
        assert all(command("infer", *words, *data, *where) == 0 for data in inputs)
        lines = [json.loads(line) for line in (answers / "predictions.jsonl").read_text().splitlines()]
        found.append([(line["task_id"], line["augmentation"], line["tokens"]) for line in lines])
        submitted.append((answers / "submission.json").read_text())
        samples = [(sample.task_id, sample.ref.augmentation) for sample in spile.open(str(tmp_path / name))]
        assert samples == [(task, how) for task, how, _ in found[-1]]
    assert [task for task, _, _ in found[0]] == [json.loads(row)["task_id"] for row in rows for _ in range(2)]
    assert found[0] == found[1]
    assert submitted[0] == submitted[1]


def test_added_taps_and_packed_sequences_have_the_order(texts: Path, extract: Callable[..., str]) -> None:
    roots = [extract("--dataset", texts), extract("--dataset", texts, *ENGINE)]
    for root in roots:
        assert command("extract", "--add-taps", "mlp.0", "--to", root) == 0
    one, several = map(spile.open, roots)
    for positions in ("last", "all"):
        found, wanted = (each.numpy("mlp.0", positions=positions) for each in (several, one))
        assert np.allclose(found, wanted, atol=0.02, rtol=0.02)
    packed = spile.open(extract("--dataset", texts, "--pack", *ENGINE))
    assert [(ref.index, ref.stream) for ref in packed.samples] == sorted(
        (ref.index, ref.stream) for ref in packed.samples
    )


@pytest.mark.parametrize(
    "changes", [{"turn": 0}, {"turn": 1, "streams": None}, {"turn": 1, "streams": 0}, {"turn": "1"}]
)
def test_a_forged_turn_is_refused(one: Dataset, changes: dict[str, Any]) -> None:
    record = json.loads(open_folder(one.root.url).get("stream_0/stream.json"))
    del record["crc32c"]
    with pytest.raises(Damaged, match="is not the record of a stream"):
        parse_stream(seal({**record, "streams": 2, **changes}), "stream.json")
    assert parse_stream(seal({**record, "streams": 2, "turn": 3}), "stream.json").identity.turn == 3
