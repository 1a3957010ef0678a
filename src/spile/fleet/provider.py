"""The cloud as the fleet sees it: states, requests, machines and errors.

    (none) ──create──▶ CREATING ──▶ READY ──preempted──▶ PREEMPTED ─┐
      ▲                   │          │ ▲                            │ delete
      │                stockout      │ └─ STARTING ◀─start─ STOPPED │
      │                   ▼          ├─▶ RESTARTING, REIMAGING,     │
      │                (none)        │   REPAIRING ──▶ READY        │
      │                              └─▶ TERMINATED, HIDDEN ────────┤
      └──────────────────────── DELETING ◀──────────────────────────┘

A dead machine does no work, holds quota and costs nothing (a stopped one: its disk) until it is deleted. It has to be
deleted and created again. NOT_FOUND stands for a machine for which the API answers 404. Queued resources have their
own states:

    ACCEPTED ─▶ WAITING_FOR_RESOURCES ─▶ PROVISIONING ─▶ ACTIVE ─▶ SUSPENDING ─▶ SUSPENDED ─delete─▶ (none)
        └──────────────┴──▶ FAILED ──────────────────────────────────────────────────┘
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, StrEnum
from typing import Any, Self, cast

from spile.errors import CloudError, SpileError, UserError


class Stage(Enum):
    """The stage of a machine's life, and what has to be done with the machine."""

    ABSENT = "there is no machine: create one"
    STARTING = "it is starting: wait"
    RUNNING = "it runs: watch its heartbeat"
    ENDING = "it is being deleted: wait until it is gone"
    DEAD = "it will never work again: delete it"


class _ApiState(StrEnum):
    """A state in the API's spelling, the stage or state that it stands for, and its meaning."""

    stands_for: Any
    meaning: str

    def __new__(cls, value: str, stands_for: Any, meaning: str) -> Self:
        state = str.__new__(cls, value)
        state._value_, state.stands_for, state.meaning = value, stands_for, meaning
        return state

    @classmethod
    def parse(cls, text: str | None) -> Self:
        """Return the state; an unknown one is ``UNKNOWN``."""
        states = {state.value: state for state in cls}
        return states.get(text or "", states["STATE_UNSPECIFIED"])


class NodeState(_ApiState):
    """The state of a TPU VM, with its stage and its meaning."""

    @property
    def stage(self) -> Stage:
        return cast("Stage", self.stands_for)

    UNKNOWN = ("STATE_UNSPECIFIED", Stage.STARTING, "the API does not say; check again later")
    CREATING = ("CREATING", Stage.STARTING, "capacity is being found and the VM booted")
    READY = ("READY", Stage.RUNNING, "the VM runs; the heartbeat shows whether the worker runs")
    RESTARTING = ("RESTARTING", Stage.STARTING, "the VM reboots; the worker resumes at boot")
    REIMAGING = ("REIMAGING", Stage.STARTING, "the VM gets a new disk image")
    DELETING = ("DELETING", Stage.ENDING, "it is being deleted; it holds quota until it is gone")
    REPAIRING = ("REPAIRING", Stage.STARTING, "the host is under maintenance and comes back")
    STOPPED = ("STOPPED", Stage.DEAD, "it was stopped; spot VMs cannot be started again")
    STOPPING = ("STOPPING", Stage.ENDING, "it is being stopped")
    STARTING = ("STARTING", Stage.STARTING, "a stopped VM boots again")
    PREEMPTED = ("PREEMPTED", Stage.DEAD, "the cloud took it back; it holds quota until deleted")
    TERMINATED = ("TERMINATED", Stage.DEAD, "it ended: maintenance, 24 hours of preemptible life, or an error")
    HIDING = ("HIDING", Stage.ENDING, "its project is being suspended")
    HIDDEN = ("HIDDEN", Stage.DEAD, "its project is suspended")
    UNHIDING = ("UNHIDING", Stage.STARTING, "its project comes back")
    NOT_FOUND = ("NOT_FOUND", Stage.ABSENT, "there is no such machine")
    QUEUED = ("QUEUED", Stage.STARTING, "a queued resource waits for capacity; no VM yet")


class QueuedState(_ApiState):
    """The state of a queued resource, and the state of the machine that it stands for."""

    @property
    def node(self) -> NodeState:
        return cast("NodeState", self.stands_for)

    UNKNOWN = ("STATE_UNSPECIFIED", NodeState.QUEUED, "the API does not say; check again later")
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
    """The zone has no capacity at the moment."""


class Quota(CloudError):
    """The project's quota is used up."""


class Missing(CloudError):
    """The resource does not exist."""


class Unavailable(CloudError):
    """The API failed through all retries."""


class LostReply(CloudError):
    """The connection broke after the request was sent. It may have been carried out."""


class NotAllowed(UserError):
    """No valid credentials, or no permission."""


class NameTaken(UserError):
    """A machine with that name exists."""


class BadRequest(UserError):
    """The API does not accept the request: an unknown zone, type or version."""


@dataclass(frozen=True)
class Endpoint:
    """One host of a node."""

    internal: str
    external: str | None = None


@dataclass(frozen=True)
class NodeRequest:
    """A request for a node."""

    accelerator_type: str
    runtime_version: str
    preemptible: bool = False
    spot: bool = False
    reserved: bool = False
    reservation: str | None = None
    """The name of a reservation; with ``reserved`` alone, any of the project."""
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
    """Unique for each machine, also if it has the name of an earlier one."""
    created: float = 0.0
    preemptible: bool = False
    labels: Mapping[str, str] = field(default_factory=dict)
    metadata: Mapping[str, str] = field(default_factory=dict)
    endpoints: tuple[Endpoint, ...] = ()
    queued: str | None = None
    """The queued resource that it belongs to."""
    request: NodeRequest = field(default_factory=lambda: NodeRequest("", ""))
    """The request that created it, to create it again."""


@dataclass(frozen=True)
class QueuedResource:
    """A queued resource."""

    name: str
    zone: str
    state: QueuedState
    nodes: tuple[str, ...] = ()
    prefix: str | None = None
    """The prefix of its nodes' names, if there are several."""
    best_effort: bool = False
    reservation: str | None = None
    """The name of the reservation that it uses; ``-`` for any of the project."""
    created: float = 0.0
    accelerator_type: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    detail: str = ""


@dataclass(frozen=True)
class Operation:
    """A long-running operation, or a request that failed at once."""

    name: str = ""
    zone: str = ""
    done: bool = False
    error: SpileError | None = None
