"""Attacks on what spile says: after each, the last line and the exit code are compared with what is stored."""

from __future__ import annotations

import functools
import itertools
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from killing import assert_whole
from safetensors import safe_open
from test_faults_at_random import schedule
from tests.fakes.gcs import FakeBucket
from tests.fakes.hub import DatasetHub
from tests.fakes.server import FakeReply, Request

import spile
from backends import Clouds
from spile.cli.main import main
from spile.data.sources import open_input
from spile.errors import SpileError
from spile.objects import open_folder
from spile.objects.retry import Retry
from spile.proof.verification import verify
from spile.reading.dataset import open as open_dataset
from spile.reading.export import export_dataset
from spile.spec.run import DataSpec
from spile.spec.sample import Role, Sample
from spile.store.run import join_run
from spile.store.writer import join_stream
from world import produce, run_identity, stream_identity, write_shard

# -- kills during a push -----------------------------------------------------------------------------------------------

TARGET = "hf://datasets/someone/rows"
_PUSH = """
import sys
from spile.cli.main import main
from spile.reading import push
push._FILES = 1
main(["push", "root", "hf://datasets/someone/rows"])
"""


class KillingHub(DatasetHub):
    """A hub that kills its client at one of the requests that write, before or after it applies the request."""

    child: subprocess.Popen[str] | None = None
    at, writes = -1, 0

    def answer(self, request: Request) -> FakeReply:
        step, self.writes = self.writes, self.writes + 2 * (request.method != "GET")
        if request.method == "GET" or self.child is None or not step <= self.at < step + 2:
            return super().answer(request)
        reply = super().answer(request) if self.at > step else FakeReply(500)
        self.child.kill()
        self.child.wait()
        return reply


def _push(hub: KillingHub, folder: Path, at: int = -1) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **hub.environment(folder / "cache"), "HF_TOKEN": "secret"}
    hub.at, hub.writes = at, 0
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", _PUSH]
    hub.child = subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True)
    out, err = hub.child.communicate(timeout=120)
    return subprocess.CompletedProcess(command, hub.child.returncode, out, err)


def _pushed(hub: KillingHub, folder: Path) -> str | None:
    """Return the version of the stream in the repository, or None without a dataset; what it has is proven."""
    copy = Path(shutil.copytree(hub.folder, folder / "copy", dirs_exist_ok=False))
    try:
        if not (copy / "run.json").exists():
            return None
        assert verify(open_folder(str(copy))).ok
        return str(open_dataset(str(copy)).streams[0].record.id)
    finally:
        shutil.rmtree(copy)


