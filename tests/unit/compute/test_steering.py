"""Taps that are changed while the model computes: `model.run` with functions, and `--steer` in runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import spile
from spile.errors import UserError
from spile.models import model_files
from spile.run.resolve import read_steering, steering_hash
from spile.spec.taps import Steer, Tap

TEXTS = ["The cat sat on the mat", "A dog", "Nobody knows the answer"]
VECTOR = np.random.default_rng(0).standard_normal(192).astype(np.float32)
CONFIG = model_files.find("embedded").config


@pytest.fixture(scope="module")
def model() -> Any:
    return spile.load("embedded")


@pytest.fixture
def vectors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    save_file({"v": VECTOR}, "one.safetensors")
    save_file({"v": VECTOR, "w": 2 * VECTOR}, "two.safetensors")
    save_file({"v": VECTOR[:5]}, "short.safetensors")
    save_file({"v": VECTOR * np.nan}, "nan.safetensors")
    save_file({"v": 0 * VECTOR}, "zeros.safetensors")
    save_file({"v": np.stack([VECTOR, VECTOR])}, "stack.safetensors")
    save_file({"v": VECTOR.astype(np.int32)}, "int.safetensors")
    Path("text.safetensors").write_text("not a tensor")
    return tmp_path


def test_functions_change_taps_and_what_follows(model: Any) -> None:
    plain = model.tap(TEXTS, taps=["residual", "z.3", "logits"])

    def edit(rows: Any, info: Any) -> Any:
        return jnp.where(info.last[:, None], rows + VECTOR, rows)

    edits = {"residual.2": edit, "z.3.1": lambda rows: 0 * rows}
    found = model.run(TEXTS, edit=edits, taps=["residual", "z.3", "logits"])
    for before, after in zip(plain, found, strict=True):
        np.testing.assert_allclose(after["residual.1"], before["residual.1"], atol=1e-5)
        np.testing.assert_allclose(after["residual.2"][:-1], before["residual.2"][:-1], atol=1e-5)
        np.testing.assert_allclose(after["residual.2"][-1], before["residual.2"][-1] + VECTOR, atol=1e-5)
        assert not after["z.3"].reshape(len(after), CONFIG.n_heads, -1)[:, 1].any()
        assert after["z.3"].any()
        assert np.abs(after["logits.top10"][-1] - before["logits.top10"][-1]).max() > 0.01
    again = model.run(TEXTS, taps="residual.2")
    np.testing.assert_allclose(again[0]["residual.2"], plain[0]["residual.2"], atol=1e-5)


@pytest.mark.parametrize(
    ("edit", "line"),
    [
        ({"residual.99": lambda x: x}, "expected layers 0 to 5 of the model, found residual.99"),
        ({"logits.top5": lambda x: x}, "expected a tap that the model computes with, such as residual.12"),
        ({"stream.1": lambda x: x}, "not a tap"),
        ({"residual.1": lambda x: x[:1]}, "edit of residual.1: expected rows of the shape"),
    ],
)
def test_a_wrong_edit_is_refused(model: Any, edit: Any, line: str) -> None:
    with pytest.raises(UserError, match=line) as error:
        model.run(TEXTS[:1], edit=edit, taps="residual.1")
    assert str(error.value).startswith("model.run(): ")


def test_words_are_parsed() -> None:
    assert Steer.parse("residual.2=a/b.safetensors") == Steer(Tap("residual", 2), "add", "a/b.safetensors")
    assert Steer.parse("embed=gs://b/x.safetensors#n:-2.5e-1") == Steer(
        Tap("embed"), "add", "gs://b/x.safetensors", "n", -0.25
    )
    assert Steer.parse("z.3.0-1=zero") == Steer(Tap("z", 3, (0, 1)), "zero")
    assert Steer.parse("mlp.3=ablate:x#n") == Steer(Tap("mlp", 3), "ablate", "x", "n")
    assert Steer.parse("mlp.3=patch:./root#task:1") == Steer(Tap("mlp", 3), "patch", "./root", "task:1")
    for bad in ("residual.2", "residual=zero", "residual.2=", "residual.2=patch:root", "residual.2=ablate:"):
        with pytest.raises(UserError, match="--steer"):
            Steer.parse(bad)


@pytest.mark.parametrize(
    ("word", "line"),
    [
        ("residual.2=short.safetensors", "expected 192 numbers, the width of residual.2, found 5"),
        ("residual.2=stack.safetensors", "expected 192 numbers, the width of residual.2, found 384"),
        ("residual.2=nan.safetensors", "expected finite numbers, found NaN or infinity"),
        ("residual.2=int.safetensors", "expected a tensor of F64, F32, F16 or BF16, found I32"),
        ("residual.2=ablate:zeros.safetensors", "expected a direction, found a vector of zeros"),
        ("residual.2=text.safetensors", "expected a safetensors file, found "),
        ("residual.2=none.safetensors", "expected a safetensors file, found no such file"),
        (
            "residual.2=two.safetensors",
            "expected one tensor, found 2 tensors. Name one of its tensors, such as two.safetensors#v",
        ),
        (
            "residual.2=two.safetensors#x",
            "expected one tensor, found x. Name one of its tensors, such as two.safetensors#v",
        ),
        ("residual.9=zero", "expected layers 0 to 5 of the model, found residual.9"),
        ("loss=zero", "expected a tap that the model computes with, such as residual.12, found loss"),
    ],
)
@pytest.mark.usefixtures("vectors")
def test_a_vector_that_does_not_fit_is_refused_in_one_line(word: str, line: str) -> None:
    with pytest.raises(UserError) as error:
        read_steering([word], CONFIG)
    assert str(error.value).startswith(f"--steer {word}: ")
    assert line in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.usefixtures("vectors")
def test_the_hash_depends_on_the_numbers_and_not_on_their_file() -> None:
    same = ("residual.2=one.safetensors:4", "residual.2=two.safetensors#w:2.0")
    other = ("residual.2=one.safetensors", "residual.3=one.safetensors:4", "residual.2=ablate:one.safetensors")
    found = [steering_hash(read_steering([word], CONFIG)) for word in (*same, *other)]
    assert found[0] == found[1]
    assert len(set(found)) == 4
    assert steering_hash(read_steering([], CONFIG)) is None


@pytest.mark.slow
def test_answers_are_steered_and_recomputed_with_the_same_vectors(vectors: Path) -> None:
    options: dict[str, Any] = {"taps": ["residual.0", "residual.4"], "store_dtype": "float32"}
    spile.extract("embedded", TEXTS[:2], vectors / "plain", **options)
    words = ["residual.2=one.safetensors:2.0", "mlp.0=ablate:one.safetensors", "z.0.0=zero"]
    patched, root = f"residual.4=patch:{vectors / 'plain'}#1", vectors / "steered"
    spile.infer("embedded", TEXTS[:2], root, steer=[*words, patched], max_new_tokens=3, **options)
    first, second = spile.open(vectors / "plain"), spile.open(root)
    known = first[1]["residual.4"]
    for plain, sample in zip(first, second, strict=True):
        np.testing.assert_allclose(sample["residual.4"][: len(known)], known, atol=1e-5)
        assert np.abs(sample["residual.0"][: len(plain)] - plain["residual.0"]).max() > 0.01
    assert len(second[0]) > len(first[0])
    assert spile.verify(root, recompute=2).ok

    with pytest.raises(UserError, match="was created with steering "):
        spile.infer("embedded", TEXTS[:2], root, steer=words, max_new_tokens=3, **options)
    (vectors / "one.safetensors").rename(vectors / "gone.safetensors")
    with pytest.raises(UserError, match=r"steer residual.2=one.safetensors:2.0: .* no such file"):
        spile.verify(root, recompute=1)
    save_file({"v": 3 * VECTOR}, vectors / "one.safetensors")
    with pytest.raises(UserError, match="Put the vectors of the run back"):
        spile.verify(root, recompute=1)


def test_a_change_after_the_last_layer_is_refused_for_answers(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a tap before the final norm"):
        spile.infer("embedded", TEXTS, tmp_path / "out", steer=["final_norm=zero"])
    assert not (tmp_path / "out").exists()


@pytest.mark.torch
def test_the_torch_backend_refuses_changes_and_gradients(tmp_path: Path) -> None:
    for options, line in (
        ({"steer": ["residual.1=zero"]}, "steer: expected a model that runs in JAX"),
        ({"gradients": "loss"}, "gradients loss: expected a model that runs in JAX"),
        ({"taps": "pattern"}, "expected a tap that"),
    ):
        with pytest.raises(UserError, match=line):
            spile.extract("embedded", TEXTS, tmp_path / "out", backend="torch", **options)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="edit: expected a model that runs in JAX"):
        spile.load("embedded", backend="torch").run(TEXTS, edit={"residual.1": lambda x: x})
    assert not (tmp_path / "out").exists()
