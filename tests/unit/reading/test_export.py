"""Exports hold the dataset's own rows; the old guides' pickles come back; a hostile one runs nothing."""

from __future__ import annotations

import gzip
import json
import os
import pickle
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from tests.fakes.gcs import FakeGcs

import spile
from spile.errors import DataError, SpecError, UserError
from spile.objects import open_folder
from spile.proof.verification import verify
from spile.reading.dataset import Dataset
from spile.reading.dataset import open as open_dataset
from spile.reading.export import _UNFINISHED, Export, export_dataset, hook_name, new_folder
from spile.reading.importing import import_pickles, read_pickle
from spile.spec.sample import Role
from unit.cli.refusals import spile as command
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
    done = export_dataset(dataset, str(tmp_path / "old"), to="pickle", taps=TAPS)
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
        export_dataset(dataset, str(tmp_path / "both"), to="pickle", taps=("residual.1", "attn.1"))
    with pytest.raises(UserError, match="expected a new or an empty folder"):
        export_dataset(dataset, str(tmp_path / "old"), to="pickle", taps=TAPS)


def test_pickles_in_a_bucket_with_the_metadata_of_the_guides(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    export_dataset(dataset, str(tmp_path / "old"), to="pickle", taps=TAPS)
    with FakeGcs() as fake:
        fake.add_bucket("bucket")
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", fake.url)
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        bucket = open_folder("gs://bucket/old")
        for number in (1, 9):  # what an export that was killed leaves
            bucket.put(f"tpu_3/shard_{number:04d}.pkl.gz", b"half")
        export_dataset(dataset, bucket.url, to="pickle", taps=TAPS)
        keys = {info.key for info in bucket.list()}
        assert keys == {str(path.relative_to(tmp_path / "old")) for path in (tmp_path / "old").rglob("*.*")}
        for number in (0, 3):
            listed = json.loads(bucket.get(f"tpu_{number}/metadata.json"))
            assert (listed["worker_id"], listed["layers"], listed["model_path"]) == (number, [0, 1], dataset.run.model)
            assert {f"tpu_{number}/{shard['file']}" for shard in listed["shards"]} == {
                key for key in keys if key.startswith(f"tpu_{number}/shard")
            }
            assert listed["total_samples"] == sum(ref.stream == number for ref in dataset.samples)
            for shard in listed["shards"]:
                assert bucket.info(f"tpu_{number}/{shard['file']}").size == shard["size"]
        with pytest.raises(UserError, match="expected a new or an empty folder"):
            export_dataset(dataset, bucket.url, to="pickle", taps=TAPS)


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], content: Any, protocol: int
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("evil.pkl.gz").write_bytes(gzip.compress(pickle.dumps(content, protocol)))
    with pytest.raises(DataError, match=r"evil\.pkl\.gz is refused: expected a pickle of dicts, lists"):
        read_pickle(Path("evil.pkl.gz"))
    assert not Path("ran").exists()
    if protocol == 4:
        assert command("import", "evil.pkl.gz", "--output", "out") == 2
        errors = capfd.readouterr().err
        assert ("is refused" in errors, "Traceback" in errors) == (True, False)
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
        assert np.array_equal(found.rows, array)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ([], "found list"),
        ({"a": []}, "a str for a list"),
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


