"""The program of a run is compiled and run before the work, and what fails is one line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import pytest

from spile.cli.main import main
from spile.compute import device, generator
from spile.errors import UserError
from spile.models import weights
from spile.run.pod import check
from spile.run.pod.pod import WorkerGroup
from spile.spec.run import make_spec

FAILURE = jax.errors.JaxRuntimeError("INTERNAL: Mosaic failed to compile TPU kernel: E2001: Unsupported RHS type\n\nIR")
LINE = (
    "this worker cannot run embedded: the program does not compile for cpu: INTERNAL: Mosaic failed to compile TPU "
    "kernel: E2001: Unsupported RHS type. Another machine or other flags are needed; docs/tpu.md lists what compiles "
    "for each TPU."
)


def fail(*_: object) -> Any:
    raise device.convert_error(FAILURE, device.DoesNotCompile, "the program does not compile for cpu") from FAILURE


@pytest.mark.parametrize(
    ("values", "infer"),
    [
        ({}, False),
        ({"taps": ["logits", "loss"], "store_dtype": "int8", "positions": "last"}, False),
        ({"gradients": "loss", "layers": "0,2", "positions": "mean"}, False),
        ({"layers": "1", "capture": "both"}, True),
        ({"capture": "none"}, True),
    ],
)
def test_the_program_runs_without_the_weights(
    values: dict[str, Any], infer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "locate_tensors", fail)
    lines: list[str] = []
    check.check_program(make_spec({"model": "embedded", **values}, infer=infer), WorkerGroup(), lines.append)
    assert len(lines) == 1
    assert lines[0].startswith("✓ The program of embedded compiles and runs on 1 × cpu")


@pytest.mark.parametrize(("module", "infer"), [(device, False), (generator, True)])
def test_a_program_that_does_not_compile_is_one_line(module: Any, infer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "compile_traced", fail)
    with pytest.raises(UserError) as caught:
        check.check_program(make_spec({"model": "embedded"}, infer=infer), WorkerGroup(), lambda _: None)
    assert str(caught.value) == LINE


def test_a_worker_checks_before_it_claims(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A CPU stands for a TPU here."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "stream_000.jsonl").write_text('{"text": "a"}\n')
    spec = make_spec(
        {"model": "embedded", "dataset_dir": str(tmp_path / "data"), "output": str(tmp_path / "out"), "prompt": "text"}
    )
    monkeypatch.setattr(check, "CHECKED_PLATFORMS", ("cpu",))
    words = ["worker", "--spec", spec.to_json().decode(), "--claim"]
    with monkeypatch.context() as broken:
        broken.setattr(device, "compile_traced", fail)
        with pytest.raises(SystemExit) as ended:
            main(words)
    assert ended.value.code == 2
    assert capsys.readouterr().err.splitlines()[-1] == f"spile: {LINE}"
    assert not (tmp_path / "out").exists()
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0
    assert "✓ The program of embedded compiles and runs on 1 × cpu" in capsys.readouterr().out
