"""The agent on a machine and each way a worker can end, with real processes and a real folder."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tests.fakes.cloud_server import FakeCloud

from spile.cli.main import main
from spile.engines.supervisor import RestartPolicy
from spile.errors import SpecError, StoreError, UserError
from spile.fleet.agent import NEW_DEPLOYMENT, Agent, worker_command
from spile.fleet.cloud_tpu import CloudTpu
from spile.fleet.home import FleetHome, WorkerReport, pin_machines
from spile.fleet.logs import WorkerLog, read_log
from spile.fleet.manage import wait_for_operation
from spile.fleet.provider import NodeRequest
from spile.fleet.spec import FleetSpec, Policy, plan_workers

ZONE, NAME = "us-central1-a", "tpu-us-central1-a-1"


def a_home(folder: Path, **more: object) -> FleetHome:
    home = FleetHome.open(str(folder / "f"))
    fleet = FleetSpec(
        "f", "fake-project", (ZONE,), plan_workers((ZONE,), 2), NodeRequest("v3-8", "r"), deployment="d1",
        run={"output": "gs://b/activations", "dataset_dir": "gs://b/datasets", "max_samples": 7}, **more,
    )  # type: ignore[arg-type]  # fmt: skip
    home.write_fleet(fleet)
    return home


def an_agent(home: FleetHome, code: str, **more: object) -> Agent:
    words = [sys.executable, "-uc", code]
    options = {"wait_at_end": False, **more}
    restarts = RestartPolicy(pause=0.01, **({"retries": options.pop("retries")} if "retries" in options else {}))  # type: ignore[arg-type]
    return Agent(home, NAME, "", restarts=restarts, check_seconds=0.05, command=lambda *_: words, **options)  # type: ignore[arg-type]


def test_the_worker_gets_the_run_spec_and_claims_streams(tmp_path: Path) -> None:
    home = a_home(tmp_path)
    fleet = home.read_fleet()
    words = worker_command(fleet.workers[1])
    assert words[1:] == ["-m", "spile.cli.main", "worker", "--spec", "-", "--claim", "--worker-name", NAME]
    an_agent(home, "import json, sys; raise SystemExit(0 if json.load(sys.stdin)['max_samples'] == 7 else 2)").run()
    assert home.read_reports()[NAME].verdict == "finished"


def test_a_finished_worker(tmp_path: Path) -> None:
    home = a_home(tmp_path)
    assert an_agent(home, "print('hello')").run() == 0
    report = home.read_reports()[NAME]
    assert (report.verdict, report.phase, report.deployment, report.launches) == ("finished", "done", "d1", 1)


def test_the_fleets_variables_reach_the_worker(tmp_path: Path) -> None:
    home = a_home(tmp_path, environment={"HF_TOKEN": "hf_x"})
    an_agent(
        home, "import os; raise SystemExit(0 if os.environ['HF_TOKEN'] == 'hf_x' and 'PATH' in os.environ else 2)"
    ).run()
    assert home.read_reports()[NAME].verdict == "finished"


def test_a_refused_task_is_reported_at_once(tmp_path: Path) -> None:
    home = a_home(tmp_path)
    an_agent(home, "print('spile: --layers: expected …'); raise SystemExit(2)").run()
    report = home.read_reports()[NAME]
    assert (report.verdict, report.exit_code, report.launches) == ("refused", 2, 1)
    assert "--layers" in report.error


def test_a_crash_is_launched_again_a_few_times_then_reported_with_its_last_lines(tmp_path: Path) -> None:
    home = a_home(tmp_path)
    code = "for n in range(99): print('line', n)\nraise ZeroDivisionError('boom')"
    an_agent(home, code).run()
    report = home.read_reports()[NAME]
    assert (report.verdict, report.exit_code, report.launches) == ("crashed", 1, 4)
    assert report.error.endswith("ZeroDivisionError: boom")
    assert "line 98" in report.error
    assert "line 9\n" not in report.error, "only the last lines"


def test_a_crash_that_heals(tmp_path: Path) -> None:
    home = a_home(tmp_path)
    mark = tmp_path / "once"
    code = (
        f"import pathlib; p = pathlib.Path({str(mark)!r}); n = p.exists(); p.touch(); raise SystemExit(0 if n else 9)"
    )
    an_agent(home, code).run()
    report = home.read_reports()[NAME]
    assert (report.verdict, report.launches) == ("finished", 2)


def test_a_fenced_worker_waits_for_the_other(tmp_path: Path) -> None:
    home = a_home(tmp_path)
    code = (
        f"import pathlib; p = pathlib.Path({str(tmp_path / 'n')!r}); p.open('a').write('x');"
        "raise SystemExit(3 if len(p.read_text()) < 7 else 0)"
    )
    an_agent(home, code).run()
    assert home.read_reports()[NAME].verdict == "finished", "six times fenced is no crash"


def test_a_new_deployment_ends_the_worker_and_asks_for_its_code(tmp_path: Path) -> None:
    from dataclasses import replace

    home = a_home(tmp_path)
    agent = an_agent(home, "import time; print('up'); time.sleep(60)")
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(agent.run()))
    thread.start()
    while NAME not in home.read_reports():
        time.sleep(0.02)
    home.write_fleet(replace(home.read_fleet(), deployment="d2"))
    thread.join(120)
    assert codes == [NEW_DEPLOYMENT]


def test_a_deployment_that_the_machines_metadata_does_not_name_is_not_taken(
    tmp_path: Path,
    fake: FakeCloud,
    client: CloudTpu,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Permission to write to the bucket is not permission to deploy."""
    for key, value in fake.environment().items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("GCE_METADATA_HOST", f"127.0.0.1:{fake.port}/vm/{ZONE}/{NAME}/0")
    home = a_home(tmp_path)
    request = NodeRequest("v3-8", "r", labels={"spile-fleet": "f"})
    wait_for_operation(client, client.create_node(ZONE, NAME, request))
    agent = an_agent(home, "import time; print('up'); time.sleep(60)", pin=home.read_pinned()[1])
    agent.zone = ZONE
    codes: list[int] = []
    thread = threading.Thread(target=lambda: codes.append(agent.run()))
    thread.start()
    output = ""
    new = replace(home.read_fleet(), deployment="d2")
    deadline = time.monotonic() + 120
    while "it is not used" not in output and time.monotonic() < deadline:
        if "up" in output:
            home.write_fleet(new)
        time.sleep(0.1)
        output += capfd.readouterr().out
    assert f"name its sha256, {home.read_pinned()[1]}: it is not used" in output
    time.sleep(0.3)
    assert codes == [], "the worker goes on with what was deployed"
    assert output.count("it is not used") + capfd.readouterr().out.count("it is not used") == 1, "said once"
    assert pin_machines(client, new, home.folder.url) == []
    thread.join(120)
    assert codes == [NEW_DEPLOYMENT]


