"""verify finds every changed bit of every file of a dataset, or names the file among those that it did not check."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.gcs import FakeGcs

import spile as package
from backends import Clouds
from spile.data.split import make_streams
from spile.errors import Damaged
from spile.objects import Folder, open_folder
from spile.proof.report import Report
from spile.proof.verification import verify
from spile.spec.ranges import Ranges
from spile.spec.sample import Skip
from spile.store.claims import ClaimBook
from spile.store.index import write_entry
from spile.store.layout import parse_key, stale_commit_key
from spile.store.ledger import Ledger, read_commits, read_ledger, unseal
from spile.store.quarantine import Trials, write_trials
from spile.store.run import read_run
from spile.store.writer import StreamWriter, read_stream
from unit.cli.refusals import lines, spile
from world import produce

FLIPS = 10
GRID = {"input": [[1, 2], [3, 4]], "output": [[4, 3], [2, 1]]}
INFER = ("--layers", "0", "--max-seq-length", "400", "--max-new-tokens", "4", "--batch-size", "2", "--statistics")
STATED = "spec.json: compared only where run.json and stream.json state the same"
NAMED = (
    STATED,
    "README.md, notes.txt: not a name that spile gives",
    "answers.json, claims/0000/000001.json, stream_0/added_2e5e9138/progress.json, stream_0/progress.json, "
    "stream_0/strays/0009-0123.json, stream_0/suspects.json: for workers and displays",
    "stream_0/shard_0077-abcdef.safetensors: no commit that could be read names it (--gc lists what can be removed)",
)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset with a file of each kind that a local folder can have."""
    folder = tmp_path_factory.mktemp("made")
    rows = [{"task_id": f"task-{n}", "train": [GRID], "test": [GRID]} for n in range(2)]
    tasks, root = lines(folder / "tasks.jsonl", *rows), folder / "out"
    assert spile("infer", "--dataset", tasks, "--output", root, *INFER) == 0
    assert spile("infer", "--dataset", tasks, "--output", root, *INFER, "--output-dir", root) == 0
    assert spile("extract", "--add-taps", "mlp.1", "--to", root) == 0
    stream = open_folder(str(root / "stream_0"))
    assert ClaimBook(open_folder(str(root)), "worker").take([0]) is not None
    write_trials(stream, Trials("0" * 16, trial=Ranges([(0, 1)])))
    stream.put(stale_commit_key(9, "0123"), b"{}")
    stream.put("shard_0077-abcdef.safetensors", b"left behind")
    for name in ("README.md", "notes.txt"):
        (root / name).write_text("text")
    return root


def flipped(path: Path) -> Iterator[str]:
    """Yield after changing one bit of a file, a different one each time; put the file back afterwards."""
    data, choose = path.read_bytes(), random.Random(path.name)
    for bit in choose.sample(range(8 * len(data)), min(FLIPS, 8 * len(data))):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        yield f"{path.name}, bit {bit % 8} of byte {bit // 8}: {data[max(0, bit // 8 - 20) : bit // 8 + 20]!r}"
    path.write_bytes(data)


def named(report: Report) -> str:
    return " ".join(report.unchecked)


def test_what_was_not_checked_is_named_and_everything_else_was(made: Path, capfd: pytest.CaptureFixture[str]) -> None:
    report = package.verify(made)
    assert report.ok
    assert set(report.unchecked) == set(NAMED)
    assert spile("verify", made) == 0
    assert f"not checked: {STATED}" in capfd.readouterr().out
    kinds = {str(path.relative_to(made)).partition("-")[0] for path in made.rglob("*") if path.is_file()}
    assert {"predictions.jsonl", "submission.json", "stream_0/predictions.jsonl", "stream_0/submission.json"} <= kinds


def test_every_flipped_bit_is_found_or_its_file_is_named(made: Path) -> None:
    for path in sorted(made.rglob("*")):
        if not path.is_file():
            continue
        key = str(path.relative_to(made))
        is_named = key in " ".join(NAMED)
        for where in flipped(path):
            if key == "run.json":  # without it nothing can be checked
                with pytest.raises(Damaged, match=r"run\.json"):
                    package.verify(made)
                continue
            report = package.verify(made)
            assert is_named or not report.ok, where
            assert not report.ok or key in named(report), where
    assert package.verify(made).ok


