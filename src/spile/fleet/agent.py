"""The agent that runs on every machine of a fleet: it supervises the worker and deletes the machine at the end.

``python -m spile.fleet.agent --home gs://bucket/fleet/name --node tpu-us-central1-a-0 --zone us-central1-a``

The worker is ``spile worker --spec - --claim``: the run spec comes from ``fleet.json``, and the worker claims one
stream after another. What the agent does when it ends:

    exit code   action
    0           report "finished" and delete the machine
    2           report "refused": the same task would be refused again
    3           another worker owns the stream: wait and start again
    4           another host of the slice was lost: start again
    other       start again a few times (``launch.supervisor.RestartPolicy``), then report "crashed"

After "refused" or "crashed" the agent waits for a corrected deployment, and deletes the machine after
``Policy.idle_limit`` seconds, so that nothing is billed that does not work, with or without a monitor. It also stops
the worker and deletes the machine if the fleet was stopped or has spent its budget.

The output of workers is kept in the bucket, ``<home>/logs/NAME/000012.log``; it outlives the machine and is rotated.
"""

from __future__ import annotations

import argparse
import base64
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from spile.engines.supervisor import AttemptHistory, RestartAction, RestartPolicy
from spile.errors import CloudError, SpecError, SpileError, UserError, untrusted
from spile.fleet.cloud_tpu import CloudTpu, open_session, read_settings
from spile.fleet.home import FleetHome, WorkerReport, own_pin
from spile.fleet.logs import WorkerLog
from spile.fleet.manage import delete_machine
from spile.fleet.spec import FleetSpec, Verdict, Worker, owns
from spile.spec.phase import Phase
from spile.store.heartbeat import REFERENCE, secret_values
from spile.store.quarantine import Supervision
from spile.version import __version__

NEW_DEPLOYMENT = 75
"""The exit code that asks the launch script to read ``fleet.json`` again, because there is a new deployment."""
_KILL_FACTOR = 10
"""Restarts after a kill, as a multiple of those after errors: a worker works on many streams, and an agent does not see
whether it commits."""
_BUDGET_MARGIN = 1.05
"""Machines stop by themselves at this multiple of the budget. A monitor stops them at the budget itself."""
_VERDICTS: dict[RestartAction, Verdict] = {
    RestartAction.DONE: "finished",
    RestartAction.REFUSED: "refused",
    RestartAction.GIVE_UP: "crashed",
}


def worker_command(worker: Worker) -> list[str]:
    """Return the command of the worker, which reads the run spec from its standard input."""
    return [sys.executable, "-m", "spile.cli.main", "worker", "--spec", "-", "--claim", "--worker-name", worker.name]


