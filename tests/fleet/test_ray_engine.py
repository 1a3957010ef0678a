"""``--engine ray`` on a real cluster: a head, and nodes in network namespaces that die, join and are cut off."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.fakes.gcs import FakeGcs

import spile
from fleet.ray_nodes import NOTICE_CUT_LINKS, RAY, WHY_NOT, RayNodes, can_make_namespaces
from fleet.ssh.loopback import wait_until
from spile.cli.main import main
from spile.data.split import make_streams
from spile.objects import Folder, open_folder
from spile.proof.verification import verify
from spile.store.layout import find_streams

pytestmark = pytest.mark.skipif(not RAY, reason=WHY_NOT)
BUCKET = "gs://runs"


@pytest.fixture
def cluster(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[RayNodes]:
    """A head; its nodes and the bucket are on the same bridge."""
    if not can_make_namespaces():
        pytest.skip("no network namespaces here")
    nodes = RayNodes(NOTICE_CUT_LINKS if "cut_link" in request.node.name else None)
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
    return command(
        cluster, "extract", "--engine", "ray", "--ray-address", cluster.address, "--model", "embedded", *words
    )


def command(cluster: RayNodes, *words: str, stderr: int = subprocess.STDOUT) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "spile.cli.main", *words],
        env=cluster.env,
        stdout=subprocess.PIPE,
        stderr=stderr,
        text=True,
    )


def streams(tmp_path: Path, count: int) -> None:
    from spile.data.manifest import upload

    make_streams("embedded", tmp_path / "streams", count)
    upload(tmp_path / "streams", open_folder(f"{BUCKET}/streams"))


def proven(root: Folder) -> None:
    report = verify(root)
    assert report.ok, [problem.line() for problem in report.all_problems]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_an_ordinary_cluster_loses_a_node_and_gains_one(cluster: RayNodes, tmp_path: Path) -> None:
    """Ray's own settings, 16 streams on 3 nodes: a node dies, another joins, Ctrl+C, the same command again."""
    streams(tmp_path, 16)
    for number in range(1, 4):
        cluster.start(number)
    words = ["--dataset-dir", f"{BUCKET}/streams", "--output", f"{BUCKET}/out", "--num-workers", "3"]
    words += ["--predictions-per-task", "4", "--shard-size-gb", "1e-6"]
    run = start(cluster, *words)
    root = open_folder(f"{BUCKET}/out")
    assert wait_until(lambda: any(True for _ in root.list("stream_")) and len(find_streams(root)) >= 3, 200)
    cluster.kill(1)
    cluster.start(4)
    assert wait_until(lambda: len(find_streams(root)) >= 6, 200)
    run.send_signal(signal.SIGINT)
    out, _ = run.communicate(timeout=200)
    assert run.returncode == 130, out
    assert "was lost (" in out
    assert out.rstrip().endswith("the same command again resumes")
    again = start(cluster, *words)
    out, _ = again.communicate(timeout=280)
    assert again.returncode == 0, out
    assert "streams      16 of 16 done" in out
    assert "was lost" not in out, "a cluster with Ray's settings keeps its workers"
    proven(root)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_cut_link_is_noticed(cluster: RayNodes, tmp_path: Path) -> None:
    """With the settings that the guide recommends; each sample is stored once at the end."""
    streams(tmp_path, 6)
    for number in range(1, 3):
        cluster.start(number)
    words = ["--dataset-dir", f"{BUCKET}/streams", "--output", f"{BUCKET}/out", "--num-workers", "2"]
    run = start(cluster, *words, "--predictions-per-task", "4", "--shard-size-gb", "1e-6")
    root = open_folder(f"{BUCKET}/out")
    assert wait_until(lambda: any(True for _ in root.list("stream_")) and len(find_streams(root)) >= 2, 200)
    cluster.cut(1)
    cluster.start(3)
    out, _ = run.communicate(timeout=280)
    assert run.returncode == 0, out
    assert "was lost (" in out or "is silent; another takes over" in out, out  # Ray, or spile on a busy machine
    proven(root)


