"""Bad input to ``spile extract``: one line that says expected, found and next, exit code 2, and nothing was touched."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spile.cli.main import main
from unit.weights.models import copy_model, edit_tensors, shard_model

GRID = [[1, 2], [3, 4]]
TASK = {"task_id": "a", "train": [{"input": GRID, "output": GRID}], "test": [{"input": GRID}]}
SMALL = ("--layers", "0", "--max-seq-length", "64")

Refuse = Callable[..., str]


def listing(folder: Path) -> dict[str, bytes | None]:
    """Everything below, with its content."""
    return {str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def spile(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    assert isinstance(ended.value.code, int)
    return ended.value.code


@pytest.fixture
def refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Refuse:
    """The one line that ``spile extract`` ends with; nothing below the test's folder has changed."""

    def run(*words: object, code: int = 2) -> str:
        before = listing(tmp_path)
        capfd.readouterr()
        found = spile("extract", *words)
        errors = capfd.readouterr().err
        assert found == code, errors
        assert len(errors.splitlines()) == 1, errors
        assert listing(tmp_path) == before
        return errors.removeprefix("spile: ").strip()

    return run


@pytest.fixture
def fresh(tmp_path: Path) -> Path:
    """An output that is not there yet, and must not be after a refusal."""
    return tmp_path / "fresh"


def lines(file: Path, *rows: Any) -> Path:
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    return lines(tmp_path / "texts.jsonl", {"text": "1 2 3"}, {"text": "a b c d"})


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the embedded model."""
    folder = tmp_path_factory.mktemp("made")
    data = lines(folder / "texts.jsonl", {"text": "1 2 3"}, {"text": "a b c d"})
    assert spile("extract", "--dataset", data, "--output", folder / "out", *SMALL) == 0
    return folder


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    """A finished run of one's own."""
    return Path(shutil.copytree(made / "out", tmp_path / "out"))


# -- models ------------------------------------------------------------------------------------------------------------


def test_no_such_model(refused: Refuse, fresh: Path) -> None:
    line = refused("--model", "./nowhere", "--output", fresh)
    assert line == "no such model: ./nowhere: expected a folder, or a name such as Qwen/Qwen2.5-0.5B, found neither"


def test_a_model_that_the_hub_cannot_give(
    refused: Refuse, fresh: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path_factory.mktemp("hub")))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    line = refused("--model", "nobody/nothing", "--output", fresh)
    assert line.startswith("no folder nobody/nothing here, and the hub cannot be reached for a model of that name")
    assert line.endswith("check the name and the network, or give a folder that holds the model")


def test_a_folder_without_a_config(refused: Refuse, tmp_path: Path, fresh: Path) -> None:
    (tmp_path / "model").mkdir()
    line = refused("--model", tmp_path / "model", "--output", fresh)
    assert line == f"no config.json in {tmp_path}/model; give the folder of a whole Hugging Face model"


def configured(folder: Path, **changes: Any) -> Path:
    file = copy_model(folder) / "config.json"
    fields = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))
    return folder


def test_an_unknown_architecture_is_named_with_those_known(refused: Refuse, tmp_path: Path, fresh: Path) -> None:
    model = configured(tmp_path / "model", model_type="mamba", architectures=["MambaForCausalLM"])
    line = refused("--model", model, "--output", fresh)
    for word in ("mamba", "llama", "mistral", "qwen2", "qwen3"):
        assert word in line


def test_a_config_that_is_no_json(refused: Refuse, tmp_path: Path, fresh: Path) -> None:
    (configured(tmp_path / "model") / "config.json").write_text("{")
    assert "config.json" in refused("--model", tmp_path / "model", "--output", fresh)


def test_a_config_without_a_size(refused: Refuse, tmp_path: Path, fresh: Path) -> None:
    model = configured(tmp_path / "model", hidden_size=None)
    assert "hidden_size" in refused("--model", model, "--output", fresh)


def _truncate(file: Path, keep: float) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep)])


