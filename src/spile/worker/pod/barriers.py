"""JAX's coordination service: the one module that touches it, because JAX has no public name for it.

It needs no device: a barrier, and a directory of keys and values, over one gRPC connection to worker 0. A test fails
when a new JAX moves any of it. JAX's own ``initialize`` is not used: it would run the service inside process 0, so that
process 0's death aborts everybody before they can say why, and would take SIGTERM for its preemption service.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import IO, Any

from spile.errors import PodError
from spile.worker.pod.identity import Identity

__all__ = ["SERVICE_HEARTBEAT", "Coordination", "Service", "detect_cluster", "start_service"]

SERVICE_HEARTBEAT = 100
"""Seconds, JAX's own default: our watch is the one that looks after the living."""
_LOOK_UP = 0.25
"""Seconds that a wait inside the service's client may hold back a signal."""
_OWN_DETECTION = ("tpu", "gcetpu", "gketpu")
"""Clusters that ``identity`` finds by itself, without JAX's minutes of retries."""


def detect_cluster() -> tuple[str, int, int] | None:
    """What JAX detects by itself (Slurm, Open MPI, Kubernetes): coordinator, process count, this process's number."""
    from jax._src.clusters import ClusterEnv

    for kind in ClusterEnv._cluster_types:
        if kind.name not in _OWN_DETECTION and not kind.opt_in_only_method and kind.is_env_present():
            count = kind.get_process_count()
            if count is None or count <= 1:
                return None
            address = kind.get_coordinator_address(timeout_secs=10, override_coordinator_port=None)
            return address, int(count), int(kind.get_process_id())
    return None


class Service:
    """The coordination service, in a process of its own beside worker 0."""

    def __init__(self, process: subprocess.Popen[str], address: str) -> None:
        self._process, self.address = process, address

    def release(self, wait: float = 5.0) -> None:
        """All have left: it may end."""
        stdin: IO[str] | None = self._process.stdin
        if stdin is not None:
            with contextlib.suppress(OSError):
                stdin.write("bye\n")
                stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(wait)


def start_service(host: str, count: int, linger: float) -> Service:
    """Start it on a free port of ``host``. It ends by itself ``linger`` seconds after this process does."""
    command = [sys.executable, "-m", "spile.worker.pod.service", host, str(count), f"{linger:g}"]
    # A session of its own: Ctrl+C in worker 0's terminal must not take it away before the others have heard.
    process = subprocess.Popen(  # noqa: S603 - our own interpreter and module
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env=_quiet(os.environ),
    )
    line = process.stdout.readline().strip() if process.stdout is not None else ""
    if not line:
        raise PodError(f"the coordination service could not start on {host}", fix="see the lines above")
    return Service(process, line)


def _quiet(environment: Mapping[str, str]) -> dict[str, str]:
    return {**environment, "TF_CPP_MIN_LOG_LEVEL": "3"}


class Coordination:
    """A connection to the service."""

    def __init__(self, client: Any, identity: Identity, scope: str = "") -> None:
        self._client, self.identity, self._scope = client, identity, scope

    def scoped(self, name: str) -> Coordination:
        """The same connection with names of its own, so that a second visit does not meet the first one's."""
        return Coordination(self._client, self.identity, f"{name}/")

    @classmethod
    def connect(cls, address: str, identity: Identity, *, timeout: float) -> Coordination:
        """Connect, and let JAX's backends find the connection: the processes become one."""
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
        _aside(client.connect)
        state = distributed.global_state
        state.client, state.coordinator_address = client, address
        state.process_id, state.num_processes = identity.process, identity.count
        return cls(client, identity)

    def close(self) -> None:
        """Leave: the service forgets us without a word to the others."""
        from jax._src import distributed

        self._client.shutdown()
        distributed.global_state.client = None

    # -- keys and values ------------------------------------------------------------------------------------------

    def put(self, key: str, value: str) -> None:
        """Create or replace."""
        self._client.key_value_set(self._scope + key, value, allow_overwrite=True)

    def entries(self, folder: str) -> dict[str, str]:
        """Everything under ``folder/``, without that prefix."""
        prefix = f"{self._scope}{folder}/"
        return {key[len(prefix) :]: value for key, value in self._client.key_value_dir_get(prefix)}

    def get(self, key: str, timeout: float) -> str | None:
        """A value, waited for; None when time is up. A signal is heard meanwhile."""
        import jax

        until = time.monotonic() + timeout
        while (left := until - time.monotonic()) > 0:
            try:
                value: str = self._client.blocking_key_value_get(
                    self._scope + key, max(1, int(min(left, _LOOK_UP) * 1000))
                )
            except jax.errors.JaxRuntimeError as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    raise
                continue
            return value
        return None

    def delete(self, key: str) -> None:
        """Forget."""
        self._client.key_value_delete(self._scope + key)

    # -- barriers -------------------------------------------------------------------------------------------------

    def barrier(self, name: str, timeout: float) -> None:
        """Wait until all have come; :class:`PodError` names everyone who has not, and what they last reported."""
        import jax

        me = str(self.identity.process)
        self.put(f"at/{name}/{me}", "here")
        try:
            _aside(lambda: self._client.wait_at_barrier(self._scope + name, max(1, int(timeout * 1000))))
        except jax.errors.JaxRuntimeError as error:
            late = self._late(name, timeout)
            if late is None:
                raise
            raise late from error

    def _alive(self) -> dict[str, str]:
        return Coordination(self._client, self.identity).entries("alive")

    def _late(self, name: str, timeout: float) -> PodError | None:
        here = {int(process) for process in self.entries(f"at/{name}")}
        reports = {int(process): text.partition("\t")[2] for process, text in self._alive().items()}
        missing = [process for process in range(self.identity.count) if process not in here]
        if not missing:
            return None
        named = "; ".join(
            f"{self.identity.host(process)}, last reported: {reports.get(process) or 'nothing'}" for process in missing
        )
        others = sorted({reports[process] for process in here if reports.get(process)})
        beside = f" (the others: {', '.join(others)})" if others else ""
        return PodError(
            f"{len(missing)} of {self.identity.count} workers did not come to the barrier '{name}' "
            f"within {timeout:g} s: {named}{beside}",
            fix="see those hosts' logs, then run the same command again",
        )


def _aside(call: Callable[[], object]) -> None:
    """A long call in a thread of its own: it waits outside Python, where the main thread would hear no signal."""
    errors: list[BaseException] = []
    over = threading.Event()

    def work() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001 - raised again where it was called
            errors.append(error)
        over.set()

    threading.Thread(target=work, name="spile-barrier", daemon=True).start()
    over.wait()
    if errors:
        raise errors[0]
