"""Edited taps equal transformers with hooks that make the same change, for every family, in packed rows too."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tests.fakes.random_weights import random

from numerics import cases
from spile.models import model_files, weights
from spile.models.architecture import ModelConfig
from spile.models.decoder import Steering, forward
from spile.models.params import Params, layer_runs, stack_layers
from spile.spec.taps import Tap, tap_rows, with_gradients

LENGTHS = (17, 9, 21)
"""Samples of the packed batch row."""
TOLERANCE = 2e-5


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


def packed(case: str) -> tuple[list[np.ndarray], tuple[np.ndarray, ...]]:
    """Return samples, and all of them as tokens, positions and segments of one batch row with padding."""
    samples = [cases.tokens(case, 1, length)[0] for length in LENGTHS]
    rows = np.zeros((3, 1, sum(LENGTHS) + 6), np.int32)
    at = 0
    for number, tokens in enumerate(samples, 1):
        here = slice(at, at + len(tokens))
        rows[0, 0, here], rows[1, 0, here], rows[2, 0, here] = tokens, np.arange(len(tokens)), number
        at += len(tokens)
    return samples, tuple(rows)


def split(values: Any) -> list[np.ndarray]:
    return np.split(np.asarray(values, np.float64)[0, : sum(LENGTHS)], np.cumsum(LENGTHS)[:-1])


def steering_of(config: ModelConfig) -> Steering:
    """Return one edit of each kind, and a vector added at each other kind of tap whose value is a module's."""
    wanted = [
        (Tap("z", 1, (1,)), "zero"), (Tap("mlp", 0), "ablate"), (Tap("residual", 1), "add"),
        (Tap("resid_pre", 2), "patch"), (Tap("embed"), "add"), (Tap("attn", 0), "add"), (Tap("attn_in", 1), "add"),
        (Tap("mlp_in", 1), "add"), (Tap("final_norm"), "add"),
    ]  # fmt: skip
    values: list[np.ndarray] = []
    for tap, kind in wanted:
        width = tap_rows(tap, config.sizes(tap.layer), "float32").width
        vector = draw(7, width) if kind == "patch" else draw(width)
        values.append(vector / np.linalg.norm(vector) if kind == "ablate" else vector)
    return Steering(tuple(tap for tap, _ in wanted), tuple(kind for _, kind in wanted), tuple(values))  # type: ignore[arg-type]


def in_torch(kind: str, value: Any, rows: Any) -> Any:
    """The same change in PyTorch, written a second time."""
    import torch

    vector = torch.from_numpy(value)
    if kind == "zero":
        return torch.zeros_like(rows)
    if kind == "add":
        return rows + vector
    if kind == "ablate":
        return rows - (rows @ vector)[..., None] * vector
    return torch.cat([vector[: rows.shape[-2]].expand(*rows.shape[:-2], -1, -1), rows[..., len(vector) :, :]], dim=-2)


def with_edits(model: Any, steering: Steering) -> None:
    """Hook a model of transformers."""
    from spile.compute.torch_backend import find_hook_point, find_layers

    for tap, kind, value in zip(steering.taps, steering.kinds, steering.values, strict=True):
        point = find_hook_point(model, find_layers(model), tap)

        def change(rows: Any, tap: Tap = tap, kind: str = kind, value: Any = value, point: Any = point) -> Any:
            if tap.heads is None:
                return in_torch(kind, value, point.value(rows)) / (point.scale or 1)
            size = value.shape[0]
            new, here = rows.clone(), slice(tap.heads[0] * size, (tap.heads[0] + 1) * size)
            new[..., here] = in_torch(kind, value, rows[..., here])
            return new

        def after(_module: Any, _inputs: Any, output: Any, change: Any = change) -> Any:
            return (change(output[0]), *output[1:]) if isinstance(output, tuple) else change(output)

        def before(_module: Any, args: Any, kwargs: Any, change: Any = change) -> Any:
            if args:
                return (change(args[0]), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}

        if point.side == "output":
            point.module.register_forward_hook(after)
        else:
            point.module.register_forward_pre_hook(before, with_kwargs=True)