@pytest.mark.parametrize("keep", [0.0, 0.00001, 0.001, 0.9])
def test_truncated_weights(refused: Refuse, tmp_path: Path, fresh: Path, texts: Path, keep: float) -> None:
    _truncate(copy_model(tmp_path / "model") / "model.safetensors", keep)
    line = refused("--model", tmp_path / "model", "--dataset", texts, "--output", fresh)
    assert line.startswith("model.safetensors is no whole safetensors file: found ")
    assert line.endswith("download or copy it again, then run the same command")


def test_corrupt_weights(refused: Refuse, tmp_path: Path, fresh: Path, texts: Path) -> None:
    file = copy_model(tmp_path / "model") / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[40:44] = b"\xff\xff\xff\xff"
    file.write_bytes(data)
    line = refused("--model", tmp_path / "model", "--dataset", texts, "--output", fresh)
    assert line.startswith("model.safetensors is no whole safetensors file: found a header that cannot be read")


def test_a_missing_tensor_is_named(refused: Refuse, tmp_path: Path, fresh: Path, texts: Path) -> None:
    model = edit_tensors(copy_model(tmp_path / "model"), model__layers__1__mlp__up_proj__weight=None)
    line = refused("--model", model, "--dataset", texts, "--output", fresh)
    assert "lacks 1 of its" in line
    assert line.endswith("found no model.layers.1.mlp.up_proj.weight")


def test_a_tensor_of_another_shape_is_named(refused: Refuse, tmp_path: Path, fresh: Path, texts: Path) -> None:
    wrong = {"model__layers__1__mlp__up_proj__weight": np.zeros((3, 5), np.float32)}
    model = edit_tensors(copy_model(tmp_path / "model"), **wrong)
    line = refused("--model", model, "--dataset", texts, "--output", fresh)
    assert "model.layers.1.mlp.up_proj.weight" in line
    assert "found (3, 5)" in line


def test_a_weight_file_that_the_index_names_is_missing(refused: Refuse, tmp_path: Path, fresh: Path) -> None:
    model = shard_model(copy_model(tmp_path / "model"))
    (model / "model-00002-of-00003.safetensors").unlink()
    line = refused("--model", model, "--output", fresh)
    assert "1 missing, the first model-00002-of-00003.safetensors" in line


def test_pickled_weights_are_refused(refused: Refuse, tmp_path: Path, fresh: Path) -> None:
    model = copy_model(tmp_path / "model")
    (model / "model.safetensors").rename(model / "pytorch_model.bin")
    line = refused("--model", model, "--output", fresh)
    assert "pickled weights (pytorch_model.bin), which can run code" in line
    assert line.endswith("convert them to safetensors, or name a revision that has them")


def test_no_tokenizer(refused: Refuse, tmp_path: Path, fresh: Path, texts: Path) -> None:
    model = copy_model(tmp_path / "model")
    (model / "tokenizer.json").unlink()
    line = refused("--model", model, "--dataset", texts, "--output", fresh)
    assert line.startswith(f"no tokenizer in {model}: expected tokenizer.json, found none")


def small_vocabulary(folder: Path, size: int) -> Path:
    """The embedded model with fewer rows in its embedding than its tokenizer has tokens."""
    from unit.weights.models import tensors

    model = configured(folder, vocab_size=size)
    return edit_tensors(model, model__embed_tokens__weight=tensors(model)["model.embed_tokens.weight"][:size])


def test_a_tokenizer_of_another_model(refused: Refuse, tmp_path: Path, fresh: Path, texts: Path) -> None:
    model = small_vocabulary(tmp_path / "model", 16)
    line = refused("--model", model, "--dataset", texts, "--output", fresh)
    assert line.startswith("the tokenizer is not this model's: sample 0 (")
    assert "expected tokens below the model's vocabulary of 16, found " in line


