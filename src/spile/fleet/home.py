"""A fleet's folder in the bucket, ``<bucket>/fleet/<name>/``. Machines and monitors communicate only through it.

fleet.json               the specification of the fleet, with the run spec; every machine reads it
startup.sh               the script that every machine runs at boot
spile-….whl              the code, of the version that deployed the fleet
requirements.txt         the dependencies for a machine with TPUs, by hash
lease/000007.json        the active monitor (see :class:`Lease`)
history/000007.json      the history as the seventh monitor stored it; the highest number counts
actions/000007.jsonl     its actions, one per line, with the reason
workers/NAME.json        the last report of NAME's agent: phase, verdict, restarts, cost
logs/NAME/000012.log     the output of NAME's worker; 16 objects of 256 KiB are kept
orders/stop.json         the order to end the deployment (spile fleet stop)
orders/budget.json       the budget, if it was changed after the deploy (spile monitor --budget)
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path

from spile.errors import CloudError, Damaged, SpecError, SpileError, UserError, untrusted
from spile.fleet.cloud_tpu import CloudTpu, read_settings
from spile.fleet.manage import NodeResult, for_each_zone, slice_secret
from spile.fleet.provider import Node, Operation
from spile.fleet.reconcile import Action
from spile.fleet.spec import FleetSpec, History, Verdict, owns
from spile.objects import open_folder
from spile.objects.folder import Folder, NotFound, get_if_present, remove_by_name
from spile.objects.machine import ask_metadata, google_metadata_url
from spile.spec.phase import Phase
from spile.spec.records import read_record

FLEET = "fleet.json"
STARTUP = "startup.sh"
_MAX_REPORT_BYTES = 1 << 20
"""The largest report that is read, in bytes. Real ones have a few thousand."""


def fleet_url(bucket: str, name: str) -> str:
    return f"{bucket.rstrip('/')}/fleet/{name}"


def fleets_of(bucket: str) -> list[FleetSpec]:
    folder = open_folder(f"{bucket.rstrip('/')}/fleet")
    keys = [info.key for info in folder.list() if info.key.count("/") == 1 and info.key.endswith(f"/{FLEET}")]
    return [FleetSpec.from_json(folder.get(key), f"{folder.url}/{key}") for key in sorted(keys)]


@dataclass(frozen=True)
class _Order:
    """An order that was given after the deploy."""

    deployment: str
    who: str
    time: str
    dollars: float | None = None


class NumberedObjects:
    """Objects of a folder that differ by a number, such as ``lease/000007.json``."""

    def __init__(self, folder: Folder, prefix: str, suffix: str) -> None:
        self._folder, self._prefix, self._suffix = folder, prefix, suffix
        number = "([0-9]{6}|[1-9][0-9]{6,})"
        self._shape = re.compile(f"{re.escape(prefix)}{number}{re.escape(suffix)}")

    def key(self, number: int) -> str:
        return f"{self._prefix}{number:06d}{self._suffix}"

    def put(self, number: int, data: bytes) -> None:
        self._folder.put(self.key(number), data)

    def numbers(self) -> list[int]:
        found = (self._shape.fullmatch(info.key) for info in self._folder.list(self._prefix))
        return sorted(int(each[1]) for each in found if each)

    def remove_below(self, limit: int, *, fence: Callable[[], bool] = lambda: True) -> None:
        """Remove the objects with smaller numbers."""

        def is_ours(key: str) -> bool:
            return self._shape.fullmatch(key) is not None

        old = [self.key(number) for number in self.numbers() if number < limit]
        if old and fence():
            remove_by_name(self._folder.url, old, ours=is_ours, remove=self._folder.delete)


@dataclass(frozen=True)
class WorkerReport:
    """The last report of a machine's agent, or of its startup script before the agent runs."""

    node: str
    deployment: str = ""
    phase: Phase = Phase.UNKNOWN
    verdict: Verdict = ""
    updated: float = 0.0
    exit_code: int | None = None
    launches: int = 0
    error: str = ""
    """The last lines of the log, if the worker failed."""
    version: str = ""
    dollars: float = 0.0
    """What this worker's machines have cost so far, by the agents' own clocks."""

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), indent=1).encode()

    @classmethod
    def from_json(cls, data: bytes) -> WorkerReport:
        """Parse a report. Fields that only a newer version knows are ignored."""
        with untrusted(Damaged, "the worker's report cannot be read"):
            return read_record(cls, json.loads(data))


