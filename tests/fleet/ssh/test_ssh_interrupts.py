"""Ctrl+C before anything runs."""

from __future__ import annotations

import asyncio
import socket

import pytest

from spile.errors import Interrupted
from spile.fleet.ssh.fanout import run_everywhere
from spile.fleet.ssh.hosts import Access, parse_hosts
from spile.fleet.ssh.session import Job


def test_an_interrupt_while_connecting_runs_nothing() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:  # it accepts, and never says a word
        places = parse_hosts([f"127.0.0.1:{mute.getsockname()[1]}"])

        async def main() -> None:
            interrupt = asyncio.Event()
            asyncio.get_running_loop().call_later(0.5, interrupt.set)
            await run_everywhere(places, Job("true"), access=Access(), output=lambda *_: None, interrupt=interrupt)

        with pytest.raises(Interrupted, match="interrupted before anything ran"):
            asyncio.run(main())