def test_every_bit_of_the_records_is_covered_by_their_seal(made: Path) -> None:
    """Each field of a commit, of ``stream.json`` and of ``run.json`` is between the first byte and the checksum."""
    for path in (made / "run.json", made / "stream_0" / "stream.json", made / "stream_0" / "commits" / "0001.json"):
        data = path.read_bytes()
        for bit in range(0, 8 * len(data), 3):
            changed = bytearray(data)
            changed[bit // 8] ^= 1 << bit % 8
            with pytest.raises(Damaged):
                unseal(bytes(changed), path.name)


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("seed", 7, "seed is 7, but 0 in run.json"),
        ("taps", ["mlp"], "taps is mlp.0, but residual.0 in stream_0/stream.json"),
        ("max_new_tokens", 5, "generation.max_new_tokens is 5, but 4 in run.json"),
        ("max_seq_length", "x", "expected auto or a whole number"),
    ],
)
def test_the_spec_is_compared_where_records_state_the_same(
    made: Path, tmp_path: Path, name: str, value: object, found: str
) -> None:
    root = tmp_path / "copy"
    shutil.copytree(made, root)
    spec = json.loads((root / "spec.json").read_text())
    (root / "spec.json").write_text(json.dumps(spec | {name: value}))
    (problem,) = package.verify(root).all_problems
    assert problem.line().startswith(f"damaged: {root}/spec.json")
    assert found in problem.text
    (root / "spec.json").write_text(json.dumps(spec | {"batch_size": 7, "output": "elsewhere", "seed": 0}))
    assert package.verify(root).ok


def test_streams_with_different_taps_are_proven(tmp_path: Path) -> None:
    """The spec is that of the last command."""
    texts = lines(tmp_path / "texts.jsonl", *({"text": str(n)} for n in range(6)))
    make_streams(str(texts), tmp_path / "streams", 2)
    root = tmp_path / "out"
    for number in (0, 1):
        data = tmp_path / "streams" / f"stream_00{number}.jsonl"
        assert spile("extract", "--dataset", data, "--output", root, "--layers", number) == 0
    assert package.verify(root).ok
    assert package.verify(root, streams=[0]).ok
    spec = json.loads((root / "spec.json").read_text())
    (root / "spec.json").write_text(json.dumps(spec | {"layers": "3"}))
    (problem,) = package.verify(root).all_problems
    assert "taps is residual.3, but residual.0 in stream_0/stream.json" in problem.text


def test_a_spec_that_asks_for_more_than_a_limited_run_has(tmp_path: Path) -> None:
    texts = lines(tmp_path / "texts.jsonl", *({"text": str(n)} for n in range(9)))
    root = tmp_path / "out"
    assert spile("extract", "--dataset", texts, "--output", root, "--layers", "0", "--max-samples", "3") == 0
    spec = json.loads((root / "spec.json").read_text())
    (root / "spec.json").write_text(json.dumps(spec | {"max_samples": None}))
    (problem,) = package.verify(root).all_problems
    assert "it ended with --max-samples 3, but spec.json asks for all samples; run the same" in problem.text
    assert package.verify(root, max_samples=3).ok
    (root / "spec.json").write_text(json.dumps(spec | {"max_samples": 2}))
    assert package.verify(root).ok
    (root / "spec.json").unlink()
    assert package.verify(root).unchecked == ("stream_0/progress.json: for workers and displays",)


def test_files_of_an_unfinished_or_unselected_stream_are_named(tmp_path: Path) -> None:
    root = open_folder(str(tmp_path))
    produce(root, 45)
    produce(root, 45, worker_id=1)
    assert verify(root).unchecked == ()
    assert verify(root, streams=[1]).unchecked == ("the other streams: not selected",)
    (tmp_path / "tpu_0" / "commits" / "0005.json").unlink()
    report = verify(root)
    assert "tpu_0/metadata.json: the stream is not complete" in report.unchecked
    assert [problem.kind for problem in report.all_problems] == ["missing"]


