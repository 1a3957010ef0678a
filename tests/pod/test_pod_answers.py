"""Answers on a pod equal those of one process, over data and model parallel meshes, each sample once."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pod.launching import launch
from spile.proof.verification import verify
from spile.reading.dataset import open as open_dataset
from spile.run.worker import run_stream
from spile.spec.run import DataSpec, GenerationSpec, RunSpec
from unit.models.toy_models import small_model

COUNT = 7
"""More than there are slots, and no multiple of the devices."""

BODY = """
import json
from spile.run.worker import run_stream
from spile.spec.run import DataSpec, RunSpec, GenerationSpec
with join(identity, times=PodTimes(120, 120, 60)) as pod:
    hosts = pod
    for name, mesh, drawing in json.loads({cases!r}):
        data = DataSpec(dataset={tasks!r}, max_seq_length=64, long="skip")
        spec = RunSpec(model={model!r}, data=data, output={root!r} + "/" + name, store_dtype="float32",
                           layers=(0, 1), batch_size=1, mesh_shape=tuple(mesh), shard_size_gb=1e-5,
                           generation=GenerationSpec(9, **drawing))
        assert run_stream(spec, hosts=hosts).complete, name
"""
DRAWING = {"temperature": 0.7, "top_p": 0.9}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = [{"text": f"{number} a b c d {number} e f g {'h ' * number}"} for number in range(COUNT)]
    file = tmp_path_factory.mktemp("tasks") / "tasks.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def answer_tokens(root: Path) -> list[tuple[int, list[int]]]:
    lines = (root / "stream_0" / "predictions.jsonl").read_text().splitlines()
    return [(one["sample"], one["tokens"]) for one in map(json.loads, lines)]


@pytest.mark.parametrize(
    ("processes", "cases"),
    [
        (2, [("data", (2, 1), DRAWING)]),
        pytest.param(4, [("data", (4, 1), {}), ("both", (2, 2), DRAWING)], marks=pytest.mark.slow),
    ],
)
def test_processes_give_the_answers_of_one(
    tmp_path: Path, tasks: Path, processes: int, cases: list[tuple[str, tuple[int, int], dict[str, float]]]
) -> None:
    model = str(small_model(tmp_path / "model", 2))
    body = BODY.format(cases=json.dumps(cases), tasks=str(tasks), root=str(tmp_path), model=model)
    with launch(tmp_path, body, processes, devices=1) as group:
        ended = group.wait(280)
    assert [end.code for end in ended] == [0] * processes, [end.err[-1500:] for end in ended]
    for name, _, drawing in cases:
        alone = tmp_path / f"{name}-alone"
        data = DataSpec(dataset=str(tasks), max_seq_length=64, long="skip")
        spec = RunSpec(model=model, data=data, output=str(alone), store_dtype="float32", layers=(0, 1),
                           batch_size=3, mesh_shape=(1, 1), generation=GenerationSpec(9, **drawing))  # fmt: skip
        assert run_stream(spec).complete
        assert answer_tokens(tmp_path / name) == answer_tokens(alone)
        report = verify(str(tmp_path / name))
        assert report.ok, report.all_problems
        found, reference = open_dataset(str(tmp_path / name)), open_dataset(str(alone))
        for sample in reference.samples:
            ours, theirs = found.sample(0, sample.index), reference.sample(0, sample.index)
            np.testing.assert_array_equal(ours.tokens, theirs.tokens)
            rows = theirs.rows("residual.1")
            scale = np.sqrt(np.mean(np.square(rows)))
            np.testing.assert_allclose(ours.rows("residual.1"), rows, atol=1e-4 * scale, rtol=0)