def test_the_folder_that_ray_unpacks_and_deletes_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under ray job submit --working-dir."""
    folder = tmp_path / "session_1" / "runtime_resources" / "working_dir_files" / "_ray_pkg_0123"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    line = refused(capsys, "--output", "out")
    assert line == (
        "spile: --output out is inside the working directory that Ray unpacked for this job and deletes after it. "
        "Name a bucket, or the absolute path of a folder that all nodes share."
    )
    assert list(folder.iterdir()) == []


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["extract", "--engine", "ray", "--model", "embedded", *words])
    assert ended.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_missing_cluster_is_reported_at_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    line = refused(capsys, "--ray-address", "127.0.0.1:9", "--output", str(tmp_path / "out"))
    assert line.startswith(
        "spile: no Ray cluster at 127.0.0.1:9: found [Errno 111] Connection refused. Name the head's"
    )
    line = refused(capsys, "--ray-address", "nonsense", "--output", str(tmp_path / "out"))
    assert line == "spile: --ray-address: expected HOST:6379 or ray://HOST:10001, found 'nonsense'"
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_missing_parts_of_nodes_are_reported_before_the_run_starts(cluster: RayNodes, tmp_path: Path) -> None:
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

    def answer_tokens(need: str, *words: str) -> str:
        flags = ["--dataset-dir", f"{BUCKET}/streams", "--output", f"{BUCKET}/out", "--resources", need]
        process = start(cluster, *flags, *words)
        out, _ = process.communicate(timeout=180)
        assert process.returncode == 2, out
        return out.splitlines()[-1]

    line = answer_tokens("TPU=4")
    assert line.startswith("spile: --resources TPU=4: expected a node that has them, found ")
    assert "node1: CPU=1, older=1" in line
    assert f"node1: expected spile {spile.__version__}, found 0.0.1" in answer_tokens("older=1")
    assert "node2: no spile there (ModuleNotFoundError: No module named 'spile.errors')" in answer_tokens("none=1")
    assert answer_tokens("far=1").startswith("spile: 1 of 1 nodes cannot work: found node3: ")
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
    proven(root)
    names = [info.key for info in root.list("stream_") if info.key.endswith(".safetensors")]
    assert {name.rpartition("-h")[2] for name in names} == {"00.safetensors", "01.safetensors"}, names


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_verify_and_inspect_give_the_same_reports_as_without_an_engine(cluster: RayNodes, tmp_path: Path) -> None:
    """Also of a damaged dataset, if a node dies meanwhile, and if one does not see the dataset."""
    ray = ["--engine", "ray", "--ray-address", cluster.address, "--num-workers", "2"]

    def read(*words: str) -> tuple[int, str, str]:
        run = command(cluster, *words, stderr=subprocess.PIPE)
        out, err = run.communicate(timeout=400)
        return run.returncode, out, err

    for number in (1, 2):
        cluster.start(number)
    root = str(tmp_path / "out")
    code, out, err = read("extract", "--model", "embedded", "--output", root, "--shard-size-gb", "1e-3")
    assert code == 0, out + err
    for words in (["inspect", root, "--stats", "--json"], ["verify", root, "--json"]):
        alone, together = read(*words), read(*words, *ray)
        assert alone[:2] == together[:2], together
        assert alone[0] == 0
    shard = sorted(Path(root).rglob("*.safetensors"))[3]
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    alone = read("verify", root, "--json")
    slow = command(cluster, "verify", root, "--json", *ray, stderr=subprocess.PIPE)
    assert wait_until(lambda: any("--part" in words for words in cluster.commands(1)), 300)
    cluster.kill(1)
    out, err = slow.communicate(timeout=400)
    assert (slow.returncode, out) == alone[:2], err
    assert alone[0] == 1
    assert "part 0-0:" in err
    assert "was lost (" in err
    cluster.start(3)
    cluster.hide(3, root)
    code, out, err = read("verify", root, *ray)
    assert (code, out) == (2, "")
    assert err.startswith(f"spile: 1 of 2 nodes cannot work: found node3: it does not see {root}/"), err
