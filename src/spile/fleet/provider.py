"""What a machine's state means to us.

    (none) ──create──▶ CREATING ──▶ READY ──preempted──▶ PREEMPTED ─┐
      ▲                   │          │ ▲                            │ delete
      │                stockout      │ └─ STARTING ◀─start─ STOPPED │
      │                   ▼          ├─▶ RESTARTING, REIMAGING,     │
      │                (none)        │   REPAIRING ──▶ READY        │
      │                              └─▶ TERMINATED, HIDDEN ────────┤
      └──────────────────────── DELETING ◀──────────────────────────┘

A dead machine does no work, holds quota and costs nothing (a stopped one: its disk) until it is deleted; so the only
way from a dead machine to a working one is delete, then create. NOT_FOUND is what we call a machine that the API
answers 404 for. Queued resources have a diagram of their own:

    ACCEPTED ─▶ WAITING_FOR_RESOURCES ─▶ PROVISIONING ─▶ ACTIVE ─▶ SUSPENDING ─▶ SUSPENDED ─delete─▶ (none)
        └──────────────┴──▶ FAILED ──────────────────────────────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Protocol, Self

from spile.errors import CloudError, UserError

__all__ = [
    "BadRequest",
    "Endpoint",
    "Life",
    "LostReply",
    "Missing",
    "NameTaken",
    "Node",
    "NodeRequest",
    "NodeState",
    "NotAllowed",
    "Operation",
    "Provider",
    "QueuedRequest",
    "QueuedResource",
    "QueuedState",
    "Quota",
    "Stockout",
    "Unavailable",
]


class Life(Enum):
    """What a state asks of us."""

    ABSENT = "there is no machine: make one"
    COMING = "it is on its way: wait"
    ALIVE = "it runs: watch its heartbeat"
    LEAVING = "it is going: wait until it is gone"
    DEAD = "it will never work again: delete it"


class _ApiState(StrEnum):
    """A state as the API spells it, and what it means."""

    meaning: str

    @classmethod
    def parse(cls, text: str | None) -> Self:
        """One that we do not know is ``UNKNOWN``, not a crash."""
        found = cls._value2member_map_.get(text or "")
        return found if isinstance(found, cls) else cls("STATE_UNSPECIFIED")


class NodeState(_ApiState):
    """A TPU VM's state, each with its life and its meaning."""

    life: Life

    def __new__(cls, value: str, life: Life, meaning: str) -> NodeState:
        """A string that carries what it means."""
        state = str.__new__(cls, value)
        state._value_ = value
        state.life = life
        state.meaning = meaning
        return state

    UNKNOWN = ("STATE_UNSPECIFIED", Life.COMING, "the API does not say; look again later")
    CREATING = ("CREATING", Life.COMING, "capacity is being found and the VM booted")
    READY = ("READY", Life.ALIVE, "the VM runs; whether our worker does, its heartbeat tells")
    RESTARTING = ("RESTARTING", Life.COMING, "the VM reboots; the worker resumes at boot")
    REIMAGING = ("REIMAGING", Life.COMING, "the VM gets a new disk image")
    DELETING = ("DELETING", Life.LEAVING, "somebody deleted it; quota is held until it is gone")
    REPAIRING = ("REPAIRING", Life.COMING, "the host is under maintenance and comes back")
    STOPPED = ("STOPPED", Life.DEAD, "somebody stopped it; spot VMs cannot be started again")
    STOPPING = ("STOPPING", Life.LEAVING, "somebody is stopping it")
    STARTING = ("STARTING", Life.COMING, "a stopped VM boots again")
    PREEMPTED = ("PREEMPTED", Life.DEAD, "the cloud took it back; it holds quota until deleted")
    TERMINATED = ("TERMINATED", Life.DEAD, "it ended: maintenance, 24 hours of preemptible life, or an error")
    HIDING = ("HIDING", Life.LEAVING, "its project is being suspended")
    HIDDEN = ("HIDDEN", Life.DEAD, "its project is suspended")
    UNHIDING = ("UNHIDING", Life.COMING, "its project comes back")
    NOT_FOUND = ("NOT_FOUND", Life.ABSENT, "there is no such machine")
    QUEUED = ("QUEUED", Life.COMING, "a queued resource waits for capacity; no VM yet")


class QueuedState(_ApiState):
    """A queued resource's state, and what it makes of the machine that it stands for."""

    node: NodeState

    def __new__(cls, value: str, node: NodeState, meaning: str) -> QueuedState:
        """A string that carries what it means."""
        state = str.__new__(cls, value)
        state._value_ = value
        state.node = node
        state.meaning = meaning
        return state

    UNKNOWN = ("STATE_UNSPECIFIED", NodeState.QUEUED, "the API does not say; look again later")
    CREATING = ("CREATING", NodeState.QUEUED, "the request is being registered")
    ACCEPTED = ("ACCEPTED", NodeState.QUEUED, "it passed the first checks and stands in the queue")
    WAITING_FOR_RESOURCES = ("WAITING_FOR_RESOURCES", NodeState.QUEUED, "it passed all checks and waits for capacity")
    PROVISIONING = ("PROVISIONING", NodeState.CREATING, "capacity was found; its nodes are being created")
    ACTIVE = ("ACTIVE", NodeState.READY, "all its nodes are READY")
    SUSPENDING = ("SUSPENDING", NodeState.DELETING, "its nodes are being deleted")
    SUSPENDED = (
        "SUSPENDED",
        NodeState.PREEMPTED,
        "its nodes are gone; never allocated again; holds quota until deleted",
    )
    FAILED = ("FAILED", NodeState.TERMINATED, "it could not be provisioned; holds quota until deleted")
    DELETING = ("DELETING", NodeState.DELETING, "it is being deleted")


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
