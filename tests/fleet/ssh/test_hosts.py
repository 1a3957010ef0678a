"""Which hosts, and the words ssh is called with."""

from __future__ import annotations

import getpass
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fleet.ssh.loopback import wait_until
from programs import needs
from spile.errors import CloudError, SpileError, UserError
from spile.fleet.manage import hosts_of, slices_named
from spile.fleet.provider import Endpoint, Node, NodeState
from spile.hosts import hosts
from spile.hosts.hosts import Access, Host, ensure_key, parse_hosts
from spile.hosts.run import HostOutcome, combine_errors, environment_of, ssh_error, worst_exit_code


def node(name: str, hosts: int = 1, state: NodeState = NodeState.READY, zone: str = "z", uid: str = "77") -> Node:
    ends = tuple(Endpoint(f"10.0.0.{number}", f"34.0.0.{number}") for number in range(hosts))
    return Node(name, zone, state, uid=uid, endpoints=ends)


def test_a_prefix_names_one_slice_or_the_numbered_ones() -> None:
    names = ["a-10", "a-2", "a-x", "ab-1", "a-2-3", "b"]
    assert slices_named("a", names) == ["a-2", "a-10"]
    assert slices_named("b", names) == ["b"]
    assert slices_named("a-2", names) == ["a-2"]
    assert slices_named("c", names) == []
    assert slices_named("a.", ["ab-1"]) == []


def test_hosts_of_two_slices() -> None:
    hosts = hosts_of([node("t-1", 2, uid="8"), node("t-0", 2), node("other")], "t")
    assert [(host.label, host.slice, host.worker, host.address) for host in hosts] == [
        ("t-0:w0", 0, 0, "34.0.0.0"),
        ("t-0:w1", 0, 1, "34.0.0.1"),
        ("t-1:w0", 1, 0, "34.0.0.0"),
        ("t-1:w1", 1, 1, "34.0.0.1"),
    ]
    assert [host.address for host in hosts_of([node("t", 2)], "t", internal_ip=True)] == ["10.0.0.0", "10.0.0.1"]
    assert hosts_of([node("t")], "t")[0].label == "t"


def test_the_variables_tell_each_host_its_place() -> None:
    hosts = hosts_of([node("t-0", 2), node("t-1", 2)], "t")
    assert environment_of(hosts[3], hosts) == {
        "TPU_WORKER_ID": "1",
        "PYTHONUNBUFFERED": "1",
        "MEGASCALE_COORDINATOR_ADDRESS": "10.0.0.0:8080",
        "MEGASCALE_NUM_SLICES": "2",
        "MEGASCALE_SLICE_ID": "1",
    }
    assert environment_of(hosts[0], hosts[:2]) == {"TPU_WORKER_ID": "0", "PYTHONUNBUFFERED": "1"}


@pytest.mark.parametrize(
    ("nodes", "kind", "line"),
    [
        (
            [],
            UserError,
            "no TPU VM named t, nor t-0, t-1, …: found no TPU VM at all. "
            "Check the names with spile tpu list, or give --zone and --project.",
        ),
        (
            [node("u"), node("tt")],
            UserError,
            "no TPU VM named t, nor t-0, t-1, …: found tt, u. "
            "Check the names with spile tpu list, or give --zone and --project.",
        ),
        (
            [node("t-0"), node("t-1", state=NodeState.PREEMPTED)],
            CloudError,
            "not every slice is READY: found t-1 is PREEMPTED. Wait, or run: spile tpu recreate-preempted",
        ),
        ([node("t"), node("t", zone="y")], UserError, "t is in 2 zones: found y, z. Choose one with --zone."),
        ([node("t", 0)], CloudError, "t has no network endpoint. Wait until it is READY."),
    ],
)
def test_a_prefix_that_matches_no_usable_slice(nodes: list[Node], kind: type[SpileError], line: str) -> None:
    with pytest.raises(kind) as caught:
        hosts_of(nodes, "t")
    assert str(caught.value) == line


def test_the_preferred_zone_decides() -> None:
    assert hosts_of([node("t", uid="1"), node("t", zone="y", uid="2")], "t", zone="y")[0].node_id == "2"


def test_a_tpu_is_reached_as_gcloud_does() -> None:
    (host,) = hosts_of([node("t")], "t")
    words = Access().command(host, "true")
    home = Path("~/.ssh").expanduser()
    for option in (
        "CheckHostIP=no",
        "HashKnownHosts=no",
        "IdentitiesOnly=yes",
        f"UserKnownHostsFile={home}/google_compute_known_hosts",
        "HostKeyAlias=tpu.77-0",
        "BatchMode=yes",
    ):
        assert words[words.index(option) - 1] == "-o"
    assert words[words.index("-i") + 1] == f"{home}/google_compute_engine"
    assert words[words.index("-l") + 1] == getpass.getuser()
    assert words[-3:] == ["--", "34.0.0.0", "true"]


