"""Find out which process of a pod this is: from flags, the VM's metadata, variables, or JAX's cluster detection.

"The VM has no such attribute" and "the metadata server does not answer" are different: a host of a slice that took
silence for a no would do the work of the whole slice by itself, and so would every other host.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from spile.errors import PodError, SpecError
from spile.objects.machine import google_metadata_url, metadata_reply

Metadata = Callable[[str], str | None]
"""Returns an attribute of the VM; None if it does not exist. Raises :class:`NoMetadata` if there is no answer."""

_GCE_NAMES = ("Google", "Google Compute Engine")
_CHIPS = ("accel[0-9]*", "vfio/[0-9]*")
"""Device files of TPU chips: up to v4, and since v5e."""
_PAUSE, _LONGEST_PAUSE = 0.25, 5.0


class NoMetadata(PodError):
    """A TPU VM's metadata server did not answer."""


class Patience(NamedTuple):
    """How long to wait for an attribute, in seconds: for all tries together, and for one."""

    total: float
    one: float


_OF_A_TPU = Patience(60.0, 4.0)
_OF_ANOTHER = Patience(4.0, 2.0)
"""For a VM without TPUs, which cannot be part of a slice."""


def gce_metadata(
    environment: Mapping[str, str],
    *,
    product: Path = Path("/sys/class/dmi/id/product_name"),
    devices: Path = Path("/dev"),
    patience: Patience | None = None,
) -> Metadata | None:
    """Return the metadata server of this VM; None if this is not a Google VM, which is known without the network."""
    named = environment.get("GCE_METADATA_IP") or environment.get("GCE_METADATA_HOST")
    if not named and not (product.is_file() and product.read_text(errors="replace").strip() in _GCE_NAMES):
        return None
    base = google_metadata_url("instance/attributes/", environment)
    tpu = any(next(devices.glob(name), None) is not None for name in _CHIPS)
    return _MetadataServer(base, patience or (_OF_A_TPU if tpu else _OF_ANOTHER), tpu)


@dataclass(frozen=True)
class _MetadataServer:
    """Asks the metadata server, with retries."""

    base: str
    patience: Patience
    tpu: bool

    def __call__(self, key: str) -> str | None:
        began, pause = time.monotonic(), _PAUSE
        while True:
            status, content = metadata_reply("GET", self.base + key, {"Metadata-Flavor": "Google"}, self.patience.one)
            if status in (200, 404):
                return content if status == 200 else None
            refused = 400 <= status < 500 and status != 429
            waited = time.monotonic() - began
            if refused or waited + pause >= self.patience.total:
                break
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        if not self.tpu:
            return None
        raise NoMetadata(
            f"this TPU VM's metadata server does not say which host of which slice this is ({waited:.0f} s)",
            expected=f"an answer to {key}",
            found=content,
            fix="run it again, or give --process-id, --num-processes and --coordinator-address "
            "(--num-processes 1 if this host works alone)",
        )


ROLL_CALL_PORT = 5555


@dataclass(frozen=True)
class Identity:
    """One process of a pod."""

    process: int
    count: int
    coordinator: str = ""
    """The host of worker 0, as the others reach it; empty for a single process."""
    port: int = ROLL_CALL_PORT
    """The port of the roll call on that host."""
    hosts: tuple[str, ...] = ()
    """All hosts in order, if known."""
    source: str = "one process"
    """Where this was found."""
    name: str = ""
    """The host name of this machine."""
    secret: str = field(default="", repr=False)
    """A secret that the hosts of a slice share, if there is one. Callers without it are ignored."""

    @property
    def first(self) -> bool:
        return self.process == 0

    def host(self, process: int) -> str:
        """Return a process for messages: ``worker 3 (10.0.0.5)``."""
        known = self.hosts[process] if process < len(self.hosts) else ""
        return f"worker {process} ({known})" if known else f"worker {process}"


@dataclass(frozen=True)
class _Found:
    """What one source knows; None for what it does not know."""

    process: int | None = None
    count: int | None = None
    hosts: tuple[str, ...] = ()
    coordinator: str | None = None
    source: str = ""
    secret: str = field(default="", repr=False)


