"""Find out which process of a pod this is: from flags, the VM's metadata, variables, or JAX's cluster detection.

"The VM has no such attribute" and "the metadata server does not answer" are different: a host of a slice that took the
second for the first would do the work of the whole slice by itself, and so would every other host.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from spile.errors import PodError, SpecError
from spile.objects.machine import google_metadata_url, metadata_reply

Metadata = Callable[[str], str | None]
"""Returns an attribute of the VM; None if it does not exist. Raises :class:`NoMetadata` if there is no answer."""

ROLL_CALL_PORT = 5555
_GCE_PRODUCTS = ("Google", "Google Compute Engine")
_CHIP_FILES = ("accel[0-9]*", "vfio/[0-9]*")
"""Device files of TPU chips: up to v4, and since v5e."""
_FIRST_PAUSE, _LONGEST_PAUSE = 0.25, 5.0


class NoMetadata(PodError):
    """A TPU VM's metadata server did not answer."""


class MetadataTimeouts(NamedTuple):
    """How long to wait for an attribute, in seconds: for all requests together, and for one."""

    total: float
    request: float


_TPU_TIMEOUTS = MetadataTimeouts(60.0, 4.0)
_OTHER_TIMEOUTS = MetadataTimeouts(4.0, 2.0)
"""For a VM without TPUs, which cannot be part of a slice."""


def gce_metadata(
    environment: Mapping[str, str],
    *,
    product: Path = Path("/sys/class/dmi/id/product_name"),
    devices: Path = Path("/dev"),
    timeouts: MetadataTimeouts | None = None,
) -> Metadata | None:
    """Return the metadata server of this VM; None if this is not a Google VM, which is known without the network."""
    address = environment.get("GCE_METADATA_IP") or environment.get("GCE_METADATA_HOST")
    if not address and not (product.is_file() and product.read_text(errors="replace").strip() in _GCE_PRODUCTS):
        return None
    base = google_metadata_url("instance/attributes/", environment)
    tpu = any(next(devices.glob(name), None) is not None for name in _CHIP_FILES)
    total, request = timeouts or (_TPU_TIMEOUTS if tpu else _OTHER_TIMEOUTS)

    def read_attribute(key: str) -> str | None:
        began, pause = time.monotonic(), _FIRST_PAUSE
        while True:
            status, content = metadata_reply("GET", base + key, {"Metadata-Flavor": "Google"}, request)
            if status in (200, 404):
                return content if status == 200 else None
            refused = 400 <= status < 500 and status != 429
            waited = time.monotonic() - began
            if refused or waited + pause >= total:
                break
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        if not tpu:
            return None
        raise NoMetadata(
            f"this TPU VM's metadata server does not say which host of which slice this is ({waited:.0f} s)",
            expected=f"an answer to {key}",
            found=content,
            fix="run it again, or give --process-id, --num-processes and --coordinator-address "
            "(--num-processes 1 if this host works alone)",
        )

    return read_attribute


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
    name: str = field(default_factory=socket.gethostname)
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


_Facts = dict[str, Any]
"""What a source knows of the fields of :class:`Identity`, with its own name as ``source``."""


def find_identity(
    environment: Mapping[str, str],
    *,
    coordinator_address: str | None = None,
    process_id: int | None = None,
    num_processes: int | None = None,
    hosts: int | None = None,
    metadata: Metadata | None = None,
    detect: Callable[[], tuple[str, int, int] | None] = lambda: None,
) -> Identity:
    """Return the identity of this process from the flags, the metadata server, the variables and JAX's detection.

    ``hosts`` is the number of hosts of ``--topology``. ``detect`` returns coordinator, count and number.
    """
    flags = {"process": process_id, "count": num_processes, "coordinator": coordinator_address}
    facts: _Facts = {"source": "flags", **{name: value for name, value in flags.items() if value is not None}}
    no_answer: NoMetadata | None = None
    if num_processes != 1 and None in flags.values():
        described: _Facts = {}
        try:
            described = _from_metadata(metadata, environment)
        except NoMetadata as error:  # raised below if no other source knows the slice
            no_answer = error
        facts = _merge(facts, described, _from_variables(environment), _from_jax(detect, environment))
    count, process, source = facts.get("count", hosts), facts.get("process"), facts["source"]
    if no_answer is not None and (count in (None, 1) or process is None):
        raise no_answer
    if count is None and process:
        raise SpecError(
            f"{source} says that this is worker {process}, but the number of workers is unknown",
            fix="give --num-processes or --topology, or unset the variable if an earlier launch left it",
        )
    count = 1 if count is None else count
    if hosts is not None and hosts != count:
        raise SpecError(
            "the topology's hosts",
            expected=f"{hosts} (--topology)",
            found=f"{count} ({source or 'this host'})",
            fix="give this slice's own --topology, or leave it out",
        )
    if count == 1:
        return Identity(0, 1, source=source or "one process")
    if process is None:
        raise SpecError(
            f"{count} processes, but the number of this one is unknown",
            expected="CLOUD_TPU_TASK_ID, TPU_WORKER_ID or a TPU VM's metadata",
            fix="run it on every host of the slice: spile run --tpu-prefix NAME -- spile …; or give --process-id; or "
            "leave --topology out for a single host",
        )
    if not 0 <= process < count:
        raise SpecError(f"this process's number ({source})", expected=f"from 0 to {count - 1}", found=process)
    return _make_identity(facts, process, count, environment.get("SPILE_POD_SECRET"))