class FleetHome:
    """Reads and writes a fleet's folder."""

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self._histories = NumberedObjects(folder, "history/", ".json")
        self._seen: dict[str, tuple[tuple[float, int, str | None], WorkerReport]] = {}
        self._log: list[str] = []
        self._log_number = 0

    @classmethod
    def open(cls, url: str) -> FleetHome:
        return cls(open_folder(url))

    def read_fleet(self) -> FleetSpec:
        return self.read_pinned()[0]

    def read_pinned(self) -> tuple[FleetSpec, str]:
        """Return the specification and the sha256 of its bytes.

        A ``fleet.json`` of another fleet is refused: its machines would be changed by this one.
        """
        data, name = get_if_present(self.folder, FLEET), self.folder.url.rstrip("/").rpartition("/")[2]
        if data is None:
            raise UserError(f"no fleet at {self.folder.url}", expected=FLEET, fix="create one with: spile deploy")
        fleet = FleetSpec.from_json(data, f"{self.folder.url}/{FLEET}")
        if fleet.name != name:
            raise UserError(
                f"{self.folder.url}/{FLEET} belongs to another fleet",
                expected=name,
                found=fleet.name,
                fix="check who can write to the bucket, remove the file, and deploy again",
            )
        return fleet, sha256(data)

    def find_fleet(self) -> FleetSpec | None:
        """Return the specification, or None if no fleet was deployed."""
        return None if get_if_present(self.folder, FLEET) is None else self.read_fleet()

    def write_fleet(self, fleet: FleetSpec) -> None:
        """Store the specification, and record its sha256 on this computer."""
        data = fleet.to_json()
        record_deployed(self.folder.url, sha256(data))  # First, so that nothing has changed if this fails.
        self.folder.put(FLEET, data)

    def with_orders(self, fleet: FleetSpec) -> FleetSpec:
        """Return this specification with the orders that were given since the deploy."""
        order = self._order("budget", fleet)
        budget = fleet.policy.budget if order is None else order.dollars
        return replace(fleet, policy=replace(fleet.policy, budget=budget, stop=self.read_stop(fleet)))

    def read_stop(self, fleet: FleetSpec) -> str:
        """Return who ordered the deployment to stop, and when; empty if there is no order."""
        order = self._order("stop", fleet)
        return f"stopped by {order.who} at {order.time}" if order else ""

    def order_stop(self, fleet: FleetSpec) -> None:
        """Order the end of this deployment: its machines are deleted and no more are created."""
        self._put_order("stop", fleet)

    def order_budget(self, fleet: FleetSpec, dollars: float) -> None:
        """Change the budget of this deployment for every monitor from now on."""
        self._put_order("budget", fleet, dollars)

    def _order(self, name: str, fleet: FleetSpec) -> _Order | None:
        """Return an order to this deployment. Orders do not carry over to the next one."""
        key = f"orders/{name}.json"
        data = get_if_present(self.folder, key)
        if data is None:
            return None
        with untrusted(Damaged, f"{self.folder.url}/{key} is not an order", fix="remove it"):
            order = read_record(_Order, json.loads(data))
        return order if order.deployment == fleet.deployment else None

    def _put_order(self, name: str, fleet: FleetSpec, dollars: float | None = None) -> None:
        moment = datetime.now(UTC).isoformat(timespec="seconds")
        order = _Order(fleet.deployment, user_at_host(), moment, dollars)
        self.folder.put(f"orders/{name}.json", json.dumps(asdict(order), indent=1).encode())

    def read_history(self) -> History:
        numbers = self._histories.numbers()
        return History.from_json(self.folder.get(self._histories.key(numbers[-1]))) if numbers else History()

    def write_history(self, history: History, number: int) -> None:
        """Store the history under the lease's number, so that a monitor without the lease overwrites nothing."""
        self._histories.put(number, history.to_json())

    def log(self, done: Iterable[tuple[Action, Operation]], number: int, now: float) -> list[str]:
        """Append actions to the log and return them as lines."""
        if number != self._log_number:
            self._log, self._log_number = [], number
        lines = []
        for action, operation in done:
            result = operation.error.line() if operation.error else "ok"
            moment = datetime.fromtimestamp(now, UTC).isoformat(timespec="seconds")
            self._log.append(json.dumps({"time": moment, **asdict(action), "result": result}))
            tail = "" if result == "ok" else f" -> {result}"
            lines.append(f"{action.verb} {action.name} in {action.zone}: {action.reason}{tail}")
        if lines:
            self.folder.put(f"actions/{number:06d}.jsonl", ("\n".join(self._log) + "\n").encode())
        return lines

    def write_report(self, report: WorkerReport) -> None:
        self.folder.put(f"workers/{report.node}.json", report.to_json())

    def read_reports(self) -> dict[str, WorkerReport]:
        """Return the reports of all machines by name. Only those that changed are read again."""
        found: dict[str, WorkerReport] = {}
        for info in self.folder.list("workers/"):
            name = info.key[len("workers/") : -len(".json")]
            if info.size > _MAX_REPORT_BYTES:
                continue
            mark = (info.updated, info.size, info.etag)
            known = self._seen.get(name)
            if known is None or known[0] != mark:
                try:
                    known = mark, WorkerReport.from_json(self.folder.get(info.key))
                except (NotFound, Damaged):  # The next round reads it again.
                    continue
                self._seen[name] = known
            found[name] = known[1]
        return found


