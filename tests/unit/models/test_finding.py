"""A model is found by the name that a user types; every mistake is one line with a fix."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from spile.errors import ModelError
from spile.models import model_files
from unit.models.toy_models import EMBEDDED, copy_model, shard_model


def test_the_embedded_model() -> None:
    files = model_files.find("embedded")
    assert files.name == "embedded"
    assert files.revision is None
    assert files.config.architecture == "qwen2"
    assert files.tokenizer_folder == EMBEDDED
    assert files.weight_files == ("model.safetensors",)


def test_finding_needs_no_jax() -> None:
    code = "from spile.models.model_files import find; find('embedded').weights_hash()"
    code = f"import sys; {code}; print('jax' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_a_folder_and_an_index_of_files(tmp_path: Path) -> None:
    folder = copy_model(tmp_path / "m")
    assert model_files.find(str(folder)).config == model_files.find("embedded").config
    assert len(model_files.find(str(shard_model(folder))).weight_files) == 3


def one_line(name: str, revision: str | None = None) -> str:
    with pytest.raises(ModelError) as caught:
        model_files.find(name, revision)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_no_such_folder() -> None:
    for name in ("./nowhere", "/no/such/folder", "a/b/c", "~/nowhere", "two words"):
        assert one_line(name).startswith(f"no such model: {name}")


def test_a_file_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "m").touch()
    assert one_line(str(tmp_path / "m")).endswith("found a file")


def test_a_folder_without_config(tmp_path: Path) -> None:
    assert one_line(str(tmp_path)).startswith(f"no config.json in {tmp_path}. Give the folder of a complete")


def test_a_config_that_is_no_json(tmp_path: Path) -> None:
    folder = copy_model(tmp_path / "m")
    (folder / "config.json").write_text("{")
    assert "is not JSON" in one_line(str(folder))
    (folder / "config.json").write_text("[]")
    assert "expected a JSON object, found list" in one_line(str(folder))


def test_an_unknown_architecture(tmp_path: Path) -> None:
    folder = copy_model(tmp_path / "m")
    (folder / "config.json").write_text(json.dumps({"model_type": "mamba"}))
    output = one_line(str(folder))
    assert output.startswith("unknown architecture: expected one of qwen2, qwen3, llama, mistral, gemma")
    assert output.endswith(
        "found 'mamba'. Use --backend torch with spile extract or infer, which runs any model of transformers."
    )


def test_only_pickles_are_refused(tmp_path: Path) -> None:
    folder = copy_model(tmp_path / "m")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "has only pickled weights (pytorch_model.bin), which can run code" in one_line(str(folder))
    (folder / "pytorch_model.bin").unlink()
    assert "has no weights: expected model.safetensors" in one_line(str(folder))


def test_an_index_with_a_missing_file(tmp_path: Path) -> None:
    folder = shard_model(copy_model(tmp_path / "m"))
    (folder / "model-00002-of-00003.safetensors").unlink()
    assert "found 1 missing, the first model-00002-of-00003.safetensors" in one_line(str(folder))


@pytest.mark.parametrize(
    ("index", "line"),
    [
        ("no json", "is not an index of weights"),
        ("[]", "is not an index of weights"),
        ("{}", "is not an index of weights"),
        ('{"weight_map": {"a": "../x"}}', "names a file outside its folder: found ../x"),
    ],
)
def test_a_bad_index(index: str, line: str, tmp_path: Path) -> None:
    folder = copy_model(tmp_path / "m")
    (folder / "model.safetensors.index.json").write_text(index)
    assert line in one_line(str(folder))


def test_a_revision_needs_the_hub(tmp_path: Path) -> None:
    assert one_line("embedded", "main") == "--revision: expected a model of the Hugging Face hub, found embedded"


def test_hashes_follow_the_content(tmp_path: Path) -> None:
    first, second = (model_files.find(str(copy_model(tmp_path / name))) for name in "ab")
    assert first.weights_hash() == second.weights_hash() == model_files.find("embedded").weights_hash()
    assert first.tokenizer_hash() == second.tokenizer_hash()
    folder = tmp_path / "b"
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\x55")
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + " ")
    assert first.weights_hash() != second.weights_hash()
    assert first.tokenizer_hash() != second.tokenizer_hash()


def test_the_hash_holds_the_config_and_not_its_spelling(tmp_path: Path) -> None:
    folder = copy_model(tmp_path / "m")
    raw = json.loads((folder / "config.json").read_text())
    del raw["rope_theta"]
    (folder / "config.json").write_text(json.dumps({**raw, "rope_parameters": {"rope_theta": 1e4}, "use_cache": True}))
    assert model_files.find(str(folder)).weights_hash() == model_files.find("embedded").weights_hash()
    (folder / "config.json").write_text(json.dumps({**raw, "rope_theta": 2e4}))
    assert model_files.find(str(folder)).weights_hash() != model_files.find("embedded").weights_hash()


def test_large_files_are_hashed_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = model_files.find("embedded")
    whole = files.weights_hash()
    monkeypatch.setattr("spile.models.model_files._HASH_CHUNK", 1000)
    parts = files.weights_hash()
    assert len(whole) == len(parts) == 64
    assert whole != parts
    assert parts == files.weights_hash()


def test_no_tokenizer(tmp_path: Path) -> None:
    folder = copy_model(tmp_path / "m")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(ModelError, match="no tokenizer in"):
        model_files.find(str(folder)).tokenizer_hash()