def find_identity(
    environment: Mapping[str, str],
    *,
    coordinator_address: str | None = None,
    process_id: int | None = None,
    num_processes: int | None = None,
    hosts: int | None = None,
    metadata: Metadata | None = None,
    detect: Callable[[], tuple[str, int, int] | None] | None = None,
    name: str | None = None,
) -> Identity:
    """Return the identity of this process from the flags, the metadata server, the variables and JAX's detection.

    ``hosts`` is the number of hosts of ``--topology``. ``detect`` returns coordinator, count and number.
    """
    found = _Found(process_id, num_processes, (), coordinator_address, "flags")
    no_answer: NoMetadata | None = None
    if num_processes != 1 and None in (coordinator_address, process_id, num_processes):
        described, no_answer = _from_metadata(metadata, environment)
        found = _merged(found, described, _from_variables(environment), _from_jax(detect, environment))
    count = found.count if found.count is not None else hosts
    name = name or socket.gethostname()
    if no_answer is not None and (count in (None, 1) or found.process is None):
        raise no_answer
    if count is None or count == 1:
        _refuse_half(found, count)
        if hosts is not None and hosts > 1:
            raise _disagreement(hosts, 1, found.source or "this host")
        return Identity(0, 1, source=found.source or "one process", name=name)
    if found.process is None:
        raise SpecError(
            f"{count} processes, but the number of this one is unknown",
            expected="CLOUD_TPU_TASK_ID, TPU_WORKER_ID or a TPU VM's metadata",
            fix="run it on every host of the slice: spile run --tpu-prefix NAME -- spile …; or give --process-id; or "
            "leave --topology out for a single host",
        )
    if not 0 <= found.process < count:
        raise SpecError(
            f"this process's number ({found.source})", expected=f"from 0 to {count - 1}", found=found.process
        )
    if hosts is not None and hosts != count:
        raise _disagreement(hosts, count, found.source)
    return replace(_placed(found, count, name), secret=environment.get("SPILE_POD_SECRET") or found.secret)


def _placed(found: _Found, count: int, name: str) -> Identity:
    address = found.coordinator or (found.hosts[0] if found.hosts else "")
    if not address:
        raise SpecError(
            f"process {found.process} of {count} does not know where worker 0 is ({found.source})",
            fix="give --coordinator-address HOST",
        )
    host, port = _split(address)
    return Identity(
        process=found.process or 0,
        count=count,
        coordinator=host,
        port=port or ROLL_CALL_PORT,
        hosts=found.hosts if len(found.hosts) == count else (),
        source=found.source,
        name=name,
    )


def _disagreement(wanted: int, found: int, source: str) -> SpecError:
    return SpecError(
        "the topology's hosts",
        expected=f"{wanted} (--topology)",
        found=f"{found} ({source})",
        fix="give this slice's own --topology, or leave it out",
    )


def _refuse_half(found: _Found, count: int | None) -> None:
    if count is None and found.process:
        raise SpecError(
            f"{found.source} says that this is worker {found.process}, but the number of workers is unknown",
            fix="give --num-processes or --topology, or unset the variable if an earlier launch left it",
        )


def _merged(*sources: _Found) -> _Found:
    """Take each fact from the first source that has it."""
    known = _Found()
    names: list[str] = []
    for found in sources:
        before = known
        known = replace(
            known,
            process=found.process if known.process is None else known.process,
            count=found.count if known.count is None else known.count,
            hosts=known.hosts or found.hosts,
            coordinator=known.coordinator or found.coordinator,
            secret=known.secret or found.secret,
        )
        if known != before:
            names.append(found.source)
    return replace(known, source=", ".join(names))


