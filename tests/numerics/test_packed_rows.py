"""Packed samples give the same numbers as each sample alone, independent of their neighbours."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from numerics import cases
from numerics.test_against_transformers import load
from spile.models.decoder import forward
from spile.spec.taps import Tap

LENGTH = 64


class Piece(NamedTuple):
    """The first tokens of a golden sample, at a place in a row."""

    row: int
    start: int
    sample: int
    size: int


RAGGED = (
    Piece(0, 0, 0, 28), Piece(0, 28, 1, 17), Piece(0, 45, 0, 1), Piece(0, 46, 1, 18),
    Piece(1, 0, 1, 1), Piece(1, 1, 0, 13), Piece(1, 14, 1, 28),
    Piece(2, 0, 1, 28),
)  # fmt: skip
"""A full row, one with padding, and one of a single sample."""


def ragged(tokens: np.ndarray) -> tuple[Piece, ...]:
    """Pieces of these samples."""
    return tuple(piece._replace(size=min(piece.size, tokens.shape[1])) for piece in RAGGED)


def of_piece(tap: Tap, whole: np.ndarray, piece: Piece) -> np.ndarray:
    """Return the golden values of a piece."""
    part = whole[piece.sample, : piece.size].copy()
    part[-1] = 0 if tap.kind == "loss" else part[-1]  # nothing follows a piece's last token
    return part


def packed(pieces: tuple[Piece, ...], golden: np.ndarray, filler: np.ndarray) -> tuple[np.ndarray, ...]:
    """Tokens, positions, segments; ``filler`` stands where no piece does."""
    tokens, positions, segments = filler.copy(), np.zeros_like(filler), np.zeros_like(filler)
    for number, piece in enumerate(pieces, 1):
        place = piece.row, slice(piece.start, piece.start + piece.size)
        tokens[place] = golden[piece.sample, : piece.size]
        positions[place], segments[place] = np.arange(piece.size), number
    return tokens, positions, segments


@pytest.mark.parametrize("case", cases.EACH_OPTION)
def test_every_piece_equals_the_golden(case: str, tmp_path: Path) -> None:
    golden = load_file(cases.golden_path(case))
    params, config = load(case, tmp_path)
    pieces = ragged(golden["tokens"])
    rows = packed(pieces, golden["tokens"], np.zeros((3, LENGTH), np.int32))
    step = jax.jit(functools.partial(forward, config=config, taps=cases.taps(case)))
    found: dict[str, float] = {}
    for tap, values in zip(cases.taps(case), step(params, *rows), strict=True):
        ours = [np.asarray(values)[piece.row, piece.start : piece.start + piece.size] for piece in pieces]
        wanted = [of_piece(tap, golden[str(tap)], piece) for piece in pieces]
        if tap.kind == "logits_ids":
            np.testing.assert_array_equal(np.concatenate(ours), np.concatenate(wanted))
        else:
            found[str(tap)] = cases.distance(np.concatenate(ours), np.concatenate(wanted))
    assert not cases.contract(found, cases.own_distances(golden, case))


@functools.cache
def _step(case: str, folder: Path) -> tuple[Any, Any, int]:
    params, config = load(case, folder)
    run = jax.jit(functools.partial(forward, config=config, taps=(Tap("attn", 2), Tap("residual", 2))))
    return run, params, config.vocab_size


@pytest.mark.parametrize("case", ["qwen2-tied", "mistral-window"])
@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_neighbours_and_padding_change_no_bit(case: str, tmp_path_factory: Any, data: st.DataObject) -> None:
    run, params, vocabulary = _step(case, tmp_path_factory.getbasetemp() / case)
    size = data.draw(st.integers(1, LENGTH))
    start = data.draw(st.integers(0, LENGTH - size))
    draw = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    segments = np.sort(draw.integers(1, 5, (2, LENGTH))).astype(np.int32)
    own = slice(start, start + size)
    segments[0, own], segments[0, own.stop :] = 9, segments[0, own.stop :] + 10
    positions = np.zeros_like(segments)
    positions[0, own] = np.arange(size)
    mine = draw.integers(0, vocabulary, size).astype(np.int32)

    def rows(poison: bool) -> list[np.ndarray]:
        tokens = draw.integers(0, vocabulary, segments.shape).astype(np.int32)
        tokens[0, own] = mine
        embed = np.array(params.embed)
        if poison:
            embed[tokens[1]] = 1e18
        embed[mine] = np.asarray(params.embed)[mine]
        poisoned = dataclasses.replace(params, embed=jnp.asarray(embed))
        return [np.asarray(tap)[0, own] for tap in run(poisoned, tokens, positions, segments)]

    for one, other in zip(rows(False), rows(True), strict=True):
        assert np.isfinite(one).all()
        np.testing.assert_array_equal(one, other)
