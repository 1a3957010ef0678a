"""The phases a worker really goes through, on the screen and in its heartbeat."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from backends import cloud_url, clouds, shared_clouds
from spile.compute.device import DeviceProducer
from spile.compute.progress import Progress
from spile.errors import ModelError
from spile.objects import open_folder
from spile.run import worker as module
from spile.run.worker import run_stream
from spile.spec.phase import Phase
from spile.spec.run import DataSpec, RunSpec
from spile.store.heartbeat import read_beat

__all__ = ["cloud_url", "clouds", "shared_clouds"]


class Recorded(Progress):
    def phase(self, phase: Phase, detail: str = "") -> None:
        super().phase(phase, detail)
        self.__dict__.setdefault("seen", []).append(phase)


@pytest.fixture
def spec(tmp_path: Path) -> RunSpec:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"text": f"{n} a b"}) + "\n" for n in range(4)))
    return RunSpec(data=DataSpec(dataset=str(data), max_seq_length=64), output=str(tmp_path / "out"), layers=(0,))


def test_every_phase_of_a_worker_is_set_and_in_order(spec: RunSpec) -> None:
    progress = Recorded()
    run_stream(spec, progress=progress)
    order = [Phase.LOOKING, Phase.LOADING, Phase.COMPILING, Phase.RUNNING, Phase.WRITING, Phase.DONE]
    seen = list(dict.fromkeys(progress.__dict__["seen"]))
    # The program is compiled beside the loading: where that took longer, nobody waits for the compiler.
    assert seen in (order, [phase for phase in order if phase is not Phase.COMPILING])


def test_a_run_is_writing_only_after_the_model_has_computed_all_batches(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    progress, fetch = Recorded(), DeviceProducer.fetch

    def recorded(self: DeviceProducer, pending: object) -> Any:
        time.sleep(0.01)
        found = fetch(self, pending)
        progress.__dict__["seen"].append("fetched")
        return found

    monkeypatch.setattr(DeviceProducer, "fetch", recorded)
    run_stream(replace(spec, batch_size=1), progress=progress)
    assert progress.__dict__["seen"][-3:] == ["fetched", Phase.WRITING, Phase.DONE]


def test_the_first_lines_of_a_run_name_the_lengths_and_the_device(spec: RunSpec) -> None:
    seen: list[str] = []
    summary = run_stream(spec, progress=Progress(log=seen.append))
    assert seen[0] == "64 tokens: no prompt is longer; the longest of 4 has 3."
    assert seen[1] == f"embedded on {summary.device}"
    assert "cpu" in seen[1]
    again: list[str] = []
    run_stream(spec, progress=Progress(log=again.append))
    assert again == []  # Nothing was left to do, so that no device was used.


@pytest.mark.parametrize("cloud_url", ["gs"], indirect=True)
def test_the_end_of_a_run_into_a_bucket_is_an_upload(spec: RunSpec, cloud_url: str) -> None:
    progress = Recorded()
    run_stream(replace(spec, output=cloud_url), progress=progress)
    assert Phase.UPLOADING in progress.__dict__["seen"]
    assert Phase.WRITING not in progress.__dict__["seen"]


def test_a_stream_begun_before_says_that_it_is_loading_and_why_it_could_not(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loading takes minutes: without this a resumed stream's heartbeat would be the dead worker's for as long."""
    run_stream(replace(spec, data=replace(spec.data, max_samples=2)))
    stream = open_folder(spec.output).child("stream_0")

    def loads(*_: object) -> None:
        deadline = time.monotonic() + 120
        while (beat := read_beat(stream)) is None or beat.phase is not Phase.LOADING:
            assert time.monotonic() < deadline, beat
            time.sleep(0.01)
        raise ModelError("no such weights")

    monkeypatch.setattr(module, "make_producer", loads)
    with pytest.raises(ModelError, match="no such weights"):
        run_stream(spec)
    beat = read_beat(stream)
    assert beat is not None
    assert (beat.phase, beat.last_error) == (Phase.FAILED, "no such weights")


def test_a_new_stream_leaves_nothing_where_its_model_cannot_be_loaded(
    spec: RunSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loads(*_: object) -> None:
        raise ModelError("no such weights")

    monkeypatch.setattr(module, "make_producer", loads)
    with pytest.raises(ModelError):
        run_stream(spec)
    assert not Path(spec.output).exists()
