"""The monitor and its table, against the fake cloud; the bucket is a folder."""

from __future__ import annotations

import io
import json
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from rich.console import Console
from tests.fakes.cloud import Cloud, CloudTimes
from tests.fakes.cloud_server import Api, FakeCloud

from fleet_simulation import DirectSession
from spile.cli.fleet import watch_fleet
from spile.errors import SpecError
from spile.fleet.cloud_tpu import CloudSettings, CloudTpu
from spile.fleet.home import FleetHome, WorkerReport
from spile.fleet.monitor import FleetMonitor, FleetStatus, check_webhook
from spile.fleet.provider import NodeRequest, NotAllowed
from spile.fleet.spec import FleetSpec, Policy, plan_workers
from spile.objects import open_folder
from spile.spec.phase import Phase
from spile.store.claims import ClaimBook
from spile.store.heartbeat import Beat
from spile.store.layout import PROGRESS, STREAM, stream_folder
from spile.store.ledger import FORMAT, seal
from spile.view.fleet import plain_lines, render, watch

A, B = "us-central1-a", "us-central1-b"


@pytest.fixture
def home(tmp_path: Path) -> FleetHome:
    home = FleetHome.open(str(tmp_path / "fleet" / "f"))
    fleet = FleetSpec(
        "f", "fake-project", (A, B), plan_workers((A, B), 1), NodeRequest("v3-8", "r", preemptible=True),
        run={"output": str(tmp_path / "activations")}, deployment="d", policy=Policy(interval=0.1),
    )  # fmt: skip
    home.write_fleet(fleet)
    return home


def text_of(status: FleetStatus) -> str:
    console = Console(width=160, file=io.StringIO())
    console.print(render(status, interval=60))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def until(monitor: FleetMonitor, true) -> FleetStatus:
    for _ in range(3000):
        status = monitor.step()
        if true(status):
            return status
        time.sleep(0.02)
    raise AssertionError(text_of(status))


def say(home: FleetHome, name: str, at: float | None = None, **more: object) -> None:
    home.write_report(WorkerReport(name, "d", updated=time.time() if at is None else at, **more))  # type: ignore[arg-type]


class StillClock:
    """A monitor and its cloud on a clock that advances one second per round, independent of the machine's load."""

    def __init__(self, home: FleetHome) -> None:
        self.now = 1_000_000.0
        self.cloud = Cloud(lambda: self.now, times=CloudTimes(create=0.5, delete=0.5, queue=0.5))
        settings = CloudSettings("fake-project", endpoint="http://still/", anonymous=True)
        client = CloudTpu(settings, session=DirectSession(Api(self.cloud, check_answers=False)), sleep=lambda _: None)
        self.monitor = FleetMonitor(home, client, clock=lambda: self.now)

    def until(self, true: Callable[[FleetStatus], bool]) -> FleetStatus:
        for _ in range(20):
            status = self.monitor.step()
            if true(status):
                return status
            self.now += 1.0
            self.cloud.advance()
        raise AssertionError(text_of(status))


def test_a_life(home: FleetHome, fake: FakeCloud, client: CloudTpu) -> None:
    monitor = FleetMonitor(home, client)
    status = monitor.step()
    assert [line.split(":")[0] for line in status.actions] == [f"create tpu-{zone}-0 in {zone}" for zone in (A, B)]
    assert status.needs_recovery == 2
    status = until(monitor, lambda status: all(each.machine == "READY" for each in status.workers))
    assert (status.healthy, status.working) == (0, 0), "READY, and not heard of yet"
    say(home, "tpu-us-central1-a-0", phase="starting")
    status = monitor.step()
    assert (status.healthy, status.working) == (1, 1)
    text = text_of(status)
    expected = (
        "Total workers: 2 across 2 zones", "Check interval: 60 s", "NAME", "SAMPLES", "SHARDS", "COMMITTED", "TOTALS",
        "✓ Healthy: 1", "⟳ Working: 1", "✗ Needs recovery: 0", "so far", "Last update: 20", "Press Ctrl+C",
    )  # fmt: skip
    for words in expected:
        assert words in text
    fake.admin("preempt", {"zone": B, "name": "tpu-us-central1-b-0"})
    status = monitor.step()
    assert "delete tpu-us-central1-b-0 in us-central1-b: it is PREEMPTED" in "\n".join(plain_lines(status))
    assert "✗ Needs recovery: 1" in text_of(status)
    until(monitor, lambda status: status.workers[1].machine == "READY" and status.workers[1].past.preemptions == 1)
    for name in ("tpu-us-central1-a-0", "tpu-us-central1-b-0"):
        say(home, name, phase="done", verdict="finished")
    status = until(monitor, lambda status: status.over)
    assert not status.failed
    assert client.nodes("-") == []
    assert "DONE" in text_of(status)
    monitor.close()
    logged = [json.loads(line) for line in home.folder.get("actions/000001.jsonl").splitlines()]
    assert {entry["verb"] for entry in logged} == {"create", "delete"}
    assert all(entry["reason"] and entry["time"] for entry in logged)


