"""``spile slurm job`` on a real slurmctld with three real slurmd: array, retries, cancel, preemption, time limit."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet.slurm_cluster import SlurmCluster, why_no_slurm
from fleet.ssh.loopback import wait_until
from ports import coordinator_port
from spile.cli.main import main
from spile.data.split import make_streams
from spile.objects import open_folder
from spile.proof.verification import verify
from spile.store.claims import ClaimReader

pytestmark = pytest.mark.skipif(bool(why_no_slurm()), reason=why_no_slurm() or "-")

WORKER = """#!/bin/bash
# Stands in for spile: says when it starts; on SIGTERM it takes a while to commit. A second SIGTERM ends it at once,
# unless it comes together with the first.
log="{folder}/$SLURM_ARRAY_TASK_ID.$SLURM_PROCID"
terms=0
again() {{ [ $terms = 0 ] || [ $(($(date +%s%N) - first)) -lt 500000000 ] || {{ echo lost >> "$log"; exit 130; }}; }}
trap 'again; terms=1; first=$(date +%s%N)' TERM
echo "start $SLURM_NODEID" >> "$log"
while [ $terms = 0 ]; do
  [ -e "{folder}/go" ] && exit "$(cat "{folder}/go")"
  sleep 0.1
done
for _ in $(seq 10); do sleep 0.2; done
echo committed >> "$log"
exit 130
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[SlurmCluster]:
    made = SlurmCluster()
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def slurm(cluster: SlurmCluster) -> Iterator[SlurmCluster]:
    yield cluster
    cluster.run("scancel", "--user=root")
    assert wait_until(lambda: cluster.jobs() == {}, 90)


class Job:
    """A job of the printed script, with the stand-in as ``spile``."""

    def __init__(
        self, slurm: SlurmCluster, folder: Path, capsys: pytest.CaptureFixture[str], *words: str, workers: int = 1
    ) -> None:
        self.slurm, self.folder = slurm, folder
        (folder / "bin").mkdir()
        (folder / "bin" / "spile").write_text(WORKER.format(folder=folder))
        (folder / "bin" / "spile").chmod(0o755)
        place = ["--dataset-dir", f"{folder}/streams", "--output", f"{folder}/out", "--log-dir", str(folder)]
        flags = [*place, "--num-workers", str(workers), "--setup", f"export PATH={folder}/bin:$PATH", *words]
        self.number = slurm.submit(printed(folder, capsys, *flags))

    def log(self, worker: int = 0, host: int = 0) -> list[str]:
        path = self.folder / f"{worker}.{host}"
        return path.read_text().splitlines() if path.exists() else []

    def output(self, worker: int = 0) -> str:
        path = self.folder / f"spile-{worker}.log"
        return path.read_text() if path.exists() else ""

    def state(self, worker: int = 0) -> str:
        return self.slurm.state(f"{self.number}_{worker}")

    def runs(self, hosts: int = 1, times: int = 1) -> bool:
        return wait_until(lambda: all(self.log(0, host).count(f"start {host}") == times for host in range(hosts)), 60)

    def end(self, code: int) -> None:
        (self.folder / "go").write_text(str(code))

    def ends(self, state: str, worker: int = 0) -> bool:
        return wait_until(lambda: self.state(worker) == state, 90)


def printed(folder: Path, capsys: pytest.CaptureFixture[str], *words: str) -> Path:
    with pytest.raises(SystemExit) as ended:
        main(["slurm", "job", "--model", "embedded", *words])
    out, err = capsys.readouterr()
    assert ended.value.code == 0, err
    (folder / "job.sh").write_text(out)
    return folder / "job.sh"