def forger_of(root: Path, folder: Folder) -> StreamWriter:
    """Return a writer that appends to a ledger."""
    record, run = read_stream(folder), read_run(open_folder(str(root)))
    assert record is not None
    assert run is not None
    stored = read_ledger(folder, record.id)
    return StreamWriter(folder, record, run, "abcdef", Ledger(commits=stored.commits))


def test_the_skipped_samples_of_added_taps_are_those_of_the_stream(made: Path, tmp_path: Path) -> None:
    root = tmp_path / "copy"
    shutil.copytree(made, root)
    forger = forger_of(root, open_folder(str(next(root.glob("stream_0/added_*")))))
    forger.commit([], [Skip(5, "task-5", "too long")])
    problems = [problem.text for problem in package.verify(root).all_problems]
    assert "it skips samples 5, which the stream does not skip for the same reason" in problems


@pytest.mark.parametrize("what", ["the same shard", "a skip"])
def test_a_doubled_sample_of_added_taps(made: Path, tmp_path: Path, what: str) -> None:
    root = tmp_path / "copy"
    shutil.copytree(made, root)
    folder = open_folder(str(next(root.glob("stream_0/added_*"))))
    forger = forger_of(root, folder)
    if what == "the same shard":
        shards = [shard for commit in read_commits(folder, forger.record.id) for shard in commit.shards]
        forger.commit(shards[:1], [])
        doubled = shards[0].samples.text()
    else:
        forger.commit([], [Skip(1, "task-1", "too long")])
        doubled = "1"
    found = [(problem.kind, problem.where, problem.text) for problem in package.verify(root).all_problems]
    assert ("doubled", folder.url, f"samples {doubled}") in found
    assert (("doubled", folder.url, "rows of one of the stream's shards are there twice") in found) == ("same" in what)


def test_copies_in_the_index_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeGcs() as fake:
        fake.add_bucket("b")
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", fake.url)
        root = open_folder("gs://b/run")
        produce(root, 20)
        write_entry(root, 0)
        assert verify(root).ok
        assert verify(root).unchecked == ()
        data, key = root.get("index/0000.json.z"), "index/0000.json.z"
        for bit in random.Random(1).sample(range(8 * len(data)), FLIPS):
            changed = bytearray(data)
            changed[bit // 8] ^= 1 << bit % 8
            root.put(key, bytes(changed))
            assert [key in problem.where for problem in verify(root).all_problems] == [True], bit


@pytest.mark.parametrize("stray", ["tpu_0//x", "/y", "notes//z", "tpu_0/commits//0002.json", "tpu_0/./x"])
def test_a_name_that_is_no_key_is_ignored_and_named(stray: str, cloud_folder: Folder, clouds: Clouds) -> None:
    produce(cloud_folder, 45)
    whole = [sample.index for sample in package.open(cloud_folder).samples]
    bucket, _, prefix = cloud_folder.url.partition("://")[2].partition("/")
    if cloud_folder.url.startswith("gs:"):
        clouds.gcs.buckets.store(bucket, f"{prefix}/{stray}", b"stray")
    else:
        client = clouds.s3_client(clouds.s3.url)
        client.put_object(Bucket=bucket, Key=f"{prefix}/{stray}", Body=b"stray")
    assert [sample.index for sample in package.open(cloud_folder).samples] == whole
    report = verify(cloud_folder)
    assert report.ok
    assert report.unchecked == (f"{stray}: not a name that spile gives",)
    again = produce(cloud_folder, 45)
    assert again.ledger.samples == len(whole)


def test_all_kinds_of_names_are_in_the_test(made: Path) -> None:
    files = [parse_key(str(path.relative_to(made))) for path in made.rglob("*") if path.is_file()]
    assert {file.kind.value for file in files if file} == {"record", "data", "derived", "local"}
