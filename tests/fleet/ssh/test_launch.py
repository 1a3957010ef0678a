"""Launching: which processes stay, and that slow hosts do not delay others."""

from __future__ import annotations

from fleet.ssh.loopback import Hosts, wait_until
from spile.hosts.hosts import Access, Host, parse_hosts
from spile.hosts.run import launch


def test_each_host_by_itself(hosts: Hosts) -> None:
    places = parse_hosts([f"{hosts.named(0)},127.0.0.1:1,{hosts.named(1, 2)}"])

    def script(host: Host) -> str:
        line = "setsid sleep 1000 >/dev/null 2>&1 & echo launched $TPU_WORKER_ID"
        return f"{line}\nexit 4" if host.worker == 2 else line

    access = Access(key=hosts.key, options=hosts.options)
    done = launch(places, script, access=access)
    assert [one.output for one in done] == ["launched 0\n", "", "launched 2\n", "launched 3\n"]
    assert [str(one.error) if one.error else None for one in done] == [
        None,
        "127.0.0.1:1: nothing listens there: found ssh: connect to host 127.0.0.1 port 1: Connection refused. "
        "Check that sshd is running on the host, and the port.",
        f"{hosts[1].name}: the launch failed: found exit code 4, after: launched 2",
        None,
    ]
    assert wait_until(lambda: [len(host.processes()) for host in hosts.hosts] == [1, 0, 1, 0])
