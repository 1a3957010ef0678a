"""The seam between the fleet and a cloud: nodes, queued resources, operations, and the errors a cloud answers with.

CloudError (exit 1)                     UserError (exit 2)
├── Stockout     try another zone       ├── NotAllowed   401, 403: credentials or a role
├── Quota        stop, and say so       ├── NameTaken    409: somebody has this name
├── Missing      404                    └── BadRequest   400: a type, a zone, a network that is not there
├── Unavailable  429 and 5xx, after retries
└── LostReply    the request may have been carried out: look before asking again
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from spile.errors import CloudError, UserError
from spile.fleet.cloud.states import NodeState, QueuedState

__all__ = [
    "BadRequest",
    "Endpoint",
    "LostReply",
    "Missing",
    "NameTaken",
    "Node",
    "NodeRequest",
    "NotAllowed",
    "Operation",
    "Provider",
    "QueuedRequest",
    "QueuedResource",
    "Quota",
    "Stockout",
    "Unavailable",
]


class Stockout(CloudError):
    """The zone has no capacity now."""


class Quota(CloudError):
    """The project may not have more of these here."""


class Missing(CloudError):
    """There is no such thing."""


class Unavailable(CloudError):
    """The API is overloaded or broken, and stayed so through all retries."""


class LostReply(CloudError):
    """The connection broke after the request was sent: it may have been carried out."""


class NotAllowed(UserError):
    """No valid credentials, or no permission."""


class NameTaken(UserError):
    """A machine of that name exists."""


class BadRequest(UserError):
    """The API does not accept the request: an unknown zone, type or version."""


@dataclass(frozen=True)
class Endpoint:
    """One host of a node."""

    internal: str
    external: str | None = None


@dataclass(frozen=True)
class NodeRequest:
    """What a new node shall be."""

    accelerator_type: str
    runtime_version: str
    preemptible: bool = False
    spot: bool = False
    reserved: bool = False
    network: str | None = None
    subnetwork: str | None = None
    external_ips: bool = True
    service_account: str | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    tags: tuple[str, ...] = ()


@dataclass(frozen=True)
class Node:
    """A TPU VM (or a slice of several hosts) as the cloud describes it."""

    name: str
    zone: str
    state: NodeState
    accelerator_type: str = ""
    uid: str = ""
    """Different for each incarnation of a name."""
    created: float = 0.0
    preemptible: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    endpoints: tuple[Endpoint, ...] = ()
    health: str = ""
    queued: str | None = None
    """The queued resource that it belongs to."""
    request: NodeRequest | None = None
    """What it was made as: to make it again."""


@dataclass(frozen=True)
class QueuedRequest:
    """What a new queued resource shall hold: one node, or several that act as one (multislice)."""

    node: NodeRequest
    node_count: int = 1
    node_prefix: str | None = None
    best_effort: bool = False


@dataclass(frozen=True)
class QueuedResource:
    """A place in the cloud's queue."""

    name: str
    zone: str
    state: QueuedState
    nodes: tuple[str, ...] = ()
    prefix: str | None = None
    """Of its nodes' names, where they act as one."""
    best_effort: bool = False
    created: float = 0.0
    accelerator_type: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    detail: str = ""


@dataclass(frozen=True)
class Operation:
    """Something long that the cloud was asked to do."""

    name: str
    zone: str
    done: bool
    error: CloudError | UserError | None = None
    target: str = ""
    verb: str = ""


class Provider(Protocol):
    """A cloud. Every method raises the errors above, one line each; none retries what may have been carried out."""

    def nodes(self, zone: str) -> list[Node]:
        """All nodes of a zone, ours and foreign; ``-`` means every zone."""

    def node(self, zone: str, name: str) -> Node:
        """One node, or :class:`Missing`."""

    def create_node(self, zone: str, name: str, request: NodeRequest) -> Operation:
        """Ask for a node. The operation tells of a stockout later."""

    def delete_node(self, zone: str, name: str) -> Operation:
        """Ask for its end."""

    def label_node(self, zone: str, name: str, labels: Mapping[str, str]) -> Operation:
        """Replace a node's labels."""

    def set_metadata(self, zone: str, name: str, metadata: Mapping[str, str]) -> Operation:
        """Replace a node's metadata."""

    def operation(self, zone: str, name: str) -> Operation:
        """How far an operation is."""

    def queued(self, zone: str) -> list[QueuedResource]:
        """All queued resources of a zone; ``-`` means every zone."""

    def create_queued(self, zone: str, name: str, request: QueuedRequest) -> Operation:
        """Stand in the queue."""

    def delete_queued(self, zone: str, name: str, *, force: bool) -> Operation:
        """Leave the queue; ``force`` deletes its nodes too."""

    def zones(self) -> list[str]:
        """The zones that have TPUs."""

    def accelerator_types(self, zone: str) -> list[str]:
        """What a zone offers."""
