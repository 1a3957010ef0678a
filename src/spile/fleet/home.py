"""A fleet's folder in the bucket, ``<bucket>/fleet/<name>/``: the only place where machines and monitors meet.

fleet.json               what the fleet shall be; every machine reads its assignment here
startup.sh               what every machine runs at boot
spile-….whl              the code, of this very version
requirements.txt         what the code needs on a machine with TPUs, by hash
lease/000007.json        who monitors (see ``lease``)
history/000007.json      what the seventh monitor knew; the highest counts
actions/000007.jsonl     what it did, a line each, with the reason
workers/NAME.json        what NAME's agent last said: booting, installing, starting, finished, crashed, refused
logs/NAME/000012.log     what NAME's worker printed; 16 of 256 KiB are kept (see ``worker_logs``)
orders/stop.json         that the deployment shall end, and who said so (spile fleet stop)
orders/budget.json       its budget, where somebody changed it since the deploy (spile monitor --budget)
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any, get_args

from spile.errors import Damaged, UserError, untrusted
from spile.fleet.history import History, Verdict
from spile.fleet.lease import this_person
from spile.fleet.pins import remember
from spile.fleet.reconcile import Action, ActionOutcome
from spile.fleet.spec import FleetSpec
from spile.objects import open_folder
from spile.objects.folder import Folder, NotFound
from spile.spec.phase import Phase
from spile.spec.records import typed_fields

__all__ = ["FLEET", "STARTUP", "FleetHome", "WorkerReport", "fleet_url", "fleets_of"]

FLEET = "fleet.json"
STARTUP = "startup.sh"
_MOST = 1 << 20
"""Bytes of a machine's report; ours have a few thousand."""


def fleet_url(bucket: str, name: str) -> str:
    """Where a fleet's folder is."""
    return f"{bucket.rstrip('/')}/fleet/{name}"


def fleets_of(bucket: str) -> list[FleetSpec]:
    """Every fleet that was deployed to a bucket."""
    folder = open_folder(f"{bucket.rstrip('/')}/fleet")
    keys = [info.key for info in folder.list() if info.key.count("/") == 1 and info.key.endswith(f"/{FLEET}")]
    return [FleetSpec.from_json(folder.get(key), f"{folder.url}/{key}") for key in sorted(keys)]


@dataclass(frozen=True)
class _Order:
    """What an owner wants of a deployment since it was made."""

    deployment: str
    who: str
    time: str
    dollars: float


@dataclass(frozen=True)
class WorkerReport:
    """What a machine's agent, or its startup script before there is one, says of itself."""

    node: str
    deployment: str = ""
    phase: Phase = Phase.UNKNOWN
    verdict: Verdict = ""
    updated: float = 0.0
    exit_code: int | None = None
    launches: int = 0
    error: str = ""
    """The log's last lines, when it went wrong."""
    version: str = ""
    dollars: float = 0.0
    """What this worker's machines have cost so far, by the agents' own clocks."""

    def to_json(self) -> bytes:
        """Return the content of ``workers/NAME.json``."""
        return json.dumps(asdict(self), indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes) -> WorkerReport:
        """As stored; what a later version adds is left out."""
        with untrusted(Damaged, "a worker's report that cannot be read"):
            known = typed_fields(cls, json.loads(data))
            verdict = known.get("verdict", "")
            if verdict not in get_args(Verdict):
                raise ValueError(f"verdict {verdict!r}")
            return cls(**{**known, "phase": Phase.read(known.get("phase"))})