@pytest.mark.skipif(shutil.which("ssh") is None, reason="needs ssh (apt-get install openssh-client)")
@pytest.mark.parametrize(
    ("theirs", "effective"),
    [("", "accept-new"), ("StrictHostKeyChecking yes", "true"), ("Compression yes", "accept-new")],
)
@pytest.mark.parametrize("kind", ["named", "tpu"])
def test_a_stricter_configuration_of_the_user_counts(
    kind: str, theirs: str, effective: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirs").write_text(f"Host *\n  {theirs}\n" if theirs else "")
    config = hosts._SSH_CONFIG.read_text()
    (tmp_path / "config").write_text(config.replace("~/.ssh/config", str(tmp_path / "theirs")))
    monkeypatch.setattr(hosts, "_SSH_CONFIG", tmp_path / "config")
    (host,) = parse_hosts(["example"]) if kind == "named" else hosts_of([node("t")], "t")
    words = Access().command(host, "true")
    found = subprocess.run(
        [words[0], "-G", *words[1:-1]], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert f"stricthostkeychecking {effective}" in found
    words = Access(options=("StrictHostKeyChecking=no",)).command(host, "true")
    found = subprocess.run(
        [words[0], "-G", *words[1:-1]], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert "stricthostkeychecking false" in found, "--ssh-option counts first"


def test_a_named_host_is_reached_as_its_owner_does() -> None:
    me, other = parse_hosts(["me@h:2222,[::1]:22"])
    assert (me.user, me.address, me.port, me.worker) == ("me", "h", 2222, 0)
    assert (other.user, other.address, other.port, other.worker) == (None, "::1", 22, 1)
    words = Access(options=("ProxyJump=b",)).command(me, "true")
    assert "-i" not in words
    assert "IdentitiesOnly=yes" not in words
    assert words[:2] + words[4:6] == ["ssh", "-T", "-o", "ProxyJump=b"]
    assert words[words.index("-p") + 1] == "2222"
    assert [host.slice for host in parse_hosts(["a,b", "c"])] == [0, 0, 1]


@pytest.mark.parametrize(
    "words", [("run", "--", "true"), ("collect", "x"), ("docker", "stop", "--all")], ids=lambda words: words[0]
)
def test_ctrl_c_while_hosts_are_reached_is_one_line(words: tuple[str, ...], tmp_path: Path) -> None:
    """Also with several hosts, whose transfers are all cancelled."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "file").touch()
    ssh = tmp_path / "bin" / "ssh"
    ssh.write_text(f"#!/bin/sh\necho $$ >> {tmp_path}/began\nexec sleep 600\n")
    ssh.chmod(0o755)
    place = words.index("--") if "--" in words else len(words)
    line = [*words[:place], "--hosts", "a", "--hosts", "b", *words[place:]]
    running = subprocess.Popen(
        [sys.executable, "-m", "spile.cli.main", *line],
        cwd=tmp_path / "here",
        env={**os.environ, "PATH": f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        assert wait_until(lambda: (tmp_path / "began").exists() and len((tmp_path / "began").read_text().split()) == 2)
        os.kill(running.pid, signal.SIGINT)
        text, _ = running.communicate(timeout=60)
    finally:
        running.kill()
    assert (running.returncode, "Traceback" in text) == (130, False), text
    assert "interrupted" in text
    for pid in (tmp_path / "began").read_text().split():
        assert wait_until(lambda pid=pid: not Path(f"/proc/{pid}").exists()), "the commands on hosts ended"


def outcome(code: int, cause: str = "ended") -> HostOutcome:
    return HostOutcome(parse_hosts(["h"])[0], code, cause, 0.0)


@pytest.mark.parametrize(
    ("outcomes", "code"),
    [
        ([outcome(0), outcome(0)], 0),
        ([outcome(143, "stopped"), outcome(3)], 3),
        ([outcome(1), outcome(3), outcome(137, "stopped")], 3),
        ([outcome(255, "the connection was lost"), outcome(143, "stopped")], 255),
        ([outcome(143, "stopped"), outcome(143, "stopped")], 130),
        ([outcome(0), outcome(143, "stopped")], 130),
    ],
)
def test_the_worst_is_of_those_that_failed_by_themselves(outcomes: list[HostOutcome], code: int) -> None:
    assert worst_exit_code(outcomes) == code


def test_what_ssh_says_becomes_one_line() -> None:
    host = Host("t", "7", 0, "h", 0)
    error = ssh_error(host, 255, "ssh: connect to host h port 22: Connection timed out\n")
    assert str(error) == (
        "t: the host cannot be reached: found ssh: connect to host h port 22: Connection timed out. "
        "Open tcp:22 in the firewall, or use --internal-ip from inside the network."
    )
    assert str(ssh_error(host, 255, "kex_exchange: strange\n")) == "t: ssh failed: found kex_exchange: strange"
    assert str(ssh_error(host, 7, "")) == "t: ssh failed: found exit code 7"
    both = combine_errors([error, ssh_error(host, 127, "")], 4)
    assert str(both) == "2 of 4 hosts failed; t: no python3 on the host. Install Python 3.8 or newer there."
    assert both.exit_code == 2


@needs("ssh-keygen")
def test_the_key_is_made_once(tmp_path: Path) -> None:
    key = tmp_path / "ssh" / "key"
    public = ensure_key(key)
    assert public.startswith("ssh-rsa ")
    assert key.stat().st_mode & 0o077 == 0
    assert ensure_key(key) == public
    key.with_name("key.pub").unlink()
    with pytest.raises(
        UserError, match=r"a private key without its public half: expected .*key.pub\. Create it with: ssh-keygen -y"
    ):
        ensure_key(key)
