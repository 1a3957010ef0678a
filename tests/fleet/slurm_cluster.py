"""A real Slurm cluster on one machine: munged, slurmctld and three slurmd, in a folder of their own."""

from __future__ import annotations

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from fleet.ssh.loopback import below, end, wait_until
from ports import free_port
from spile.engines import child

_DAEMONS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "unshare")
NODES = ("n1", "n2", "n3")
_CHILD = str(Path(child.__file__))
CONFIG = """\
ClusterName=spile
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
SlurmctldPort={port}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,batch_sched_delay=1
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=2
KillWait=30
MpiDefault=none
MailProg=/bin/true
PartitionName=low Nodes=ALL Default=YES PriorityTier=1 PreemptMode=REQUEUE State=UP MaxTime=INFINITE
PartitionName=graced Nodes=ALL PriorityTier=1 PreemptMode=REQUEUE GraceTime=60 State=UP MaxTime=INFINITE
PartitionName=high Nodes=ALL PriorityTier=10 State=UP MaxTime=INFINITE
"""
START = """\
mount --bind {folder}/hosts /etc/hosts
export SLURM_CONF={folder}/slurm.conf
munged --force --socket={folder}/munge/socket --key-file={folder}/munge.key --pid-file={folder}/munge/pid \\
  --log-file={folder}/munge/log --seed-file={folder}/munge/seed --foreground &
until [ -S {folder}/munge/socket ]; do sleep 0.1; done
slurmctld -D > {folder}/slurmctld.out 2>&1 &
for node in {nodes}; do slurmd -D -N $node > {folder}/slurmd-$node.out 2>&1 & done
wait
"""


def why_no_slurm() -> str:
    """Return why a cluster cannot be started here, or an empty string."""
    missing = [name for name in _DAEMONS if shutil.which(name) is None]
    if missing:
        return f"no {', '.join(missing)} (apt-get install slurm-wlm munge)"
    return "" if os.geteuid() == 0 else "Slurm's daemons need root"


class SlurmCluster:
    """Three nodes with two processors each; the names n1 to n3 resolve for the daemons and their jobs only."""

    def __init__(self) -> None:
        folder = self.folder = Path(tempfile.mkdtemp(prefix="slurm-", dir="/tmp"))
        folder.chmod(0o755)
        for name in ("munge", "state", "spool"):
            (folder / name).mkdir(mode=0o755)
        (folder / "munge.key").write_bytes(secrets.token_bytes(1024))
        (folder / "munge.key").chmod(0o600)
        host = socket.gethostname()
        (folder / "hosts").write_text(f"127.0.0.1 localhost {host} {' '.join(NODES)}\n")
        config = CONFIG.format(folder=folder, host=host, port=free_port())
        for node in NODES:
            config += (
                f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={free_port()} CPUs=2 State=UNKNOWN\n"
            )
        lines = config.splitlines()
        lines.sort(key=lambda line: line.startswith("PartitionName="))  # partitions name nodes that exist already
        (folder / "slurm.conf").write_text("\n".join(lines) + "\n")
        (folder / "cgroup.conf").write_text("ConstrainCores=no\n")
        (folder / "start.sh").write_text(START.format(folder=folder, nodes=" ".join(NODES)))
        self.env = {**os.environ, "SLURM_CONF": f"{folder}/slurm.conf"}
        command = ["unshare", "--mount", "bash", str(folder / "start.sh")]
        self._process = subprocess.Popen(
            [sys.executable, _CHILD, str(os.getpid()), "", *(shutil.which(command[0]) or "", *command[1:])],
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            assert wait_until(lambda: self.run("sinfo", "-h", "-o", "%T", "-p", "low").strip() == "idle", 60), (
                self.log()
            )
        except BaseException:
            self.close()
            raise

    def log(self) -> str:
        return "".join(f"== {path}\n{path.read_text()[-3000:]}" for path in sorted(self.folder.glob("*.out")))

    def run(self, *words: str) -> str:
        ran = subprocess.run(words, env=self.env, capture_output=True, text=True, check=False)
        return ran.stdout + ran.stderr

    def submit(self, script: Path, *words: str) -> str:
        """Submit a script; return its job number."""
        output = self.run("sbatch", "--parsable", *words, str(script)).strip()
        assert output.isdecimal(), output
        return output

    def jobs(self) -> dict[str, str]:
        """Return the states of all jobs that have not ended, ``JOB_TASK`` → ``RUNNING``."""
        lines = self.run("squeue", "-h", "-r", "-o", "%i %T").splitlines()
        return dict(line.split() for line in lines if len(line.split()) == 2)

    def show(self, job: str) -> dict[str, str]:
        """Return what slurmctld knows of one job or task."""
        words = self.run("scontrol", "show", "job", job, "--oneliner").split()
        return dict(word.partition("=")[::2] for word in words if "=" in word)

    def state(self, job: str) -> str:
        return self.show(job).get("JobState", "")

    def close(self) -> None:
        if self._process.poll() is None:
            self.run("scancel", "--user=root", "--signal=KILL", "--full")
            self.run("scancel", "--user=root")
            deadline = time.monotonic() + 10
            while self.jobs() and time.monotonic() < deadline:
                time.sleep(0.2)
        for pid in [*below(self._process.pid), self._process.pid]:
            end(pid)
        self._process.wait()
        for pid in _started_by(self.folder):  # a step's own daemon leaves its parent
            end(pid)
        shutil.rmtree(self.folder, ignore_errors=True)


def _started_by(folder: Path) -> list[int]:
    found = []
    for path in Path("/proc").iterdir():
        try:
            mine = path.name.isdigit() and f"SLURM_CONF={folder}/".encode() in (path / "environ").read_bytes()
        except OSError:
            continue
        found += [int(path.name)] if mine and int(path.name) != os.getpid() else []
    return found
