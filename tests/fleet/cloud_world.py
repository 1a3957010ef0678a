"""A cloud and a bucket on this machine, whose machines run the real startup script, agent and worker."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import IO

from tests.fakes.cloud import CloudTimes
from tests.fakes.cloud_server import FakeCloud
from tests.fakes.gcs import FakeGcs

__all__ = ["A", "B", "World", "a_home"]

A, B = "us-central1-a", "us-central1-b"


def a_home(folder: Path) -> Path:
    """A home with a key for ssh, so that none is made."""
    keys = folder / ".ssh"
    keys.mkdir(parents=True)
    (keys / "google_compute_engine").write_text("private\n")
    (keys / "google_compute_engine.pub").write_text("ssh-rsa AAAA me@here\n")
    return folder


class World:
    """A fake cloud and bucket, and a way to run spile commands."""

    def __init__(self, folder: Path, gcs: FakeGcs) -> None:
        self.folder, self.gcs = folder, gcs
        gcs.add_bucket("b")
        machines = {
            "STORAGE_EMULATOR_HOST": gcs.url,
            "JAX_PLATFORMS": "cpu",
            **{name: value for name, value in os.environ.items() if "_CACHE_" in name and name.startswith("JAX_")},
            "SPILE_EXPECT": "any",
            "SPILE_AGENT_FLAGS": "--pause 0.1 --check-seconds 1",
        }
        self.cloud = FakeCloud(folder / "cloud", times=CloudTimes(0.2, 0.1, 0.1), environment=machines)
        self.environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("SPILE_")},
            **self.cloud.environment(),
            "STORAGE_EMULATOR_HOST": gcs.url,
            "CLOUDSDK_CONFIG": str(folder),
            "HOME": str(a_home(folder / "home")),
            "COLUMNS": "200",
        }

    def spile(self, *words: str) -> tuple[int, str]:
        done = subprocess.run(
            [sys.executable, "-m", "spile.cli.main", *words],
            env=self.environment, capture_output=True, text=True, check=False, timeout=280,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr

    def start(self, *words: str, log: IO[str]) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "spile.cli.main", *words]
        return subprocess.Popen(command, env=self.environment, stdout=log, stderr=subprocess.STDOUT, text=True)

    def objects(self, prefix: str = "") -> list[str]:
        return sorted(key for key in self.gcs.buckets.buckets["b"].objects if key.startswith(prefix))

    def commits(self) -> int:
        return sum("/commits/" in key for key in self.objects("activations/"))

    def ready(self) -> list[tuple[str, str]]:
        places = [raw["name"].split("/") for raw in self.cloud.cloud.nodes("-") if raw["state"] == "READY"]
        return [(place[3], place[5]) for place in places]

    def logs(self) -> str:
        """For a failure."""
        return "\n".join(f"== {path}\n{path.read_text()[-3000:]}" for path in sorted(self.folder.rglob("*.log")))