def test_a_tokenizer_with_tokens_that_no_sample_has(tmp_path: Path, fresh: Path, texts: Path) -> None:
    """Many models ship one: it is no fault."""
    from spile.data.tokens import load_tokenizer

    model = copy_model(tmp_path / "model")
    backend = load_tokenizer(model).backend
    highest = max(max(backend.encode(text).ids) for text in ("1 2 3", "a b c d"))
    shutil.rmtree(model)
    small_vocabulary(model, highest + 1)
    assert spile("extract", "--model", model, "--dataset", texts, "--output", fresh, *SMALL) == 0


# -- data --------------------------------------------------------------------------------------------------------------


def test_no_such_dataset(refused: Refuse, fresh: Path) -> None:
    line = refused("--dataset", "nowhere.jsonl", "--output", fresh)
    assert line == "no such dataset: nowhere.jsonl; check --dataset, or --dataset-dir and --worker-id"


def test_no_such_stream(refused: Refuse, tmp_path: Path, fresh: Path) -> None:
    line = refused("--dataset-dir", tmp_path, "--worker-id", 5, "--output", fresh)
    assert line.startswith(f"no such dataset: {tmp_path}/stream_005.jsonl")


@pytest.mark.parametrize("text", ["", "\n\n  \n"])
def test_an_empty_dataset(refused: Refuse, tmp_path: Path, fresh: Path, text: str) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(text)
    line = refused("--dataset", data, "--output", fresh)
    assert line == f"{data} is empty: expected a JSON object a line, found no line"


def task(**changes: Any) -> dict[str, Any]:
    return {**TASK, **changes}


def pair(grid: Any) -> list[Any]:
    return [{"input": GRID, "output": grid}]


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("{no json", "line 3"),
        ("[1, 2]", "line 3"),
        ('{"text": "truncated', "line 3"),
        ('"\\ud800"', "line 3"),
        (task(train=[]), "no train pairs"),
        (task(train=None), "no train pairs"),
        (task(test=[]), "no test input"),
        (task(train=pair([[1, 2], [3]])), "a ragged grid"),
        (task(train=pair([[1] * 31] * 2)), "a grid larger than 30×30"),
        (task(train=pair([[1]] * 31)), "a grid larger than 30×30"),
        (task(train=pair([[11]])), "a cell outside 0 to 9"),
        (task(train=pair([])), "a grid that is no list of rows"),
        (task(train=pair([["a"]])), "a cell that is no number"),
    ],
)
def test_a_bad_line_is_named_by_its_number(refused: Refuse, tmp_path: Path, fresh: Path, row: Any, words: str) -> None:
    data = lines(tmp_path / "data.jsonl", TASK, "", row, TASK)
    line = refused("--dataset", data, "--output", fresh)
    assert f"{data} line 3" in line
    assert words in line


