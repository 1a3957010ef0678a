"""Queued resources: a place in the cloud's queue, then nodes, then ACTIVE; SUSPENDED for ever when a node is lost."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

from spile.fleet.fake_cloud.errors import ApiError

if TYPE_CHECKING:
    from spile.fleet.fake_cloud.cloud import Cloud, CloudOperation

__all__ = ["Queue"]


class Queue:
    """All queued resources of one cloud."""

    def __init__(self, cloud: Cloud) -> None:
        self._cloud = cloud
        self._queued: dict[tuple[str, str], dict[str, Any]] = {}

    def queued(self, zone: str) -> list[dict[str, Any]]:
        """A zone's queued resources, or all with ``-``."""
        return [raw for (place, _), raw in sorted(self._queued.items()) if zone in ("-", place)]

    def queued_one(self, zone: str, name: str) -> dict[str, Any]:
        """One queued resource, or a 404."""
        try:
            return self._queued[zone, name]
        except KeyError:
            raise ApiError(404, f"Resource 'queuedResources/{name}' was not found in {zone}") from None

    def enqueue(self, project: str, zone: str, name: str, body: dict[str, Any], version: str) -> CloudOperation:
        """Stand in the queue: ACCEPTED, then nodes when there is stock, then ACTIVE."""
        self._cloud.check_place(zone)
        if (zone, name) in self._queued:
            raise ApiError(409, f"Resource 'projects/{project}/locations/{zone}/queuedResources/{name}' already exists")
        specs = body.get("tpu", {}).get("nodeSpec", [])
        if not specs:
            raise ApiError(400, "At least one node spec must be given.")
        for spec in specs:
            self._cloud.check_place(zone, spec.get("node", {}).get("acceleratorType"))
        raw = {**copy.deepcopy(body), "name": f"projects/{project}/locations/{zone}/queuedResources/{name}"}
        raw.update(createTime=self._cloud.now(), state={"state": "ACCEPTED", "stateInitiator": "SERVICE"})
        self._queued[zone, name] = raw
        operation = self._cloud.begin(zone, "create", raw["name"], version)
        shown = {"@type": f"type.googleapis.com/google.cloud.tpu.{version}.QueuedResource", **raw}
        self._cloud.end(operation, response=shown)
        self._cloud.later(self._cloud.pace.queue, lambda: self._provision(project, zone, name, raw, version))
        return operation

    def _provision(self, project: str, zone: str, name: str, raw: dict[str, Any], version: str) -> None:
        if self._queued.get((zone, name)) is not raw or raw["state"]["state"] == "DELETING":
            return
        if zone in self._cloud.dry:
            raw["state"] = {"state": "WAITING_FOR_RESOURCES", "stateInitiator": "SERVICE"}
            self._cloud.later(self._cloud.pace.queue, lambda: self._provision(project, zone, name, raw, version))
            return
        taken = [node for _, node in self._node_names(name, raw) if (zone, node) in self._cloud.machines]
        if taken:
            error = {"code": 6, "message": f"Node {taken[0]} already exists"}
            raw["state"] = {"state": "FAILED", "stateInitiator": "SERVICE", "failedData": {"error": error}}
            return
        raw["state"] = {"state": "PROVISIONING", "stateInitiator": "SERVICE"}
        made = []
        for spec, node_name in self._node_names(name, raw):
            body = copy.deepcopy(spec.get("node", {}))
            body["queuedResource"] = raw["name"]
            body["schedulingConfig"] = {"spot": True} if {"spot", "bestEffort"} & set(raw) else {}
            made.append(self._cloud.new_node(project, zone, node_name, body, version))
        self._cloud.later(self._cloud.pace.create, lambda: self._activate(zone, name, raw, made))

    def _node_names(self, name: str, raw: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
        found: list[tuple[dict[str, Any], str]] = []
        for spec in raw["tpu"]["nodeSpec"]:
            many = spec.get("multisliceParams") or spec.get("multiNodeParams")
            if many:
                prefix = many.get("nodeIdPrefix") or name
                found.extend((spec, f"{prefix}-{number}") for number in range(int(many["nodeCount"])))
            else:
                found.append((spec, spec.get("nodeId") or name))
        return found

    def _activate(self, zone: str, name: str, raw: dict[str, Any], made: list[dict[str, Any]]) -> None:
        if self._queued.get((zone, name)) is not raw or raw["state"]["state"] != "PROVISIONING":
            return
        for node in made:
            if node["state"] == "CREATING":
                self._cloud.became_ready(node)
        raw["state"] = {"state": "ACTIVE", "stateInitiator": "SERVICE"}

    def after_loss(self, zone: str, node: dict[str, Any]) -> None:
        """A queued resource that lost a node is suspended, for ever."""
        owner = str(node.get("queuedResource", "")).rpartition("/")[2]
        raw = self._queued.get((zone, owner))
        if raw is not None and raw["state"]["state"] != "DELETING":
            raw["state"] = {"state": "SUSPENDED", "stateInitiator": "SERVICE"}

    def dequeue(self, zone: str, name: str, force: bool, version: str) -> CloudOperation:
        """Leave the queue. Without ``force`` only once its nodes are gone."""
        raw = self.queued_one(zone, name)
        owned = [
            node
            for (place, _), node in self._cloud.machines.items()
            if place == zone and node.get("queuedResource") == raw["name"]
        ]
        if owned and not force:
            raise ApiError(400, f"Queued resource {name} still has nodes: delete them first, or use force.")
        raw["state"] = {"state": "DELETING", "stateInitiator": "USER"}
        for node in owned:
            self._cloud.remove(node)
        operation = self._cloud.begin(zone, "delete", raw["name"], version)
        shown = {"@type": "type.googleapis.com/google.protobuf.Empty"}
        if version == "v2alpha1":
            shown = {"@type": f"type.googleapis.com/google.cloud.tpu.{version}.QueuedResource", **raw}

        def act() -> None:
            for node in owned:
                self._cloud.machines.pop((zone, node["name"].rpartition("/")[2]), None)
            self._queued.pop((zone, name), None)
            self._cloud.end(operation, response=shown)

        self._cloud.later(self._cloud.pace.delete, act)
        return operation
