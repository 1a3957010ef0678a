"""JAX's coordination service: a directory of keys and values that all processes share, over gRPC to worker 0.

This is the only module that touches it, because JAX has no public interface; a test fails if a new JAX moves it. JAX's
own ``initialize`` is not used: it would run the service inside process 0, whose death would abort the other processes
before they can report why, and it would take SIGTERM for its preemption service.

``python -m spile.run.pod.coordination HOST COUNT LINGER`` is the service itself, in a process of its own next to
worker 0. It prints its address and serves until its parent writes ``stop`` or dies. If the parent dies, it stays for
LINGER seconds, so that the others can find out which host died and what it reported last.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

from spile.errors import PodError
from spile.objects.folder import run_interruptibly
from spile.run.pod.identity import Identity

SERVICE_HEARTBEAT = 100
"""Seconds, JAX's default. Our own watch notices dead processes earlier."""
_GET_SECONDS = 0.25
"""Seconds that a wait inside the client may delay a signal, which Python handles between two calls."""
_DETECTED_BY_IDENTITY = ("tpu", "gcetpu", "gketpu")
"""Clusters that ``identity`` detects itself, without JAX's minutes of retries."""
_STOP_DELAY = 0.5
"""Seconds for the last answers."""


def detect_cluster() -> tuple[str, int, int] | None:
    """Return coordinator, process count and process number as JAX detects them (Slurm, Open MPI, Kubernetes)."""
    from jax._src.clusters import ClusterEnv

    for kind in ClusterEnv._cluster_types:
        if kind.name not in _DETECTED_BY_IDENTITY and not kind.opt_in_only_method and kind.is_env_present():
            count = kind.get_process_count()
            if count is None or count <= 1:
                return None
            address = kind.get_coordinator_address(timeout_secs=10, override_coordinator_port=None)
            return address, int(count), int(kind.get_process_id())
    return None


class Service:
    """The process of the coordination service, on a free port of ``host``.

    It ends ``linger`` seconds after this process does.
    """

    def __init__(self, host: str, count: int, linger: float) -> None:
        command = [sys.executable, "-m", "spile.run.pod.coordination", host, str(count), f"{linger:g}"]
        # A session of its own: Ctrl+C in worker 0's terminal must not end it before the others are notified.
        self.process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "TF_CPP_MIN_LOG_LEVEL": "3"},
        )
        assert self.process.stdout is not None  # noqa: S101 - it is a pipe
        with self.process.stdout as lines:
            self.address = lines.readline().strip()
        if not self.address:
            raise PodError(f"the coordination service could not start on {host}", fix="see the lines above")

    def stop(self) -> None:
        """End the service, after all processes have left."""
        with contextlib.suppress(subprocess.TimeoutExpired, OSError):
            self.process.communicate("stop\n", timeout=5.0)


class Coordination:
    """A connection to the service."""

    def __init__(self, client: Any, scope: str = "") -> None:
        self._client, self._scope = client, scope

    def scoped(self, name: str) -> Coordination:
        """Return the same connection with separate key names, so that a second run does not see those of the first."""
        return Coordination(self._client, f"{name}/")

    @classmethod
    def connect(cls, address: str, identity: Identity, *, timeout: float) -> Coordination:
        """Connect, and register the connection with JAX so that its backends span all processes."""
        import jax
        from jax._src import distributed, xla_bridge
        from jax._src.lib import _jax  # type: ignore[attr-defined]

        if xla_bridge.backends_are_initialized():
            raise PodError("a device was touched before the pod was joined", fix="join the pod first")
        jax.config.update("jax_enable_recoverability", True)
        jax.config.update("jax_enable_preemption_service", False)
        client = _jax.get_distributed_runtime_client(
            address,
            identity.process,
            init_timeout=max(1, int(timeout)),
            heartbeat_timeout=SERVICE_HEARTBEAT,
            shutdown_on_destruction=False,
            use_compression=True,
        )
        run_interruptibly(client.connect)
        state = distributed.global_state
        state.client, state.coordinator_address = client, address
        state.process_id, state.num_processes = identity.process, identity.count
        return cls(client)

    def close(self) -> None:
        """Disconnect without ending the other processes."""
        from jax._src import distributed

        self._client.shutdown()
        distributed.global_state.client = None

    def put(self, key: str, value: str) -> None:
        self._client.key_value_set(self._scope + key, value, allow_overwrite=True)

    def entries(self, folder: str) -> dict[str, str]:
        """Return everything under ``folder/``, without that prefix."""
        prefix = f"{self._scope}{folder}/"
        return {key[len(prefix) :]: value for key, value in self._client.key_value_dir_get(prefix)}

    def get(self, key: str, timeout: float) -> str | None:
        """Wait for a value and return it; None after ``timeout`` seconds. Signals are handled meanwhile."""
        import jax

        until = time.monotonic() + timeout
        while (left := until - time.monotonic()) > 0:
            try:
                value: str = self._client.blocking_key_value_get(
                    self._scope + key, max(1, int(min(left, _GET_SECONDS) * 1000))
                )
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
                continue
            return value
        return None

    def delete(self, key: str) -> None:
        self._client.key_value_delete(self._scope + key)


# -- the service's own process ----------------------------------------------------------------------------------------


def serve(host: str, count: int, linger: float) -> None:
    """Run the service for ``count`` processes until the parent process ends it or dies.

    Signals are ignored: Slurm and systemd signal all processes of a job at once, and the workers need the service to
    commit together.
    """
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    from jax._src.lib import _jax  # type: ignore[attr-defined]

    numeric = str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    with socket.socket(socket.AF_INET6 if ":" in numeric else socket.AF_INET) as probe:
        probe.bind((numeric, 0))
        port = probe.getsockname()[1]
    address = f"[{numeric}]:{port}" if ":" in numeric else f"{numeric}:{port}"
    service = _jax.get_distributed_runtime_service(
        address, count, heartbeat_timeout=SERVICE_HEARTBEAT, shutdown_timeout=1, recoverable=True
    )
    print(address, flush=True)
    for stream in (1, 2):  # a reader of our parent's output must not wait for this process
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream)
    stop_requested = bool(sys.stdin.readline())
    time.sleep(_STOP_DELAY if stop_requested else linger)
    del service
    os._exit(0)  # its threads may wait for a process that is gone


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
