from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet.ssh.loopback import SSHD, WHY_NOT, Hosts, keygen


@pytest.fixture
def empty_hosts(tmp_path: Path) -> Iterator[Hosts]:
    """No hosts yet; the test starts its own."""
    if SSHD is None:
        pytest.skip(WHY_NOT)
    if os.getuid() == 0:
        Path("/run/sshd").mkdir(exist_ok=True)
    folder = tmp_path / "hosts"
    folder.mkdir()
    keygen(folder / "key")
    hosts = Hosts(folder, folder / "key")
    yield hosts
    hosts.close()


@pytest.fixture
def hosts(empty_hosts: Hosts) -> Hosts:
    """Four hosts."""
    for number in range(4):
        empty_hosts.start(number)
    return empty_hosts


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A directory with code in it."""
    folder = tmp_path / "project"
    (folder / "deep").mkdir(parents=True)
    (folder / "main.py").write_text("print('hello')\n")
    (folder / "deep" / "data.txt").write_text("data\n")
    (folder / "tool.sh").write_text("#!/bin/sh\necho tool\n")
    (folder / "tool.sh").chmod(0o755)
    (folder / ".gitignore").write_text("*.ckpt\n")
    (folder / "huge.ckpt").write_text("never copied\n")
    return folder