def _make_identity(facts: _Facts, process: int, count: int, secret: str | None) -> Identity:
    hosts: tuple[str, ...] = facts.get("hosts", ())
    address = facts.get("coordinator") or (hosts[0] if hosts else "")
    if not address:
        raise SpecError(
            f"process {process} of {count} does not know where worker 0 is ({facts['source']})",
            fix="give --coordinator-address HOST",
        )
    host, colon, port = address.rpartition(":")
    if not colon or host.endswith(":"):  # no port, or an IPv6 address
        host, port = address, ""
    return Identity(
        process,
        count,
        coordinator=host,
        port=_number(port, "--coordinator-address's port") if port else ROLL_CALL_PORT,
        hosts=hosts if len(hosts) == count else (),
        source=facts["source"],
        secret=secret or facts.get("secret", ""),
    )


def _merge(*sources: _Facts) -> _Facts:
    """Take each fact from the first source that has it, and name the sources that contributed."""
    known: _Facts = {}
    names = []
    for facts in sources:
        if facts.keys() - known.keys() - {"source"}:
            names.append(facts["source"])
        known = {**facts, **known}
    return {**known, "source": ", ".join(names)}


def _from_metadata(metadata: Metadata | None, environment: Mapping[str, str]) -> _Facts:
    if metadata is None or "TPU_SKIP_MDS_QUERY" in environment:
        return {}
    number, endpoints = metadata("agent-worker-number"), metadata("worker-network-endpoints")
    if not number and not endpoints:
        return {}
    if not number or not endpoints:
        raise PodError(
            "the VM's metadata names only a part of the host's place in the slice",
            expected="agent-worker-number and worker-network-endpoints",
            found="only the " + ("first" if number else "second"),
            fix="wait until the TPU is READY and run it again, or give --process-id and --num-processes",
        )
    # Each endpoint is a bare address or name:id:address.
    hosts = tuple(part.rpartition(":")[2] for part in endpoints.split(","))
    # Lines such as MEGASCALE_NUM_SLICES: '2'.
    lines = (line.partition(":") for line in (metadata("tpu-env") or "").splitlines() if ":" in line)
    variables = {key.strip(): value.strip().strip("'") for key, _, value in lines}
    process = _number(number, "agent-worker-number")
    facts = _place_in_slices(process, hosts, {**variables, **environment}, "the VM's metadata")
    # spile tpu create and spile deploy give a slice this secret.
    secret = metadata("spile-secret") if facts["count"] != 1 else None
    return {**facts, "secret": secret} if secret else facts


def _from_variables(environment: Mapping[str, str]) -> _Facts:
    listed = environment.get("TPU_PROCESS_ADDRESSES") or environment.get("TPU_WORKER_HOSTNAMES") or ""
    hosts = tuple(host.strip() for host in listed.split(",") if host.strip())
    source = "CLOUD_TPU_TASK_ID"
    # TPU_WORKER_ID alone names a stream; it is a process number only if several hosts are listed.
    if source not in environment and len(hosts) > 1:
        source = "TPU_WORKER_ID"
    text = environment.get(source, "").strip()
    if not text:
        return {}
    number = _number(text, source)
    if len(hosts) > 1:
        return _place_in_slices(number, hosts, environment, f"{source} among {len(hosts)} TPU_WORKER_HOSTNAMES")
    return {"source": source, "process": number, **({"hosts": hosts, "count": 1} if hosts else {})}


def _place_in_slices(number: int, hosts: tuple[str, ...], variables: Mapping[str, str], source: str) -> _Facts:
    """Return the place in one slice, or in one of several that act together (multislice)."""
    slices = _number(variables.get("MEGASCALE_NUM_SLICES") or "1", "MEGASCALE_NUM_SLICES")
    slice_id = _number(variables.get("MEGASCALE_SLICE_ID") or "0", "MEGASCALE_SLICE_ID")
    coordinator = variables.get("MEGASCALE_COORDINATOR_ADDRESS")
    if slices <= 1 or not coordinator:
        return {"source": source, "process": number, "count": len(hosts), "hosts": hosts}
    return {
        "source": f"{source}, slice {slice_id} of {slices}",
        "process": number + slice_id * len(hosts),
        "count": slices * len(hosts),
        "coordinator": _without_port(coordinator),
    }


def _from_jax(detect: Callable[[], tuple[str, int, int] | None], environment: Mapping[str, str]) -> _Facts:
    names = ("COORDINATOR_ADDRESS", "NUM_PROCESSES", "PROCESS_ID")
    address, count, process = (environment.get(f"JAX_{name}", "") for name in names)
    if address and count and process:
        source = "JAX_PROCESS_ID"
        detected = address, _number(count, "JAX_NUM_PROCESSES"), _number(process, source)
    elif (found := detect()) is not None:
        source, detected = "JAX's cluster detection", found
    else:
        return {}
    return {
        "source": source,
        "coordinator": _without_port(detected[0]),
        "count": detected[1],
        "process": detected[2],
    }


def _without_port(address: str) -> str:
    """Return the host of an address whose port belongs to JAX and not to the roll call."""
    return address.partition(":")[0]


def _number(text: str, name: str) -> int:
    if not text.strip().isdecimal():
        raise SpecError(name, expected="a number", found=repr(text))
    return int(text)