def test_an_assignment_that_changed_since_the_start_is_judged_before_it_is_run(tmp_path: Path) -> None:
    home = a_home(tmp_path)
    mark = tmp_path / "ran"
    agent = an_agent(home, f"open({str(mark)!r}, 'w')", pin="0" * 64)
    assert agent.run() == NEW_DEPLOYMENT
    assert not mark.exists()


def test_the_service_ends_and_the_worker_had_its_notice(tmp_path: Path) -> None:
    """systemd sends SIGTERM to agent and worker: the worker commits, the agent waits, and nothing is restarted."""
    home = a_home(tmp_path)
    mark = tmp_path / "committed"
    code = f"""
import signal, time, pathlib
def end(*_):
    time.sleep(0.3)
    pathlib.Path({str(mark)!r}).touch()
    raise SystemExit(130)
signal.signal(signal.SIGTERM, end)
print('up', flush=True)
time.sleep(60)
"""
    program = (
        "import functools, sys; from spile.fleet import agent; "
        f"agent.Agent = functools.partial(agent.Agent, command=lambda *_: [sys.executable, '-uc', {code!r}]); "
        f"sys.exit(agent.main(['--home', {home.folder.url!r}, '--node', {NAME!r}]))"
    )
    process = subprocess.Popen(
        [sys.executable, "-uc", program], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "up\n"
    os.killpg(process.pid, signal.SIGTERM)
    assert process.wait(120) == 0
    process.stdout.close()
    assert mark.exists()
    assert home.read_reports()[NAME].verdict == "", "no verdict: the next machine resumes"


def test_the_machine_deletes_itself_and_no_other(
    tmp_path: Path, fake: FakeCloud, client: CloudTpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in fake.environment().items():
        monkeypatch.setenv(key, value)
    home = a_home(tmp_path)
    wait_for_operation(client, client.create_node(ZONE, NAME, NodeRequest("v3-8", "r", labels={"spile-fleet": "f"})))
    agent = an_agent(home, "pass")
    agent.zone = ZONE
    agent.run()
    while client.nodes(ZONE):
        time.sleep(0.02)
    wait_for_operation(client, client.create_node(ZONE, NAME, NodeRequest("v3-8", "r")))
    agent.run()
    time.sleep(0.2)
    assert [node.name for node in client.nodes(ZONE)] == [NAME], "a machine without the fleet's label is not ours"


def test_no_assignment(tmp_path: Path) -> None:
    home = a_home(tmp_path)
    with pytest.raises(SpecError, match=r"nobody has no work in .*fleet.json: expected one of tpu-us-central1-a-0"):
        Agent(home, "nobody", "").run()
    with pytest.raises(UserError, match=r"no fleet at .*: expected fleet.json\. Create one with: spile deploy"):
        Agent(FleetHome.open(str(tmp_path / "empty")), NAME, "").run()


def test_reports_survive_json_and_later_versions(tmp_path: Path) -> None:
    home = a_home(tmp_path)
    an_agent(home, "pass").run()
    raw = json.loads((tmp_path / "f" / "workers" / f"{NAME}.json").read_text())
    (tmp_path / "f" / "workers" / f"{NAME}.json").write_text(json.dumps({**raw, "new": 1}))
    assert home.read_reports()[NAME].verdict == "finished"
    (tmp_path / "f" / "workers" / "half.json").write_text('{"node": ')
    assert set(home.read_reports()) == {NAME}


@pytest.mark.parametrize("code", [2, 1, 0])
def test_a_corrected_deploy_starts_where_the_first_was_refused_crashed_or_done(tmp_path: Path, code: int) -> None:
    """Without a monitor, the agent waits for the next deployment."""
    home = a_home(tmp_path)
    agent = an_agent(home, f"raise SystemExit({code})", wait_at_end=True, retries=0)
    ended: list[int] = []
    thread = threading.Thread(target=lambda: ended.append(agent.run()))
    thread.start()
    deadline = time.monotonic() + 120
    while not (home.read_reports().get(NAME) and home.read_reports()[NAME].verdict) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert ended == [], "it stays"
    home.write_fleet(replace(home.read_fleet(), deployment="d2"))
    thread.join(120)
    assert ended == [NEW_DEPLOYMENT]


def test_a_waiting_agent_ends_with_its_machine(tmp_path: Path) -> None:
    home = a_home(tmp_path)
    agent = an_agent(home, "raise SystemExit(2)", wait_at_end=True)

    def end_it() -> None:
        while not (home.read_reports().get(NAME) and home.read_reports()[NAME].verdict):
            time.sleep(0.02)
        agent.stopping.set()

    threading.Thread(target=end_it, daemon=True).start()
    assert agent.run() == 0


def test_a_workers_log_is_kept_in_the_bucket_and_can_be_searched_when_its_machine_is_gone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = a_home(tmp_path)
    an_agent(home, "for n in range(50): print('line', n)\nprint('spile: boom [x]'); raise SystemExit(2)").run()
    assert list(read_log(home.folder, NAME))[-2:] == ["line 49", "spile: boom [x]"]

    def logs(*words: str) -> tuple[object, list[str]]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(["logs", *words, "--home", home.folder.url])
        answer_text = capsys.readouterr()
        return ended.value.code, (answer_text.out + answer_text.err).splitlines()

    assert logs("1", "--lines", "2") == (0, ["line 49", "spile: boom [x]"])
    assert logs(NAME, "--grep", "line 4[0-2]") == (0, ["line 40", "line 41", "line 42"])
    assert [json.loads(line) for line in logs("1", "--json", "--lines", "1")[1]] == [
        {"worker": NAME, "line": "spile: boom [x]"}
    ]
    assert logs("0")[1] == ["no log of tpu-us-central1-a-0 is stored yet"]
    assert logs("7")[0] == 2
    assert logs("1", "--grep", "[")[1][0].startswith("spile: --grep: expected a regular expression")


def test_a_log_that_the_bucket_did_not_take_is_stored_at_the_next_flush(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    home = a_home(tmp_path)
    log = WorkerLog(home.folder, NAME, part=100)

    def out(*_: object) -> None:
        raise StoreError("the bucket is out")

    log.add("x" * 150)
    with monkeypatch.context() as patch:
        patch.setattr(home.folder, "put", out)
        log.flush()
    assert "spile agent: the bucket is out" in capsys.readouterr().out
    log.flush()
    assert list(read_log(home.folder, NAME)) == ["x" * 150]
    log.add("y")
    log.flush()
    assert list(read_log(home.folder, NAME)) == ["x" * 150, "y"]


def test_a_kept_log_is_rotated_and_bounded(tmp_path: Path) -> None:
    home = a_home(tmp_path)
    log = WorkerLog(home.folder, NAME, part=1000, parts=3)
    for number in range(1000):
        log.add(f"line {number:06d}")
        log.flush()
    sizes = [info.size for info in home.folder.list(f"logs/{NAME}/")]
    assert len(sizes) <= 4
    assert max(sizes) < 1100
    lines = list(read_log(home.folder, NAME))
    assert lines[-1] == "line 000999"
    assert lines == sorted(lines), "in order, nothing twice"
    again = WorkerLog(home.folder, NAME)
    again.add("the next machine")
    again.flush()
    assert list(read_log(home.folder, NAME))[-2:] == ["line 000999", "the next machine"]


def test_a_machine_whose_worker_gave_up_deletes_itself_after_the_limit(
    tmp_path: Path, fake: FakeCloud, client: CloudTpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a monitor, a machine that does not work is not billed for ever."""
    for key, value in fake.environment().items():
        monkeypatch.setenv(key, value)
    home = a_home(tmp_path, policy=Policy(idle_limit=0.3))
    wait_for_operation(client, client.create_node(ZONE, NAME, NodeRequest("v3-8", "r", labels={"spile-fleet": "f"})))
    agent = an_agent(home, "raise SystemExit(2)", wait_at_end=True)
    agent.zone = ZONE
    thread = threading.Thread(target=agent.run)
    thread.start()
    deadline = time.monotonic() + 120
    while client.nodes(ZONE) and time.monotonic() < deadline:
        time.sleep(0.02)
    agent.stopping.set()
    thread.join(120)
    assert client.nodes(ZONE) == []
    assert home.read_reports()[NAME].verdict == "refused"


@pytest.mark.parametrize("how", ["budget", "stop"])
def test_a_machine_obeys_the_budget_and_an_order_to_stop_without_a_monitor(tmp_path: Path, how: str) -> None:
    home = a_home(tmp_path)
    fleet = home.read_fleet()
    if how == "budget":
        home.order_budget(fleet, 5.0)
        home.write_report(WorkerReport("tpu-us-central1-a-0", dollars=5.5))  # what another worker's machines cost
    else:
        home.order_stop(fleet)
    mark = tmp_path / "committed"
    code = (
        f"import pathlib, signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path({str(mark)!r})"
        ".touch(), sys.exit(130))); time.sleep(60)"
    )
    agent = an_agent(home, code)
    agent.check_seconds = 2.0  # the worker has set its handler by then
    assert agent.run() == 0
    report = home.read_reports()[NAME]
    assert report.verdict == "stopped"
    assert ("the budget of $5.00 is spent" if how == "budget" else "stopped by") in report.error
    assert mark.exists(), "the worker could commit"


def test_costs_of_earlier_machines_are_added_up(tmp_path: Path) -> None:
    home = a_home(tmp_path)
    home.write_report(WorkerReport(NAME, dollars=2.0))
    an_agent(home, "pass").run()
    assert 2.0 < home.read_reports()[NAME].dollars < 2.1


def test_a_corrected_deploy_is_taken_up_during_the_pause_of_a_crash_loop(tmp_path: Path) -> None:
    home = a_home(tmp_path)
    agent = an_agent(home, "raise SystemExit(1)")
    agent.restarts = RestartPolicy(pause=600.0)
    ended: list[int] = []
    thread = threading.Thread(target=lambda: ended.append(agent.run()))
    thread.start()
    deadline = time.monotonic() + 120
    while home.read_reports().get(NAME, WorkerReport("")).exit_code is None and time.monotonic() < deadline:
        time.sleep(0.02)
    home.write_fleet(replace(home.read_fleet(), deployment="d2"))
    thread.join(120)
    assert ended == [NEW_DEPLOYMENT]