def test_bytes_that_are_no_text(refused: Refuse, tmp_path: Path, fresh: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_bytes(b'{"text": "fine"}\n{"text": "\xff\xfe"}\n')
    assert f"{data} line 2" in refused("--dataset", data, "--output", fresh)


def test_a_line_of_another_kind(refused: Refuse, tmp_path: Path, fresh: Path) -> None:
    data = lines(tmp_path / "data.jsonl", {"text": "fine"}, {"texts": "not"})
    line = refused("--dataset", data, "--output", fresh)
    assert f"{data} line 2" in line
    assert "text" in line


# -- flags -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--layers", "4"], "--layers: expected layers 0 to 3 (the model has 4), found 4"),
        (["--layers", "0-99"], "--layers: expected layers 0 to 3 (the model has 4), found 4-99"),
        (["--layers", "-1"], "--layers"),
        (["--layers", "3-1"], "--layers"),
        (["--layers", "many"], "--layers: expected all, or numbers and ranges such as 0-11,20, found 'many'"),
        (["--taps", "logits"], "--taps: expected some of residual, attn, mlp, found logits"),
        (["--batch-size", "-3"], "--batch-size: expected from 1 to 1,048,576, found -3"),
        (["--batch-size", "0"], "--batch-size: expected from 1 to 1,048,576, found 0"),
        (["--batch-tokens", "0"], "--batch-tokens: expected from 1 to"),
        (["--max-seq-length", "0"], "--max-seq-length: expected from 1 to 1,048,576, found 0"),
        (["--max-samples", "-1"], "--max-samples: expected from 1 to"),
        (["--shard-size-gb", "0"], "--shard-size-gb: expected from 1e-06 to 64, found 0"),
        (["--shard-size-gb", "nan"], "--shard-size-gb: expected from 1e-06 to 64, found nan"),
        (["--shard-size-gb", "1e300"], "--shard-size-gb: expected from 1e-06 to 64, found 1e+300"),
        (["--commit-every", "-5"], "--commit-every: expected from 0.01 to"),
        (["--seed", "-1"], "--seed: expected from 0 to"),
        (["--worker-id", "-2"], "--worker-id: expected from 0 to 99,999, found -2"),
        (["--predictions-per-task", "0"], "--predictions-per-task: expected from 1 to 4,096, found 0"),
        (["--overwrite"], "--overwrite: expected --no-checkpointing beside it, found --overwrite alone"),
        (["--upload-to-gcs"], "--upload-to-gcs: expected --gcs-bucket B beside it, found no bucket"),
        (["--mesh-shape", "3"], "--mesh-shape"),
        (["--mesh-shape", "7,9"], "mesh"),
        (["--revision", "main"], "--revision: expected a name on the Hugging Face hub beside it, found embedded"),
        (["--grid-encoder", "Nothing()"], "Nothing"),
        (["--dtype", "int3"], "--dtype"),
        (["--store-dtype", "int8"], "--store-dtype"),
    ],
)
def test_an_absurd_flag(refused: Refuse, fresh: Path, words: list[str], line: str) -> None:
    assert line in refused("--output", fresh, *words)


# -- outputs -----------------------------------------------------------------------------------------------------------


def test_an_output_of_another_run_names_the_fields(refused: Refuse, made: Path, run: Path) -> None:
    data = made / "texts.jsonl"
    line = refused("--dataset", data, "--output", run, *SMALL, "--store-dtype", "float32", "--seed", "7")
    for word in ("store_dtype", "bfloat16", "float32", "seed", "7"):
        assert word in line


def test_an_output_of_another_model(refused: Refuse, tmp_path: Path, made: Path, run: Path) -> None:
    model = edit_tensors(copy_model(tmp_path / "model"), model__norm__weight=np.zeros(64, np.float32))
    line = refused("--model", model, "--dataset", made / "texts.jsonl", "--output", run, *SMALL)
    assert "weights" in line


def test_an_output_of_another_dataset_or_other_taps(refused: Refuse, tmp_path: Path, made: Path, run: Path) -> None:
    other = lines(tmp_path / "other.jsonl", {"text": "1 2 3"}, {"text": "x y z"})
    assert "sha256" in refused("--dataset", other, "--output", run, *SMALL)
    line = refused("--dataset", made / "texts.jsonl", "--output", run, "--layers", "1", "--max-seq-length", "64")
    assert "taps" in line


def test_starting_over_is_refused_where_commits_are(refused: Refuse, made: Path, run: Path) -> None:
    line = refused("--dataset", made / "texts.jsonl", "--output", run, *SMALL, "--no-checkpointing")
    assert line.startswith(f"--no-checkpointing: expected a stream without commits, found commits in {run}/tpu_0")


def test_starting_over_removes_nothing_before_all_else_is_right(refused: Refuse, made: Path, run: Path) -> None:
    words = ("--dataset", made / "texts.jsonl", "--output", run, *SMALL, "--no-checkpointing", "--overwrite")
    assert "mesh" in refused(*words, "--mesh-shape", "7,9")


def test_starting_over(made: Path, run: Path) -> None:
    before = listing(run)
    words = ("--dataset", made / "texts.jsonl", "--output", run, *SMALL, "--no-checkpointing", "--overwrite")
    assert spile("extract", *words) == 0
    assert not before.keys() & {name for name in listing(run) if "shard_" in name and name.endswith("safetensors")}
    assert spile("verify", run) == 0


