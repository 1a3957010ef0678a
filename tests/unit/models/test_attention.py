"""The implementations agree with a plain one and with each other."""

from __future__ import annotations

import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from spile.models import attention
from spile.models.architecture import ModelConfig
from spile.models.attention import AttentionOptions

CONFIG = ModelConfig("qwen2", 64, 2, 4, 2, 64, 64, 100)
PLAIN = AttentionOptions()


def slow(*sizes: tuple[int, int | None]) -> list[Any]:
    """Sizes that repeat what the others show."""
    return [pytest.param(*each, marks=pytest.mark.slow) for each in sizes]


def plain(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, window: int | None, segments: np.ndarray | None = None
) -> np.ndarray:
    """Written the long way, in float64, a query at a time."""
    out = np.zeros(q.shape)
    groups = q.shape[2] // k.shape[2]
    for row, place, head in np.ndindex(*q.shape[:3]):
        seen = np.arange(place + 1) > place - (window or q.shape[1])
        if segments is not None:
            seen &= segments[row, : place + 1] == segments[row, place]
        keys = k[row, : place + 1, head // groups].astype(np.float64)[seen]
        scores = keys @ q[row, place, head] / np.sqrt(q.shape[-1])
        weights = np.exp(scores - scores.max())
        out[row, place, head] = weights / weights.sum() @ v[row, : place + 1, head // groups][seen]
    return out


def inputs(length: int, heads: int = 4, kv_heads: int = 2, head_dim: int = 16, batch: int = 2) -> list[jax.Array]:
    draw = np.random.default_rng(length)
    sizes = (heads, kv_heads, kv_heads)
    return [jnp.asarray(draw.standard_normal((batch, length, size, head_dim)), jnp.float32) for size in sizes]


@pytest.mark.parametrize(
    ("length", "window"),
    [(1, None), (5, 1), (700, 300), *slow((5, None), (256, 7), (256, 300), (700, None), (700, 7))],
)
@pytest.mark.parametrize("name", ["xla", "blocked"])
def test_plain_attention_for_any_chunks(name: str, length: int, window: int | None) -> None:
    q, k, v = inputs(length, batch=1)
    found = attend(attention.ATTENTIONS[name], AttentionOptions(window))(q, k, v)
    np.testing.assert_allclose(found, plain(*map(np.asarray, (q, k, v)), window), atol=2e-6)


def attend(implementation: Any, options: AttentionOptions = PLAIN, **more: Any) -> Any:
    """Compile an implementation; without segments, each row is one."""

    def run(q: jax.Array, k: jax.Array, v: jax.Array, segments: jax.Array | None = None) -> jax.Array:
        segments = jnp.ones(q.shape[:2], jnp.int32) if segments is None else segments
        out: jax.Array = implementation(q, k, v, segments, options, **more)
        return out

    return jax.jit(run)


def pieces(length: int, rows: int, seed: int = 0) -> jax.Array:
    """Segments of every size, single tokens and a boundary at a chunk's among them; zeros, which are padding, last."""
    draw = np.random.default_rng(seed + length)
    ids = np.zeros((rows, length), np.int32)
    for row in range(rows):
        cuts = sorted({0, 1, 2, min(256, length), *draw.integers(0, length, 4).tolist(), length - length // 8})
        for number, (start, stop) in enumerate(itertools.pairwise(cuts), 1):
            ids[row, start:stop] = number
    return jnp.asarray(ids)


@pytest.mark.parametrize(
    ("length", "window"), [(5, 1), (600, 300), *slow((5, None), (256, None), (256, 7), (600, None))]
)
@pytest.mark.parametrize("name", ["xla", "blocked"])
def test_stays_within_a_segment(name: str, length: int, window: int | None) -> None:
    q, k, v = inputs(length, batch=2)
    segments = pieces(length, 2)
    found = attend(attention.ATTENTIONS[name], AttentionOptions(window))(q, k, v, segments)
    np.testing.assert_allclose(found, plain(*map(np.asarray, (q, k, v)), window, np.asarray(segments)), atol=2e-6)


@pytest.mark.parametrize(("length", "window"), [(130, 40), *slow((300, 1), (520, None))])
def test_flash_stays_within_a_segment(length: int, window: int | None) -> None:
    q, k, v = inputs(length, head_dim=64, batch=2)
    segments = pieces(length, 2)
    found = attend(attention.flash, AttentionOptions(window), interpret=True)(q, k, v, segments)
    np.testing.assert_allclose(found, attention.xla(q, k, v, segments, AttentionOptions(window)), atol=3e-6)


def test_blocks_with_a_soft_cap_and_in_bfloat16_are_what_whole_rows_of_scores_are() -> None:
    q, k, v = inputs(400, heads=6, kv_heads=3, batch=2)
    segments = pieces(400, 2)
    for dtype, off in ((jnp.float32, 2e-5), (jnp.bfloat16, 0.03)):
        cast = [x.astype(dtype) for x in (q * 30, k, v)]
        found = attend(attention.blocked, AttentionOptions(50, 20.0))(*cast, segments)
        assert found.dtype == dtype
        exact = attend(attention.xla, AttentionOptions(50, 20.0))(*(x.astype(jnp.float32) for x in cast), segments)
        np.testing.assert_allclose(found.astype(jnp.float32), exact, atol=off)


@pytest.mark.parametrize("name", ["xla", "blocked"])
def test_a_sink_is_a_key_without_a_value(name: str) -> None:
    q, k, v = inputs(300)
    sinks = jnp.asarray([0.5, 3.0, -2.0, 40.0])
    choices = (AttentionOptions(40), AttentionOptions(40, sinks=sinks))
    without, found = (attend(attention.ATTENTIONS[name], options)(q, k, v) for options in choices)
    # The scores of a query whose window is one position are q·k alone: its weight is a sigmoid.
    score = jnp.einsum("rhd,rhd->rh", q[:, 0], jnp.repeat(k[:, 0], 2, axis=1)) / 4.0
    weight = jax.nn.sigmoid(score - sinks)
    np.testing.assert_allclose(found[:, 0], without[:, 0] * weight[..., None], atol=2e-6)
    np.testing.assert_allclose(found, attend(attention.xla, choices[1])(q, k, v), atol=2e-6)
    assert float(jnp.abs(found[:, :, 3]).max()) < 1e-10
    with pytest.raises(ValueError, match="sinks"):
        attend(attention.cudnn, choices[1])(q, k, v)


def test_scores_beyond_what_an_exponential_holds_stay_finite() -> None:
    q, k, v = inputs(300, batch=1)
    found, exact = (attend(each)(q * 1e4, k * 1e4, v, pieces(300, 1)) for each in (attention.blocked, attention.xla))
    np.testing.assert_allclose(found, exact, atol=1e-5)


def test_chunks_are_few_and_bounded() -> None:
    for length in (1, 255, 256, 257, 1024, 2048, 4096, 32768):
        size = attention._chunk(length)
        assert 1 <= size <= 1024
        assert -(-length // size) <= max(8, length // 1024)


@pytest.mark.parametrize(("length", "window"), [(384, 200), *slow((128, None), (100, None))])
def test_flash_equals_xla(length: int, window: int | None) -> None:
    q, k, v = inputs(length, head_dim=64, batch=2)
    found = attend(attention.flash, AttentionOptions(window), interpret=True)(q, k, v)
    assert found.shape == q.shape
    np.testing.assert_allclose(found, attend(attention.xla, AttentionOptions(window))(q, k, v), atol=3e-6)


@pytest.mark.slow
def test_flash_in_bfloat16() -> None:
    q, k, v = (jnp.asarray(x, jnp.bfloat16) for x in inputs(200, head_dim=128, heads=4, kv_heads=1, batch=1))
    found = attend(attention.flash, interpret=True)(q, k, v)
    assert found.dtype == jnp.bfloat16
    exact = attend(attention.xla)(*(x.astype(jnp.float32) for x in (q, k, v)))
    np.testing.assert_allclose(found.astype(jnp.float32), exact, atol=0.03)


def test_over_mesh_is_the_same() -> None:
    mesh = Mesh(np.array(jax.devices()[:1]).reshape(1, 1), ("data", "model"))
    q, k, v = inputs(40)
    spread, segments = attention.attention_over_mesh("xla", mesh, "data", "model"), pieces(40, 2)
    found, alone = (attend(each, AttentionOptions(5))(q, k, v, segments) for each in (spread, attention.xla))
    np.testing.assert_array_equal(found, alone)


@pytest.mark.parametrize(
    ("platform", "kind", "dtype", "expected"),
    [
        ("cpu", "cpu", jnp.float32, "blocked"),
        ("cpu", "cpu", jnp.bfloat16, "blocked"),
        ("gpu", "NVIDIA H200", jnp.bfloat16, "cudnn"),
        ("cuda", "NVIDIA H200", jnp.bfloat16, "cudnn"),
        ("gpu", "NVIDIA H200", jnp.float32, "xla"),
        ("tpu", "TPU v2", jnp.bfloat16, "xla"),
        ("tpu", "TPU v3", jnp.bfloat16, "xla"),
        ("tpu", "TPU v4", jnp.bfloat16, "flash"),
        ("tpu", "TPU v5 lite", jnp.bfloat16, "flash"),
        ("tpu", "TPU7x", jnp.bfloat16, "flash"),
        ("tpu", "TPU v5 lite", jnp.float32, "xla"),
    ],
)
def test_choose(platform: str, kind: str, dtype: Any, expected: str) -> None:
    assert attention.choose(CONFIG, platform, kind, dtype) == expected
    assert expected in attention.ATTENTIONS


@pytest.mark.parametrize("window", [None, 40])
def test_cudnn_gets_no_mask_of_all_pairs_of_a_long_row(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    attend_now, masks = jax.nn.dot_product_attention, list[tuple[int, ...]]()

    def on_any_device(*arrays: jax.Array, mask: jax.Array, implementation: str, **options: Any) -> jax.Array:
        masks.append(mask.shape[-2:])
        return attend_now(*arrays, mask=mask, implementation="xla", **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", on_any_device)
    monkeypatch.setattr(attention, "_MOST_UNROLLED", 1000)
    q, k, v = inputs(1100, batch=2)
    segments = pieces(1100, 2)
    found = attention.cudnn(q, k, v, segments, AttentionOptions(window))
    np.testing.assert_allclose(found, attend(attention.blocked, AttentionOptions(window))(q, k, v, segments), atol=3e-6)
    assert max(queries for queries, _ in masks) <= 256


@pytest.mark.parametrize(("window", "cap"), [(None, None), (300, 20.0), (30, None)])
def test_a_long_row_is_computed_chunk_after_chunk(
    window: int | None, cap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = inputs(1100, batch=2)
    segments, options = pieces(1100, 2), AttentionOptions(window, cap, jnp.asarray([0.5, 3.0, -2.0, 4.0]), top=3)
    at_once = attention.xla(q, k, v, segments, options), *attention.largest_weights(q, k, segments, options)
    monkeypatch.setattr(attention, "_MOST_UNROLLED", 1000)
    in_turn = attention.xla(q, k, v, segments, options), *attention.largest_weights(q, k, segments, options)
    for one, other in zip(at_once, in_turn, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)


@pytest.mark.parametrize("name", ["xla", "gradient"])
def test_memory_grows_with_the_length_and_not_with_its_square(name: str) -> None:
    def temporary(length: int) -> int:
        q, segments = jnp.zeros((1, length, 2, 8)), jnp.zeros((1, length), jnp.int32)
        forward: Any = functools.partial(attention.xla, segments=segments, options=AttentionOptions())
        if name == "gradient":
            forward = jax.grad(lambda q, k, v: attention.xla(q, k, v, segments, AttentionOptions()).sum())
        found = jax.jit(forward).lower(q, q, q).compile().memory_analysis()
        return int(found.temp_size_in_bytes)

    assert temporary(32_768) < 5 * temporary(8192)