def test_an_array_has_a_task_for_each_worker(
    slurm: SlurmCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(slurm, tmp_path, capsys, "--cpus", "2", workers=4)
    assert wait_until(lambda: sum(len(job.log(worker)) for worker in range(4)) == 3, 60), "there are three nodes"
    assert len([state for state in slurm.jobs().values() if state == "RUNNING"]) == 3
    job.end(0)
    assert all(job.ends("COMPLETED", worker) for worker in range(4)), job.output()
    assert [len(job.log(worker)) for worker in range(4)] == [1, 1, 1, 1]


@pytest.mark.parametrize("hosts", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_scancel_ends_the_job_after_a_commit(
    hosts: int, slurm: SlurmCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(slurm, tmp_path, capsys, "--hosts-per-worker", str(hosts))
    assert job.runs(hosts)
    slurm.run("scancel", job.number)
    assert job.ends("CANCELLED"), job.output()
    assert wait_until(lambda: slurm.jobs() == {}, 60), "it is not requeued"
    assert [job.log(0, host) for host in range(hosts)] == [[f"start {host}", "committed"] for host in range(hosts)]
    assert slurm.show(f"{job.number}_0")["Restarts"] == "0"


@pytest.mark.parametrize(
    ("hosts", "partition"),
    [*(pytest.param(1, name, marks=pytest.mark.slow) for name in ("low", "graced")), (2, "graced")],
)
def test_a_preempted_job_commits_and_is_requeued(
    hosts: int, partition: str, slurm: SlurmCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(slurm, tmp_path, capsys, "--hosts-per-worker", str(hosts), "--partition", partition)
    assert job.runs(hosts)
    (tmp_path / "other.sh").write_text("#!/bin/bash\nsleep 1\n")
    slurm.submit(tmp_path / "other.sh", "--partition=high", "--nodes=3", "--exclusive", "--output=/dev/null")
    assert job.runs(hosts, times=2), job.output()
    assert [job.log(0, host) for host in range(hosts)] == [
        [f"start {host}", "committed", f"start {host}"] for host in range(hosts)
    ], job.output()
    assert slurm.show(f"{job.number}_0")["Restarts"] == "1"
    job.end(0)
    assert job.ends("COMPLETED")


@pytest.mark.slow
def test_every_task_of_a_preempted_array_is_requeued_once(
    slurm: SlurmCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last task has the array's own number: questions and orders about it meant all tasks, and it failed."""
    job = Job(slurm, tmp_path, capsys, "--partition", "graced", workers=3)
    assert wait_until(lambda: [len(job.log(worker)) for worker in range(3)] == [1, 1, 1], 60), job.output()
    (tmp_path / "other.sh").write_text("#!/bin/bash\nsleep 1\n")
    slurm.submit(tmp_path / "other.sh", "--partition=high", "--nodes=3", "--exclusive", "--output=/dev/null")
    again = ["start 0", "committed", "start 0"]
    assert wait_until(lambda: all(job.log(worker) == again for worker in range(3)), 60), job.output(2)
    assert [slurm.show(f"{job.number}_{worker}")["Restarts"] for worker in range(3)] == ["1", "1", "1"]
    job.end(0)
    assert all(job.ends("COMPLETED", worker) for worker in range(3))


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [1, 2])
def test_before_its_time_limit_a_job_commits_and_is_requeued(
    hosts: int, slurm: SlurmCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(slurm, tmp_path, capsys, "--hosts-per-worker", str(hosts), "--time", "1", "--grace", "30")
    assert wait_until(lambda: job.log(0, hosts - 1).count("committed") == 1, 120), job.output()
    assert job.runs(hosts, times=2), job.output()
    assert job.log(0)[:3] == ["start 0", "committed", "start 0"]
    job.end(0)
    assert job.ends("COMPLETED")


def test_retries_are_as_many_as_asked_for(
    slurm: SlurmCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "go").write_text("1")
    job = Job(slurm, tmp_path, capsys, "--retries", "1")
    assert job.ends("FAILED"), job.output()
    assert job.log(0) == ["start 0", "start 0"]
    assert job.output().count("of 2 ended with exit code 1") == 2
    assert slurm.show(f"{job.number}_0")["ExitCode"] == "1:0"


def test_a_mistake_is_not_tried_again(slurm: SlurmCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "go").write_text("2")
    job = Job(slurm, tmp_path, capsys)
    assert job.ends("FAILED"), job.output()
    assert job.log(0) == ["start 0"]
    assert "spile: worker 0 was refused; it is not tried again" in job.output()


class RealRun:
    """A run of the embedded model with real workers."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str], streams: int, *words: str) -> None:
        self.folder = folder
        make_streams("embedded", folder / "streams", streams)
        (folder / "bin").mkdir()
        (folder / "bin" / "spile").write_text(f'#!/bin/bash\nexec {sys.executable} -m spile.cli.main "$@"\n')
        (folder / "bin" / "spile").chmod(0o755)
        path = f"export PATH={folder}/bin:$PATH PYTHONPATH={os.environ.get('PYTHONPATH', '')} JAX_PLATFORMS=cpu"
        place = ["--dataset-dir", f"{folder}/streams", "--output", f"{folder}/out", "--log-dir", str(folder)]
        size = ["--shard-size-gb", "1e-6", "--predictions-per-task", "4"]
        self.script = printed(folder, capsys, *place, *size, *words, "--setup", path, "--grace", "60")

    def commits(self) -> int:
        return len(list((self.folder / "out").glob("*/commits/*.json")))

    def output(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob("spile-*.log")))

    def is_proven(self) -> None:
        report = verify(open_folder(f"{self.folder}/out"))
        assert report.ok, [problem.line() for problem in report.all_problems]


@pytest.mark.slow
@pytest.mark.parametrize("hosts", [1, 2])
def test_a_real_run_that_is_preempted_is_proven(
    hosts: int, slurm: SlurmCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The embedded model on three nodes; a job of another partition takes them while shards are committed."""
    workers = 3 // hosts
    host_flags = ["--hosts-per-worker", str(hosts), "--partition", "graced"]
    run = RealRun(tmp_path, capsys, workers + 1, *host_flags, "--num-workers", str(workers))
    with coordinator_port():
        number = slurm.submit(run.script)
        assert wait_until(lambda: run.commits() >= 2, 200), run.output()
        (tmp_path / "other.sh").write_text("#!/bin/bash\nsleep 1\n")
        slurm.submit(tmp_path / "other.sh", "--partition=high", "--nodes=3", "--exclusive", "--output=/dev/null")
        assert wait_until(lambda: slurm.jobs() == {}, 280), run.output()
    states = {slurm.state(f"{number}_{worker}") for worker in range(workers)}
    assert states == {"COMPLETED"}, run.output()
    assert "SIGTERM: finishing the batches in flight" in run.output()
    assert "ended with exit code" not in run.output(), "each worker ended by itself, after a commit"
    run.is_proven()


@pytest.mark.slow
def test_workers_are_added_and_cancelled_in_the_middle_of_a_run(
    slurm: SlurmCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One worker, then two more from the same script, then without the first: they share the streams by claims."""
    run = RealRun(tmp_path, capsys, 8, "--num-workers", "1")
    first = slurm.submit(run.script)
    assert wait_until(lambda: run.commits() >= 1, 200), run.output()
    slurm.submit(run.script, "--array=0-1", f"--output={tmp_path}/spile-more-%a.log")
    assert wait_until(lambda: len(owners(tmp_path)) >= 2, 200), run.output()
    slurm.run("scancel", first)
    assert wait_until(lambda: slurm.jobs() == {}, 280), run.output()
    assert slurm.state(f"{first}_0") == "CANCELLED"
    run.is_proven()
    assert len(owners(tmp_path)) >= 2


def owners(folder: Path) -> set[str]:
    return {each.worker for each in ClaimReader(open_folder(f"{folder}/out")).owners().values()}