def find_home(root: str, fleet: str | None = None) -> FleetHome | None:
    """Return the home of the fleet that is named next to a bucket or dataset, or whose own folder ``root`` is.

    Raises:
        UserError: There is no such fleet. None is returned if ``root`` cannot be a fleet's folder.
    """
    above, _, last = root.rstrip("/").rpartition("/")
    places = [root] if fleet is None else [fleet_url(root, fleet), fleet_url(above, fleet)]
    if fleet is None and "/fleet/" not in f"{above}/":
        return None
    for place in places:
        home = FleetHome.open(place)
        if get_if_present(home.folder, FLEET) is not None:
            return home
    raise UserError(
        f"no fleet {fleet or last} at {root}", expected=f"{places[0]}/{FLEET}", fix="create one with: spile deploy"
    )


_CLOCK = "lease/clock"


def user_at_host() -> str:
    return f"{os.environ.get('USER', 'unknown')}@{socket.gethostname()}"


def bucket_clock(folder: Folder) -> Callable[[], float]:
    """Return a clock that agrees with that of the bucket and is independent of this machine's own time.

    An object is written once, and its modification time is read. The clock also runs while this machine is suspended.
    """
    before = _since_boot()
    folder.put(_CLOCK, b"\n")
    offset = folder.info(_CLOCK).updated - (before + _since_boot()) / 2
    return lambda: _since_boot() + offset


def _since_boot() -> float:
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


@dataclass(frozen=True)
class Holder:
    """The owner of the lease."""

    number: int
    owner: str
    """User, host and process; ``who`` in the file."""
    token: str
    renewed: float
    ttl: float
    released: bool = False

    def expired(self, now: float) -> bool:
        """Return whether another monitor may take over."""
        return self.released or now - self.renewed > self.ttl