def test_a_damaged_run_record(refused: Refuse, made: Path, run: Path) -> None:
    (run / "run.json").write_text("{}")
    line = refused("--dataset", made / "texts.jsonl", "--output", run, *SMALL, code=1)
    assert "run.json" in line


def test_a_gap_in_the_ledger(refused: Refuse, made: Path, run: Path) -> None:
    (run / "tpu_0" / "commits" / "0001.json").rename(run / "tpu_0" / "commits" / "0002.json")
    line = refused("--dataset", made / "texts.jsonl", "--output", run, *SMALL, code=1)
    assert "has a gap: expected commits 1 to 2, found none numbered 1" in line


def test_a_file_where_the_output_should_be(refused: Refuse, texts: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    line = refused("--dataset", texts, "--output", tmp_path / "file")
    assert "found a file where a folder should be; choose another --output" in line


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A file system of one's own, where that is allowed."""
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("nothing can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


needs_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0 or shutil.which("mount") is None, reason="mounts need root"
)


@needs_root
def test_a_full_disk(refused: Refuse, texts: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=64k") as disk:
        (disk / "mine").write_bytes(b"x" * 65536)
        line = refused("--dataset", texts, "--output", disk / "out", *SMALL)
    assert line.startswith(f"cannot write {disk}/out: expected a folder with room, found a full disk; free some room")


@needs_root
def test_a_disk_that_fills_up_during_the_run(
    texts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], made: Path
) -> None:
    """What was committed stays, nothing half-written does, and with more room the same command goes on."""
    rows = [{"text": " ".join(map(str, range(n, n + 40)))} for n in range(60)]
    data = lines(tmp_path / "many.jsonl", *rows)
    words = ("extract", "--dataset", data, *SMALL, "--shard-size-gb", "5e-5", "--batch-tokens", "64", "--output")
    with mounted(tmp_path / "disk", "size=400k") as disk:
        assert spile(*words, disk / "out") == 2
        (line,) = capfd.readouterr().err.splitlines()
        assert "found a full disk; free some room or choose another --output, then run the same command again" in line
        assert not list(disk.rglob(".tmp-*"))
        commits = sorted(path.name for path in disk.glob("out/tpu_0/commits/*"))
        assert commits
        subprocess.run(["mount", "-o", "remount,size=16m", disk], check=True)
        assert spile(*words, disk / "out") == 0
        assert spile("verify", disk / "out") == 0


@needs_root
def test_a_read_only_folder(refused: Refuse, texts: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=64k,ro") as disk:
        line = refused("--dataset", texts, "--output", disk / "out", *SMALL)
    assert line == (
        f"cannot write {disk}/out: expected a folder with room, found a read-only file system; choose another --output"
    )


# -- numbers -----------------------------------------------------------------------------------------------------------


def test_infinite_weights_are_a_failure_that_names_the_tap(
    tmp_path: Path, texts: Path, fresh: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    from unit.weights.models import tensors

    model = copy_model(tmp_path / "model")
    up = tensors(model)["model.layers.1.mlp.up_proj.weight"].copy()
    up[0, 0] = np.inf
    edit_tensors(model, model__layers__1__mlp__up_proj__weight=up)
    words = ("--model", model, "--dataset", texts, "--output", fresh, "--max-seq-length", "64")
    assert spile("extract", *words) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert "NaN or infinity at residual.1, residual.2, residual.3: expected finite activations" in line
    assert not list(fresh.rglob("*.safetensors"))
    assert not list(fresh.rglob(".tmp-*shard*"))
    assert not list(fresh.glob("tpu_0/commits/*"))


# -- as a process ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--dataset", "nowhere.jsonl"], "spile: no such dataset: nowhere.jsonl; check"),
        (["--layers", "77"], "spile: --layers: expected layers 0 to 3"),
    ],
)
def test_as_a_process(tmp_path: Path, words: list[str], line: str) -> None:
    command = [sys.executable, "-m", "spile.cli.main", "extract", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith(line)
    assert not list(tmp_path.iterdir())
