"""What runs on every machine: reads its assignment, runs the worker, says how it ended, and deletes the machine.

``python -m spile.fleet.agent --home gs://bucket/fleet/name --node tpu-us-central1-a-0 --zone us-central1-a``

    worker's exit   what the agent does
    0               says "finished"; the machine deletes itself
    2               says "refused": the same task again would be refused again
    3               another worker owns the stream: waits and looks again
    else            launches it anew, a few times; then says "crashed", with the log's last lines
"""

from __future__ import annotations

import argparse
import base64
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from spile.errors import CloudError, SpecError, SpileError, UserError, untrusted
from spile.fleet.home import FleetHome, WorkerReport
from spile.fleet.pins import own_pin
from spile.fleet.spec import FleetSpec, Worker
from spile.fleet.worker_logs import LogKeeper
from spile.spec.hiding import REFERENCE, secret_values, struck_out
from spile.spec.phase import Phase
from spile.version import __version__

__all__ = ["AGAIN", "Agent", "main", "resolve", "worker_command"]


_NAME = re.compile(r"projects/[A-Za-z0-9._:-]+/secrets/[A-Za-z0-9_-]+(/versions/[A-Za-z0-9_-]+)?")
_ENDPOINT = "https://secretmanager.googleapis.com"


def resolve(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables, with what they refer to in the place of references."""
    return {
        name: _fetch(name, value.removeprefix(REFERENCE)) if value.startswith(REFERENCE) else value
        for name, value in environment.items()
    }


def _fetch(variable: str, name: str) -> str:
    if not _NAME.fullmatch(name):
        raise SpecError(f"--env {variable}", expected=f"{REFERENCE}projects/P/secrets/S", found=REFERENCE + name)
    where = name if "/versions/" in name else f"{name}/versions/latest"
    endpoint = os.environ.get("SPILE_SECRETS_ENDPOINT", _ENDPOINT).rstrip("/")
    import google.auth
    import requests
    from google.auth.transport.requests import AuthorizedSession

    with untrusted(CloudError, f"the secret {name} for {variable} cannot be read", fix="see the machine's account"):
        if endpoint.startswith("http://"):  # never Google: a token must not travel over it
            session: requests.Session = requests.Session()
        else:
            credentials, _ = google.auth.default(scopes=["https://www.googleapis.com/auth/cloud-platform"])
            session = AuthorizedSession(credentials)
        reply = session.get(f"{endpoint}/v1/{where}:access", timeout=30)
        if reply.status_code != 200:
            raise CloudError(f"the secret {name} for {variable} cannot be read", found=f"status {reply.status_code}")
        return base64.b64decode(reply.json()["payload"]["data"]).decode().rstrip("\n")


AGAIN = 75
"""The exit code that asks the launch script to look at ``fleet.json`` again: there is a new deployment."""
_TAIL = 40
_LONG_RUN = 900.0


def worker_command(fleet: FleetSpec, worker: Worker) -> list[str]:
    """What the machine runs, for its stream."""
    words = [sys.executable, "-m", "spile.cli.main", "extract", "--worker-id", str(worker.id), "--output", fleet.root]
    if fleet.streams is not None:
        words += ["--dataset-dir", fleet.streams]
    if fleet.split:
        words += ["--expect-split", fleet.split]
    if fleet.max_samples is not None:
        words += ["--max-samples", str(fleet.max_samples)]
    return [*words, *fleet.arguments]


@dataclass
class Agent:
    """One machine's agent. ``host`` is its number on a slice of many hosts; only host 0 speaks for all."""

    home: FleetHome
    node: str
    zone: str
    host: int = 0
    relaunches: int = 3
    pause: float = 10.0
    look: float = 60.0
    """Seconds between looks for a new deployment."""
    pin: str = ""
    """The sha256 of the ``fleet.json`` that the startup script has found pinned; empty where nothing is."""
    stay: bool = True
    """Whether it waits for the next deployment where this one's work has ended and the machine is still there."""
    command: Callable[[FleetSpec, Worker], Sequence[str]] = worker_command
    stopping: threading.Event = field(default_factory=threading.Event)
    _refused: str = ""

    def run(self) -> int:
        """Work until there is nothing to do here; the exit code for systemd."""
        fleet, found = self.home.read_pinned()
        if self.pin and found != self.pin:
            print("spile agent: fleet.json is another than at the start; the startup script judges it", flush=True)
            return AGAIN
        worker = self._assignment(fleet)
        report = WorkerReport(self._name(), fleet.deployment, version=__version__)
        crashes = fences = launches = 0
        while True:
            launches += 1
            self._report(replace(report, phase=Phase.STARTING, launches=launches))
            began = time.monotonic()
            code, tail = self._work(fleet, worker)
            if code == AGAIN or self.stopping.is_set():
                return code if code == AGAIN else 0
            report = replace(report, launches=launches, exit_code=code, error=tail)
            if code == 0:
                self._report(replace(report, phase=Phase.DONE, verdict="finished", error=""))
                self._leave(fleet)
                return self._next(fleet)
            if code == 2:
                self._report(replace(report, phase=Phase.FAILED, verdict="refused"))
                return self._next(fleet)
            crashes = 0 if time.monotonic() - began > _LONG_RUN else crashes
            fences, crashes = (fences + 1, crashes) if code == 3 else (fences, crashes + 1)
            if crashes > self.relaunches or fences > 10 * self.relaunches:
                self._report(replace(report, phase=Phase.FAILED, verdict="crashed"))
                return self._next(fleet)
            print(f"spile agent: the worker ended with {code}; launching it again", flush=True)
            if self.stopping.wait(self.pause * 2.0 ** min(crashes, 5)):
                return 0

    def _next(self, fleet: FleetSpec) -> int:
        """Wait for another deployment: a corrected one needs no new machine, and nobody has to start this one again."""
        if self.stay:
            print("spile agent: waiting for another deployment", flush=True)
        while self.stay and not self.stopping.wait(self.look):
            if self._renewed(fleet):
                return AGAIN
        return 0

    def _renewed(self, fleet: FleetSpec) -> bool:
        try:
            new, found = self.home.read_pinned()
            return new.deployment != fleet.deployment and self._is_pinned(fleet, found)
        except SpileError as error:  # the bucket has hiccups; the worker's own writes tell when it is serious
            print(f"spile agent: {error}", flush=True)
            return False

    def _is_pinned(self, fleet: FleetSpec, found: str) -> bool:
        """Whether this machine's own metadata names that ``fleet.json``: who writes the bucket is not who deploys."""
        if not self.pin or own_pin(self.zone, self.node, fleet.project, found) == found:
            return True
        if found != self._refused:
            print(
                f"spile agent: another fleet.json is in {self.home.folder.url}, and this machine's metadata does not "
                f"name its sha256, {found}: it is not used. Where somebody deployed it, deploy again",
                flush=True,
            )
        self._refused = found
        return False

    def _name(self) -> str:
        return self.node if self.host == 0 else f"{self.node}-h{self.host}"

    def _assignment(self, fleet: FleetSpec) -> Worker:
        for worker in fleet.workers:
            if worker.name == self.node:
                return worker
        raise SpecError(
            f"{self.node} has no work in {self.home.folder.url}/fleet.json",
            expected=f"one of {', '.join(worker.name for worker in fleet.workers[:8])}",
        )

    def _report(self, report: WorkerReport) -> None:
        self.home.write_report(replace(report, updated=time.time()))

    def _work(self, fleet: FleetSpec, worker: Worker) -> tuple[int, str]:
        """Run the worker to its end: its exit code and its last lines. A new deployment ends it first."""
        tail: deque[str] = deque(maxlen=_TAIL)
        # The machine's own process group, so that what ends the machine's service ends the worker too.
        words = list(self.command(fleet, worker))
        given = resolve(fleet.environment)
        hidden = secret_values(fleet.environment, {**os.environ, **given})
        ended, renewed = threading.Event(), threading.Event()
        keeper = LogKeeper(self.home.folder, self._name())
        with subprocess.Popen(  # noqa: S603
            words,
            env={**os.environ, **given},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        ) as child:
            watcher = threading.Thread(target=self._watch, args=(fleet, child, ended, renewed, keeper), daemon=True)
            watcher.start()
            for line in child.stdout or ():
                said = struck_out(line, hidden)  # the tail goes to the bucket, the line to the machine's log
                tail.append(said.rstrip("\n"))
                keeper.add(said)
                print(said, end="", flush=True)
            code = child.wait()
        ended.set()
        watcher.join()
        _flush(keeper)
        return (AGAIN if renewed.is_set() else code), "\n".join(tail)

    def _watch(
        self,
        fleet: FleetSpec,
        child: subprocess.Popen[str],
        ended: threading.Event,
        renewed: threading.Event,
        keeper: LogKeeper,
    ) -> None:
        while not ended.wait(self.look):
            _flush(keeper)
            if self._renewed(fleet):
                renewed.set()
                child.send_signal(signal.SIGTERM)
                return

    def _leave(self, fleet: FleetSpec) -> None:
        """Delete this machine. If that fails the monitor will."""
        if self.host != 0 or not fleet.policy.delete_finished or not self.zone:
            return
        from spile.fleet.cloud_tpu import CloudTpu, read_settings
        from spile.fleet.manage import delete_queued_of
        from spile.fleet.spec import owns

        try:
            client = CloudTpu(read_settings(os.environ, project=fleet.project))
            node = client.node(self.zone, self.node)
            if not owns(fleet.name, node):
                return
            print("spile agent: finished; this machine deletes itself", flush=True)
            if node.queued is not None:
                delete_queued_of(client, fleet.name, self.zone, node.queued)
            else:
                client.delete_node(self.zone, self.node)
        except (CloudError, UserError) as error:
            print(f"spile agent: cannot delete this machine ({error}); spile monitor will", flush=True)


def _flush(keeper: LogKeeper) -> None:
    try:
        keeper.flush()
    except SpileError as error:  # the log is for people; the run goes on without it
        print(f"spile agent: {error}", flush=True)


def main(words: Sequence[str] | None = None) -> int:
    """The agent as a process."""
    parser = argparse.ArgumentParser(prog="python -m spile.fleet.agent")
    parser.add_argument("--home", required=True)
    parser.add_argument("--node", required=True)
    parser.add_argument("--zone", default="")
    parser.add_argument("--host", type=int, default=0)
    parser.add_argument("--pin", default="")
    parser.add_argument("--pause", type=float, default=10.0)
    parser.add_argument("--look", type=float, default=60.0)
    options = parser.parse_args(words)
    home, numbers = FleetHome.open(options.home), {"pause": options.pause, "look": options.look}
    agent = Agent(home, options.node, options.zone, options.host, pin=options.pin, **numbers)
    # The service's end sends the same signal to the worker, which commits what it has; the agent only waits for it.
    # In a thread: a handler that comes while the main thread is inside wait() would wait for its lock for ever.
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=agent.stopping.set).start())
    try:
        return agent.run()
    except SpileError as error:
        print(f"spile agent: {error}", file=sys.stderr, flush=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