def test_the_budget_ends_it(home: FleetHome, fake: FakeCloud, client: CloudTpu) -> None:
    monitor = FleetMonitor(home, client, policy={"budget": 1.0}, clock=fake.clock)
    until(monitor, lambda status: all(each.machine == "READY" for each in status.workers))
    fake.admin("clock", {"advance": 500})
    assert monitor.step().history.stopped == ""
    fake.admin("clock", {"advance": 1000})
    status = until(monitor, lambda status: status.over)
    assert status.failed
    assert status.history.stopped.startswith("the budget of $1.00 is spent ($2.0")
    assert client.nodes("-") == []
    assert "Stopped: the budget of $1.00 is spent" in text_of(status)


def test_a_budget_raised_on_one_monitor_counts_for_the_next(home: FleetHome, fake: FakeCloud, client: CloudTpu) -> None:
    deployed = home.read_fleet()
    home.write_fleet(replace(deployed, policy=replace(deployed.policy, budget=1.0)))
    monitor = FleetMonitor(home, client, clock=fake.clock)
    until(monitor, lambda status: all(each.machine == "READY" for each in status.workers))
    home.order_budget(deployed, 1000.0)
    fake.admin("clock", {"advance": 1000})
    monitor.close()
    later = FleetMonitor(home, client, clock=fake.clock)
    status = later.step()
    assert (status.history.stopped, len(client.nodes("-"))) == ("", 2)
    assert status.history.dollars > 1.0
    home.order_budget(deployed, 1.1)
    assert until(later, lambda status: status.over).history.stopped.startswith("the budget of $1.10 is spent")
    home.write_fleet(replace(deployed, deployment="e"))
    assert home.with_orders(home.read_fleet()).policy.budget is None, "the next deployment has its own"


def test_a_complete_run_is_a_success_at_any_cost(home: FleetHome, fake: FakeCloud, client: CloudTpu) -> None:
    monitor = FleetMonitor(home, client, clock=fake.clock)
    until(monitor, lambda status: all(each.machine == "READY" for each in status.workers))
    fake.admin("clock", {"advance": 1500})
    for name in ("tpu-us-central1-a-0", "tpu-us-central1-b-0"):
        home.write_report(WorkerReport(name, "d", updated=fake.clock(), phase=Phase.DONE, verdict="finished"))
    home.order_budget(home.read_fleet(), 0.5)
    status = until(monitor, lambda status: status.over)
    assert status.history.dollars > 0.5
    assert not status.failed
    assert last_line(status).startswith("the work is finished; $")
    spent = replace(status, history=replace(status.history, stopped="the budget of $0.50 is spent"))
    assert last_line(spent).startswith("the work is finished; $"), "whatever was decided on the way"


def last_line(status: FleetStatus) -> str:
    console = Console(width=160, file=io.StringIO())
    watch(lambda: status, console, interval=60)
    return console.file.getvalue().splitlines()[-1]  # type: ignore[attr-defined, no-any-return]


def test_a_fleet_that_is_stopped_ends_for_good(home: FleetHome, client: CloudTpu) -> None:
    """The order is in the bucket: the running monitor deletes the machines, and no later one creates them."""
    monitor = FleetMonitor(home, client)
    until(monitor, lambda status: all(each.machine == "READY" for each in status.workers))
    home.order_stop(home.read_fleet())
    status = until(monitor, lambda status: status.over)
    assert status.history.stopped.startswith("stopped by ")
    assert status.failed, "it is not complete"
    assert last_line(status).startswith("stopped by ")
    monitor.close()
    later = FleetMonitor(home, client)
    assert later.step().over
    assert client.nodes("-") == []


