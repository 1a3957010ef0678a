"""The image's parts: what it installs, and what compose starts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from tests.fakes.gcs import FakeGcs

ROOT = Path(__file__).parents[3]


def pins(*names: str) -> str:
    words = [sys.executable, str(ROOT / "scripts" / "runtime_requirements.py"), *names]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_the_image_has_what_an_installation_needs_and_no_tools() -> None:
    text = pins()
    found = set(re.findall(r"^([\w.-]+)==", text, re.MULTILINE))
    assert {"jax", "jaxlib", "numpy", "tokenizers", "cyclopts", "rich"} <= found
    assert not found & {"pytest", "moto", "ruff", "mypy", "hypothesis", "torch", "ray"}
    assert text.count("--hash=sha256:") > len(found)
    lock = (ROOT / "requirements.txt").read_text()
    assert all(line in lock for line in text.splitlines() if "==" in line), "the pins are the lock's"
    assert "hatchling==" in pins("hatchling")
    with pytest.raises(subprocess.CalledProcessError):
        pins("no-such-package")


def test_the_dockerfiles_targets_end_as_a_user_who_is_not_root() -> None:
    text = (ROOT / "Dockerfile").read_text()
    stages = re.findall(r"^FROM (\S+) AS (\S+)$", text, re.MULTILINE)
    parents = {name: parent for parent, name in stages}
    targets = [name for name in parents if name != "runtime" and not name.startswith("build")]
    assert sorted(targets) == ["cpu", "cuda", "dev", "tpu"]
    assert [parents[name] for name in targets] == ["runtime"] * 4
    assert stages[-1][1] == "cpu", "what docker build makes unasked"
    runtime = text.split("AS runtime", 1)[1].split("\nFROM", 1)[0]
    assert re.search(r"^USER 1000$", runtime, re.MULTILINE)
    assert re.findall(r"^USER (.+)$", text, re.MULTILINE) == ["1000"], "no target changes the user"
    ignored = (ROOT / ".dockerignore").read_text().split()
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", text, re.MULTILINE)
    for name in " ".join(copied).split():
        assert (ROOT / name).exists(), name
        paths = (Path(name), *Path(name).parents)  # An exception for a folder includes everything in it.
        assert any(f"!{path}" in ignored for path in paths), f"{name} does not reach the build"


def services() -> dict[str, list[str]]:
    found = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    return {name: service["command"] for name, service in found.items()}


@pytest.mark.slow
def test_composes_services_work_one_after_the_other() -> None:
    """As compose starts them, with the fake bucket's own name replaced by its address here."""
    commands = services()
    assert list(commands) == ["bucket", "worker", "monitor", "verify"]
    with FakeGcs() as fake:
        fake.add_bucket(commands["bucket"][-1])
        for name in ("worker", "monitor", "verify"):
            program, *words = commands[name]
            assert program == "spile"
            ran = subprocess.run(
                [sys.executable, "-m", "spile.cli.main", *words],
                env={**os.environ, "STORAGE_EMULATOR_HOST": fake.url},
                capture_output=True,
                text=True,
                check=False,
                timeout=200,
            )
            assert ran.returncode == 0, (name, ran.stdout, ran.stderr)