def _from_metadata(metadata: Metadata | None, environment: Mapping[str, str]) -> tuple[_Found, NoMetadata | None]:
    """Return what the metadata says, or its error, which is raised if no other source knows the slice."""
    if metadata is None or "TPU_SKIP_MDS_QUERY" in environment:
        return _Found(), None
    try:
        number, endpoints = metadata("agent-worker-number"), metadata("worker-network-endpoints")
    except NoMetadata as no_answer:
        return _Found(), no_answer
    if not number and not endpoints:
        return _Found(), None
    if not number or not endpoints:
        raise PodError(
            "the VM's metadata names only a part of the host's place in the slice",
            expected="agent-worker-number and worker-network-endpoints",
            found="only the " + ("first" if number else "second"),
            fix="wait until the TPU is READY and run it again, or give --process-id and --num-processes",
        )
    # Each endpoint is a bare address or name:id:address.
    hosts = tuple(part.rpartition(":")[2] for part in endpoints.split(","))
    variables = {**_tpu_env(metadata("tpu-env") or ""), **environment}
    found = _slices(_number(number, "agent-worker-number"), hosts, variables, "the VM's metadata")
    # spile tpu create and spile deploy give a slice this secret.
    return replace(found, secret=(metadata("spile-secret") or "") if found.count != 1 else ""), None


def _tpu_env(text: str) -> dict[str, str]:
    """Lines such as ``MEGASCALE_NUM_SLICES: '2'``."""
    pairs = (line.partition(":") for line in text.splitlines() if ":" in line)
    return {key.strip(): value.strip().strip("'") for key, _, value in pairs}


def _from_variables(environment: Mapping[str, str]) -> _Found:
    listed = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES") or ""
    hosts = tuple(host.strip() for host in listed.split(",") if host.strip())
    number = environment.get("CLOUD_TPU_TASK_ID")
    source = "CLOUD_TPU_TASK_ID"
    # TPU_WORKER_ID alone names a stream; it is a process number only if several hosts are listed.
    if number is None and len(hosts) > 1:
        number, source = environment.get("TPU_WORKER_ID"), "TPU_WORKER_ID"
    if number is None or not number.strip():
        return _Found()
    if len(hosts) <= 1:
        return _Found(_number(number, source), 1 if hosts else None, hosts, None, source)
    return _slices(_number(number, source), hosts, environment, f"{source} among {len(hosts)} TPU_WORKER_HOSTNAMES")


def _slices(number: int, hosts: tuple[str, ...], variables: Mapping[str, str], source: str) -> _Found:
    """Return the identity in one slice, or in one of several that act together (multislice)."""
    slices = _number(variables.get("MEGASCALE_NUM_SLICES") or "1", "MEGASCALE_NUM_SLICES")
    mine = _number(variables.get("MEGASCALE_SLICE_ID") or "0", "MEGASCALE_SLICE_ID")
    coordinator = variables.get("MEGASCALE_COORDINATOR_ADDRESS")
    if slices <= 1 or not coordinator:
        return _Found(number, len(hosts), hosts, None, source)
    # Its port belongs to JAX and not to the roll call.
    where = coordinator.partition(":")[0]
    return _Found(number + mine * len(hosts), slices * len(hosts), (), where, f"{source}, slice {mine} of {slices}")


def _from_jax(detect: Callable[[], tuple[str, int, int] | None] | None, environment: Mapping[str, str]) -> _Found:
    own = tuple(environment.get(f"JAX_{name}") for name in ("COORDINATOR_ADDRESS", "NUM_PROCESSES", "PROCESS_ID"))
    if all(own):
        address, count, number = own
        return _Found(
            _number(number or "", "JAX_PROCESS_ID"),
            _number(count or "", "JAX_NUM_PROCESSES"),
            (),
            (address or "").partition(":")[0],
            "JAX_PROCESS_ID",
        )
    detected = detect() if detect is not None else None
    if detected is None:
        return _Found()
    coordinator, processes, mine = detected
    return _Found(mine, processes, (), coordinator.partition(":")[0], "JAX's cluster detection")


def _number(text: str, name: str) -> int:
    if not text.strip().isdecimal():
        raise SpecError(name, expected="a number", found=repr(text))
    return int(text)


def _split(address: str) -> tuple[str, int | None]:
    host, colon, port = address.rpartition(":")
    if not colon or host.endswith(":"):
        return address, None
    return host, _number(port, "--coordinator-address's port")


def this_process(**flags: object) -> Identity:
    """Return the identity of this process from its environment, the metadata server and JAX's detection."""
    from spile.worker.pod.coordination import detect_cluster

    return find_identity(
        os.environ,
        metadata=gce_metadata(os.environ),
        detect=detect_cluster,
        **flags,  # type: ignore[arg-type]
    )