@pytest.mark.parametrize("replaced", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_killed_push_leaves_the_earlier_dataset_the_new_one_or_none(tmp_path: Path, replaced: bool) -> None:
    """Each request that writes is a moment, before and after it; without ``slow`` only a few of the first push."""
    (tmp_path / "hub").mkdir()
    produce(open_folder(str(tmp_path / "root")), 20, shard=10)
    with KillingHub(tmp_path / "hub") as hub:
        earlier = None
        if replaced:
            assert _push(hub, tmp_path).returncode == 0
            earlier = _pushed(hub, tmp_path)
            shutil.rmtree(tmp_path / "root")
            produce(open_folder(str(tmp_path / "root")), 20, shard=7)
        new = str(open_dataset(str(tmp_path / "root")).streams[0].record.id)
        for at in itertools.count() if replaced else (5, 12):
            ended = _push(hub, tmp_path, at)
            found = _pushed(hub, tmp_path)
            assert found in (earlier, new), at
            if ended.returncode == 0:
                assert "at commit" in ended.stdout + ended.stderr
                break
            assert "at commit" not in ended.stdout + ended.stderr
        assert _push(hub, tmp_path).returncode == 0
        assert _pushed(hub, tmp_path) == new


# -- buckets -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPILE_RETRY_SECONDS", "0.4")
    monkeypatch.setattr(Retry, "first", 0.005)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("cloud_url", ["az"], indirect=True)
@pytest.mark.parametrize("seeds", [range(2), pytest.param(range(2, 40), marks=pytest.mark.slow)])
def test_random_faults_of_azure(clouds: Clouds, cloud_url: str, seeds: range) -> None:
    for seed in seeds:
        schedule(clouds, f"{cloud_url}/{seed}", seed)


@pytest.mark.parametrize("cloud_url", ["gs"], indirect=True)
@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 60), marks=pytest.mark.slow)])
def test_listings_that_are_late(clouds: Clouds, cloud_url: str, seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing lacks the newest objects, and still names deleted ones. GCS, S3 and Azure do not do this any more."""
    whole, hidden = FakeBucket.page, [0.0]

    def late(self: FakeBucket, prefix: str, after: str, limit: int) -> tuple[list[str], bool]:
        names, more = whole(self, prefix, after, limit)
        return [name for name in names if dice.random() >= hidden[0]], more

    monkeypatch.setattr(FakeBucket, "page", late)
    for seed in seeds:
        dice, url = random.Random(seed), f"{cloud_url}/late-{seed}"
        for _ in range(4):
            hidden[0] = dice.choice([0.2, 0.5, 1.0])
            with _only_our_errors():
                produce(open_folder(url), 24, shard=4 + seed % 5)
            with _only_our_errors():
                report = verify(open_folder(url))
                if report.ok:
                    hidden[0] = 0.0
                    assert_whole(open_folder(url), 24)
        hidden[0] = 0.0
        produce(open_folder(url), 24)
        assert_whole(open_folder(url), 24)


@contextmanager
def _only_our_errors() -> Iterator[None]:
    try:
        yield
    except SpileError as error:
        said = str(error)
    else:
        return
    assert len(said.splitlines()) == 1


# -- the clock ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_a_clock_that_jumps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Every look at the clock is up to two days off, in both directions."""
    dice, real = random.Random(seed), time.time
    monkeypatch.setattr(time, "time", lambda: real() + dice.uniform(-2, 2) * 86400)
    texts = [f"text {n}" for n in range(6)]
    for most in (2, 4, None):
        limit = {} if most is None else {"max_samples": most}
        spile.extract("embedded", texts, tmp_path / "out", taps=["residual.0"], **limit)
        assert len(spile.open(tmp_path / "out")) == (most or 6)
    assert main_code("verify", tmp_path / "out", "--gc", "--yes") == 0
    assert main_code("monitor", tmp_path / "out", "--once") in (0, 2)
    assert main_code("verify", tmp_path / "out") == 0
    assert [sample.text for sample in spile.open(tmp_path / "out")] == texts


def main_code(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    assert isinstance(ended.value.code, int)
    return ended.value.code


# -- permissions -------------------------------------------------------------------------------------------------------


@pytest.fixture
def home() -> Iterator[Path]:
    """A folder of an ordinary user, who this process is within :func:`_as_user`."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


@contextmanager
def _as_user() -> Iterator[None]:
    """Let the kernel check permissions: root has all of them."""
    before = os.geteuid()
    if before == 0:
        _import_all()
        os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(before)


@functools.cache
def _import_all() -> None:
    """Run each command once as root: an ordinary user may not be able to read root's Python."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "root"
        produce(open_folder(str(root)), 20, shard=10)
        for words in _readers(root, Path(folder)):
            main_code(*words)
        main_code("verify", Path(folder) / "absent")
        damaged = _first(root, "*.safetensors")
        damaged.write_bytes(b"x" * damaged.stat().st_size)
        for words in _readers(root, Path(folder) / "again"):
            main_code(*words)


def _first(folder: Path, pattern: str) -> Path:
    return min(folder.rglob(pattern))


PLACES: dict[str, Callable[[Path], Path]] = {
    "the root": lambda root: root,
    "a stream": lambda root: root / "tpu_0",
    "the commits": lambda root: root / "tpu_0" / "commits",
    "a commit": lambda root: _first(root, "commits/*.json"),
    "a shard": lambda root: _first(root, "*.safetensors"),
    "run.json": lambda root: root / "run.json",
    "stream.json": lambda root: _first(root, "stream.json"),
}


@pytest.mark.parametrize("mode", [0o000, 0o111, 0o444])
@pytest.mark.parametrize("place", PLACES)
def test_what_may_not_be_read_is_not_proven(
    home: Path, capfd: pytest.CaptureFixture[str], place: str, mode: int
) -> None:
    root = home / "root"
    with _as_user():
        produce(open_folder(str(root)), 20, shard=10)
        spoiled = PLACES[place](root)
        before = spoiled.stat().st_mode
        spoiled.chmod(mode)
        readable = spoiled.is_file() and mode == 0o444
        capfd.readouterr()
        codes = {words[0]: main_code(*words) for words in _readers(root, home)}
        printed = "".join(capfd.readouterr())
        spoiled.chmod(before)
        assert "Traceback" not in printed
        if readable:
            assert set(codes.values()) == {0}
        else:
            assert codes["verify"] != 0, (place, codes)
            assert "✓" not in printed
            assert (home / "out").exists() == (codes["export"] == 0)
        if codes["export"] == 0:
            _assert_exported(root, home / "out")
        assert main_code("verify", root) == 0, "nothing was changed"


def _readers(root: Path, home: Path) -> list[list[object]]:
    return [
        ["verify", root],
        ["inspect", root],
        ["export", root, "--to", "npy", "--output", home / "out"],
    ]


def _assert_exported(root: Path, out: Path) -> None:
    """The export has the rows that an independent reader finds in the shards."""
    rows = []
    for shard in sorted(root.rglob("*.safetensors")):
        with safe_open(shard, "np") as file:
            rows.append(file.get_tensor("residual.1").astype(np.float32))
    assert np.array_equal(np.load(out / "residual.1.npy"), np.concatenate(rows))


@pytest.mark.parametrize("place", ["the root", "a stream", "the commits"])
def test_a_run_that_may_not_write_says_so_and_resumes(home: Path, place: str) -> None:
    root = home / "root"
    with _as_user():
        produce(open_folder(str(root)), 20, shard=10)
        _first(root, "metadata.json").unlink()
        max(root.rglob("commits/*.json")).unlink()
        locked = PLACES[place](root)
        locked.chmod(0o555)
        try:
            if place == "the root":  # an existing stream is all that it writes to
                produce(open_folder(str(root)), 20, shard=5)
            else:
                with pytest.raises(SpileError, match="permission denied") as refused:
                    produce(open_folder(str(root)), 20, shard=5)
                assert len(str(refused.value).splitlines()) == 1
        finally:
            locked.chmod(0o755)
        produce(open_folder(str(root)), 20, shard=5)
        assert_whole(open_folder(str(root)), 20)


def test_an_export_into_a_folder_that_may_not_be_written(home: Path) -> None:
    with _as_user():
        produce(open_folder(str(home / "root")), 20, shard=10)
        (home / "locked").mkdir(mode=0o555)
        with pytest.raises(SpileError, match="permission denied"):
            export_dataset(str(home / "root"), str(home / "locked" / "out"), to="npy")
        assert not list((home / "locked").iterdir())


# -- edits of data during a run ----------------------------------------------------------------------------------------


def _write(file: Path, word: str, rows: int) -> None:
    texts = [f"{word} {n:05d}" for n in range(rows)]
    if file.suffix == ".csv":
        file.write_text("text\n" + "".join(f"{text}\n" for text in texts))
        return
    arrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    with tempfile.NamedTemporaryFile() as made:
        parquet.write_table(arrow.table({"text": texts}), made.name, row_group_size=500, compression="none")
        content = Path(made.name).read_bytes()
    with file.open("r+b" if file.exists() else "wb") as target:  # in place, as a program that maps or updates it
        target.write(content)


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
@pytest.mark.parametrize("after", [0, 1, 700, 1900])
def test_an_edit_in_place_during_a_pass_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, after: int
) -> None:
    """Rows of two versions of a large file were stored as one dataset, if it was Parquet."""
    monkeypatch.setattr("spile.data.lines._CHUNK", 1000)
    monkeypatch.setattr("spile.data.sources._BLOCK", 1000)
    file = tmp_path / f"rows{suffix}"
    _write(file, "one", 2000)
    rows = open_input(DataSpec(dataset=str(file))).lines()
    found = list(itertools.islice(rows, after))
    if after:
        time.sleep(0.02)  # the file system's clock has steps of a few milliseconds
    _write(file, "two", 2000)
    said = ""
    try:
        found += rows
    except SpileError as error:
        said = str(error)
    assert not said or (after and "changed since it was read" in said)
    words = {b"two" in line.raw for line in found}
    assert len(words) <= 1, "rows of both versions"


# -- very many, very small samples -------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [5_000, pytest.param(1_000_000, marks=[pytest.mark.soak, pytest.mark.timeout(3600)])])
def test_tiny_samples(tmp_path: Path, count: int) -> None:
    """Samples of one token: readers and an export give the rows that are in the shards, in the order of the data."""
    root, at_once = open_folder(str(tmp_path / "root")), 50_000
    join_run(root, run_identity())
    store = join_stream(root, 0, stream_identity(count), run_identity())
    for first in range(0, count, at_once):
        samples = [
            Sample(index, f"line-{index}", np.array([index % 1000], np.int32), np.array([Role.USER], np.uint8))
            for index in range(first, min(count, first + at_once))
        ]
        builder = store.begin(samples)
        write_shard(builder, samples, step=at_once)
        store.commit([builder.finish()])
    store.finish()
    assert verify(root).ok
    dataset = open_dataset(root)
    assert len(dataset) == count
    for index in (0, count // 2, count - 1):
        assert dataset[index].task_id == f"line-{index}"
    export_dataset(dataset, str(tmp_path / "out"), to="npy", taps=["residual.1"])
    _assert_exported(tmp_path / "root", tmp_path / "out")
    assert (tmp_path / "out" / "samples.jsonl").read_bytes().count(b"\n") == count
