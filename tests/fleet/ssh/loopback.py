"""Hosts on loopback: real sshds with throwaway keys, each with a home of its own."""

from __future__ import annotations

import contextlib
import getpass
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import pytest

from ports import free_port
from spile.cli.main import main

SSHD = shutil.which("sshd") or ("/usr/sbin/sshd" if Path("/usr/sbin/sshd").exists() else None)
WHY_NOT = "OpenSSH's sshd is not installed (apt-get install openssh-server)"


def wait_until(true: Callable[[], object], seconds: float = 120.0) -> bool:
    """Return whether the condition becomes true, with a long timeout for a busy machine."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if true():
            return True
        time.sleep(0.05)
    return bool(true())


def marked(mark: str) -> list[int]:
    """Every living process that carries the mark in its environment."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                alive = folder.joinpath("stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
                if alive and mark.encode() in folder.joinpath("environ").read_bytes():
                    found.append(int(folder.name))
            except OSError:
                continue
    return found


@dataclass
class SshHost:
    """One sshd and the home it logs into."""

    home: Path
    mark: str
    port: int
    address: str = "127.0.0.1"
    server: subprocess.Popen[bytes] | None = None
    link: str | None = None

    @property
    def name(self) -> str:
        return f"{self.address}:{self.port}"

    def processes(self) -> list[int]:
        return marked(self.mark)


@dataclass
class Hosts:
    """Some hosts, and the keys to them."""

    folder: Path
    key: Path
    hosts: list[SshHost] = field(default_factory=list)

    def __getitem__(self, number: int) -> SshHost:
        return self.hosts[number]

    def named(self, *numbers: int) -> str:
        return ",".join(self.hosts[number].name for number in numbers or range(len(self.hosts)))

    @property
    def options(self) -> tuple[str, ...]:
        return (f"UserKnownHostsFile={self.folder / 'known_hosts'}", "GlobalKnownHostsFile=/dev/null")

    def flags(self, *numbers: int) -> list[str]:
        words = ["--hosts", self.named(*numbers), "--user", getpass.getuser(), "--ssh-key", str(self.key)]
        for option in self.options:
            words += ["--ssh-option", option]
        return words

    def processes(self) -> list[int]:
        return [pid for host in self.hosts for pid in host.processes()]

    def start(
        self, number: int, *, before: tuple[str, ...] = (), address: str = "127.0.0.1", port: int = 0, config: str = ""
    ) -> SshHost:
        """One more sshd; ``before`` is what to run it under, such as a network namespace."""
        home = self.folder / f"host{number}"
        home.mkdir()
        host_key = home / "host_key"
        keygen(host_key)
        mark = f"SPILE_TEST_MARK={uuid.uuid4().hex}"
        port = 22 if before else port or free_port(address)
        lines = [
            f"Port {port}",
            f"ListenAddress {address}",
            f"HostKey {host_key}",
            f"PidFile {home / 'sshd.pid'}",
            f"AuthorizedKeysFile {self.key}.pub",
            "PermitRootLogin prohibit-password",
            "PasswordAuthentication no",
            "KbdInteractiveAuthentication no",
            "UsePAM no",
            "StrictModes no",
            "PrintMotd no",
            "MaxStartups 100",
            config or f"SetEnv HOME={home} {mark}",
        ]
        (home / "sshd_config").write_text("\n".join(lines) + "\n")
        words = [*before, str(SSHD), "-D", "-e", "-f", str(home / "sshd_config")]
        log = (home / "sshd.log").open("wb")
        server = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
        log.close()
        host = SshHost(home, mark, port, address, server)
        self.hosts.append(host)
        if not wait_until(lambda: b"Server listening" in (home / "sshd.log").read_bytes() or server.poll() is not None):
            raise RuntimeError((home / "sshd.log").read_text())
        assert server.poll() is None, (home / "sshd.log").read_text()
        return host

    def close(self) -> None:
        for pid in self.processes():
            end(pid)
        for host in self.hosts:
            if host.server is not None:
                # Its sessions too: one whose link was cut would wait for its client for hours.
                for pid in (*below(host.server.pid), host.server.pid):
                    end(pid)
                host.server.wait()


def below(parent: int) -> list[int]:
    """The processes that a process has started, and theirs."""
    try:
        children = [int(pid) for pid in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    except OSError:
        return []
    return [pid for child in children for pid in (*below(child), child)]


def end(pid: int) -> None:
    """Kill it, if it is still there."""
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def keygen(path: Path) -> None:
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True, stdin=subprocess.DEVNULL
    )


def spile(project: Path, *words: str, **more: object) -> subprocess.Popen[str]:
    """The real program, in its own process."""
    return subprocess.Popen(
        [sys.executable, "-m", "spile.cli.main", *words],
        cwd=project,
        stdin=subprocess.DEVNULL,
        stdout=more.pop("stdout", subprocess.PIPE),  # type: ignore[call-overload]
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "200", **more.pop("env", {})},  # type: ignore[dict-item]
        start_new_session=True,
        **more,  # type: ignore[arg-type]
    )


def done(project: Path, *words: str, env: Mapping[str, str] | None = None) -> tuple[int, str, str]:
    """Run the program in this process, which avoids starting Python; its code, output and errors."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.chdir(project))
        stack.enter_context(patch.dict(os.environ, {"COLUMNS": "200", **(env or {})}))
        out, err = (stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2))
        for number, file in ((1, out), (2, err)):  # what the processes that it starts print, too
            kept = os.dup(number)
            stack.callback(os.close, kept)
            stack.callback(os.dup2, kept, number)
            os.dup2(file.fileno(), number)
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as ended:
            main(list(words))
        texts = []
        for file in (out, err):
            file.flush()
            file.seek(0)
            texts.append(file.read())
    return int(ended.value.code or 0), texts[0], texts[1]


def finish(process: subprocess.Popen[str], seconds: float = 240) -> tuple[int, str, str]:
    """Its code, output and errors."""
    try:
        out, err = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
        raise AssertionError(f"did not end:\n{out}\n{err}") from None
    return process.returncode, out, err
