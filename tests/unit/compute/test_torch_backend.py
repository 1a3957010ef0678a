"""Any Hugging Face model on PyTorch: the same store, ledger, reader and verification, and the same rows as JAX."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from holding import HeldCommits
from spile.errors import RunMismatch, SpecError
from spile.objects import open_folder
from spile.proof.rerun import recomputer
from spile.proof.verification import verify
from spile.reading import dataset
from spile.run.worker import run_stream
from spile.spec.run import DataSpec, RunSpec
from spile.spec.taps import parse_tap_words

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

EMBEDDED = Path(__file__).parents[3] / "src" / "spile" / "models" / "embedded"


@pytest.fixture(scope="module")
def opt(tmp_path_factory: Any) -> str:
    """A tiny model of a family that the table does not have, with the embedded model's tokenizer."""
    from transformers import OPTConfig, OPTForCausalLM

    folder = tmp_path_factory.mktemp("opt")
    vocabulary = json.loads((EMBEDDED / "config.json").read_text())["vocab_size"]
    torch.manual_seed(0)
    config = OPTConfig(
        vocab_size=vocabulary, hidden_size=16, word_embed_proj_dim=16, num_hidden_layers=2, ffn_dim=24,
        num_attention_heads=2, max_position_embeddings=256, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    OPTForCausalLM(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED / name, folder / name)
    return str(folder)


def spec(model: str, output: Path, samples: int = 6, **more: Any) -> RunSpec:
    data = DataSpec(max_seq_length=96, max_samples=samples)
    taps = parse_tap_words(more.pop("taps", ["residual", "z", "logits"]))
    return RunSpec(
        model=model, output=str(output), data=data, taps=taps, store_dtype="float32", shard_size_gb=1e-5, **more
    )


def rows(folder: Path) -> dict[str, np.ndarray]:
    stored = dataset.open(str(folder))
    samples = [stored.sample(0, index) for index in sorted(ref.index for ref in stored.samples)]
    return {
        tap: np.concatenate([np.asarray(sample.rows(tap), np.float64) for sample in samples]) for tap in stored.taps
    }


def test_one_byte_per_number_and_some_positions(opt: str, tmp_path: Path) -> None:
    """As on a device: encoded on the host, and only of the positions that are asked for."""
    whole = spec(opt, tmp_path / "whole", 3, taps=["residual"])
    run_stream(whole)
    run_stream(replace(whole, output=str(tmp_path / "some"), store_dtype="int8", positions="random:5"))
    every, some = dataset.open(str(tmp_path / "whole")), dataset.open(str(tmp_path / "some"))
    for ref in some.samples:
        left, right = some.sample(0, ref.index), every.sample(0, ref.index)
        wanted = right.rows("residual.1")[left.positions]
        step = np.abs(wanted).max(1, keepdims=True) / 254
        assert left.rows("residual.1").shape == (5, 16)
        assert (np.abs(left.rows("residual.1") - wanted) <= step * 1.001 + 1e-5).all()
    again = recomputer(str(tmp_path / "some"))
    assert verify(str(tmp_path / "some"), max_samples=3, recompute=again, k=3).ok


def test_an_unknown_family_is_stored_resumed_and_proven(opt: str, tmp_path: Path) -> None:
    path = "module:model.decoder.layers.1.fc1"
    given = spec(opt, tmp_path / "a", taps=["residual", "mlp_hidden", "logits", path])
    assert run_stream(given).complete
    more = replace(given, data=replace(given.data, max_samples=9))
    summary = run_stream(more)
    assert (summary.samples, summary.interrupted) == (9, False)
    again = replace(more, output=str(tmp_path / "b"), batch_size=1)
    run_stream(again)
    ours, theirs = rows(tmp_path / "a"), rows(tmp_path / "b")
    assert ours[path].shape[1] == 24
    for tap, values in ours.items():
        np.testing.assert_allclose(values, theirs[tap], atol=1e-5)
    report = verify(
        open_folder(str(tmp_path / "a")), max_samples=9, recompute=recomputer(str(tmp_path / "a")), k=3, seed=0
    )
    assert not report.problems


def test_the_same_rows_as_jax(tmp_path: Path) -> None:
    kinds = ["residual", "attn", "mlp", "embed", "resid_pre", "resid_mid", "attn_in", "mlp_in", "mlp_hidden", "q", "k"]
    given = spec("embedded", tmp_path / "jax", 3, taps=[*kinds, "v", "z", "final_norm", "logits"], heads=(0, 1))
    run_stream(given)
    run_stream(replace(given, output=str(tmp_path / "torch"), backend="torch"))
    ours, theirs = rows(tmp_path / "jax"), rows(tmp_path / "torch")
    assert list(ours) == list(theirs)
    for tap, values in ours.items():
        scale = np.sqrt(np.mean(values**2))
        if tap.startswith("logits_ids"):
            assert np.mean(values[:, 0] == theirs[tap][:, 0]) > 0.99
        else:
            # a loss near 0 is the difference of two numbers of the size of the logits
            assert np.abs(values - theirs[tap]).max() <= (1e-5 if tap == "loss" else 1e-4 * scale), tap


def test_a_run_of_the_jax_backend_is_not_continued_with_torch_by_default(tmp_path: Path) -> None:
    given = spec("embedded", tmp_path / "a", 2, taps=["residual"])
    run_stream(given)
    more = replace(given, backend="torch", data=replace(given.data, max_samples=4))
    with pytest.raises(
        RunMismatch, match=r"begun with --backend jax: expected --backend jax, found --backend torch.*equal"
    ):
        run_stream(more)
    assert run_stream(replace(more, same_numbers=True)).samples == 4
    other = spec("embedded", tmp_path / "b", 2, taps=["residual"], backend="torch")
    run_stream(other)
    assert run_stream(replace(other, backend="auto", data=more.data)).samples == 4  # as it was begun
    with pytest.raises(RunMismatch, match="begun with --backend torch"):
        run_stream(replace(other, backend="jax"))


def test_places_that_are_not_there_are_named(opt: str, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"--taps router: expected .* found none for router\.0\. Name the module"):
        run_stream(spec(opt, tmp_path / "a", taps=["router"]))
    with pytest.raises(SpecError, match=r"module:model\.decoder\.nothing.*found none of that name"):
        run_stream(spec(opt, tmp_path / "a", taps=["module:model.decoder.nothing"]))
    with pytest.raises(SpecError, match="--backend torch for a module's path"):
        run_stream(spec("embedded", tmp_path / "a", taps=["module:model.norm"]))
    assert not (tmp_path / "a" / "run.json").exists()


@pytest.mark.parametrize(
    "commits", [2, pytest.param(1, marks=pytest.mark.slow), pytest.param(9, marks=pytest.mark.slow)]
)
def test_killed_and_run_again(opt: str, tmp_path: Path, commits: int) -> None:
    given = spec(opt, tmp_path / "a", 20, taps=["residual", "z"], batch_size=1)
    command = [
        str(Path(sys.executable).parent / "spile"), "extract", "--model", opt, "--max-seq-length", "96",
        "--max-samples", "20", "--store-dtype", "float32", "--shard-size-gb", "0.00001", "--batch-size", "1",
        "--taps", "residual", "z", "--output", str(tmp_path / "a"),
    ]  # fmt: skip
    held = HeldCommits(tmp_path / "held", after=commits)
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", **held.environment}
    killed = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    folder = tmp_path / "a" / "stream_0" / "commits"
    while killed.poll() is None and len(list(folder.glob("*.json")) if folder.is_dir() else []) < commits:
        time.sleep(0.002)
    killed.send_signal(signal.SIGKILL)
    assert killed.wait() == -signal.SIGKILL, "it ended before it was killed"
    summary = run_stream(given)
    assert (summary.samples, summary.complete) == (20, True)
    run_stream(replace(given, output=str(tmp_path / "b")))
    report = verify(open_folder(str(tmp_path / "a")), max_samples=20)
    assert report.ok, report.all_problems
    ours, theirs = rows(tmp_path / "a"), rows(tmp_path / "b")
    for tap, values in theirs.items():
        np.testing.assert_allclose(ours[tap], values, atol=1e-5)
