"""A run over ARC prompts compiles one program, or two where its tail differs, beside the reading of the weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from spile.compute.device import DeviceProducer
from spile.compute.progress import Progress
from spile.run.worker import run_stream
from spile.spec.run import DataSpec, RunSpec


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Return the shapes that programs were compiled for: rows per device, their length, and stored rows."""
    shapes: list[tuple[int, int, int]] = []
    real = DeviceProducer.compile

    def counting(self: DeviceProducer, shape: tuple[int, int, int]) -> object:
        shapes.append(shape)
        return real(self, shape)

    monkeypatch.setattr(DeviceProducer, "compile", counting)
    return shapes


def test_one_or_two_programs_are_compiled_and_the_wall_time_is_shown(
    tmp_path: Path, compiled: list[tuple[int, int, int]]
) -> None:
    spec = RunSpec(
        model="embedded", data=DataSpec(dataset="embedded", max_samples=14), output=str(tmp_path), layers=(0,)
    )
    progress = Progress.of_process()
    visit = run_stream(spec, progress=progress).progress
    assert 1 <= len(compiled) <= 2
    assert compiled[0] == (1, 4096, 4096)  # Without --positions, every row of the batch is stored.
    assert visit.shapes == len(compiled)
    names = {name.split(" ")[0] for _, _, name in progress.spans}
    assert {"interpreter", "devices", "weights", "compile"} <= names
    assert min(visit.wall.start, visit.wall.run) > 0
    assert visit.wall.total == pytest.approx(visit.wall.start + visit.seconds)


def test_a_wait_for_programs_is_not_called_the_model() -> None:
    progress = Progress()
    progress.start()
    progress.add_busy("model", 2.0)
    progress.compiled(1.0)
    assert progress.snapshot().limit == "model"
    progress.compiled(1.5)
    assert progress.snapshot().limit == "compiling"
