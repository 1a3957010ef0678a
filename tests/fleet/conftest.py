from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.cloud import CloudTimes
from tests.fakes.cloud_server import FakeCloud
from tests.fakes.cloud_vms import processes_marked
from tests.fakes.gcs import FakeGcs

from fleet.cloud_world import World
from fleet.prompt import Prompt, prompt_of
from programs import require
from spile.fleet.cloud_tpu import CloudTpu, read_settings


@pytest.fixture(autouse=True)
def _state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deployments of this computer are recorded separately for each test, and operations are fast."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setattr("spile.fleet.manage.POLL_SECONDS", 0.02)


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeCloud]:
    with FakeCloud(tmp_path / "cloud", times=CloudTimes(create=0.05, delete=0.05, queue=0.05)) as cloud:
        yield cloud


@pytest.fixture
def client(fake: FakeCloud) -> Iterator[CloudTpu]:
    provider = CloudTpu(read_settings(environment=fake.environment()), sleep=lambda _: None)
    yield provider
    provider.close()


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    require("curl")  # the startup script of its machines reads the metadata server with it
    with FakeGcs() as gcs:
        made = World(tmp_path, gcs)
        with made.cloud:
            yield made
            left = [mark for raw in made.cloud.cloud.nodes("-") for mark in [raw["id"]]]
        assert not any(processes_marked(mark) for mark in left), "the cloud's end leaves no process"


@pytest.fixture
def prompt(world: World, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Prompt:
    return prompt_of(world, monkeypatch, capfd)