def test_a_new_deployment_is_watched_where_it_writes(home: FleetHome, client: CloudTpu, tmp_path: Path) -> None:
    monitor = FleetMonitor(home, client)
    monitor.step()
    home.write_fleet(replace(home.read_fleet(), deployment="e", run={"output": str(tmp_path / "other")}))
    assert monitor.step().snapshot.root == str(tmp_path / "other")


def test_a_quota_error_is_reported(home: FleetHome, fake: FakeCloud, client: CloudTpu) -> None:
    for zone in (A, B):
        fake.admin("quota", {"zone": zone, "limit": 0})
    monitor = FleetMonitor(home, client)
    status = monitor.step()
    assert status.history.blocks[A].why.startswith("no quota to create TPU tpu-us-central1-a-0")
    assert "no quota to create" in text_of(status)
    calls = len(fake.api.calls)
    for _ in range(5):
        monitor.step()
    assert not [call for call in fake.api.calls[calls:] if call[0] == "POST"], "and not asked for again and again"


def test_a_zone_that_does_not_answer_is_reported_and_delays_no_other_zone(
    home: FleetHome, fake: FakeCloud, client: CloudTpu
) -> None:
    fake.admin("fault", {"method": "GET", "path": A, "status": 500, "count": 1000})
    status = FleetMonitor(home, client).step()
    assert any(f"cannot list TPUs in {A}" in line for line in status.problems)
    assert [line.split(":")[0] for line in status.actions] == [f"create tpu-{B}-0 in {B}"]


def test_a_second_monitor_watches_and_takes_over(home: FleetHome, client: CloudTpu, fake: FakeCloud) -> None:
    first, second = FleetMonitor(home, client, owner="ann"), FleetMonitor(home, client, owner="bob")
    first.step()
    status = second.step()
    assert status.holder is not None
    assert status.actions == ()
    assert "ann monitors this fleet; this one only watches" in text_of(status)
    first.close()
    status = until(second, lambda status: status.holder is None)
    assert status.history.workers[0].creates == 1, "it goes on with what the first one knew"
    watcher = FleetMonitor(home, client, watch_only=True)
    assert watcher.step().holder is not None
    second.close()


def test_finished_machines_may_be_kept(home: FleetHome, client: CloudTpu) -> None:
    monitor = FleetMonitor(home, client, policy={"delete_finished": False})
    until(monitor, lambda status: all(each.machine == "READY" for each in status.workers))
    for name in ("tpu-us-central1-a-0", "tpu-us-central1-b-0"):
        say(home, name, phase="done", verdict="finished")
    assert monitor.step().over
    assert len(client.nodes("-")) == 2


def test_no_permission_anywhere_is_an_error_and_not_a_table(
    home: FleetHome, fake: FakeCloud, client: CloudTpu, capsys: pytest.CaptureFixture[str]
) -> None:
    fake.admin("fault", {"status": 403, "message": "Permission 'tpu.nodes.list' denied", "count": 1000})
    with pytest.raises(
        NotAllowed, match=r"cannot list TPUs in us-central1-a: your account may not do this: .*--role=roles/tpu.admin"
    ):
        watch_fleet(home, client, Console(), interval=1)


def test_a_hiccup_later_is_only_shown(home: FleetHome, fake: FakeCloud, client: CloudTpu) -> None:
    out = io.StringIO()

    calls: list[int] = []

    def gone(_: float) -> None:
        calls.append(1)
        folder = Path(home.folder.url)
        if len(calls) == 1:
            (folder / "fleet.json").rename(folder / "gone.json")
        elif len(calls) == 2:
            (folder / "gone.json").rename(folder / "fleet.json")
        else:
            raise KeyboardInterrupt

    code = watch_fleet(home, client, Console(file=out), interval=1, sleep=gone)
    assert code == 0
    assert "no fleet at" in out.getvalue()
    assert "stopped watching; the fleet continues" in out.getvalue()
    assert len(client.nodes("-")) == 2