class FleetHome:
    """Reads and writes a fleet's folder."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self._seen: dict[str, tuple[tuple[float, int, str | None], WorkerReport]] = {}
        self._log: list[str] = []
        self._log_number = 0

    @classmethod
    def open(cls, url: str) -> FleetHome:
        """The folder at a URL."""
        return cls(open_folder(url))

    def read_fleet(self) -> FleetSpec:
        """What the fleet shall be."""
        return self.read_pinned()[0]

    def read_pinned(self) -> tuple[FleetSpec, str]:
        """The same, with the sha256 of the very bytes that it was read from."""
        try:
            data = self.folder.get(FLEET)
        except NotFound:
            raise UserError(f"no fleet at {self.folder.url}", expected=FLEET, fix="spile deploy makes one") from None
        return self._own(FleetSpec.from_json(data, f"{self.folder.url}/{FLEET}")), hashlib.sha256(data).hexdigest()

    def find_fleet(self) -> FleetSpec | None:
        """The same; None where none was deployed."""
        try:
            return self._own(FleetSpec.from_json(self.folder.get(FLEET), f"{self.folder.url}/{FLEET}"))
        except NotFound:
            return None

    def _own(self, fleet: FleetSpec) -> FleetSpec:
        """A folder speaks for the fleet of its own name: another one's machines would go with this one."""
        name = self.folder.url.rstrip("/").rpartition("/")[2]
        if fleet.name != name:
            raise UserError(
                f"{self.folder.url}/{FLEET} is of another fleet",
                expected=name,
                found=fleet.name,
                fix="see who may write the bucket, remove it, and deploy again",
            )
        return fleet

    def write_fleet(self, fleet: FleetSpec) -> None:
        """Put it: the last thing a deploy does before machines are asked for. This computer remembers that it did."""
        data = fleet.to_json()
        remember(self.folder.url, hashlib.sha256(data).hexdigest())  # first: where that fails, nothing has changed
        self.folder.put(FLEET, data)

    def read_ordered(self) -> FleetSpec:
        """What the fleet shall be, with what its owners ordered since the deploy."""
        return self.ordered(self.read_fleet())

    def ordered(self, fleet: FleetSpec) -> FleetSpec:
        """That fleet, with what its owners ordered since the deploy."""
        budget = self._order("budget", fleet).get("dollars", fleet.policy.budget)
        return replace(fleet, policy=replace(fleet.policy, budget=budget, stop=self.read_stop(fleet)))

    def read_stop(self, fleet: FleetSpec) -> str:
        """Who ended this deployment, and when; empty: nobody."""
        order = self._order("stop", fleet)
        return f"stopped by {order.get('who')} at {order.get('time')}" if order else ""

    def order_stop(self, fleet: FleetSpec) -> None:
        """End this deployment for good: whoever monitors it deletes its machines and makes no more."""
        self._put_order("stop", fleet)

    def order_budget(self, fleet: FleetSpec, dollars: float) -> None:
        """Another budget for this deployment, for every monitor from now on."""
        self._put_order("budget", fleet, dollars=dollars)

    def _order(self, name: str, fleet: FleetSpec) -> dict[str, Any]:
        """An order to this very deployment; the next one begins without any."""
        key = f"orders/{name}.json"
        try:
            data = self.folder.get(key)
        except NotFound:
            return {}
        with untrusted(Damaged, f"{self.folder.url}/{key} is no order", fix="remove it"):
            order = typed_fields(_Order, json.loads(data))
        return order if order.get("deployment") == fleet.deployment else {}

    def _put_order(self, name: str, fleet: FleetSpec, **more: object) -> None:
        moment = datetime.now(UTC).isoformat(timespec="seconds")
        order = {"deployment": fleet.deployment, "who": this_person(), "time": moment, **more}
        self.folder.put(f"orders/{name}.json", json.dumps(order, indent=1).encode())

    def read_history(self) -> History:
        """What the last monitor knew."""
        keys = sorted(info.key for info in self.folder.list("history/"))
        return History.from_json(self.folder.get(keys[-1])) if keys else History()

    def write_history(self, history: History, number: int) -> None:
        """Put it under the lease's number, so that a monitor that lost the lease overwrites nothing."""
        self.folder.put(f"history/{number:06d}.json", history.to_json())

    def log(self, done: Iterable[tuple[Action, ActionOutcome]], number: int, now: float) -> list[str]:
        """Add actions to the log, and give them as lines."""
        if number != self._log_number:
            self._log, self._log_number = [], number
        lines = []
        for action, outcome in done:
            result = outcome.error.line() if outcome.error else "ok"
            moment = datetime.fromtimestamp(now, UTC).isoformat(timespec="seconds")
            self._log.append(json.dumps({"time": moment, **asdict(action), "result": result}))
            tail = "" if result == "ok" else f" -> {result}"
            lines.append(f"{action.verb} {action.name} in {action.zone}: {action.reason}{tail}")
        if lines:
            self.folder.put(f"actions/{number:06d}.jsonl", ("\n".join(self._log) + "\n").encode())
        return lines

    def write_report(self, report: WorkerReport) -> None:
        """Say how this machine's worker is."""
        self.folder.put(f"workers/{report.node}.json", report.to_json())

    def read_report(self, node: str) -> WorkerReport | None:
        """Return the last report of one machine's agent; None if there is none that can be read."""
        try:
            return WorkerReport.from_json(self.folder.get(f"workers/{node}.json"))
        except (NotFound, Damaged):
            return None

    def read_reports(self) -> dict[str, WorkerReport]:
        """All machines' reports, by name; only those that changed are read again."""
        found: dict[str, WorkerReport] = {}
        for info in self.folder.list("workers/"):
            name = info.key[len("workers/") : -len(".json")]
            if info.size > _MOST:
                continue
            mark = (info.updated, info.size, info.etag)
            known = self._seen.get(name)
            if known is None or known[0] != mark:
                try:
                    known = mark, WorkerReport.from_json(self.folder.get(info.key))
                except (NotFound, Damaged):  # half an answer is no answer; the next look tells
                    continue
                self._seen[name] = known
            found[name] = known[1]
        return found
