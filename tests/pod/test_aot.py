"""The real TPU compiler, if it is installed, on the worker's program for several topologies."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spile.errors import SpecError
from spile.models.architecture import ModelConfig
from spile.planning.tpu_compiler import Fit, Program, _bisect, _last_words, available, largest, search
from spile.spec.taps import Tap

QWEN_05 = ModelConfig("qwen2", 896, 24, 14, 2, 64, 4864, 151936, qkv_bias=True, tied=True)
QWEN_7 = ModelConfig("qwen2", 3584, 28, 28, 4, 128, 18944, 152064, qkv_bias=True)


def program(config: ModelConfig, machine: str, mesh: tuple[int, int] | None = None, length: int = 2048) -> Program:
    taps = tuple(Tap("residual", layer) for layer in range(config.n_layers))
    return Program(config, taps, machine, length, mesh_shape=mesh)


@pytest.mark.parametrize("limit", [1, 2, 7, 8, 9, 63, 64, 100, 900])
@pytest.mark.parametrize("first", [1, 8, 64])
def test_the_search_ends_near_the_largest(limit: int, first: int) -> None:
    """A device with room for exactly ``limit`` rows over its weights, each row alike."""

    def ask(rows: int) -> Fit:
        memory, weights = 1000 + limit * 100 + 50, 1000
        fits = rows <= limit
        return Fit(rows, 128, (1, 1), memory, fits, weights, weights + rows * 100 if fits else 0)

    fits = list(_bisect(ask, first))
    best = largest(fits)
    assert best is not None
    assert limit / 1.35 - 1 <= best.rows <= limit
    assert len(fits) <= 6


def test_nothing_fits() -> None:
    fits = list(_bisect(lambda rows: Fit(rows, 128, (1, 1), 10, False), 64))
    assert largest(fits) is None
    assert fits[-1].rows == 1


@pytest.mark.parametrize(
    ("log", "line"),
    [
        (
            "Traceback:\nmosaic.MosaicError: INTERNAL: E2001\nSee https://openxla.org\n\nPlease report a bug at: https://x",
            "mosaic.MosaicError: INTERNAL: E2001",
        ),
        ("E1119 a\nF1119 20:11:18.5 Check failed: topology\n*** Check failure stack trace: ***\n@ 0x1", "F1119 20:11"),
        ("one\ntwo\n", "two"),
        ("", "no message"),
    ],
)
def test_the_cause_is_found_in_the_compilers_log(log: str, line: str) -> None:
    assert _last_words(log).startswith(line)


@pytest.mark.skipif(available(), reason="the compiler is here")
def test_without_the_compiler() -> None:
    with pytest.raises(SpecError, match=r"expected libtpu, found none\. Run: pip install 'spile\[tpu\]'"):
        list(search(program(QWEN_05, "v5e-4"), 1))


CASES = [
    (QWEN_05, "v3-8", None, 4),
    (QWEN_05, "tpu7x:2x2x1", None, 8),
    (QWEN_05, "v5e:2x2", None, 8),
    (QWEN_05, "v5e:8x8", None, 8),
    (QWEN_05, "v5e:16x16", (16, 16), 8),
    (QWEN_05, "v4-8", None, 8),
    (QWEN_05, "v6e-8", None, 8),
    (QWEN_7, "v5e:2x2", None, 1),
    (QWEN_7, "v5e:8x8", None, 1),
    (QWEN_7, "v5e:16x16", (16, 16), 1),
    (QWEN_7, "v4-16", None, 2),
    (QWEN_7, "v6e-16", None, 2),
]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not available(), reason="needs libtpu: pip install 'spile[tpu]'")
@pytest.mark.parametrize(("config", "machine", "mesh", "rows"), CASES, ids=lambda value: str(value)[:24])
def test_it_compiles_and_fits(config: ModelConfig, machine: str, mesh: tuple[int, int] | None, rows: int) -> None:
    (fit,) = search(program(config, machine, mesh), rows, find_largest=False)
    assert fit.fits, fit
    assert 0 < fit.weights < fit.peak <= fit.memory
    assert fit.host > 0.9 * rows * 2048 * config.d_model * 2 * (config.n_layers - 1)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.skipif(not available(), reason="needs libtpu: pip install 'spile[tpu]'")
def test_a_run_that_does_not_fit_is_reported() -> None:
    small = replace(QWEN_05, n_layers=4, windows=())
    (fit,) = search(program(small, "v5e-1", None, 2048), 4096, find_largest=False)
    assert not fit.fits
