"""The model on devices as a producer: rows in their positions, and one-line errors."""

from __future__ import annotations

import functools
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spile.compute import device
from spile.compute.batches import Batch
from spile.compute.device import DeviceProducer, configure_jax
from spile.compute.mesh import make_mesh
from spile.compute.producer import DoesNotCompile, OutOfDeviceMemory, check_tokens
from spile.compute.progress import Progress
from spile.errors import Failure, ModelError
from spile.models import model_files
from spile.models.decoder import forward
from spile.models.params import LayerRun, Params, layer_runs, one_run_per_layer
from spile.models.weights import load
from spile.run.resolve import compute_dtype_for
from spile.spec.sample import Sample
from spile.spec.taps import Tap, select_taps

FILES = model_files.find("embedded")
TAPS = (Tap("attn", 0), Tap("residual", 1))


def sample(index: int, length: int, highest: int = 100) -> Sample:
    tokens = np.random.default_rng(index).integers(0, highest, length).astype(np.int32)
    return Sample(index, f"task-{index}", tokens, np.zeros(length, np.uint8), preview="")


BATCH = Batch((((sample(0, 9), sample(1, 5)), (sample(2, 1),)),), rows=4, length=16)
"""Two samples in one row, one in another, and two rows of padding."""


@pytest.fixture(scope="module")
def params() -> Params:
    return load(FILES, "float32", 2)


@pytest.fixture
def producer(params: Params) -> Iterator[DeviceProducer]:
    made = DeviceProducer(
        params,
        FILES.config,
        TAPS,
        store_dtype="float32",
        mesh=make_mesh((1, 1)),
        attention="xla",
        dtype="float32",
    )
    yield made
    made.close()


def test_rows_are_packed_sample_after_sample(producer: DeviceProducer, params: Params) -> None:
    blocks = producer.fetch(producer.start(BATCH))
    assert [[block.group for block in of_tap] for of_tap in blocks] == [[0], [0]]
    step = jax.jit(functools.partial(forward, config=FILES.config, taps=TAPS))
    alone = [step(params, jnp.asarray(s.tokens[None])) for s in BATCH.samples]
    for of_tap, wanted in zip(blocks, zip(*alone, strict=True), strict=True):
        real = np.concatenate([np.asarray(whole[0]) for whole in wanted])
        np.testing.assert_allclose(of_tap[0].rows[: len(real)], real, rtol=1e-5, atol=1e-5)


def test_a_larger_block_holds_the_same_rows(params: Params) -> None:
    """On an accelerator all blocks have one size; here it is forced."""
    made = DeviceProducer(
        params,
        FILES.config,
        TAPS,
        store_dtype="bfloat16",
        mesh=make_mesh((1, 1)),
        attention="xla",
        dtype="float32",
    )
    small = made.fetch(made.start(BATCH))[0][0].rows
    made._block = 128
    made._programs.clear()
    large = made.fetch(made.start(BATCH))[0][0].rows
    assert (len(small), len(large)) == (64, 128)
    np.testing.assert_array_equal(small[:15].astype(np.float32), large[:15].astype(np.float32))
    made.close()


