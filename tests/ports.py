"""Ports for servers that a test must name before they are started."""

from __future__ import annotations

import fcntl
import random
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["coordinator_port", "free_port"]

_PORTS = range(15_000, 32_000)
"""Below those that the system hands out by itself: no connection of another test takes one in the meantime."""


def free_port(address: str = "127.0.0.1") -> int:
    """Return a port on which nothing listens now."""
    for port in random.SystemRandom().sample(_PORTS, 100):
        with socket.socket() as probe:
            try:
                probe.bind((address, port))
            except OSError:
                continue
            return port
    raise AssertionError(f"none of 100 ports of {address} is free")


@contextmanager
def coordinator_port() -> Iterator[None]:
    """Keep the port that pods use by default to one test at a time: those of two tests would meet there."""
    with (Path(tempfile.gettempdir()) / "spile-test-coordinator-port").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