class Lease:
    """One monitor's lease on a fleet: only one monitor acts at a time.

    ``lease/000007.json`` belongs to the seventh monitor and is created only if absent. Its owner overwrites it in every
    round, and does not act if it could not. A monitor that finds the last lease released, or not renewed for ``ttl``
    seconds, creates the next one. The previous owner sees a higher number and only watches from then on.
    """

    def __init__(
        self,
        folder: Folder,
        *,
        clock: Callable[[], float] | None = None,
        ttl: float = 0.0,
        owner: str | None = None,
    ) -> None:
        self._folder = folder
        self._leases = NumberedObjects(folder, "lease/", ".json")
        self._clock = clock or bucket_clock(folder)
        self._ttl = ttl
        self._owner = owner or f"{user_at_host()}, process {os.getpid()}"
        self._token = secrets.token_hex(8)
        self.number = 0
        """The number of the lease that this monitor holds; 0 if it holds none."""
        self._renewed = float("-inf")

    def held(self) -> bool:
        """Return whether this monitor may act now. It is never true once another monitor could have taken over."""
        return self.number > 0 and self._clock() - self._renewed < self._ttl * 0.8

    def take(self) -> Holder | None:
        """Take or renew the lease. Return None if this monitor holds it, else the holder."""
        began = self._clock()
        last = self._last()
        if self.number and (last is None or last.number == self.number):
            if began - self._renewed < self._ttl:
                self._write(self.number, began)
                return None
            self.number = 0
        if last is not None and last.token != self._token and not last.expired(began):
            self.number = 0
            return last
        number = (last.number if last else 0) + 1
        if not self._folder.create(self._leases.key(number), self._body(began)):
            winner = self._last()
            # A lost reply looks like a lost race.
            if winner is None or winner.token != self._token or winner.number != number:
                self.number = 0
                return winner
        self.number, self._renewed = number, began
        self._leases.remove_below(number - 8, fence=self.held)
        return None

    def release(self) -> None:
        """Let the next monitor start at once."""
        last = self._last()
        if self.number and last is not None and last.number == self.number:
            self._write(self.number, self._clock(), released=True)
        self.number = 0

    def holder(self) -> Holder | None:
        last = self._last()
        return None if last is None or last.expired(self._clock()) else last

    def _write(self, number: int, moment: float, *, released: bool = False) -> None:
        self._leases.put(number, self._body(moment, released=released))
        self._renewed = moment

    def _body(self, moment: float, *, released: bool = False) -> bytes:
        fields = {"who": self._owner, "token": self._token, "renewed": moment, "ttl": self._ttl, "released": released}
        return json.dumps(fields).encode()

    def _last(self) -> Holder | None:
        for number in reversed(self._leases.numbers()):
            key = self._leases.key(number)
            data = get_if_present(self._folder, key)
            if data is None:  # Deleted by a later monitor meanwhile.
                continue
            with untrusted(Damaged, f"{self._folder.url}/{key} is not a lease", fix="remove it"):
                found = json.loads(data)
                return read_record(Holder, {**found, "owner": found["who"], "number": number})
        return None


def refuse_if_monitored(nodes: Iterable[Node], fleet: str) -> None:
    """Refuse to delete machines of a fleet that is monitored: the monitor would create them again."""
    homes = sorted({home for node in nodes if (home := node.metadata.get("spile-home"))})
    for home in homes:
        holder = Lease(open_folder(home)).holder()
        if holder is not None:
            raise UserError(
                f"{holder.owner} monitors fleet {fleet} and would create them again",
                fix=f"end it for good with: spile fleet stop {home}",
            )


# -- what a machine may run, independently of who may write the bucket -------------------------------------------------
#
# A deploy records the sha256 of its fleet.json in two places outside the bucket: in the metadata of the fleet's
# machines (which takes the TPU API to change) and on the computer that ran spile deploy, one file per fleet in
# ~/.local/state/spile/deployed ($XDG_STATE_HOME). fleet.json in turn holds the sha256 of every other file. Machines
# run, and monitors create machines for, only a fleet.json that one of the two places names.

PIN = "spile-sha256"
"""The key of the metadata entry with the sha256."""
_METADATA_SECONDS = 10.0
"""Seconds to wait for the metadata server; the API has the value too."""
REQUIREMENTS, REQUIREMENTS_CUDA = "requirements.txt", "requirements-cuda.txt"


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def machine_requirements(name: str = REQUIREMENTS) -> bytes:
    """Return the pinned requirements of a machine: for TPUs, or the additional ones for GPUs."""
    return resources.files("spile.fleet").joinpath(name).read_bytes()


def startup_script() -> str:
    return resources.files("spile.fleet").joinpath("startup.sh").read_text()


def machine_metadata(home: str, pin: str, name: str) -> dict[str, str]:
    """Return a machine's metadata: the fleet's folder, the sha256 of fleet.json, the startup script and the secret."""
    return {"spile-home": home, "spile-node": name, PIN: pin, "startup-script": startup_script(), **slice_secret()}


