"""Ctrl+C before anything runs; a disk that is full while it runs."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from pathlib import Path

import pytest

from fleet.ssh.loopback import Hosts, finish, spile, wait_until
from programs import needs
from spile.errors import Failure, Interrupted
from spile.hosts.hosts import Access, Host, parse_hosts
from spile.hosts.run import Job, StopRequest, jobs_for, run_everywhere


@needs("ssh")
def test_an_interrupt_while_connecting_runs_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:  # it accepts, and never says a word
        places = parse_hosts([f"127.0.0.1:{mute.getsockname()[1]}"])

        async def main() -> None:
            stop = StopRequest()
            asyncio.get_running_loop().call_later(0.5, stop.interrupt)
            await run_everywhere(jobs_for(places, Job("true")), access=Access(), output=lambda *_: None, stop=stop)

        with pytest.raises(Interrupted, match="interrupted before anything ran"):
            asyncio.run(main())


@pytest.mark.slow
def test_output_that_cannot_be_kept_ends_all(hosts: Hosts) -> None:
    def full(host: Host, data: bytes) -> None:
        raise Failure("the disk is full")

    access = Access(key=hosts.key, options=hosts.options)
    job = Job("if [ $TPU_WORKER_ID = 1 ]; then echo up; fi; sleep 1000")
    with pytest.raises(Failure, match="the disk is full"):
        asyncio.run(run_everywhere(jobs_for(parse_hosts([hosts.named()]), job), access=access, output=full))
    assert wait_until(lambda: hosts.processes() == [])


def test_a_reader_that_goes_away_ends_all(hosts: Hosts, project: Path) -> None:
    runner = spile(project, "run", *hosts.flags(0, 1), "--", "while :; do echo line; sleep 0.1; done")
    assert runner.stdout is not None
    assert runner.stdout.readline().startswith("copied")
    runner.stdout.close()
    assert runner.wait(120) == 0
    assert runner.stderr is not None
    assert runner.stderr.read() == ""
    runner.stderr.close()
    assert wait_until(lambda: hosts.processes() == [])


@pytest.mark.slow
def test_a_runner_killed_while_it_copies_leaves_nothing(hosts: Hosts, project: Path) -> None:
    for number in range(40):
        (project / f"big{number}").write_bytes(os.urandom(1 << 20))
    runner = spile(project, "run", *hosts.flags(), "--", "true")
    assert wait_until(lambda: len(hosts.processes()) >= 4)
    runner.send_signal(signal.SIGKILL)
    finish(runner)
    assert wait_until(lambda: hosts.processes() == [])
    code, out, _ = finish(spile(project, "run", *hosts.flags(), "--", "ls big* | wc -l"))
    assert (code, out.count("│ 40\n")) == (0, 4)