class _Call:
    """Pickled as the call of a function, with a state if there is one."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __reduce__(self) -> Any:
        return self.parts


def _with(activation: Any, protocol: int = 2) -> bytes:
    return pickle.dumps({0: [{"sample_idx": 0, "activation": activation}]}, protocol)


_NEW = np.ones(1, np.float32).__reduce__()[0]
_POINTERS = _Call(np.dtype, ("V8", False, True), (3, "|", None, None, None, 8, 1, 0x11))
_FLOATS = _Call(np.dtype, ("f4", False, True), (3, "<", None, None, None, -1, -1, 0))
_MANY = np.ones((4096, 1024), np.float32)
HOSTILE: dict[str, bytes] = {
    # Crashes, memory that was never written, or all memory and time: these were possible with NumPy's own functions.
    "object pointers": _with(_Call(_NEW, (np.ndarray, (0,), b"b"), (1, (4, 2), _POINTERS, False, b"\x41" * 64))),
    "ndarray as a function": _with(_Call(np.ndarray, ((1000, 4), _FLOATS))),
    "an array that was never filled": _with(_Call(_NEW, (np.ndarray, (1000, 4), b"f"))),
    "a memo of a thousand million": b"\x80\x02]r\x00\x00\x00\x10.",
    "twenty million lists": b"\x80\x02" + b"]" * 20_000_000 + b"\x80\x02].",
    "a key that is nested a million times": b"\x80\x02})" + b"\x85" * 1_000_000 + b"K\x01s.",
    "a text that is encoded many times": b"\x80\x02](X\x00\x00\x00\x04"
    + b"a" * (1 << 26)
    + b"q\x00"
    + b"c_codecs\nencode\nh\x00X\x06\x00\x00\x00latin1\x86R" * 60
    + b"e.",
    "an array that many samples share": pickle.dumps(
        {0: [{"sample_idx": index, "activation": _MANY} for index in range(1000)]}
    ),
    "an array of many empty rows": _with(np.ones((1 << 40, 0), np.float32), 4),
    "an array of no rows": _with(np.ones((0, 4), np.float32), 4),
    # And other ways to be no such file.
    "objects": _with(np.array([object], object)),
    "a structured dtype": _with(np.zeros((2, 2), "f4,f4")),
    "other bytes than the shape": _with(_Call(_NEW, (np.ndarray, (0,), b"b"), (1, (4, 2), _FLOATS, False, b"\x41"))),
    "a negative shape": _with(_Call(_NEW, (np.ndarray, (0,), b"b"), (1, (-1, -2), _FLOATS, False, b"\x41" * 8))),
    "a new object of ndarray": b"\x80\x02cnumpy\nndarray\n(I1000\nI4\ntt\x81.",
    "state of a list": b"\x80\x02](K\x01K\x02tb.",
    "state of a name": b"\x80\x02cnumpy\nndarray\n}(X\x01\x00\x00\x00aK\x01ub.",
    "a string of two thousand million": b"\x80\x04\x8d\x00\x00\x00\x80\x00\x00\x00\x00x.",
    "an extension": b"\x80\x02\x82\x01.",
    "a persistent object": b"P1\n.",
    "an instance": b"(ios\nsystem\n.",
    "a number of a million digits": b"L" + b"9" * 1_000_000 + b"L\n.",
    "nothing on the stack": b"\x80\x02R.",
    "a mark alone": b"(.",
    "a mark that POP removes": b"\x80\x02})" + b"(0\x85" * 300_000 + b"K\x01s.",
    "a memo of a thousand million behind a frame": b"\x80\x04\x95"
    + (4).to_bytes(8, "little")
    + b"NB\7\0\0\0\0\0r\0\0\0\x10.",
}


_READER = """
import os, resource, sys
from pathlib import Path
from spile.errors import DataError
from spile.reading.importing import read_pickle

