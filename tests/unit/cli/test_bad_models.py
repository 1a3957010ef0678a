"""Models that ``spile extract`` cannot use: a one-line error, exit code 2, and no file is changed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spile.models import model_files
from unit.cli.refusals import SMALL, Refuse, spile
from unit.models.toy_models import copy_model, edit_tensors, shard_model, tensors


def test_a_mistyped_folder_is_not_looked_for_on_the_hub(
    refused: Refuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner would be a folder that is here; the hub was asked for three minutes."""

    def unasked(*_: object, **__: object) -> None:
        raise AssertionError("the hub was asked")

    monkeypatch.setattr(model_files, "download", unasked)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for name in ("models/typo", "./modl", "../modl"):
        assert refused("--model", name).startswith(f"no such model: {name}: expected a folder")


def test_no_such_model(refused: Refuse, fresh: Path) -> None:
    line = refused("--model", "./nowhere", "--output", fresh)
    assert line == "no such model: ./nowhere: expected a folder, or a name such as Qwen/Qwen2.5-0.5B, found neither"


def test_a_hub_that_is_out_is_exit_code_1_and_leaves_nothing_behind(
    fresh: Path,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path_factory: pytest.TempPathFactory,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path_factory.mktemp("hub")))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setenv("SPILE_RETRY_SECONDS", "0.1")
    assert spile("extract", "--model", "nobody/nothing", "--output", fresh) == 1
    line = capfd.readouterr().err.splitlines()[-1]
    assert line.startswith("spile: no folder nobody/nothing here, and the hub does not give a model of that name")
    assert line.endswith("Check the name and the network, or try again later.")
    assert not fresh.exists()


def test_a_folder_without_a_config(refused: Refuse, tmp_path: Path, fresh: Path) -> None:
    (tmp_path / "model").mkdir()
    line = refused("--model", tmp_path / "model", "--output", fresh)
    assert line == f"no config.json in {tmp_path}/model. Give the folder of a complete Hugging Face model."


def configured(folder: Path, **changes: Any) -> Path:
    file = copy_model(folder) / "config.json"
    fields = {**json.loads(file.read_text()), **changes}
    file.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))
    return folder


def test_an_unknown_architecture_is_named_with_those_known(refused: Refuse, tmp_path: Path, fresh: Path) -> None:
    model = configured(tmp_path / "model", model_type="mamba", architectures=["MambaForCausalLM"])
    line = refused("--model", model, "--output", fresh, "--backend", "jax")
    for word in ("mamba", "llama", "mistral", "qwen2", "qwen3"):
        assert word in line


def test_a_config_that_is_no_json(refused: Refuse, tmp_path: Path, fresh: Path) -> None:
    (configured(tmp_path / "model") / "config.json").write_text("{")
    assert "config.json" in refused("--model", tmp_path / "model", "--output", fresh)


def test_a_config_without_a_size(refused: Refuse, tmp_path: Path, fresh: Path) -> None:
    model = configured(tmp_path / "model", hidden_size=None)
    line = refused("--model", model, "--output", fresh)
    assert line == (  # A missing field takes the default of the model family; for hidden_size that is 4096.
        f"the tensor model.embed_tokens.weight of {model}: expected shape (1024, 4096), found (1024, 192)"
    )


def _truncate(file: Path, keep: float) -> None:
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * keep)])


@pytest.mark.parametrize("keep", [0.0, 0.00001, 0.001, 0.9])
def test_truncated_weights(refused: Refuse, tmp_path: Path, fresh: Path, texts: Path, keep: float) -> None:
    _truncate(copy_model(tmp_path / "model") / "model.safetensors", keep)
    line = refused("--model", tmp_path / "model", "--dataset", texts, "--output", fresh)
    assert line.startswith("model.safetensors is not a complete safetensors file: found ")
    assert line.endswith("Download or copy it again, then run the same command.")


def test_corrupt_weights(refused: Refuse, tmp_path: Path, fresh: Path, texts: Path) -> None:
    file = copy_model(tmp_path / "model") / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[40:44] = b"\xff\xff\xff\xff"
    file.write_bytes(data)
    line = refused("--model", tmp_path / "model", "--dataset", texts, "--output", fresh)
    assert line.startswith("model.safetensors is not a complete safetensors file: found a header that cannot be read")


def test_a_missing_tensor_is_named(refused: Refuse, tmp_path: Path, fresh: Path, texts: Path) -> None:
    model = edit_tensors(copy_model(tmp_path / "model"), model__layers__1__mlp__up_proj__weight=None)
    line = refused("--model", model, "--dataset", texts, "--output", fresh)
    assert "has only 73 of its" in line
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
    assert line.endswith("Convert them to safetensors, or name a revision that has them.")


def test_no_tokenizer(refused: Refuse, tmp_path: Path, fresh: Path, texts: Path) -> None:
    model = copy_model(tmp_path / "model")
    (model / "tokenizer.json").unlink()
    line = refused("--model", model, "--dataset", texts, "--output", fresh)
    assert line.startswith(f"no tokenizer in {model}: expected tokenizer.json, found none")


def small_vocabulary(folder: Path, size: int) -> Path:
    """The embedded model with fewer rows in its embedding than its tokenizer has tokens."""
    model = configured(folder, vocab_size=size)
    return edit_tensors(model, model__embed_tokens__weight=tensors(model)["model.embed_tokens.weight"][:size])


def test_a_tokenizer_of_another_model(refused: Refuse, tmp_path: Path, fresh: Path, texts: Path) -> None:
    model = small_vocabulary(tmp_path / "model", 16)
    line = refused("--model", model, "--dataset", texts, "--output", fresh)
    assert line.startswith("the tokenizer is not this model's: sample 0 (")
    assert "expected tokens below the model's vocabulary of 16, found " in line


@pytest.mark.slow
def test_a_tokenizer_with_tokens_that_no_sample_has(tmp_path: Path, fresh: Path, texts: Path) -> None:
    """Many models have one; it is not an error."""
    from spile.data.tokens import load_tokenizer

    model = copy_model(tmp_path / "model")
    backend = load_tokenizer(model).backend
    highest = max(max(backend.encode(text).ids) for text in ("1 2 3", "a b c d"))
    shutil.rmtree(model)
    small_vocabulary(model, highest + 1)
    assert spile("extract", "--model", model, "--dataset", texts, "--output", fresh, *SMALL) == 0


@pytest.mark.slow
def test_infinite_weights_are_a_failure_that_names_the_tap(
    tmp_path: Path, texts: Path, fresh: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = copy_model(tmp_path / "model")
    up = tensors(model)["model.layers.1.mlp.up_proj.weight"].copy()
    up[0, 0] = np.inf
    edit_tensors(model, model__layers__1__mlp__up_proj__weight=up)
    words = ("--model", model, "--dataset", texts, "--output", fresh, "--max-seq-length", "64")
    assert spile("extract", *words) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert (
        "NaN or infinity at residual.1, residual.2, residual.3, residual.4, residual.5: expected finite activations"
        in line
    )
    assert not list(fresh.rglob("*.safetensors"))
    assert not list(fresh.rglob(".tmp-*shard*"))
    assert not list(fresh.glob("stream_0/commits/*"))