def loaded(case: str, folder: Path) -> tuple[Params, ModelConfig]:
    files = model_files.find(str(cases.write_model(case, folder)))
    return weights.load(files, jnp.float32, head=True), files.config


def run(params: Params, rows: Any, config: ModelConfig, taps: tuple[Tap, ...], **more: Any) -> tuple[Any, ...]:
    """Compute tokens, or tokens, positions and segments, in one program."""
    found: tuple[Any, ...] = jax.jit(lambda p, *r: forward(p, *r, config=config, taps=taps, **more))(params, *rows)
    return found


def transformers_model(folder: Path) -> Any:
    from transformers import AutoModelForCausalLM

    logging.getLogger("transformers").setLevel(logging.ERROR)
    options = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


@pytest.mark.torch
@pytest.mark.parametrize("case", cases.CASES)
def test_steering_equals_hooks_of_transformers(case: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    params, config = loaded(case, tmp_path)
    steering = steering_of(config)
    taps = (Tap("residual", 0), Tap("residual", 2), Tap("final_norm"), Tap("logits", top=config.vocab_size))
    samples, rows = packed(case)
    found, plain = (run(tree, rows, config, taps) for tree in (replace(params, steering=steering), params))
    model = transformers_model(tmp_path)
    with_edits(model, steering)
    with torch.inference_mode():
        wanted = [model(torch.from_numpy(tokens)[None].long()).logits[0].numpy() for tokens in samples]
    wanted = [np.sort(each, axis=-1)[:, ::-1] for each in wanted]
    for ours, theirs, without in zip(split(found[3]), wanted, split(plain[3]), strict=True):
        assert cases.distance(ours, theirs) < TOLERANCE
        assert cases.distance(without, theirs) > 100 * TOLERANCE  # the edits do change something


def test_steered_scans_and_packed_rows_equal_single_layers_and_samples() -> None:
    config = replace(cases.config("gemma2"), n_layers=8, windows=(5, None) * 4)
    params = random(config, jax.random.key(0), head=True)
    runs = layer_runs(config, (), 8, max_steps=8)
    assert [run.period for run in runs] == [2]
    taps = tuple(Tap("residual", layer) for layer in range(8))
    edits = (Tap("residual", 3), Tap("mlp", 4), Tap("z", 6, (1, 3)), Tap("resid_pre", 5))
    widths = (24, 24, 16, 24)
    vectors = [draw(3, 24) if number == 3 else draw(width) for number, width in enumerate(widths)]
    steering = Steering(edits, ("add", "ablate", "zero", "patch"), tuple(vectors))
    samples, rows = packed("gemma2")
    single = replace(params, steering=steering)
    joined = replace(stack_layers(params, runs, lambda leaves: jnp.stack(leaves)), steering=steering)
    plain, alone, scanned = (
        np.stack([np.asarray(x)[0] for x in _flat(run(tree, rows, config, taps, **more))])
        for tree, more in ((params, {}), (single, {}), (joined, {"runs": runs}))
    )
    np.testing.assert_allclose(scanned, alone, atol=2e-5)
    assert np.abs(plain[:3] - alone[:3]).max() == 0
    assert np.abs(plain[3] - alone[3]).max() > 0.1
    own = np.stack([np.asarray(x)[0] for x in run(single, [samples[1][None]], config, taps)])
    np.testing.assert_allclose(alone[:, LENGTHS[0] : LENGTHS[0] + LENGTHS[1]], own, atol=2e-5)


def _flat(found: tuple[Any, ...]) -> list[Any]:
    """Return one array per layer; a scan with a period of two returns two stacks."""
    if found[0].ndim == 3:
        return list(found)
    return [stack[step] for step in range(len(found[0])) for stack in found]


# -- attention --------------------------------------------------------------------------------------------------------


def dense(weights: Any, ids: Any, heads: int, length: int) -> np.ndarray:
    """Return the matrix ``[heads, queries, keys]`` of one sample from its largest weights."""
    top = weights.shape[-1] // heads
    weights, ids = (np.asarray(each).reshape(-1, heads, top) for each in (weights, ids))
    out = np.zeros((len(weights), heads, length + 1))
    np.put_along_axis(out, ids.astype(int), weights, axis=2)
    return out[..., :-1].transpose(1, 0, 2)


@pytest.mark.torch
@pytest.mark.parametrize("case", cases.CASES)
def test_patterns_and_heads_equal_transformers(case: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    params, config = loaded(case, tmp_path)
    few = 4
    kinds = [("pattern", None, 64), ("pattern_ids", None, 64), ("pattern", (1,), few), ("head_out", None, None)]
    taps = tuple(Tap(kind, layer, heads, top) for layer in range(3) for kind, heads, top in kinds)
    samples, rows = packed(case)
    found = run(params, rows, config, taps)
    ours = {str(tap): split(each) for tap, each in zip(taps, found, strict=True)}
    model = transformers_model(tmp_path)
    inputs: dict[int, Any] = {}
    _keep_inputs_of_output_projections(model, inputs)
    for number, tokens in enumerate(samples):
        with torch.inference_mode():
            theirs = model(torch.from_numpy(tokens)[None].long(), output_attentions=True).attentions
        for layer in range(3):
            wanted = theirs[layer][0, :, :, : len(tokens)].double().numpy()
            full = (ours[f"{kind}.{layer}.top64"][number] for kind in ("pattern", "pattern_ids"))
            np.testing.assert_allclose(dense(*full, config.n_heads, len(tokens)), wanted, atol=2e-5)
            largest = -np.sort(-wanted[1], axis=-1)[:, :few]
            np.testing.assert_allclose(ours[f"pattern.{layer}.1.top{few}"][number], largest, atol=2e-5)
            z, weight = inputs[layer]
            by_head = np.einsum("shd,mhd->shm", z.reshape(len(tokens), config.n_heads, -1), weight)
            flat = by_head.reshape(len(tokens), -1) * (config.residual_scale or 1.0)
            assert cases.distance(ours[f"head_out.{layer}"][number], flat) < TOLERANCE


def _keep_inputs_of_output_projections(model: Any, inputs: dict[int, Any]) -> None:
    """Keep z and the output projection ``[d_model, heads, head_dim]`` of each layer, from transformers alone."""
    from spile.compute.torch_backend import find_hook_point, find_layers

    for layer in range(3):
        module = find_hook_point(model, find_layers(model), Tap("z", layer)).module
        weight = module.weight.T if type(module).__name__ == "Conv1D" else module.weight

        def keep(_module: Any, args: Any, layer: int = layer, weight: Any = weight) -> None:
            z = args[0].reshape(args[0].shape[-2], -1).double().numpy()
            heads = model.config.get_text_config().num_attention_heads
            inputs[layer] = z, weight.detach().double().numpy().reshape(weight.shape[0], heads, -1)

        module.register_forward_pre_hook(keep)


@pytest.mark.parametrize("case", ["gemma2", "gpt-oss"])
def test_patterns_of_packed_rows_sum_to_one_and_explain_z(case: str, tmp_path: Path) -> None:
    """With soft caps, windows and sinks: the weights times the values are `z`, and the heads add up to `attn`."""
    params, config = loaded(case, tmp_path)
    names = ("pattern.1.top64", "pattern_ids.1.top64", "v.1", "z.1", "head_out.1")
    taps = tuple(map(Tap.parse, names))
    _, rows = packed(case)
    found = dict(zip(names, map(split, run(params, rows, config, taps)), strict=True))
    for largest, ids, v, z, heads in zip(*found.values(), strict=True):
        matrix = dense(largest, ids, config.n_heads, len(v))
        total = matrix.sum(axis=-1)
        assert total.max() < 1 + 1e-5
        assert total.min() < 0.99 if config.sinks else total.min() > 1 - 1e-5
        assert not np.triu(matrix, 1).any()
        values = v.reshape(len(v), config.n_kv_heads, -1).repeat(config.n_heads // config.n_kv_heads, axis=1)
        np.testing.assert_allclose(np.einsum("hqk,khd->qhd", matrix, values).reshape(z.shape), z, atol=1e-4)
        o = np.asarray(params.layers[1].o, np.float64)
        np.testing.assert_allclose(heads.reshape(len(v), config.n_heads, -1).sum(axis=1), z @ o.T, atol=1e-4)


# -- gradients --------------------------------------------------------------------------------------------------------

_KINDS_WITH_GRADIENT = ("residual", "attn", "mlp", "z", "mlp_hidden")


def gradient_taps(config: ModelConfig) -> tuple[Tap, ...]:
    taps = [
        Tap(kind, layer)
        for layer in range(3)
        for kind in _KINDS_WITH_GRADIENT
        if kind != "mlp_hidden" or config.sizes(layer)["d_ff"]
    ]
    return with_gradients([Tap("embed"), *taps, Tap("final_norm")])


@pytest.mark.torch
@pytest.mark.parametrize("case", cases.CASES)
def test_gradients_equal_those_of_transformers(case: str, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    params, config = loaded(case, tmp_path)
    taps = gradient_taps(config)
    samples, rows = packed(case)
    found = run(params, rows, config, taps)
    ours = {tap: split(each) for tap, each in zip(taps, found, strict=True)}
    theirs, exact = (
        _transformers_gradients(tmp_path, taps, samples, dtype) for dtype in (torch.float32, torch.float64)
    )
    for tap, numbers in exact.items():
        distances = [
            sum(float(np.linalg.norm(found[tap][number] - wanted)) for number, wanted in enumerate(numbers))
            for found in (ours, theirs)
        ]
        size = sum(float(np.linalg.norm(wanted)) for wanted in numbers)
        assert size > 0
        # The contract of docs/models.md: at most three times the distance of transformers' own float32 from float64.
        assert distances[0] <= max(3 * distances[1], 1e-6 * size), (tap, distances, size)


def _transformers_gradients(
    folder: Path, taps: Sequence[Tap], samples: Sequence[Any], dtype: Any
) -> dict[Tap, list[Any]]:
    """Return the gradient of each sample's loss at each tap, from a model of transformers in this dtype."""
    import torch

    from spile.compute.torch_backend import find_hook_point, find_layers

    model = transformers_model(folder).to(dtype)
    kept: dict[Tap, Any] = {}
    scales: dict[Tap, float] = {}
    for tap in (tap for tap in taps if tap.gradient):
        point = find_hook_point(model, find_layers(model), replace(tap, gradient=False))
        scales[tap] = point.scale or 1.0

        def keep(value: Any, tap: Tap = tap) -> None:
            value.retain_grad()
            kept[tap] = value

        if point.side == "output":
            point.module.register_forward_hook(lambda _m, _i, out, k=keep: k(out[0] if isinstance(out, tuple) else out))
        else:
            point.module.register_forward_pre_hook(lambda _m, args, k=keep: k(args[0]))
    found: dict[Tap, list[Any]] = {tap: [] for tap in taps if tap.gradient}
    for tokens in samples:
        ids = torch.from_numpy(tokens)[None].long()
        model(ids, labels=ids).loss.backward()
        for tap, value in kept.items():
            found[tap].append(value.grad.reshape(len(tokens), -1).double().numpy() / scales[tap])
    return found


def test_gradients_of_packed_rows_are_those_of_each_sample_and_of_its_loss(tmp_path: Path) -> None:
    params, config = loaded("gemma2", tmp_path)
    tap = Tap("residual", 0)
    samples, rows = packed("gemma2")
    together = split(run(params, rows, config, with_gradients([tap]))[1])[1]
    row = [samples[1][None]]
    alone = np.asarray(run(params, row, config, with_gradients([tap]))[1])[0]
    np.testing.assert_allclose(together, alone, atol=2e-6)
    step = 2e-3 * draw(*alone.shape)

    def mean_loss(sign: float) -> float:
        (loss,) = run(params, row, config, (Tap("loss"),), edits=[(tap, lambda x, info: x + sign * step)])
        return float(np.asarray(loss, np.float64)[0, :-1].mean())

    measured = (mean_loss(1.0) - mean_loss(-1.0)) / 2
    assert measured == pytest.approx(float((alone * step).sum()), rel=0.05, abs=1e-5)