def read(folder):
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(folder / name, os.O_CREAT | os.O_WRONLY), number)
    resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
    resource.setrlimit(resource.RLIMIT_AS, (6 << 30, 6 << 30))
    try:
        read_pickle(folder / "evil.pkl")
    except DataError as error:
        print(error)
        # Not ru_maxrss: a child inherits its parent's peak.
        peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
        sys.exit(2 if int(peak.split()[1]) < 1 << 20 else 3)
    sys.exit(0)

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        read(Path(line.rstrip()))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def reader() -> Iterator[subprocess.Popen[str]]:
    """A process that reads ``evil.pkl`` of each folder it is given in a fork with limits, and gives the exit code."""
    command = [sys.executable, "-c", _READER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        yield process


@pytest.mark.parametrize("name", HOSTILE)
def test_a_pickle_that_attacks_numpy_or_memory_is_refused(
    tmp_path: Path, reader: subprocess.Popen[str], name: str
) -> None:
    """In a process with a limit on memory: the test fails if it crashes, or takes more."""
    (tmp_path / "evil.pkl").write_bytes(HOSTILE[name])
    assert reader.stdin is not None
    assert reader.stdout is not None
    reader.stdin.write(f"{tmp_path}\n")
    reader.stdin.flush()
    code = int(reader.stdout.readline())
    assert (code, (tmp_path / "err").read_text()) == (2, "")
    said = (tmp_path / "out").read_text()
    assert len(said.splitlines()) == 1
    assert len(said) < 400


def test_a_pickle_cannot_change_what_its_names_mean(tmp_path: Path) -> None:
    (tmp_path / "evil.pkl").write_bytes(b"\x80\x02cnumpy._core.multiarray\nscalar\n(N}X\x0c\0\0\0__defaults__)stb.")
    with pytest.raises(DataError, match="AttributeError"):
        read_pickle(tmp_path / "evil.pkl")


def test_a_bomb_is_refused_before_it_unpacks(tmp_path: Path) -> None:
    """300 MiB of zeros in 1.4 MB."""
    import zlib

    size = 4 << 30
    packer = zlib.compressobj(1, wbits=31)
    with (tmp_path / "bomb.pkl.gz").open("wb") as file:
        file.write(packer.compress(b"\x80\x04\x8e" + size.to_bytes(8, "little")))
        for _ in range(300):
            file.write(packer.compress(bytes(1 << 20)))
        file.write(packer.flush())
    with pytest.raises(DataError, match="unpacks to much more than activations do"):
        read_pickle(tmp_path / "bomb.pkl.gz")


def pickled(path: Path, index: int = 0, *, rows: Any = None, layer: int = 0) -> Path:
    array = np.ones((2, 3), np.float32) if rows is None else rows
    sample = {"sample_idx": index, "activation": array, "shape": array.shape, "text_preview": "secret text"}
    path.write_bytes(pickle.dumps({layer: [sample]}))
    return path


def test_an_absurd_sample_index_is_refused(tmp_path: Path) -> None:
    path = pickled(tmp_path / "a.pkl", 10**8)
    with pytest.raises(DataError, match=r"sample_idx 100000000 in .*a\.pkl: expected indices near"):
        import_pickles(str(path), open_folder(str(tmp_path / "out")))
    assert not (tmp_path / "out").exists()
    import_pickles(str(pickled(tmp_path / "b.pkl", 60_000)), open_folder(str(tmp_path / "out")))
    assert verify(open_folder(str(tmp_path / "out"))).ok


@pytest.mark.parametrize("store_dtype", ["int8", "float8_e4m3"])
def test_numbers_that_an_encoding_cannot_return_are_refused(tmp_path: Path, store_dtype: Any) -> None:
    path = pickled(tmp_path / "a.pkl", rows=np.array([[1.0, 3.4e38, 2.0]], np.float32))
    with pytest.raises(DataError, match=f"too large for {store_dtype}: found 3.4e"):
        import_pickles(str(path), open_folder(str(tmp_path / "out")), store_dtype=store_dtype)


@pytest.mark.parametrize("store_dtype", ["bfloat16", "float16", "float32", "int8"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e300])
def test_numbers_that_cannot_be_stored_are_refused(tmp_path: Path, value: float, store_dtype: Any) -> None:
    path = pickled(tmp_path / "a.pkl", rows=np.array([[1.0, value, 2.0]]))
    with pytest.raises(DataError, match=r"NaN or infinite|too large for"):
        import_pickles(str(path), open_folder(str(tmp_path / "out")), store_dtype=store_dtype)
    assert not (tmp_path / "out").exists()


def test_imports_of_two_models_are_two_runs(tmp_path: Path) -> None:
    one, two = pickled(tmp_path / "one.pkl"), pickled(tmp_path / "two.pkl", rows=np.zeros((2, 3), np.float32))
    root = open_folder(str(tmp_path / "out"))
    import_pickles(str(one), root, model="first/model")
    with pytest.raises(UserError, match=r"was created with .*, but this command asks for"):
        import_pickles(str(two), root, model="second/model", worker_id=1)
    import_pickles(str(two), root, model="first/model", worker_id=1)
    assert len(open_dataset(root).samples) == 2


def test_no_error_shows_a_sample(tmp_path: Path) -> None:
    for content in ({0: [{"sample_idx": "x", "text_preview": "secret"}]}, {0: ["secret"]}, {"secret": 1}, ["secret"]):
        path = tmp_path / "a.pkl"
        path.write_bytes(pickle.dumps(content))
        with pytest.raises(DataError) as caught:
            read_pickle(path)
        assert "secret" not in str(caught.value)


@pytest.mark.parametrize("form", ["npy", "pickle", "parquet", "hf", "saelens"])
def test_an_export_that_fails_leaves_nothing(
    dataset: Dataset, tmp_path: Path, form: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The export fails at any part of the rows, and the next export starts clean."""
    if form in ("parquet", "hf", "saelens"):
        pytest.importorskip("datasets")
    taps = TAPS[:1] if form == "saelens" else TAPS
    real, calls = Export.convert, []

    def failing(export: Export, rows: np.ndarray, what: str) -> Any:
        calls.append(what)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(export, rows, what)

    with monkeypatch.context() as patched:
        patched.setattr(Export, "convert", failing)
        patched.setattr("spile.reading.blocks._MOST_GROUP_BYTES", 1000)
        patched.setattr("spile.reading.export._SLICE", 64)
        with pytest.raises(KeyboardInterrupt):
            export_dataset(dataset, str(tmp_path / "out"), to=form, taps=taps, context_size=4)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["root"]
    export_dataset(dataset, str(tmp_path / "out"), to=form, taps=taps, context_size=4)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["out", "root"]


def test_one_export_at_a_time_writes_an_output(dataset: Dataset, tmp_path: Path) -> None:
    with new_folder(str(tmp_path / "out")) as folder:
        (folder / "file").write_text("mine")
        with pytest.raises(UserError, match="another export that is writing it"):
            export_dataset(dataset, str(tmp_path / "out"), to="npy", taps=TAPS)
        assert (folder / "file").exists()
    assert (tmp_path / "out" / "file").read_text() == "mine"


def test_a_link_in_place_of_the_unfinished_folder_is_not_followed(dataset: Dataset, tmp_path: Path) -> None:
    """What is in the unfinished folder is removed. In a shared folder, another user can put a link in its place."""
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/file").write_text("kept")
    (tmp_path / f".out{_UNFINISHED}").symlink_to(tmp_path / "precious")
    with pytest.raises(UserError, match="is a link"):
        export_dataset(dataset, str(tmp_path / "out"), to="npy", taps=TAPS)
    assert (tmp_path / "precious/file").read_text() == "kept"


def test_a_folder_that_cannot_be_replaced_is_filled(dataset: Dataset, tmp_path: Path) -> None:
    """As a mount point: here a link to an empty folder."""
    (tmp_path / "real").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "real")
    export_dataset(dataset, str(tmp_path / "out"), to="npy", taps=TAPS)
    assert (tmp_path / "out").is_symlink()
    assert np.array_equal(np.load(tmp_path / "real/residual.0.npy"), rows(dataset, "residual.0"))
    assert not list((tmp_path / "real").glob(".*"))


@pytest.mark.parametrize("form", ["npy", "pickle", "parquet", "hf"])
def test_values_too_large_for_float16_are_refused(tmp_path: Path, form: Any) -> None:
    if form in ("parquet", "hf"):
        pytest.importorskip("datasets")
    large = np.array([[1.0, 65504.0, -70000.0]], np.float32)
    source = pickled(tmp_path / "a.pkl", rows=large)
    import_pickles(str(source), open_folder(str(tmp_path / "root")), store_dtype="float32")
    stored = open_dataset(str(tmp_path / "root"))
    with pytest.raises(DataError, match=r"--dtype float16: 1 values of residual\.0 in .*found up to 7e\+04"):
        export_dataset(stored, str(tmp_path / "out"), to=form, dtype="float16")
    assert not (tmp_path / "out").exists()
    export_dataset(stored, str(tmp_path / "out"), to=form)


def test_values_too_large_for_bfloat16_are_refused(tmp_path: Path) -> None:
    source = pickled(tmp_path / "a.pkl", rows=np.array([[1.0, 3.4e38, 2.0]], np.float32))
    import_pickles(str(source), open_folder(str(tmp_path / "root")), store_dtype="float32")
    spec = Export(open_dataset(str(tmp_path / "root")), ("residual.0",), "bfloat16", None, 128, None, lambda *_: None)
    (block,) = spec.blocks()
    with pytest.raises(DataError, match=r"--dtype bfloat16: 1 values of .*expected at most 3\.38953e\+38"):
        block.rows("residual.0")


def test_npy(dataset: Dataset, tmp_path: Path) -> None:
    export_dataset(dataset, str(tmp_path / "npy"), to="npy", taps=TAPS, dtype="float16")
    for tap in TAPS:
        assert np.array_equal(np.load(tmp_path / f"npy/{tap}.npy"), rows(dataset, tap).astype(np.float16))
    notes = [json.loads(line) for line in (tmp_path / "npy/samples.jsonl").read_text().splitlines()]
    assert len(notes) == len(dataset.samples)
    at, positions = np.load(tmp_path / "npy/sample.npy"), np.load(tmp_path / "npy/position.npy")
    assert at[0] == dataset.samples[0].index
    assert positions[dataset.samples[0].length - 1] == dataset.samples[0].length - 1


def test_parquet_and_hf_are_read_by_their_own_packages(dataset: Dataset, tmp_path: Path) -> None:
    pandas, hub = pytest.importorskip("pandas"), pytest.importorskip("datasets")
    export_dataset(dataset, str(tmp_path / "parquet"), to="parquet", taps=TAPS)
    table = pandas.concat([pandas.read_parquet(path) for path in sorted((tmp_path / "parquet").iterdir())])
    assert np.array_equal(np.stack(table["residual.1"].to_list()), rows(dataset, "residual.1"))
    assert list(table["task_id"].iloc[:2]) == [dataset.samples[0].task_id] * 2
    export_dataset(dataset, str(tmp_path / "hf"), to="hf", taps=TAPS)
    loaded = hub.load_from_disk(str(tmp_path / "hf")).with_format("numpy")
    assert np.array_equal(loaded["residual.0"][:], rows(dataset, "residual.0"))
    assert not list(tmp_path.glob(".spile-export-*"))


def test_the_saelens_cache_has_contexts(dataset: Dataset, tmp_path: Path) -> None:
    hub = pytest.importorskip("datasets")
    done = export_dataset(dataset, str(tmp_path / "sae"), to="saelens", taps=["residual.1"], context_size=16)
    loaded = hub.load_from_disk(str(tmp_path / "sae")).with_format("numpy")
    wanted = rows(dataset, "residual.1")
    count = len(wanted) // 16
    assert done.rows == count == len(loaded)
    assert loaded.features["blocks.1.hook_resid_post"].shape == (16, 8)
    assert np.array_equal(np.stack(list(loaded["blocks.1.hook_resid_post"])), wanted[: count * 16].reshape(-1, 16, 8))
    assert hook_name("mlp.3") == "blocks.3.hook_mlp_out"


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    root = str(tmp_path_factory.mktemp("answered") / "root")
    few = ["1 2 3", "a b", "c d e f"]
    spile.infer("embedded", few, root, taps=["residual.0,2,5"], max_seq_length=16, max_new_tokens=5, batch_size=3)
    return open_dataset(root)


DRAFT = ("residual.0", "residual.2", "residual.5")


def test_speculators_data_has_states_and_a_loss_mask_of_answers(answered: Dataset, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="datasets needs torch to open what speculators reads")
    hub, numpy = pytest.importorskip("datasets"), pytest.importorskip("safetensors.numpy")
    done = export_dataset(answered, str(tmp_path / "draft"), to="speculators", taps=DRAFT, dtype="float32")
    table = hub.load_from_disk(str(tmp_path / "draft")).with_format("numpy")
    assert done.rows == len(table) == len(answered) == 3
    for number, sample in enumerate(answered):
        states = numpy.load_file(str(tmp_path / "draft" / "hidden_states" / f"hs_{number}.safetensors"))
        assert np.array_equal(states["hidden_states"], np.stack([sample[tap] for tap in DRAFT], axis=1))
        assert np.array_equal(states["token_ids"], sample.tokens)
        assert np.array_equal(table[number]["input_ids"], sample.tokens)
        assert table[number]["seq_len"] == len(sample)
        mask = table[number]["loss_mask"]
        assert np.array_equal(mask, (sample.roles & Role.ASSISTANT) != 0)
        assert 0 < mask.sum() <= 5


@pytest.mark.parametrize(
    ("taps", "to", "text"),
    [
        (("residual.5",), "speculators", "some layers, then residual.5"),
        (("residual.0", "residual.2"), "speculators", "some layers, then residual.5"),
        (("residual.0", "residual.5"), "specforge", "some layers, then final_norm"),
    ],
)
def test_the_last_tap_of_draft_data_is_the_end_of_the_model(
    answered: Dataset, tmp_path: Path, taps: Any, to: Any, text: str
) -> None:
    if to == "specforge":
        pytest.importorskip("torch")
    with pytest.raises(SpecError, match=text):
        export_dataset(answered, str(tmp_path / "draft"), to=to, taps=taps)
    assert not list(tmp_path.iterdir())


def test_draft_data_needs_answers(tmp_path: Path) -> None:
    pytest.importorskip("datasets")
    spile.extract("embedded", "embedded", tmp_path / "root", taps=["residual.0,5"], max_samples=1)
    with pytest.raises(UserError, match="selects no token"):
        spile.export(tmp_path / "root", tmp_path / "draft", to="speculators")
    assert not (tmp_path / "draft").exists()


def test_a_disk_that_fills_up_during_an_export_is_one_line(dataset: Dataset, tmp_path: Path) -> None:
    """A limit on the size of files stands for the full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
        for form in ("npy", "parquet", "pickle"):
            with pytest.raises(UserError, match=f"cannot write {tmp_path}/out: .* found a file larger than"):
                export_dataset(dataset, str(tmp_path / "out"), to=form, taps=TAPS)  # type: ignore[arg-type]
            assert [path.name for path in tmp_path.iterdir()] == ["root"]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
