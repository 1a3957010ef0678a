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

from enum import Enum, StrEnum
from typing import Self

__all__ = ["Life", "NodeState", "QueuedState"]


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