@dataclass
class Agent:
    """The agent of one machine. ``host`` is its number in a slice; only host 0 acts for the machine."""

    home: FleetHome
    node: str
    zone: str
    host: int = 0
    restarts: RestartPolicy = field(default_factory=lambda: RestartPolicy(pause=10.0, kill_factor=_KILL_FACTOR))
    check_seconds: float = 60.0
    """Seconds between checks for a new deployment, a stop order and the budget."""
    pin: str = ""
    """The sha256 of the ``fleet.json`` that the startup script accepted; empty if nothing is pinned."""
    wait_at_end: bool = True
    """Whether to wait for a corrected deployment after the worker has ended for good."""
    command: Callable[[Worker], Sequence[str]] = worker_command
    stopping: threading.Event = field(default_factory=threading.Event)
    _refused_pin: str = ""
    _report: WorkerReport = field(default_factory=lambda: WorkerReport(""))
    _began: float = field(default_factory=time.time)
    _price: float = 0.0
    """Dollars per hour; 0 on all hosts of a slice but the first, so that the machine is counted once."""
    _dollars_before: float = 0.0
    """The cost of earlier machines of this worker."""

    def run(self) -> int:
        """Supervise the worker until it has ended for good; return the exit code for systemd."""
        fleet, found = self.home.read_pinned()
        if self.pin and found != self.pin:
            print("spile agent: fleet.json has changed since the start; the startup script checks it again", flush=True)
            return NEW_DEPLOYMENT
        worker = self._assignment(fleet)
        before = self.home.read_reports().get(self._name())
        self._dollars_before = before.dollars if before is not None else 0.0
        self._price = fleet.price if self.host == 0 else 0.0
        self._report = WorkerReport(self._name(), fleet.deployment, version=__version__)
        history, supervision = AttemptHistory(), Supervision.begin()
        while True:
            self._write_report(phase=Phase.STARTING, launches=self._report.launches + 1)
            began = time.monotonic()
            code, tail, why = self._work(fleet, worker, supervision)
            supervision = supervision.after(code)
            if code == NEW_DEPLOYMENT or self.stopping.is_set():
                return NEW_DEPLOYMENT if code == NEW_DEPLOYMENT else 0
            if why:
                return self._end(fleet, "stopped", why)
            decision = self.restarts.decide(history, code, seconds=time.monotonic() - began)
            history = decision.history
            self._report = replace(self._report, exit_code=code, error="" if code == 0 else tail)
            if decision.action is not RestartAction.RESTART:
                return self._end(fleet, _VERDICTS[decision.action])
            print(f"spile agent: the worker ended ({decision.reason}); starting it again", flush=True)
            self._write_report(phase=Phase.STARTING)
            ended = self._wait(fleet, decision.pause)
            if ended is not None:
                return ended

    def _end(self, fleet: FleetSpec, verdict: Verdict, why: str = "") -> int:
        """Report how the worker ended, delete the machine if its work is over, else wait for a corrected deployment."""
        done = verdict in ("finished", "stopped")
        phase = {"finished": Phase.DONE, "stopped": Phase.STOPPED}.get(verdict, Phase.FAILED)
        self._write_report(phase=phase, verdict=verdict, error=why or self._report.error)
        if done:
            self._delete_machine(fleet, why or "the work is finished")
        if not self.wait_at_end:
            return 0
        print("spile agent: waiting for a new deployment", flush=True)
        ended = self._wait(fleet, fleet.policy.idle_limit)
        if ended is None:
            self._delete_machine(fleet, f"the worker {verdict} and no corrected deployment came")
            ended = self._wait(fleet, float("inf"))
        return 0 if ended is None else ended

    def _wait(self, fleet: FleetSpec, seconds: float) -> int | None:
        """Wait; return an exit code if the agent has to end before, or None after ``seconds``."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            if self.stopping.wait(min(self.check_seconds, left)):
                return 0
            if self._is_new_deployment(fleet):
                return NEW_DEPLOYMENT
        return 0 if self.stopping.is_set() else None

    def _is_new_deployment(self, fleet: FleetSpec) -> bool:
        try:
            new, found = self.home.read_pinned()
            return new.deployment != fleet.deployment and self._is_pinned(fleet, found)
        except SpileError as error:  # The next check may succeed; the worker's own writes show a lasting failure.
            print(f"spile agent: {error}", flush=True)
            return False

    def _is_pinned(self, fleet: FleetSpec, found: str) -> bool:
        """Return whether this machine's metadata names that ``fleet.json``. Access to the bucket is not enough."""
        if not self.pin or own_pin(self.zone, self.node, fleet.project, found) == found:
            return True
        if found != self._refused_pin:
            print(
                f"spile agent: another fleet.json is in {self.home.folder.url}, and this machine's metadata does not "
                f"name its sha256, {found}: it is not used. If you deployed it, deploy again",
                flush=True,
            )
        self._refused_pin = found
        return False

    def _reason_to_stop(self, fleet: FleetSpec) -> str:
        """Return why the work has to end now: a stop order, or a spent budget."""
        self._write_report()
        policy = self.home.with_orders(fleet).policy
        if policy.stop or policy.budget is None:
            return policy.stop
        spent = sum(report.dollars for report in self.home.read_reports().values())
        over = spent > policy.budget * _BUDGET_MARGIN
        return f"the budget of ${policy.budget:.2f} is spent (${spent:.2f})" if over else ""

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

    def _write_report(self, **changes: object) -> None:
        """Write the report. ``updated`` moves only with a change: a live agent must not hide a hung worker."""
        cost = self._dollars_before + (time.time() - self._began) / 3600 * self._price
        moved = {"updated": time.time()} if changes else {}
        self._report = replace(self._report, dollars=cost, **{**changes, **moved})  # type: ignore[arg-type]
        self.home.write_report(self._report)

    def _work(self, fleet: FleetSpec, worker: Worker, supervision: Supervision) -> tuple[int, str, str]:
        """Run the worker to its end.

        Returns:
            Its exit code, or ``NEW_DEPLOYMENT`` if it was ended for one; its last lines; and why the agent stopped it.
        """
        given = resolve_secrets(fleet.environment)
        log = WorkerLog(self.home.folder, self._name(), secret_values(fleet.environment, {**os.environ, **given}))
        with tempfile.TemporaryFile() as spec:
            spec.write(fleet.run_json())
            spec.seek(0)
            # The same process group as the agent, so that the end of the machine's service ends the worker too.
            with subprocess.Popen(  # noqa: S603
                list(self.command(worker)),
                env={**os.environ, **given, **supervision.environment()},
                stdin=spec,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
            ) as child:
                reader = threading.Thread(target=log.read, args=(child.stdout,), daemon=True)
                reader.start()
                again, why = self._watch(fleet, child, log)
                code = child.wait()
                reader.join()
        log.flush()
        return NEW_DEPLOYMENT if again else code if code >= 0 else 128 - code, "\n".join(log.tail), why

    def _watch(self, fleet: FleetSpec, child: subprocess.Popen[str], log: WorkerLog) -> tuple[bool, str]:
        """Store the log until the worker ends, and end it if there is a new deployment or a reason to stop."""
        while True:
            try:
                child.wait(self.check_seconds)
                return False, ""
            except subprocess.TimeoutExpired:
                log.flush()
            again, why = self._is_new_deployment(fleet), ""
            try:
                why = "" if again else self._reason_to_stop(fleet)
            except SpileError as error:  # The next check may succeed.
                print(f"spile agent: {error}", flush=True)
            if again or why:
                child.send_signal(signal.SIGTERM)
                return again, why

    def _delete_machine(self, fleet: FleetSpec, why: str) -> None:
        """Delete this machine, unless machines are kept. If that fails, the monitor deletes it."""
        if self.host != 0 or not fleet.policy.delete_finished or not self.zone:
            return
        try:
            client = CloudTpu(read_settings(fleet.project))
            node = client.node(self.zone, self.node)
            if not owns(fleet.name, node):
                return
            print(f"spile agent: {why}; this machine deletes itself", flush=True)
            delete_machine(client, fleet.name, self.zone, self.node, node.queued)
        except (CloudError, UserError) as error:
            print(f"spile agent: cannot delete this machine ({error}); spile monitor will", flush=True)