def test_a_table_taller_than_the_terminal_keeps_what_is_in_trouble(home: FleetHome) -> None:
    zones = (A, B)
    home.write_fleet(replace(home.read_fleet(), workers=plan_workers(zones, 20)))
    still = StillClock(home)
    still.until(lambda status: all(each.machine == "READY" for each in status.workers))
    for worker in still.monitor.fleet.workers[1:]:
        say(home, worker.name, still.now, phase="starting")
    say(home, "tpu-us-central1-b-19", still.now, phase="failed", verdict="refused", error="spile: no such model")
    status = still.monitor.step()
    console = Console(width=160, file=io.StringIO())
    console.print(render(replace(status, actions=()), interval=60, height=30))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.count("\n") <= 30
    assert "tpu-us-central1-a-0 " in text, "not heard of yet"
    assert "GIVEN UP" in text
    assert "more" in text
    assert "Needs recovery: 1" in text


def test_a_silent_machine_is_reported_and_the_reason_of_its_replacement_stays(
    home: FleetHome, fake: FakeCloud, client: CloudTpu
) -> None:
    """For example a machine that cannot write to the bucket: the column is not empty for twenty minutes."""
    fake.cloud._on_start = lambda _: None  # On a busy computer, the startup script would report in the middle of it.
    monitor = FleetMonitor(home, client, clock=fake.clock)
    until(monitor, lambda status: all(each.machine == "READY" for each in status.workers))
    fake.admin("clock", {"advance": 600})
    status = monitor.step()
    assert status.workers[0].note.startswith("booted 10 min")
    assert "no report yet (replaced after 20 min)" in status.workers[0].note
    assert status.workers[0].note in text_of(status), "in the column WORKER"
    say(home, status.workers[0].worker.name, fake.clock(), phase="starting", launches=3, exit_code=1, error="no memory")
    assert "restarted 2×, exit code 1: no memory" in text_of(monitor.step())
    home.folder.delete(f"workers/{status.workers[0].worker.name}.json")
    fake.admin("clock", {"advance": 700})
    monitor.step()
    status = until(monitor, lambda status: all(each.machine == "READY" for each in status.workers))
    assert "the machine before: no heartbeat since it was created" in status.workers[0].note


def test_a_zone_whose_api_is_out_does_not_make_a_live_machine_a_missing_one(
    home: FleetHome, fake: FakeCloud, client: CloudTpu
) -> None:
    monitor = FleetMonitor(home, client)
    until(monitor, lambda status: all(each.machine == "READY" for each in status.workers))
    fake.admin("fault", {"method": "GET", "path": A, "status": 503, "count": 1000})
    status = monitor.step()
    assert status.workers[0].machine == "STATE_UNSPECIFIED"
    assert status.workers[0].note == f"{A} does not answer"
    assert status.workers[1].machine == "READY"


def test_the_same_long_quota_text_stands_in_one_row(home: FleetHome, fake: FakeCloud, client: CloudTpu) -> None:
    stays = Policy(interval=0.1, move=False)
    home.write_fleet(replace(home.read_fleet(), workers=plan_workers((A,), 3), policy=stays))
    fake.admin("quota", {"zone": A, "limit": 0})
    status = FleetMonitor(home, client).step()
    assert all(worker.note.startswith("no quota to create TPU") for worker in status.workers)
    lines = plain_lines(status)
    assert sum("no quota to create TPU" in line for line in lines) == 1
    assert sum(f"no quota in {A}" in line for line in lines) == 4, "a row for each worker, and the line with the text"


def test_a_webhook_is_called_once_for_each_event(home: FleetHome, fake: FakeCloud, client: CloudTpu) -> None:
    output: list[dict[str, str]] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            output.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Silence."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hook)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}/hook"
    home.write_fleet(replace(home.read_fleet(), notify=(url, "http://127.0.0.1:9/nobody")))
    monitor = FleetMonitor(home, client)
    until(monitor, lambda status: all(each.machine == "READY" for each in status.workers))
    say(home, "tpu-us-central1-a-0", phase=Phase.FAILED, verdict="refused", error="spile: no such model")
    status = monitor.step()
    assert any(line.startswith("could not notify 127.0.0.1") for line in status.actions), "and the fleet goes on"
    say(home, "tpu-us-central1-b-0", phase=Phase.DONE, verdict="finished")
    until(monitor, lambda status: status.over)
    home.order_stop(home.read_fleet())
    monitor.step()
    monitor.step()
    server.shutdown()
    server.server_close()
    assert [each["event"] for each in output] == ["given up", "stopped"]
    assert "no such model" in output[0]["text"]
    assert (output[0]["fleet"], output[0]["output"]) == ("f", home.read_fleet().root)
    with pytest.raises(SpecError, match=r"^--notify: expected https"):
        check_webhook("slack")


