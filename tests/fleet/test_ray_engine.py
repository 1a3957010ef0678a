"""``--engine ray`` on a real cluster: a head and four nodes in network namespaces, and all that can happen to them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import spile
from fleet.ray_nodes import RAY, WHY_NOT, RayNodes, can_make_namespaces
from fleet.ssh.loopback import wait_until
from spile.cli.main import main
from spile.data.split import make_streams
from spile.objects import open_folder
from spile.store.streams import find_streams
from spile.store.verification import verify
from spile_fakes.gcs import FakeGcs

pytestmark = pytest.mark.skipif(not RAY, reason=WHY_NOT)
BUCKET = "gs://runs"


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[RayNodes]:
    """A head; its nodes and the bucket are on the same bridge."""
    if not can_make_namespaces():
        pytest.skip("no network namespaces here")
    nodes = RayNodes()
    try:
        with FakeGcs(host=nodes.gateway) as gcs:
            gcs.add_bucket("runs")
            nodes.env["STORAGE_EMULATOR_HOST"] = gcs.url
            monkeypatch.setenv("STORAGE_EMULATOR_HOST", gcs.url)
            nodes.start(0)
            yield nodes
    finally:
        nodes.close()


def start(cluster: RayNodes, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "spile.cli.main", "extract", "--engine", "ray", "--ray-address", cluster.address]
    return subprocess.Popen(
        [*command, "--model", "embedded", *words],
        env=cluster.env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def streams(tmp_path: Path, count: int) -> None:
    from spile.data.upload import upload

    make_streams("embedded", tmp_path / "streams", count)
    upload(tmp_path / "streams", open_folder(f"{BUCKET}/streams"))


@pytest.mark.slow
def test_a_node_dies_a_link_is_cut_a_node_joins(cluster: RayNodes, tmp_path: Path) -> None:
    """16 streams over 4 nodes; each sample once at the end, and the log says what happened."""
    streams(tmp_path, 16)
    for number in range(1, 5):
        cluster.start(number)
    words = ["--dataset-dir", f"{BUCKET}/streams", "--output", f"{BUCKET}/out", "--num-workers", "4"]
    began = time.monotonic()
    run = start(cluster, *words, "--predictions-per-task", "4", "--shard-size-gb", "1e-6")
    root = open_folder(f"{BUCKET}/out")
    assert wait_until(lambda: any(True for _ in root.list("tpu_")) and len(find_streams(root)) >= 4, 200)
    cluster.kill(1)
    assert wait_until(lambda: len(find_streams(root)) >= 6, 200)
    cluster.cut(2)
    cluster.start(5)
    out, _ = run.communicate(timeout=900)
    print(out, f"{time.monotonic() - began:.0f} s")
    assert run.returncode == 0, out
    assert "streams      16 of 16 done" in out
    assert "was lost; it continues on another" in out
    report = verify(root)
    assert report.ok, [problem.line() for problem in report.all_problems]


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["extract", "--engine", "ray", "--model", "embedded", *words])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_no_cluster_is_told_at_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = refused(capsys, "--ray-address", "127.0.0.1:9", "--output", str(tmp_path / "out"))
    assert line.startswith(
        "spile: no Ray cluster at 127.0.0.1:9: found [Errno 111] Connection refused; name the head's"
    )
    line = refused(capsys, "--ray-address", "nonsense", "--output", str(tmp_path / "out"))
    assert line == "spile: --ray-address: expected HOST:6379 or ray://HOST:10001, found 'nonsense'"
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_what_nodes_lack_is_told_before_the_run_starts(cluster: RayNodes, tmp_path: Path) -> None:
    """Each node has a resource of its own name, so that each can be asked for alone."""
    streams(tmp_path, 2)
    source = Path(spile.__file__).parent
    shutil.copytree(source, tmp_path / "older" / "spile", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "older" / "spile" / "version.py").write_text('__version__ = "0.0.1"\n')
    (tmp_path / "none" / "spile").mkdir(parents=True)
    (tmp_path / "none" / "spile" / "__init__.py").write_text("")
    cluster.start(1, "--resources", '{"older": 1}', env={"PYTHONPATH": str(tmp_path / "older")})
    cluster.start(2, "--resources", '{"none": 1}', env={"PYTHONPATH": str(tmp_path / "none")})
    cluster.start(3, "--resources", '{"far": 1}', env={"STORAGE_EMULATOR_HOST": "http://127.0.0.1:9"})

    def told(need: str, *words: str) -> str:
        flags = ["--dataset-dir", f"{BUCKET}/streams", "--output", f"{BUCKET}/out", "--resources", need]
        process = start(cluster, *flags, *words)
        out, _ = process.communicate(timeout=180)
        assert process.returncode == 2, out
        return out.splitlines()[-1]

    line = told("TPU=4")
    assert line.startswith("spile: --resources TPU=4: expected a node that has them, found ")
    assert "node1: CPU=1, older=1" in line
    assert f"node1: expected spile {spile.__version__}, found 0.0.1" in told("older=1")
    assert "node2: no spile there (ModuleNotFoundError: No module named 'spile.errors')" in told("none=1")
    assert told("far=1").startswith("spile: 1 of 1 nodes cannot work: found node3: ")
    assert list(open_folder(f"{BUCKET}/out").list()) == [], "nothing was begun"


@pytest.mark.slow
def test_hosts_as_one_worker(cluster: RayNodes, tmp_path: Path) -> None:
    """Two gangs' worth of streams on one gang of two nodes: each stream is stored by both hosts together."""
    streams(tmp_path, 2)
    for number in (1, 2):
        cluster.start(number)
    words = ["--dataset-dir", f"{BUCKET}/streams", "--output", f"{BUCKET}/out", "--hosts-per-worker", "2"]
    out, _ = (run := start(cluster, *words)).communicate(timeout=400)
    assert run.returncode == 0, out
    root = open_folder(f"{BUCKET}/out")
    report = verify(root)
    assert report.ok, [problem.line() for problem in report.all_problems]
    names = [info.key for info in root.list("tpu_") if info.key.endswith(".safetensors")]
    assert {name.rpartition("-h")[2] for name in names} == {"00.safetensors", "01.safetensors"}, names
