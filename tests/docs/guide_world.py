"""The environment of the old guides: buckets, a cloud, and a hub with the model and the dataset.

The model is a small one of Qwen2.5's kind with its 24 layers, the dataset a few tasks; the servers and commands are
real. What a machine would run is run here, or on real processes of the fake cloud.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.gcs import FakeGcs

from docs.old_guides import BARC, QWEN, OldLine
from fleet.cloud_world import World
from fleet.prompt import Prompt, prompt_of
from spile.objects import Folder, open_folder
from spile.proof.verification import verify
from spile.spec.taps import Tap
from spile.store.run import read_run
from spile.store.writer import read_stream
from unit.models.toy_hub import COMMIT, fake_hub
from unit.models.toy_models import small_model

__all__ = ["BUCKETS", "LAYERS", "GuideWorld", "guide_world", "one_machine"]

BUCKETS = ("fineweb-data-us-central1", "your-bucket-name", "your-bucket", "my-bucket", "bucket")
LAYERS = 24
ROWS = 96


def barc_rows(count: int = ROWS) -> list[dict[str, Any]]:
    """Rows as the guides' dataset has them, each another task."""
    return [
        {"examples": [[[[number // 10, number % 10]], [[number % 10, shift]]] for shift in range(3)]}
        for number in range(count)
    ]


def stream_text(first: int = 0, count: int = 3) -> bytes:
    """A stream of prepared tasks."""
    tasks = [
        {
            "task_id": f"t{number}",
            "train": [{"input": [[1, number % 10]], "output": [[number % 10]]}] * 2,
            "test": [{"input": [[number % 10]], "output": [[1]]}],
        }
        for number in range(first, first + count)
    ]
    return "".join(json.dumps(task) + "\n" for task in tasks).encode()


@dataclass
class GuideWorld:
    """A working directory, a command prompt and the servers around them."""

    world: World
    prompt: Prompt
    monkeypatch: pytest.MonkeyPatch
    model: Path

    @property
    def folder(self) -> Path:
        return self.world.folder

    def type(self, line: str, environment: Mapping[str, str] | None = None) -> tuple[int, str]:
        """A line of a guide after ``spile``, as written, with the variables that the guide exports before it."""
        with self.monkeypatch.context() as patch:
            for name, value in (environment or {}).items():
                patch.setenv(name, value)
            return self.prompt(*shlex.split(self.here(line)))

    def here(self, text: str) -> str:
        """A container's folders are the test's."""
        return text.replace("/app/", f"{self.folder}/app/")

    def put(self, location: str, data: bytes) -> str:
        """A file or an object where a guide has it; its sha256."""
        parent, _, name = location.rpartition("/")
        if "://" not in parent:
            Path(parent).mkdir(parents=True, exist_ok=True)
        open_folder(parent).put(name, data)
        return hashlib.sha256(data).hexdigest()

    def answer(self, text: str) -> None:
        """The user sits at a terminal and answers what is asked."""
        self.monkeypatch.setenv("TTY_COMPATIBLE", "1")
        self.monkeypatch.setattr("sys.stdin", io.StringIO(text))

    def no_machines(self) -> None:
        """Machines of the cloud are there, and run nothing: what they would run is run by the test."""
        self.monkeypatch.setattr(self.world.cloud.cloud, "_on_start", lambda _: None)

    def fleet(self, bucket: str) -> bytes:
        data: bytes = self.world.gcs.buckets.buckets[bucket].objects["fleet/default/fleet.json"].data
        return data

    def proven(self, root: str, worker: int, sha256: str, layers: tuple[int, ...] | None = None) -> None:
        """The dataset has just this worker's rows of just this data, of the guides' model, and is whole."""
        folder: Folder = open_folder(root)
        report = verify(folder, streams=[worker])
        assert report.ok, [problem.line() for problem in report.all_problems]
        run, stream = read_run(folder), read_stream(folder.child(f"tpu_{worker}"))
        assert run is not None
        assert stream is not None
        assert (run.model, run.revision, run.n_layers) == (QWEN, COMMIT, LAYERS)
        assert stream.identity.sha256 == sha256
        assert stream.identity.taps == tuple(Tap("residual", layer) for layer in layers or range(LAYERS))


@contextlib.contextmanager
def guide_world(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[GuideWorld]:
    model = small_model(folder / "model", LAYERS)
    with FakeGcs() as gcs, fake_hub(model, QWEN) as hub:
        for name in BUCKETS:
            gcs.add_bucket(name)
        world = World(folder / "here", gcs)
        hubs = {"HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "hub"), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        world.environment |= hubs
        world.cloud.vms.environment |= hubs
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder / "hub" / "hub"))
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        monkeypatch.setenv("JAX_PLATFORMS", "cpu")
        _with_dataset(monkeypatch)
        monkeypatch.setattr("spile.fleet.manage.POLL_SECONDS", 0.05)
        with world.cloud:
            yield GuideWorld(world, prompt_of(world, monkeypatch, capfd), monkeypatch, model)


def _with_dataset(monkeypatch: pytest.MonkeyPatch) -> None:
    """The guides' dataset, at the edge: the library that would stream it."""
    import datasets

    def load(name: str, *_: object, **__: object) -> object:
        assert name == BARC
        return datasets.Dataset.from_list(barc_rows()).to_iterable_dataset()

    monkeypatch.setattr(datasets, "load_dataset", load)
    monkeypatch.setattr("spile.data.tables._check_connection", lambda: None)


def one_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make this machine a single host, independent of its variables."""
    from spile.run.pod.identity import Identity

    monkeypatch.setattr("spile.cli.flags.PodFlags.identity", lambda *_: Identity(0, 1))


Ending = Callable[[GuideWorld, OldLine], None]
"""Prepares the results of the guide's earlier steps, runs the line and checks the result."""
