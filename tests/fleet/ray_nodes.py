"""A real Ray cluster on one machine: a head, and nodes in network namespaces whose cable can be cut."""

from __future__ import annotations

import importlib.util
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from fleet.ssh.loopback import below, end, wait_until
from spile.engines import child

WHY_NOT = "Ray is not installed (pip install 'spile[ray]')"
RAY = importlib.util.find_spec("ray") is not None
SETTINGS = {
    "RAY_memory_monitor_refresh_ms": "0",  # else other processes' memory ends workers
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DISABLE_IMPORT_WARNING": "1",
}
NOTICE_CUT_LINKS = {
    "RAY_health_check_period_ms": "3000",
    "RAY_health_check_timeout_ms": "3000",
    "RAY_health_check_failure_threshold": "3",
}
"""What docs/guides/ray.md recommends for clusters whose links may be cut."""
PORT = 6379
_IP = shutil.which("ip") or "ip"
_CHILD = str(Path(child.__file__))
_SMALL = ["--object-store-memory=80000000", "--min-worker-port=0", "--max-worker-port=0"]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


class NotJoined(Exception):
    """A node that failed to join, with its output."""


class RayNodes:
    """A head without CPUs and nodes, each in its own network namespace, on one bridge."""

    def __init__(self, env: dict[str, str] | None = None) -> None:
        _sweep()
        self.name = f"ry{os.getpid():x}{secrets.token_hex(1)}"  # with a cable's number at most 13 letters, of 15
        self.folder = tempfile.mkdtemp(prefix="ry-", dir="/tmp")  # sockets' paths must be short
        self.net = f"10.{secrets.randbelow(100) + 100}.{secrets.randbelow(250)}"
        self.gateway = f"{self.net}.1"
        self.env = {**os.environ, **SETTINGS, **(env or {})}
        self.nodes: dict[int, subprocess.Popen[bytes]] = {}
        ip("link", "add", self.name, "type", "bridge")
        ip("addr", "add", f"{self.gateway}/24", "dev", self.name)
        ip("link", "set", self.name, "up")

    @property
    def address(self) -> str:
        return f"{self.gateway}:{PORT}"

    def start(
        self,
        number: int,
        *flags: str,
        cpus: int = 1,
        env: dict[str, str] | None = None,
        python: str = sys.executable,
    ) -> None:
        """Number 0 is the head, on the machine itself; the others are in namespaces."""
        words = [python, "-m", "ray.scripts.scripts", "start", "--block", *_SMALL, *flags]
        if number == 0:
            words += ["--head", f"--port={PORT}", f"--node-ip-address={self.gateway}", f"--temp-dir={self.folder}"]
            words += ["--num-cpus=0", "--include-dashboard=false"]
        else:
            self._plug(number)
            words = [_IP, "netns", "exec", f"{self.name}-{number}", *words]
            words += [f"--address={self.address}", f"--node-ip-address={self.net}.{number + 1}"]
            words += [f"--num-cpus={cpus}", f"--node-name=node{number}"]
        log = (Path(self.folder) / f"node{number}.log").open("wb")
        self.nodes[number] = subprocess.Popen(
            [sys.executable, _CHILD, str(os.getpid()), "", *words],  # It ends if this process is killed.
            env={**self.env, **(env or {})},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        log.close()
        ready = b"Ray runtime started"
        assert wait_until(lambda: ready in self.log(number) or self.nodes[number].poll() is not None, 90), self.log(
            number
        )
        if self.nodes[number].poll() is not None:
            raise NotJoined(self.log(number).decode())

    def log(self, number: int) -> bytes:
        return (Path(self.folder) / f"node{number}.log").read_bytes()

    def _plug(self, number: int) -> None:
        space, link = f"{self.name}-{number}", f"{self.name}v{number}"
        ip("netns", "add", space)
        ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
        ip("link", "set", link, "master", self.name, "up")
        ip("-n", space, "addr", "add", f"{self.net}.{number + 1}/24", "dev", "eth0")
        ip("-n", space, "link", "set", "eth0", "up")
        ip("-n", space, "link", "set", "lo", "up")
        ip("-n", space, "route", "add", "default", "via", self.gateway)  # Ray asks the routes for its address

    def cut(self, number: int) -> None:
        """Drop all packets without closing connections."""
        ip("link", "set", f"{self.name}v{number}", "nomaster")

    def processes(self, number: int) -> list[int]:
        pid = self.nodes[number].pid
        return [*below(pid), pid]

    def commands(self, number: int) -> list[list[str]]:
        """Return the command lines of its processes."""
        found = []
        for pid in self.processes(number):
            with suppress(OSError):
                found.append((Path("/proc") / str(pid) / "cmdline").read_text().split("\0"))
        return found

    def hide(self, number: int, folder: str) -> None:
        """Cover a folder of this machine with an empty one, for this node only."""
        pid = str(self.processes(number)[0])
        subprocess.run(["nsenter", "-m", "-t", pid, "mount", "-t", "tmpfs", "tmpfs", folder], check=True)

    def kill(self, number: int) -> None:
        """Kill all its processes at once, as when a machine is lost."""
        victims = self.processes(number)
        for sign in (signal.SIGSTOP, signal.SIGKILL):
            for pid in victims:
                try:
                    os.kill(pid, sign)
                except ProcessLookupError:
                    continue
        self.nodes[number].wait()

    def close(self) -> None:
        for number in list(self.nodes):
            if self.nodes[number].poll() is None:
                self.kill(number)
        for pid in _in_folder(self.folder):
            end(pid)
        for number in self.nodes:
            subprocess.run(["ip", "netns", "del", f"{self.name}-{number}"], capture_output=True, check=False)
            subprocess.run(["ip", "link", "del", f"{self.name}v{number}"], capture_output=True, check=False)
        subprocess.run(["ip", "link", "del", self.name], capture_output=True, check=False)


def _sweep() -> None:
    """Remove the networks of clusters whose test process was killed."""
    for kind in (["netns", "list"], ["-brief", "link", "show", "type", "bridge"]):
        listed = subprocess.run([_IP, *kind], capture_output=True, text=True, check=False).stdout
        for line in listed.splitlines():
            made = re.match(r"(ry([0-9a-f]+)[0-9a-f]{2})(-\d+)?\b", line)
            if made is None or Path(f"/proc/{int(made[2], 16)}").exists():
                continue
            what = ["netns", "del"] if made[3] else ["link", "del"]
            subprocess.run([_IP, *what, made[0]], capture_output=True, check=False)


def _in_folder(folder: str) -> list[int]:
    """Processes of this cluster that have left their parents."""
    found = []
    for path in Path("/proc").iterdir():
        try:
            if path.name.isdigit() and folder.encode() in (path / "cmdline").read_bytes():
                found.append(int(path.name))
        except OSError:
            continue
    return found


def can_make_namespaces() -> bool:
    name = f"ry{secrets.token_hex(2)}"
    try:
        made = subprocess.run(["ip", "netns", "add", name], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False
    if made:
        subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)
    return made
