"""The coordination service as a process: ``python -m spile.worker.pod.service HOST COUNT LINGER``.

Prints its address, then serves until its parent says ``bye`` or is gone. In the second case it stays long enough for
the others to find out which host died, and from what it had reported, why.
"""

from __future__ import annotations

import os
import socket
import sys
import time

__all__ = ["main"]

_PORT = 8482
"""JAX's own; taken if free."""
_AFTER_BYE = 0.5


def _free_port(host: str) -> int:
    for port in (_PORT, 0):
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise OSError(f"no free port on {host}")


def main(host: str, count: int, linger: float) -> None:
    """Serve, until it is time to go."""
    from jax._src.lib import _jax  # type: ignore[attr-defined]

    from spile.worker.pod.barriers import SERVICE_HEARTBEAT

    numeric = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    port = _free_port(numeric)
    shown = f"[{numeric}]:{port}" if ":" in numeric else f"{numeric}:{port}"
    service = _jax.get_distributed_runtime_service(
        shown, count, heartbeat_timeout=SERVICE_HEARTBEAT, shutdown_timeout=1, recoverable=True
    )
    print(shown, flush=True)
    for stream in (1, 2):  # whoever reads our parent's output must not wait for us
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    said = sys.stdin.readline()
    time.sleep(_AFTER_BYE if said else linger)
    del service
    os._exit(0)  # its threads may hold on to a peer that has gone


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
