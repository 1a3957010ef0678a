from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from spile.fleet.cloud_tpu import CloudTpu
from spile.fleet.fake_cloud.cloud import Pace
from spile.fleet.fake_cloud.server import FakeCloud
from spile.fleet.settings import read_settings


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[FakeCloud]:
    with FakeCloud(tmp_path / "cloud", pace=Pace(create=0.05, delete=0.05, queue=0.05)) as cloud:
        yield cloud


@pytest.fixture
def client(fake: FakeCloud) -> Iterator[CloudTpu]:
    provider = CloudTpu(read_settings(fake.environment()), sleep=lambda _: None)
    yield provider
    provider.close()