def test_only_the_selected_rows_leave_the_device(producer: DeviceProducer, params: Params) -> None:
    some = DeviceProducer(
        params,
        FILES.config,
        TAPS,
        store_dtype="float32",
        mesh=make_mesh((1, 1)),
        attention="xla",
        dtype="float32",
        positions="last",
    )

    def last(sample: Sample) -> Sample:
        return replace(sample, positions=np.array([len(sample) - 1], np.int32))

    batch = replace(BATCH, groups=tuple(tuple(tuple(map(last, row)) for row in group) for group in BATCH.groups))
    places = np.cumsum([len(sample) for sample in BATCH.samples]) - 1
    rows = [of_tap[0].rows for of_tap in some.fetch(some.start(batch))]
    wanted = [of_tap[0].rows[places] for of_tap in producer.fetch(producer.start(BATCH))]
    assert {len(found) for found in rows} == {BATCH.rows * BATCH.length // 16}
    for found, expected in zip(rows, wanted, strict=True):
        np.testing.assert_allclose(found[: len(places)], expected, rtol=1e-5, atol=1e-5)
    some.close()


@pytest.mark.parametrize("kinds", [pytest.param(("residual",), marks=pytest.mark.slow), ("mlp", "residual")])
def test_layers_in_a_scan_give_the_same_rows_each_to_its_tap(kinds: tuple[str, ...]) -> None:
    count = FILES.config.n_layers
    taps = tuple(reversed(select_taps(kinds, None, count)))  # the run's order is not the taps'
    runs = layer_runs(FILES.config, taps, count, 99)
    assert runs == (LayerRun(0, 1, count),)

    def made(runs: tuple[LayerRun, ...], shift: float = 0.0) -> DeviceProducer:
        params = load(FILES, "float32", runs=runs)
        if shift:
            (stack,) = params.layers
            params = replace(params, layers=(replace(stack, up=stack.up.at[-1].add(shift)),))
        mesh = make_mesh((1, 1))
        more = {"store_dtype": "float32", "attention": "xla", "dtype": "float32"}
        return DeviceProducer(params, FILES.config, taps, mesh=mesh, runs=runs, **more)  # type: ignore[arg-type]

    scanned, alone = (each.fetch(each.start(BATCH)) for each in (made(runs), made(one_run_per_layer(count))))
    for tap, one, other in zip(taps, scanned, alone, strict=True):
        assert [block.group for block in one] == [0]
        np.testing.assert_allclose(one[0].rows[:15], other[0].rows[:15], rtol=1e-5, atol=1e-5, err_msg=str(tap))
    broken = made(runs, float("inf"))
    with pytest.raises(Failure, match=f"NaN or infinity at {', '.join(map(str, taps[: len(kinds)]))}: expected finite"):
        broken.fetch(broken.start(BATCH))


def test_a_cpu_does_not_convert_the_weights_of_all_layers_at_once() -> None:
    taps = select_taps(("residual",), None, FILES.config.n_layers)
    runs = (LayerRun(0, 1, FILES.config.n_layers),)
    params = load(FILES, "bfloat16", runs=runs)
    mesh = make_mesh((1, 1))
    more = {"store_dtype": "bfloat16", "attention": "xla", "dtype": "bfloat16"}
    made = DeviceProducer(params, FILES.config, taps, mesh=mesh, runs=runs, **more)  # type: ignore[arg-type]
    stacked = sum(leaf.nbytes for leaf in jax.tree.leaves(params.layers))
    assert made.compile((1, 16, 16)).memory_analysis().temp_size_in_bytes < stacked
    made.close()


def test_tokens_beyond_the_vocabulary_are_refused_before_anything_runs(producer: DeviceProducer) -> None:
    size = FILES.config.vocab_size
    check_tokens([sample(1, 4)], size)
    beyond = Sample(7, "seven", np.array([3, size], np.int32), np.zeros(2, np.uint8), preview="")
    with pytest.raises(ModelError) as caught:
        producer.start(Batch((((sample(0, 4), beyond),),), 2, 16))
    assert str(caught.value) == (
        f"the tokenizer is not this model's: sample 7 (seven): expected tokens below the model's vocabulary of "
        f"{size:,}, found {size}. Give the model its own tokenizer files."
    )


@pytest.mark.parametrize(
    ("store_dtype", "hint"), [("float32", ""), ("float16", ". Use --store-dtype bfloat16, which holds")]
)
def test_nan_names_its_taps(params: Params, store_dtype: str, hint: str) -> None:
    first, second = params.layers
    broken = replace(params, layers=(first, replace(second, up=second.up * jnp.inf)))
    made = DeviceProducer(
        broken, FILES.config, TAPS, store_dtype=store_dtype, mesh=make_mesh((1, 1)), attention="xla", dtype="float32"
    )
    with pytest.raises(Failure) as caught:
        made.fetch(made.start(BATCH))
    assert str(caught.value).startswith("NaN or infinity at residual.1: expected finite activations" + hint)
    made.close()


def test_what_the_device_says_is_translated(producer: DeviceProducer) -> None:
    def fails(text: str) -> Future[object]:
        future: Future[object] = Future()
        future.set_exception(jax.errors.JaxRuntimeError(text))
        return future

    producer._programs[(4, 16, 64)] = fails("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes")  # type: ignore[assignment]
    with pytest.raises(OutOfDeviceMemory, match="the device's memory ran out"):
        producer.start(BATCH)
    producer._programs[(4, 16, 64)] = fails("INTERNAL: the chip\nis on fire")  # type: ignore[assignment]
    with pytest.raises(Failure, match="the device failed: INTERNAL: the chip is on fire"):
        producer.start(BATCH)


def test_a_kernel_that_does_not_compile_is_replaced_with_one_line(params: Params, producer: DeviceProducer) -> None:
    """The splash kernel does not compile for a CPU."""
    lines: list[str] = []
    made = DeviceProducer(
        params, FILES.config, TAPS, store_dtype="float32", mesh=make_mesh((1, 1)), attention="flash", dtype="float32",
        progress=Progress(log=lines.append),
    )  # fmt: skip
    with pytest.raises(
        Failure, match=r"^the program does not compile for cpu: Only interpret mode is supported on CPU"
    ):
        made._compile((4, 16, 64), "flash")
    found, wanted = made.fetch(made.start(BATCH)), producer.fetch(producer.start(BATCH))
    made.fetch(made.start(replace(BATCH, rows=8)))
    np.testing.assert_array_equal(found[0][0].rows, wanted[0][0].rows)
    assert [line.startswith("the program does not compile for cpu: Only interpret mode") for line in lines] == [True]
    assert lines[0].endswith("Attention is computed by XLA instead of the flash kernel, which is slower")
    assert made.attention == "xla"
    made.close()


class MosaicError(Exception):
    """A compiler's error that is not a JaxRuntimeError, as of kernels for TPUs."""


MOSAIC = """INTERNAL: Mosaic failed to compile TPU kernel: E2001: Unsupported RHS type: vector<128x128xbf16>
See https://openxla.org/xla/errors/error_2001 for more details.

The MLIR operation involved:
  %4722 = "tpu.matmul"(%4717, %4719, %4721)"""


@pytest.mark.parametrize(
    ("error", "kind", "line"),
    [
        (
            MosaicError(MOSAIC),
            DoesNotCompile,
            "the program does not compile for cpu: INTERNAL: Mosaic failed to compile TPU kernel: E2001: Unsupported "
            "RHS type: vector<128x128xbf16> See https://openxla.org/xla/errors/error_2001 for more "
            "details.",
        ),
        (NotImplementedError(), DoesNotCompile, "the program does not compile for cpu: NotImplementedError"),
        (
            jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem"),
            DoesNotCompile,
            "the program does not compile for cpu: RESOURCE_EXHAUSTED: Ran out of memory in memory space vmem",
        ),
        (
            jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm"),
            OutOfDeviceMemory,
            "the device's memory ran out",
        ),
    ],
)
def test_what_compilers_say_is_one_line(error: Exception, kind: type[Failure], line: str) -> None:
    traced = Mock()
    traced.lower.return_value.compile.side_effect = error
    with pytest.raises(Failure) as caught:
        device.compile_traced(traced, make_mesh((1, 1)))
    assert (type(caught.value), str(caught.value)) == (kind, line)


def test_no_other_attention_is_tried_if_memory_runs_out() -> None:
    tried: list[str] = []

    def compile_for(attention: str) -> None:
        tried.append(attention)
        raise OutOfDeviceMemory("the device's memory ran out")

    with pytest.raises(OutOfDeviceMemory):
        device.compile_with_fallback("flash", compile_for, tried.append)
    assert tried == ["flash"]


def test_closing_forgets_programs_without_waiters(
    params: Params, monkeypatch: pytest.MonkeyPatch, producer: DeviceProducer
) -> None:
    go = threading.Event()
    monkeypatch.setattr(producer, "compile", lambda shape: go.wait(60))
    many = [Batch((((sample(0, 5),),),), rows, 64) for rows in range(1, 2 + 2 * device._COMPILERS)]
    for batch in many:
        producer.prepare(batch)
    producer.close()
    go.set()
    assert any(program.cancelled() for program in producer._programs.values())


def test_the_dtype_that_fits_a_platform() -> None:
    assert [compute_dtype_for(name) for name in ("cpu", "gpu", "tpu")] == ["float32", "bfloat16", "bfloat16"]


def test_describing(producer: DeviceProducer) -> None:
    assert producer.describe() == "1 × cpu, float32, xla attention"


def test_a_plugin_that_cannot_start_is_a_line_and_no_traceback(caplog: pytest.LogCaptureFixture) -> None:
    """The message of JAX's CUDA plugin on a machine without a driver."""
    configure_jax()
    try:
        raise RuntimeError("Unable to load cuPTI. Is it installed?")
    except RuntimeError:
        logging.getLogger("jax._src.xla_bridge").exception("%s error", "Jax plugin configuration")
    (record,) = caplog.records
    assert record.getMessage() == "Jax plugin configuration error: Unable to load cuPTI. Is it installed?"
    assert "Traceback" not in caplog.text


def test_a_home_that_cannot_be_written_to_costs_the_cache_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen: dict[str, object] = {}
    monkeypatch.setattr(jax.config, "update", chosen.__setitem__)
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    (tmp_path / "file").write_text("no folder can be made below a file, whoever asks")
    configure_jax()
    assert chosen == {}
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    configure_jax()
    assert chosen["jax_compilation_cache_dir"] == str(tmp_path / "cache" / "spile" / "xla")
