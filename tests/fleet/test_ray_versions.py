"""A real cluster of another Ray or Python, told in one line before anything runs; a real node of one cannot join.

``SPILE_OTHER_RAY`` names interpreters that have another Ray, or are another Python with this Ray::

    python3.12 -m venv other && other/bin/pip install ray==2.60.0
    SPILE_OTHER_RAY=other/bin/python pytest tests/fleet/test_ray_versions.py
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet.ray_nodes import RAY, WHY_NOT, NotJoined, RayNodes, can_make_namespaces

OTHERS = [name for name in os.environ.get("SPILE_OTHER_RAY", "").split(":") if name]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not RAY, reason=WHY_NOT),
    pytest.mark.skipif(not OTHERS, reason="SPILE_OTHER_RAY names no Python with another Ray"),
]


@pytest.fixture
def cluster() -> Iterator[RayNodes]:
    if not can_make_namespaces():
        pytest.skip("no network namespaces here")
    nodes = RayNodes()
    try:
        yield nodes
    finally:
        nodes.close()


def versions(python: str) -> tuple[str, str]:
    """Of Ray and Python."""
    words = [python, "-c", "import platform, ray; print(ray.__version__, platform.python_version())"]
    ray, own = subprocess.run(words, capture_output=True, text=True, check=True).stdout.split()
    return ray, own


def extract(cluster: RayNodes, output: Path) -> str:
    """The one line that the command is refused with."""
    words = ["extract", "--engine", "ray", "--ray-address", cluster.address, "--model", "embedded"]
    command = [sys.executable, "-m", "spile.cli.main", *words, "--output", str(output)]
    ran = subprocess.run(command, env=cluster.env, capture_output=True, text=True, check=False, timeout=180)
    assert ran.returncode == 2, (ran.stdout, ran.stderr)
    (line,) = ran.stderr.splitlines()
    return line


@pytest.mark.parametrize("other", OTHERS)
def test_a_cluster_version_mismatch_names_both_versions(cluster: RayNodes, other: str, tmp_path: Path) -> None:
    cluster.start(0, python=other)
    ray, python = versions(other)
    ours, _ = versions(sys.executable)
    assert extract(cluster, tmp_path / "out").startswith(
        f"spile: the Ray cluster at {cluster.address} has a different version: expected Ray {ours} and Python "
        f"{platform.python_version()}, as here, found Ray {ray} and Python {python}. "
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("other", OTHERS)
def test_a_node_of_another_version_cannot_join(cluster: RayNodes, other: str) -> None:
    """Ray's own doing, which our look at every node relies on: it meets no other Ray or Python there."""
    cluster.start(0)
    with pytest.raises(NotJoined):
        cluster.start(1, python=other)