def screen(status: FleetStatus, width: int, height: int) -> list[str]:
    """What a terminal of that size shows."""
    console = Console(width=width, height=height, file=io.StringIO(), color_system=None)
    console.print(render(status, interval=60, height=console.height))
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined, no-any-return]


def test_64_workers_and_long_quota_texts_fit_80_by_24_and_trouble_is_what_is_kept(home: FleetHome) -> None:
    home.write_fleet(replace(home.read_fleet(), workers=plan_workers((A, B), 32)))
    still = StillClock(home)
    still.cloud.quota[B] = 29
    status = still.until(lambda status: sum(each.machine == "READY" for each in status.workers) == 61)
    for worker in still.monitor.fleet.workers:
        say(home, worker.name, still.now, phase="starting")
    long = "spile: no such model, " + "which is a long story " * 20
    last = [f"tpu-{B}-27", f"tpu-{B}-28"]
    for name in last:
        say(home, name, still.now, phase="failed", verdict="refused", error=long)
    status = still.until(lambda status: sum(bool(each.past.gave_up) for each in status.workers) == 2)
    status = replace(status, problems=("a problem of the cloud " * 20,) * 30)
    lines = screen(status, 80, 24)
    assert 20 < len(lines) <= 23, "\n".join(lines)
    assert max(map(len, lines)) <= 80
    rows = [line for line in lines if line.startswith((f"tpu-{A}", f"tpu-{B}")) and "/" in line]
    trouble = [*last, *(f"tpu-{B}-{number}" for number in (29, 30, 31))]
    assert set(trouble) <= {row.split()[0] for row in rows}, "\n".join(lines)
    assert [row.split()[1] for row in rows if row.split()[0] in last] == ["GIVEN"] * 2
    assert any(line.startswith(f"{last[0]} and 1 more: ") and line.endswith("…") for line in lines), "cut to a line"
    assert any(line.startswith("… and 59 more") for line in lines)


def test_a_long_quota_text_is_on_the_screen_once(home: FleetHome, fake: FakeCloud, client: CloudTpu) -> None:
    stays = Policy(interval=0.1, move=False)
    home.write_fleet(replace(home.read_fleet(), workers=plan_workers((A, B), 3), policy=stays))
    fake.admin("quota", {"zone": A, "limit": 0})
    status = FleetMonitor(home, client).step()
    assert any("no quota to create" in line for line in status.actions), "the action tells it as well"
    console = Console(width=1000, file=io.StringIO())
    console.print(render(status))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.count("no quota to create") == 1
    assert "\n".join(plain_lines(status)).count("no quota to create") == 1, "in a log too"
    assert f"no quota in {A} for 3 workers: no quota to create TPU" in text


def test_a_gone_machine_counts_neither_in_tokens_per_second_nor_in_the_time_left(
    home: FleetHome, fake: FakeCloud, client: CloudTpu
) -> None:
    """Its last sign of life is fresh for two minutes more."""
    monitor = FleetMonitor(home, client)
    until(monitor, lambda status: all(each.machine == "READY" for each in status.workers))
    root, now = open_folder(monitor.fleet.root), datetime.now(UTC).isoformat()
    for number, rate in ((0, 50.0), (1, 30.0)):
        record = {"format": FORMAT, "id": "1" * 16, "worker_id": number, "fingerprint": "f", "data": "d", "sha256": "s"}
        folder = root.child(stream_folder(number, "tpu"))
        folder.put(STREAM, seal({**record, "lines": 10, "samples": 10, "taps": []}, indent=1))
        worker = {"attempt": "a", "host": "h", "started": now, "updated": now, "version": "1", "progressed": now}
        beat = Beat(Phase.RUNNING, 5, 5, 500, 1, 1, rate, 0, 10, **worker)
        folder.put(PROGRESS, json.dumps(beat.to_json()).encode())
        assert ClaimBook(root, monitor.fleet.workers[number].name).take([number]) is not None
    status = monitor.step()
    assert "80 tokens/s, " in text_of(status)
    assert "left" in text_of(status)
    fake.admin("preempt", {"zone": A, "name": monitor.fleet.workers[0].name})
    status = until(monitor, lambda status: status.workers[0].machine != "READY")
    assert "30 tokens/s, " in text_of(status), text_of(status)
    assert "left, " not in text_of(status)
