"""The features that ``spile view --sae`` shows are those of SAELens: its own checkpoints, read by both."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("sae_lens", reason="no sae-lens here: make peers makes an environment for it")
pytestmark = pytest.mark.filterwarnings("default")  # its own imports warn

from safetensors.numpy import load_file, save_file  # noqa: E402

from spile.errors import UserError  # noqa: E402
from spile.view.web import features  # noqa: E402
from spile.view.web.features import load_autoencoder  # noqa: E402

WIDTH, FEATURES, K = 16, 48, 5
SHOWN = (
    "standard",
    "topk",
    "jumprelu",
    "transcoder",
    "skip_transcoder",
    "jumprelu_transcoder",
    "jumprelu_skip_transcoder",
)
REFUSED = ("gated", "abstopk", "temporal", "matching_pursuit")
TRAINED = ("standard", "topk", "jumprelu", "batchtopk", "matryoshka_batchtopk")


def registry(training: bool = False) -> dict[str, tuple[Any, Any]]:
    import sae_lens
    from sae_lens import registry

    assert sae_lens.__version__ == "6.54.12"
    return registry.SAE_TRAINING_CLASS_REGISTRY if training else registry.SAE_CLASS_REGISTRY


def make(kind: str, *, training: bool = False, **options: Any) -> Any:
    """Return an autoencoder of SAELens with random weights, biases and thresholds, and decoders of different norms."""
    import torch

    made, config = registry(training)[kind]
    known = {each.name for each in fields(config)}
    wanted = {
        "k": K,
        "d_out": WIDTH,
        "n_heads": 2,
        "bottleneck_factor": 1,
        "apply_b_dec_to_input": "transcoder" not in kind,
    }
    wanted |= {"matryoshka_widths": [FEATURES // 2, FEATURES]}
    sae = made(config(WIDTH, FEATURES, **{name: value for name, value in wanted.items() if name in known} | options))
    torch.manual_seed(0)
    with torch.no_grad():
        for name, each in sae.named_parameters():
            each.copy_(torch.randn_like(each) * (0.5 if each.ndim == 1 else 1.0))
            if name == "threshold":
                each.abs_()
        if hasattr(sae, "topk_threshold"):
            sae.topk_threshold.fill_(2.0)
        sae.W_dec.data *= torch.linspace(0.1, 8.0, FEATURES)[:, None]
    return sae


def rows(shape: tuple[int, ...] = (200, WIDTH)) -> np.ndarray:
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


def check(folder: Path, values: np.ndarray | None = None) -> None:
    """Compare with ``SAE.encode`` of the same checkpoint: the values, and which features are active."""
    import torch
    from sae_lens import SAE

    values = rows() if values is None else values
    with torch.no_grad():
        wanted = SAE.load_from_disk(folder, dtype="float32").encode(torch.from_numpy(values)).numpy()
    found = load_autoencoder(folder).encode(values)
    assert (wanted > 0).any(1).mean() > 0.5
    assert np.array_equal(found > 0, wanted > 0)
    np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("normalize", ["none", "constant_norm_rescale"])
@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("kind", SHOWN)
def test_what_is_shown_is_what_encode_returns(kind: str, centred: bool, normalize: str, tmp_path: Path) -> None:
    if centred and "transcoder" in kind:
        with pytest.raises(ValueError, match="apply_b_dec_to_input is not supported"):
            make(kind, apply_b_dec_to_input=True)
        return
    sae = make(kind, apply_b_dec_to_input=centred, normalize_activations=normalize)
    sae.save_model(tmp_path)
    check(tmp_path)


@pytest.mark.parametrize("rescale", [True, False])
@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize("kind", TRAINED)
def test_checkpoints_of_its_trainer(kind: str, inference: bool, rescale: bool, tmp_path: Path) -> None:
    """Rescaling by the norms of the decoder is on by default for the TopK architectures."""
    options = {"rescale_acts_by_decoder_norm": rescale} if "topk" in kind else {}
    sae = make(kind, training=True, **options)
    if inference:
        sae.save_inference_model(tmp_path)
    else:
        sae.save_model(tmp_path)
    if "batchtopk" in kind and not inference:
        with pytest.raises(
            UserError, match=rf"architecture: expected one of .*found {kind}\. Save .*save_inference_model"
        ):
            load_autoencoder(tmp_path)
        return
    check(tmp_path)


def test_heads_are_joined_as_it_does(tmp_path: Path) -> None:
    sae = make("topk", reshape_activations="hook_z", rescale_acts_by_decoder_norm=True)
    sae.cfg.metadata.hook_name = "blocks.1.attn.hook_z"
    sae.save_model(tmp_path)
    check(tmp_path, rows((200, 4, WIDTH // 4)))


def test_weights_of_16_bits(tmp_path: Path) -> None:
    make("topk", dtype="bfloat16", rescale_acts_by_decoder_norm=True).save_model(tmp_path)
    check(tmp_path)


@pytest.mark.parametrize("kind", REFUSED)
def test_other_architectures_are_refused_by_name(kind: str, tmp_path: Path) -> None:
    make(kind).save_model(tmp_path)
    with pytest.raises(UserError, match=rf"cannot be shown: architecture: expected one of standard, .*found {kind}"):
        load_autoencoder(tmp_path)


@pytest.mark.parametrize("normalize", ["expected_average_only_in", "layer_norm", "covariance_whitening"])
def test_other_normalizations_are_refused_by_name(normalize: str, tmp_path: Path) -> None:
    make("standard", normalize_activations=normalize).save_model(tmp_path)
    with pytest.raises(UserError, match=rf"normalize_activations: expected none or .*found {normalize}"):
        load_autoencoder(tmp_path)


def test_every_architecture_is_judged() -> None:
    assert set(registry()) == {*SHOWN, *REFUSED}
    assert set(registry(training=True)) == {*TRAINED, *(set(REFUSED) - {"temporal"})}
    assert set(features._SAELENS) == set(SHOWN)
    inference = {each.name for kind in SHOWN for each in fields(registry()[kind][1])}
    training = {each.name for kind in ("standard", "topk", "jumprelu") for each in fields(registry(True)[kind][1])}
    assert inference | training | {"architecture"} == features._OPTIONS


def edit(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "cfg.json").read_text())
    (folder / "cfg.json").write_text(json.dumps(config | changes))


def test_unknown_options_and_tensors_are_refused_by_name(tmp_path: Path) -> None:
    make("standard").save_model(tmp_path)
    edit(tmp_path, sharpen=True)
    with pytest.raises(UserError, match=r"options: expected those of SAELens 6\.54, found sharpen"):
        load_autoencoder(tmp_path)
    make("jumprelu").save_model(tmp_path)
    weights = load_file(tmp_path / "sae_weights.safetensors")
    save_file({**weights, "gain": weights["b_enc"]}, tmp_path / "sae_weights.safetensors")
    with pytest.raises(UserError, match=r"tensors: expected W_dec, W_enc, b_dec, b_enc, threshold, found .*gain"):
        load_autoencoder(tmp_path)
    make("standard").save_model(tmp_path)
    edit(tmp_path, metadata={"sae_lens_version": "6.54.12", "hook_head_index": 3})
    with pytest.raises(UserError, match="hook_head_index: expected all heads, found 3"):
        load_autoencoder(tmp_path)


@pytest.mark.parametrize("activation", ["relu", "topk", "tanh-relu"])
def test_checkpoints_of_versions_before_6(activation: str, tmp_path: Path) -> None:
    make("standard").save_model(tmp_path)
    weights = load_file(tmp_path / "sae_weights.safetensors")
    save_file({**weights, "scaling_factor": np.ones(FEATURES, np.float32)}, tmp_path / "sae_weights.safetensors")
    kept = {
        "d_in": WIDTH,
        "d_sae": FEATURES,
        "dtype": "float32",
        "device": "cpu",
        "hook_point": "blocks.1.hook_resid_post",
    }
    kept |= {
        "activation_fn_str": activation,
        "activation_fn_kwargs": {"k": K},
        "lr": 0.1,
        "normalize_activations": False,
    }
    (tmp_path / "cfg.json").write_text(json.dumps(kept))
    if activation == "tanh-relu":
        with pytest.raises(UserError, match=re.escape("found activation_fn tanh-relu")):
            load_autoencoder(tmp_path)
        return
    check(tmp_path)