def pin_machines(provider: CloudTpu, fleet: FleetSpec, home: str) -> list[NodeResult]:
    """Write the sha256 of this deployment into the metadata of every machine; return the failures."""
    pin = sha256(fleet.to_json())

    def zone_work(zone: str) -> list[NodeResult]:
        failed = []
        for node in provider.nodes(zone):
            if not owns(fleet.name, node, home):
                continue
            if node.metadata.get(PIN) == pin:
                continue
            try:
                provider.set_metadata(zone, node.name, {**node.metadata, PIN: pin})
            except SpileError as error:
                failed.append(
                    NodeResult(node.name, zone, "failed", f"its metadata does not name this deployment: {error}")
                )
        return failed

    return for_each_zone(fleet.zones, zone_work)


def own_pin(zone: str, node: str, project: str, wanted: str) -> str:
    """Return the sha256 in this machine's metadata, from the metadata server or the API."""
    url = google_metadata_url(f"instance/attributes/{PIN}", os.environ)
    pinned = ask_metadata("GET", url, {"Metadata-Flavor": "Google"}, _METADATA_SECONDS) or ""
    if pinned == wanted or not zone:
        return pinned
    try:
        return CloudTpu(read_settings(project)).node(zone, node).metadata.get(PIN, "")
    except SpileError as error:
        print(f"spile agent: {error}", flush=True)
        return pinned


class NotDeployed(UserError):
    """The bucket contains a deployment that is not known outside the bucket."""


def _state_folder() -> Folder:
    base = os.environ.get("XDG_STATE_HOME")
    return open_folder(str((Path(base) if base else Path.home() / ".local" / "state") / "spile" / "deployed"))


def _state_key(home: str) -> str:
    return f"{sha256(home.encode())[:32]}.json"


def record_deployed(home: str, pin: str) -> None:
    """Record on this computer which deployment the fleet at ``home`` runs."""
    _state_folder().put(_state_key(home), json.dumps({"home": home, "sha256": pin}, indent=1).encode())


def recorded_deployment(home: str) -> str:
    """Return the sha256 that is recorded on this computer; empty if there is none."""
    try:
        found = json.loads(_state_folder().get(_state_key(home)))
        return str(found["sha256"]) if found["home"] == home else ""
    except (NotFound, ValueError, KeyError, TypeError, RecursionError):
        return ""


def accept_deployment(home: str, found: str, deployment: str) -> None:
    """Record the deployment that the user names, ``sha256:…``, if it is the one in the bucket."""
    wanted = deployment.strip().lower().removeprefix("sha256:")
    if not re.fullmatch(r"[0-9a-f]{64}", wanted):
        expected = "sha256: and 64 digits, as spile deploy printed it"
        raise SpecError("--deployment", expected=expected, found=repr(deployment))
    if wanted != found:
        raise NotDeployed(
            f"{home}/fleet.json is not that deployment",
            expected=f"sha256:{wanted}",
            found=f"sha256:{found}",
            fix="check who can write to the bucket, and deploy again",
        )
    record_deployed(home, wanted)


def check_pinned(provider: CloudTpu, home: str, fleet: FleetSpec, found: str) -> NotDeployed | None:
    """Return None if this computer or a machine's metadata names that ``fleet.json``; else the error.

    A value from a machine's metadata is recorded, so that an older ``fleet.json`` is not accepted later.
    """
    known = recorded_deployment(home)
    if known == found:
        return None
    for zone in fleet.possible_zones:
        try:
            nodes = provider.nodes(zone)
        except (CloudError, UserError):  # The monitor's round reports a zone that does not answer.
            continue
        pinned = [
            each.metadata.get(PIN)
            for each in nodes
            if each.metadata.get("spile-home") == home and owns(fleet.name, each)
        ]
        if found in pinned:
            record_deployed(home, found)
            return None
    return NotDeployed(
        f"{home}/fleet.json was deployed neither from this computer nor to a machine of the fleet",
        expected=f"sha256:{known}" if known else "one that is known outside of the bucket",
        found=f"sha256:{found}",
        fix="if spile deploy printed this hash on another computer, run spile monitor "
        f"{home} --deployment sha256:{found}; if not, check who can write to the bucket, and deploy again",
    )
