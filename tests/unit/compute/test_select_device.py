"""``--device``: the device that is named is used, or the error says what is missing."""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

import spile as package
from spile.compute import mesh, torch_backend
from spile.errors import SpecError
from spile.run.resolve import use_device
from unit.cli.refusals import lines, spile


@pytest.fixture(autouse=True)
def _same_platforms() -> object:
    before = jax.config.jax_platforms
    yield
    jax.config.update("jax_platforms", before)


def with_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh, "entry_points", lambda group: [SimpleNamespace(name="xla_cuda13")])


def with_device_file(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh, "_has_device_file", lambda *_patterns: True)


def test_a_cpu_is_a_cpu() -> None:
    assert mesh.select_device("cpu") == "cpu"


def test_a_cpu_is_a_cpu_of_the_torch_backend() -> None:
    pytest.importorskip("torch")
    assert use_device("cpu", "torch") == "cpu"


def test_cuda_without_a_plugin_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh, "entry_points", lambda group: [])
    with pytest.raises(SpecError, match=r"^--device cuda: JAX has no CUDA plugin. Run: pip install 'spile\[cuda\]'"):
        mesh.select_device("cuda")


def test_cuda_without_a_device_names_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    with_plugin(monkeypatch)
    monkeypatch.setattr(mesh, "_has_device_file", lambda *_patterns: False)
    with pytest.raises(SpecError, match="no NVIDIA GPU, or its driver is not loaded: no /dev/nvidia0"):
        mesh.select_device("cuda")


def test_cuda_without_a_driver_library_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with_plugin(monkeypatch)
    with_device_file(monkeypatch)

    def absent(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", absent)
    with pytest.raises(SpecError, match=r"the NVIDIA driver was not found: libcuda.so.1.*Install the driver"):
        mesh.select_device("cuda")


def test_libraries_that_do_not_match_the_driver_are_quoted(monkeypatch: pytest.MonkeyPatch) -> None:
    with_plugin(monkeypatch)
    with_device_file(monkeypatch)
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: None)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def fail() -> str:
        raise RuntimeError("Unable to initialize backend 'cuda': CUDA_ERROR_SYSTEM_DRIVER_MISMATCH")

    monkeypatch.setattr(jax, "default_backend", fail)
    with pytest.raises(SpecError, match=r"CUDA did not start: .*DRIVER_MISMATCH.*nvidia-smi.*or use --device cpu"):
        mesh.select_device("cuda")


def test_a_failed_choice_does_not_change_the_next_one(monkeypatch: pytest.MonkeyPatch) -> None:
    before = jax.config.jax_platforms
    with pytest.raises(SpecError):
        mesh.select_device("cuda")
    assert jax.config.jax_platforms == before


def test_tpu_without_libtpu_and_without_a_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh, "find_spec", lambda _name: None)
    with pytest.raises(SpecError, match=r"libtpu is not installed. Run: pip install 'spile\[tpu\]'"):
        mesh.select_device("tpu")
    monkeypatch.setattr(mesh, "find_spec", lambda _name: object())
    monkeypatch.setattr(mesh, "_has_device_file", lambda *_patterns: False)
    with pytest.raises(SpecError, match=r"this machine has no TPU"):
        mesh.select_device("tpu")


def test_a_device_after_another_one_needs_a_new_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    with pytest.raises(SpecError, match="--device cpu: this process already runs JAX on gpu; start another one"):
        mesh.select_device("cpu")


def test_torch_refuses_a_gpu_that_it_cannot_use(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = SimpleNamespace(
        version=SimpleNamespace(cuda=None), cuda=SimpleNamespace(device_count=lambda: 0, is_available=lambda: False)
    )
    monkeypatch.setitem(sys.modules, "torch", fake)
    with pytest.raises(SpecError, match=r"--device cuda: PyTorch was installed without CUDA. Install"):
        torch_backend.torch_devices("cuda")
    with pytest.raises(SpecError, match="--device tpu: expected --backend jax"):
        torch_backend.torch_devices("tpu")
    fake.cuda.device_count = lambda: 2
    assert torch_backend.torch_devices("auto") == torch_backend.torch_devices("cuda") == ("cuda:0", "cuda:1")
    assert torch_backend.torch_devices("cpu") == ("cpu",)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="has an accelerator")
def test_extract_and_worker_refuse_before_they_write(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data = lines(tmp_path / "two.jsonl", {"text": "one"}, {"text": "two"})
    assert spile("extract", "--dataset", data, "--output", tmp_path / "out", "--device", "cuda") == 2
    assert "--device cuda: JAX has no CUDA plugin" in capfd.readouterr().err
    assert not (tmp_path / "out" / "run.json").exists()
    spec = package.RunSpec(data=package.DataSpec(dataset=str(data)), output=str(tmp_path / "out"), device="cuda")
    (tmp_path / "spec.json").write_bytes(spec.to_json())
    assert spile("worker", "--spec", tmp_path / "spec.json", "--stream", "0") == 2
    assert "--device cuda" in capfd.readouterr().err
    with pytest.raises(SpecError, match=r"device.*JAX has no CUDA plugin"):
        package.tap("embedded", ["one"], device="cuda")


def test_another_device_continues_a_run(tmp_path: Path) -> None:
    data = [{"text": "one"}, {"text": "two"}]
    package.extract(data=data, output=tmp_path / "out", layers=0, max_samples=1, device="cpu")
    assert package.extract(data=data, output=tmp_path / "out", layers=0).samples == 2