_SECRET_NAME = re.compile(r"projects/[A-Za-z0-9._:-]+/secrets/[A-Za-z0-9_-]+(/versions/[A-Za-z0-9_-]+)?")
_SECRETS_ENDPOINT = "https://secretmanager.googleapis.com"


def resolve_secrets(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables with the values of their secrets.

    ``--env HF_TOKEN=secret:projects/P/secrets/S`` stores only the reference in the bucket. The machine asks Secret
    Manager for the value with its own service account, and the value exists only in the worker's environment.
    """
    return {
        name: _fetch_secret(name, value.removeprefix(REFERENCE)) if value.startswith(REFERENCE) else value
        for name, value in environment.items()
    }


def _fetch_secret(variable: str, name: str) -> str:
    if not _SECRET_NAME.fullmatch(name):
        raise SpecError(f"--env {variable}", expected=f"{REFERENCE}projects/P/secrets/S", found=REFERENCE + name)
    where = name if "/versions/" in name else f"{name}/versions/latest"
    endpoint = os.environ.get("SPILE_SECRETS_ENDPOINT", _SECRETS_ENDPOINT).rstrip("/")
    with untrusted(
        CloudError,
        f"the secret {name} for {variable} cannot be read",
        fix="check the permissions of the machine's service account",
    ):
        # Google never uses plain http, so a token must not be sent over it.
        session = open_session(anonymous=endpoint.startswith("http://"))
        reply = session.get(f"{endpoint}/v1/{where}:access", timeout=30)
        if reply.status_code != 200:
            raise CloudError(f"the secret {name} for {variable} cannot be read", found=f"status {reply.status_code}")
        return base64.b64decode(reply.json()["payload"]["data"]).decode().rstrip("\n")


def main(words: Sequence[str] | None = None) -> int:
    """Run the agent as a process; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m spile.fleet.agent")
    parser.add_argument("--home", required=True)
    parser.add_argument("--node", required=True)
    parser.add_argument("--zone", default="")
    parser.add_argument("--host", type=int, default=0)
    parser.add_argument("--pin", default="")
    parser.add_argument("--pause", type=float, default=10.0)
    parser.add_argument("--check-seconds", type=float, default=60.0)
    options = parser.parse_args(words)
    agent = Agent(
        FleetHome.open(options.home),
        options.node,
        options.zone,
        options.host,
        restarts=RestartPolicy(pause=options.pause, kill_factor=_KILL_FACTOR),
        check_seconds=options.check_seconds,
        pin=options.pin,
    )
    # When the service ends, the worker gets the same signal and commits; the agent waits for it.
    # The flag is set in a thread: a handler that interrupts the main thread inside wait() would wait for its own lock.
    signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=agent.stopping.set).start())
    try:
        return agent.run()
    except SpileError as error:
        print(f"spile agent: {error}", file=sys.stderr, flush=True)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main())
