"""``make fleet-demo``: a whole fleet on this computer, from deploy to proof, in under three minutes.

A fake bucket and a fake Cloud TPU service run in this process. The machines are real processes: each runs the real
startup script, agent and worker. Everything else is the ``spile`` command, as a user would type it. The demo deploys
two workers over eight streams, preempts one machine, grows the fleet to four workers, and verifies the dataset.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from tests.fakes.cloud import ApiError, CloudTimes
from tests.fakes.cloud_server import FakeCloud
from tests.fakes.gcs import FakeGcs

_BUCKET, _FLEET = "demo", "demo"
_ZONES = ("us-central1-a", "us-central1-b")
_DEADLINE = 300.0
"""Seconds after which the demo gives up."""
_KEPT = ("create ", "delete ", "report ", "total:", "the work is finished", "spile:")
"""The beginnings of those lines of the monitor that the demo shows."""


class Demo:
    """The fake services, and ``spile`` commands that use them."""

    def __init__(self, folder: Path, gcs: FakeGcs, *, samples: int = 12, streams: int = 8) -> None:
        self.gcs, self.samples, self.streams = gcs, samples, streams
        self.began = time.monotonic()
        gcs.add_bucket(_BUCKET)
        (folder / "home" / ".ssh").mkdir(parents=True)
        (folder / "home" / ".ssh" / "google_compute_engine").write_text("a key that no machine asks for\n")
        (folder / "home" / ".ssh" / "google_compute_engine.pub").write_text("ssh-rsa AAAA demo@localhost\n")
        machine = {
            "STORAGE_EMULATOR_HOST": gcs.url,
            "JAX_PLATFORMS": "cpu",
            "JAX_COMPILATION_CACHE_DIR": str(folder / "programs"),
            "SPILE_AGENT_FLAGS": "--pause 1 --check-seconds 2",
            "SPILE_CLAIM_SECONDS": "10",
        }
        self.cloud = FakeCloud(folder / "cloud", times=CloudTimes(1.0, 0.5, 0.5), environment=machine)
        self.environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("SPILE_")},
            **self.cloud.environment(),
            "STORAGE_EMULATOR_HOST": gcs.url,
            "CLOUDSDK_CONFIG": str(folder / "gcloud"),
            "XDG_STATE_HOME": str(folder / "state"),
            "HOME": str(folder / "home"),
            "COLUMNS": "160",
        }

    def step(self, text: str) -> None:
        print(f"\n[{time.monotonic() - self.began:4.0f} s] {text}", flush=True)

    def spile(self, *words: str) -> None:
        """Run a command to its end and show its output."""
        print(f"$ spile {' '.join(words)}", flush=True)
        done = subprocess.run(self._command(words), env=self.environment, check=False)
        if done.returncode != 0:
            raise SystemExit(f"spile {words[0]} ended with exit code {done.returncode}")

    def monitor(self) -> subprocess.Popen[str]:
        """Start ``spile monitor`` and print its actions and totals when they change."""
        words = ("monitor", f"gs://{_BUCKET}/fleet/{_FLEET}", "--interval", "2")
        print(f"$ spile {' '.join(words)} &", flush=True)
        process = subprocess.Popen(
            self._command(words), env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        threading.Thread(target=self._show, args=(process,), daemon=True).start()
        return process

    def _show(self, process: subprocess.Popen[str]) -> None:
        last = ""
        for line in process.stdout or ():
            text = line.rstrip().partition(" UTC ")[2] or line.rstrip()
            news = text.partition(", $")[0]  # The cost grows with every line.
            if text.startswith(_KEPT) and news != last:
                print(f"    {text}", flush=True)
                last = news

    def _command(self, words: Sequence[str]) -> list[str]:
        return [sys.executable, "-m", "spile.cli.main", *words]

    def deploy(self, workers_per_zone: int, *more: str) -> None:
        self.spile(
            "deploy", "--model", "embedded", "--dataset", "embedded", "--gcs-bucket", _BUCKET, "--fleet", _FLEET,
            "--zones", ",".join(_ZONES), "--workers-per-zone", str(workers_per_zone), "--num-streams",
            str(self.streams), "--max-samples", str(self.samples), "--shard-size-gb", "0.0005", *more,
        )  # fmt: skip

    def commits(self) -> int:
        return sum("/commits/" in key for key in self.gcs.buckets.buckets[_BUCKET].objects)

    def wait_for_commits(self, count: int, monitor: subprocess.Popen[str]) -> None:
        """Wait until the bucket has this many commits, or the monitor ends."""
        while self.commits() < count and monitor.poll() is None:
            if time.monotonic() - self.began > _DEADLINE:
                raise SystemExit(f"only {self.commits()} of {count} commits after {_DEADLINE:.0f} s")
            time.sleep(0.2)

    def preempt(self) -> str:
        """Preempt one working machine without notice and return its name."""
        for raw in self.cloud.cloud.nodes("-"):
            zone, name = raw["name"].split("/")[3], raw["name"].split("/")[5]
            try:
                if raw["state"] == "READY":
                    self.cloud.admin("preempt", {"zone": zone, "name": name})
                    return f"{name} in {zone}"
            except ApiError:  # It has just finished and deleted itself.
                continue
        raise SystemExit("no machine was there to preempt")

    def run(self) -> None:
        self.step(f"Deploy: {self.streams} streams, two workers in two zones")
        self.deploy(1, "--create-tpus")
        self.step("Monitor: watch the fleet, and replace machines that are lost")
        monitor = self.monitor()
        try:
            self.wait_for_commits(2, monitor)
            self.step(f"Preemption: the cloud takes {self.preempt()} back")
            self.wait_for_commits(self.commits() + 2, monitor)
            self.step("Scaling: four workers instead of two, while the run goes on")
            self.deploy(2, "--create-tpus", "--yes")
            code = monitor.wait(max(1.0, _DEADLINE - (time.monotonic() - self.began)))
        finally:
            monitor.kill()
            monitor.wait()
        if code != 0:
            raise SystemExit(f"spile monitor ended with exit code {code}")
        self.step("Proof: every sample of every stream is stored exactly once")
        self.spile("verify", f"gs://{_BUCKET}/activations", "--max-samples", str(self.samples))
        self.step("Done: no machine is left" if not self.cloud.cloud.nodes("-") else "Machines are left")


def main() -> int:
    """Run the demo in a temporary folder."""
    with tempfile.TemporaryDirectory(prefix="spile-fleet-demo-", ignore_cleanup_errors=True) as text, FakeGcs() as gcs:
        demo = Demo(Path(text), gcs)
        with demo.cloud:
            demo.run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
