"""A worker's log: from its machine, or from its heartbeat."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

from tests.fakes.cloud_server import FakeCloud

from fleet.ssh.loopback import Hosts, done, finish, spile, wait_until
from spile.fleet.cloud_tpu import CloudTpu
from spile.fleet.provider import NodeRequest
from spile.objects import open_folder
from spile.store.claims import ClaimBook

ZONE = "us-central1-a"


def beat(root: Path, number: int, host: str) -> None:
    folder = root / f"tpu_{number}"
    folder.mkdir(parents=True)
    words = {
        "attempt": "a", "host": host, "phase": "failed", "samples": 1, "samples_committed": 1, "tokens": 1,
        "shards_written": 1, "shards_committed": 1, "tokens_per_second": 1.0, "retries": 0, "expected": None,
        "started": "2026-01-16T14:00:00Z", "updated": "2026-01-16T14:32:15Z", "version": "0",
        "log_tail": ["one", "two [b]", "three"], "last_error": "it broke",
    }  # fmt: skip
    (folder / "progress.json").write_text(json.dumps(words))


def make(client: CloudTpu, name: str, kind: str = "v3-8", worker: int | None = None) -> None:
    labels = {"spile-fleet": "f"} | ({} if worker is None else {"spile-worker": str(worker)})
    operation = client.create_node(ZONE, name, NodeRequest(kind, "tpu-ubuntu2204-base", labels=labels))
    while not operation.done:
        time.sleep(0.02)
        operation = client.operation(operation.zone, operation.name)


def test_the_last_lines_of_a_machine(hosts: Hosts, tmp_path: Path) -> None:
    (hosts[1].home / "spile-worker.log").write_text("".join(f"line {number}\n" for number in range(200)))
    flags = hosts.flags(1)
    code, out, err = done(tmp_path, "logs", "5", "-n", "3", *flags)
    assert (code, out, err) == (0, "line 197\nline 198\nline 199\n", "")
    code, out, _ = done(tmp_path, "logs", "5", *flags)
    assert (code, out.count("\n")) == (0, 100)
    code, _, err = done(tmp_path, "logs", "5", *hosts.flags(0))
    assert (code, err.startswith(f"spile: no log on {hosts[0].name}: expected the unit spile-worker, or ")) == (2, True)


def test_a_machine_with_systemd_is_asked_for_its_journal(hosts: Hosts, tmp_path: Path) -> None:
    tools = hosts[0].home / "tools"
    tools.mkdir()
    for name, text in {"systemctl": '[ "$*" = "cat spile-worker" ]', "journalctl": 'echo "journal: $*"'}.items():
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)
    (hosts[0].home / ".bash_profile").write_text(f"PATH={tools}:/usr/bin:/bin\nsudo() {{ return 1; }}\n")
    code, out, err = done(tmp_path, "logs", "0", "-n", "7", *hosts.flags(0))
    assert (code, out, err) == (0, "journal: --no-pager --quiet -o cat -u spile-worker -n 7\n", "")


def test_following_until_an_interrupt(hosts: Hosts, tmp_path: Path) -> None:
    log = hosts[0].home / "spile-worker.log"
    log.write_text("old\n")
    with (tmp_path / "out").open("w+") as out:
        follower = spile(tmp_path, "logs", "0", "-f", *hosts.flags(0), stdout=out)
        assert wait_until(lambda: "old\n" in (tmp_path / "out").read_text())
        with log.open("a") as more:
            more.write("new\n")
        assert wait_until(lambda: "new\n" in (tmp_path / "out").read_text())
        follower.send_signal(signal.SIGINT)
        assert finish(follower)[0] == 0
    assert hosts.processes() == []


def test_a_machine_that_is_gone(fake: FakeCloud, client: CloudTpu, tmp_path: Path) -> None:
    beat(tmp_path / "out", 5, "t1v-n-0-w-0")
    make(client, "tpu-us-central1-a-0", worker=5)
    fake.cloud.preempt(ZONE, "tpu-us-central1-a-0")
    env: Any = {"env": dict(fake.environment())}
    for name in ("5", "tpu-us-central1-a-0"):
        code, out, err = done(tmp_path, "logs", name, "--output", "out", "-n", "2", **env)
        assert (code, err) == (0, "")
        assert out.split("\n") == [
            "tpu-us-central1-a-0 is PREEMPTED; "
            "the heartbeat of 2026-01-16T14:32:15Z (failed, on t1v-n-0-w-0) has the last lines:",
            "two [b]", "three", "last error: it broke", "",
        ]  # fmt: skip
    code, _, err = done(tmp_path, "logs", "5", **env)
    line = (
        "no log of worker 5: found tpu-us-central1-a-0 is PREEMPTED. Pass --home gs://bucket/fleet/NAME, where its log"
    )
    assert (code, err) == (2, f"spile: {line} is kept, or --output gs://… for the last lines.\n")
    code, _, err = done(tmp_path, "logs", "6", "--output", "out", **env)
    assert code == 2
    assert "no heartbeat of worker 6 in" in err
    assert "expected one in stream_N/progress.json. Check --output." in err
    code, _, err = done(tmp_path, "logs", "t1v-n-0-w-0", "--output", "out", **env)
    assert code == 0
    assert ClaimBook(open_folder(str(tmp_path / "out")), "tpu-us-central1-a-0").take([8]) is not None
    beat(tmp_path / "out", 8, "the-host-of-stream-8")
    code, out, err = done(tmp_path, "logs", "5", "--output", "out", **env)
    assert (code, "on the-host-of-stream-8" in out) == (0, True), "a worker of a fleet claims any stream"


def test_slices_by_their_prefix(fake: FakeCloud, client: CloudTpu, empty_hosts: Hosts, project: Path) -> None:
    for name in ("multi-1", "multi-0", "multi-other"):
        make(client, name, "v5p-16")
    addresses = [end.external for node in sorted(client.nodes("-"), key=lambda n: n.name)[:2] for end in node.endpoints]
    first = empty_hosts.start(0, address=str(addresses[0]))
    for number, address in enumerate(addresses[1:], 1):
        empty_hosts.start(number, address=str(address), port=first.port)
    words = ["--tpu-prefix", "multi", "--ssh-option", f"Port={first.port}", *empty_hosts.flags()[2:]]
    env: Any = {"env": dict(fake.environment())}
    line = "echo $TPU_WORKER_ID $MEGASCALE_SLICE_ID $MEGASCALE_NUM_SLICES $MEGASCALE_COORDINATOR_ADDRESS"
    code, out, err = finish(spile(project, "run", *words, "--command", line, **env))
    assert (code, err) == (0, "")
    boss = next(node for node in client.nodes(ZONE) if node.name == "multi-0").endpoints[0].internal
    for number, name in enumerate(("multi-0:w0", "multi-0:w1", "multi-1:w0", "multi-1:w1")):
        assert f"{name} │ {number % 2} {number // 2} 2 {boss}:8080\n" in out
    known = (empty_hosts.folder / "known_hosts").read_text()
    ids = {node.uid for node in client.nodes(ZONE) if node.name != "multi-other"}
    assert {line.split()[0] for line in known.splitlines()} == {f"tpu.{uid}-{host}" for uid in ids for host in (0, 1)}
    code, _, err = done(project, "run", "--tpu-prefix", "none", "--", "true", **env)
    assert (code, err) == (
        2,
        "spile: no TPU VM named none, nor none-0, none-1, …: found multi-0, multi-1, multi-other. "
        "Check the names with spile tpu list, or give --zone and --project.\n",
    )
