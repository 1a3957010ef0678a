"""Links that go silent: packets are dropped, and no connection is closed."""

from __future__ import annotations

import asyncio
import os
import secrets
import shutil
import socket
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet.ssh.loopback import Hosts, finish, spile, wait_until
from fleet.ssh.test_ssh_run import STUBBORN, results, up
from spile.hosts import run
from spile.hosts.hosts import Access, Host, parse_hosts


class Proxy:
    """A proxy to a host that can drop everything."""

    def __init__(self, port: int) -> None:
        self.silent = threading.Event()
        self._target = port
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self._sockets: list[socket.socket] = [self._server]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._server.accept()
            except OSError:
                return
            far = socket.create_connection(("127.0.0.1", self._target))
            self._sockets += [near, far]
            for one, other in ((near, far), (far, near)):
                threading.Thread(target=self._pump, args=(one, other), daemon=True).start()

    def _pump(self, one: socket.socket, other: socket.socket) -> None:
        try:
            while data := one.recv(1 << 16):
                if not self.silent.is_set():
                    other.sendall(data)
            if not self.silent.is_set():
                other.shutdown(socket.SHUT_WR)
        except OSError:
            return

    def close(self) -> None:
        for one in self._sockets:
            one.close()


def test_a_silent_link_ends_both_sides(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_HEARTBEAT", 0.5)
    monkeypatch.setattr(run, "_SILENCE", 2.0)
    proxy = Proxy(hosts[1].port)
    places = parse_hosts([f"{hosts[0].name},127.0.0.1:{proxy.port},{hosts[2].name}"])
    access = Access(key=hosts.key, options=(*hosts.options, "ServerAliveInterval=1", "ServerAliveCountMax=2"))
    seen = dict.fromkeys(places, b"")

    def output(host: Host, data: bytes) -> None:
        seen[host] += data
        if all(seen.values()):
            proxy.silent.set()

    try:
        jobs = run.jobs_for(places, run.Job(f"echo up; {STUBBORN}", grace=1.0))
        outcomes = asyncio.run(run.run_everywhere(jobs, access=access, output=output))
        assert [outcome.cause for outcome in outcomes] == ["stopped", "the connection was lost", "stopped"]
        assert outcomes[1].code == 255
        assert wait_until(lambda: hosts.processes() == [])
    finally:
        proxy.close()


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def far_hosts(empty_hosts: Hosts) -> Iterator[Hosts]:
    """Four hosts, each in a network of its own at the end of a virtual cable."""
    name = "sp" + secrets.token_hex(3)
    if os.getuid() != 0 or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    if subprocess.run(["ip", "netns", "add", f"{name}0"], capture_output=True, check=False).returncode != 0:
        pytest.skip("this machine allows no network namespaces")
    net = f"10.{secrets.randbelow(200) + 20}.{secrets.randbelow(250)}"
    try:
        for number in range(4):
            space, link = f"{name}{number}", f"{name}v{number}"
            if number:
                ip("netns", "add", space)
            ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", space)
            ip("addr", "add", f"{net}.{4 * number + 1}/30", "dev", link)
            ip("link", "set", link, "up")
            ip("-n", space, "addr", "add", f"{net}.{4 * number + 2}/30", "dev", "eth0")
            for device in ("eth0", "lo"):
                ip("-n", space, "link", "set", device, "up")
            host = empty_hosts.start(number, before=("ip", "netns", "exec", space), address=f"{net}.{4 * number + 2}")
            host.link = link
        yield empty_hosts
    finally:
        empty_hosts.close()
        for number in range(4):
            for words in (["link", "del", f"{name}v{number}"], ["netns", "del", f"{name}{number}"]):
                subprocess.run(["ip", *words], capture_output=True, check=False)


@pytest.mark.slow
def test_a_cut_cable_ends_all(far_hosts: Hosts, project: Path) -> None:
    runner = spile(project, "run", *far_hosts.flags(), "--", f"echo up; {STUBBORN}")
    assert wait_until(lambda: up(far_hosts, project))
    assert far_hosts[2].link is not None
    ip("link", "set", far_hosts[2].link, "down")
    code, out, _ = finish(runner)
    assert code == 255
    rows, logs = results(project)
    assert [row["cause"] for row in rows] == ["stopped", "stopped", "the connection was lost", "stopped"]
    assert logs == ["up\n"] * 4
    assert "the connection was lost" in out
    assert wait_until(lambda: far_hosts.processes() == [])


@pytest.mark.slow
def test_a_killed_runner_behind_a_cut_cable_leaves_nothing(far_hosts: Hosts, project: Path) -> None:
    runner = spile(project, "run", *far_hosts.flags(), "--", f"echo up; {STUBBORN}")
    assert wait_until(lambda: up(far_hosts, project))
    assert far_hosts[0].link is not None
    ip("link", "set", far_hosts[0].link, "down")
    runner.kill()
    finish(runner)
    assert wait_until(lambda: far_hosts.processes() == [])
