"""The real gcloud, pointed at a fake cloud."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

from tests.fakes.cloud_server import FakeCloud

GCLOUD = shutil.which("gcloud")


def gcloud(fake: FakeCloud, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Run the real gcloud, isolated from the user's own configuration."""
    environment = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "CLOUDSDK_CONFIG": str(folder / "gcloud"),
        "CLOUDSDK_CORE_DISABLE_PROMPTS": "1",
        **fake.environment(),
    }
    assert GCLOUD
    return subprocess.run([GCLOUD, *words], env=environment, capture_output=True, text=True, check=False, timeout=120)


def gcloud_json(fake: FakeCloud, folder: Path, *words: str) -> object:
    done = gcloud(fake, folder, *words, "--format=json")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
