"""``spile tpu …`` at the prompt, against the fake cloud."""

from __future__ import annotations

import getpass
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.fakes.cloud_server import FakeCloud

from fleet.cloud_world import a_home
from programs import needs
from spile.cli.main import main
from spile.fleet import manage
from spile.fleet.cloud_tpu import CloudTpu
from spile.fleet.manage import wait_for_queued
from spile.fleet.provider import NodeRequest

A, B = "us-central1-a", "us-central1-b"


@pytest.fixture
def spile(fake: FakeCloud, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path):
    """Run a command line: its exit code, and what it said."""
    home = str(a_home(tmp_path / "home"))
    for name, value in {**fake.environment(), "CLOUDSDK_CONFIG": home, "HOME": home, "COLUMNS": "200"}.items():
        monkeypatch.setenv(name, value)

    def run(*words: str) -> tuple[int, str]:
        with pytest.raises(SystemExit) as ended:
            main(words)
        output = capsys.readouterr()
        return int(ended.value.code or 0), output.out + output.err

    return run


def names(client: CloudTpu) -> list[str]:
    return sorted(node.name for node in client.nodes("-"))


def test_create_status_list_delete(spile, client: CloudTpu) -> None:
    code, text = spile("tpu", "create", "--zones", f"{A},{B}", "--workers-per-zone", "2", "--tpu-type", "v3-8")
    assert code == 0, text
    assert "tpu-us-central1-a-0 in us-central1-a: created" in text
    assert names(client) == [f"tpu-{zone}-{n}" for zone in (A, B) for n in (0, 1)]
    node = client.node(B, "tpu-us-central1-b-1")
    assert node.labels == {"spile-fleet": "default", "spile-worker": "3"}, "numbers run on over the zones"
    assert node.preemptible
    secrets = [node.metadata["spile-secret"] for node in client.nodes("-")]
    assert len(set(secrets)) == 4, "each slice's hosts know each other, and no other's"
    assert min(map(len, secrets)) == 64
    code, text = spile("tpu", "status", "--zones", A, "--workers-per-zone", "3")
    assert "NOT_FOUND" in text
    assert "2 READY" in text
    code, text = spile("tpu", "list", "--json")
    assert [row["worker"] for row in json.loads(text)] == ["0", "1", "2", "3"]
    code, text = spile("tpu", "delete", "--zones", A, "--workers-per-zone", "1", "--yes")
    assert names(client) == ["tpu-us-central1-a-1", "tpu-us-central1-b-0", "tpu-us-central1-b-1"]
    code, text = spile("tpu", "delete", "--zones", f"{A},{B}", "--yes")
    assert (code, names(client)) == (0, [])


@needs("ssh-keygen")
def test_machines_are_born_with_a_key_for_ssh(spile, client: CloudTpu, fake: FakeCloud, tmp_path: Path) -> None:
    """gcloud's own, made where there is none, as gcloud does; none where there is no ssh."""
    private = tmp_path / "home" / ".ssh" / "google_compute_engine"
    public = private.with_name("google_compute_engine.pub")

    def born(name: str) -> str | None:
        code, output = spile("tpu", "create", "--zones", A, "--name-prefix", name, "--fleet", name)
        assert code == 0, output
        return fake.cloud.node(A, f"{name}-{A}-0").get("metadata", {}).get("ssh-keys")

    assert born("known") == f"{getpass.getuser()}:ssh-rsa AAAA me@here"
    private.unlink()
    public.unlink()
    assert born("new") == f"{getpass.getuser()}:{public.read_text().strip()}"
    assert "PRIVATE KEY" in private.read_text()
    private.unlink()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        assert born("none") is None


def test_delete_asks_and_leaves_foreign_machines_alone(spile, client: CloudTpu) -> None:
    manage.wait_for_operation(client, client.create_node(A, "tpu-us-central1-a-0", NodeRequest("v3-8", "r")))
    code, text = spile("tpu", "delete", "--zones", A, "--workers-per-zone", "1", "--yes")
    assert code == 1, "what was named is not all gone"
    assert "it is not of fleet default" in text
    spile("tpu", "create", "--zones", A, "--fleet", "mine", "--workers-per-zone", "2")
    code, text = spile("tpu", "delete", "--zones", A, "--fleet", "mine")
    assert code == 2
    assert "Delete 1 machine (tpu-us-central1-a-1)?: expected an answer at a terminal, or --yes" in text
    assert len(names(client)) == 2


def test_a_taken_name_is_refused_and_can_be_adopted(spile, client: CloudTpu) -> None:
    manage.wait_for_operation(client, client.create_node(A, "tpu-us-central1-a-0", NodeRequest("v3-8", "r")))
    code, text = spile("tpu", "create", "--zones", A)
    assert code == 1
    assert (
        "tpu-us-central1-a-0 in us-central1-a is not of fleet default: found fleet none. Take it over with --adopt"
        in text
    )
    code, text = spile("tpu", "create", "--zones", A, "--adopt", "tpu-us-central1-a-0")
    assert code == 0, text
    assert client.node(A, "tpu-us-central1-a-0").labels == {"spile-fleet": "default", "spile-worker": "0"}
    code, text = spile("tpu", "create", "--zones", A, "--fleet", "other", "--adopt", "tpu-us-central1-a-0")
    assert code == 2
    assert "belongs to another fleet: found fleet default" in text
    code, text = spile("tpu", "create", "--zones", A, "--adopt", "nobody")
    assert (code, "no machine nobody in us-central1-a" in text) == (2, True)


def test_a_dry_zone_and_a_full_one_do_not_hold_others_up(spile, fake: FakeCloud, client: CloudTpu) -> None:
    fake.admin("stock", {"zone": A, "available": False})
    fake.admin("quota", {"zone": "europe-west4-a", "limit": 1})
    code, text = spile("tpu", "create", "--zones", f"{A},{B},europe-west4-a", "--workers-per-zone", "3")
    assert code == 1
    assert text.count("no capacity to create") == 3
    assert "it left nothing behind" in text
    assert text.count("tpu-us-central1-b") == text.count(f"in {B}: created") == 3
    assert "europe-west4-a: created" in text
    assert text.count("no quota to create TPU tpu-europe-west4-a-1") == 2, "the third was not even asked for"
    assert len([call for call in fake.api.calls if call[0] == "POST" and "europe" in call[1]]) == 2
    assert len(names(client)) == 4


def test_recreate_preempted(spile, fake: FakeCloud, client: CloudTpu) -> None:
    spile("tpu", "create", "--zones", A, "--workers-per-zone", "2", "--tpu-type", "v5p-8", "--spot")
    before = client.node(A, "tpu-us-central1-a-1")
    fake.admin("preempt", {"zone": A, "name": before.name})
    code, text = spile("tpu", "recreate-preempted", "--zones", A, "--workers-per-zone", "2", "--yes")
    assert code == 0, text
    after = client.node(A, before.name)
    assert after.uid != before.uid
    assert (after.labels, after.request) == (before.labels, before.request), "as it was"
    code, text = spile("tpu", "recreate-preempted", "--zones", A, "--yes")
    assert "no dead machine" in text


@pytest.mark.parametrize("lost", [("s-0",), ("s-0", "s-1")])
@pytest.mark.parametrize("more", [(), ("--best-effort",)])
def test_a_queued_resource_is_recreated_whole(
    spile, fake: FakeCloud, client: CloudTpu, lost: tuple[str, ...], more: tuple[str, ...]
) -> None:
    """One node is gone, and the resource is suspended for ever: all of it is made again, once, as it was."""
    words = ("--zones", A, "--tpu-type", "v5p-8", "--queued", "--node-prefix", "s", "--node-count", "2", *more)
    assert spile("tpu", "create", *words, "--queued-id", "mine")[0] == 0
    wait_for_queued(client, A, "mine")
    for name in lost:
        fake.admin("preempt", {"zone": A, "name": name})
    code, text = spile("tpu", "recreate-preempted", "--zones", A, "--yes")
    assert code == 0, text
    again = wait_for_queued(client, A, "mine")
    assert (again.nodes, again.prefix, again.best_effort) == (("s-0", "s-1"), "s", bool(more))
    assert names(client) == ["s-0", "s-1"]


def test_what_stands_in_the_queue_is_seen(spile, client: CloudTpu, fake: FakeCloud) -> None:
    fake.admin("stock", {"zone": A, "available": False})
    words = ("--zones", A, "--tpu-type", "v5p-8", "--queued", "--node-prefix", "s", "--node-count", "2", "--async")
    code, text = spile("tpu", "create", *words, "--queued-id", "mine")
    assert (code, text) == (0, "v5p-8, on demand\nmine in us-central1-a: requested: 2 nodes s-0 …\n")
    while client.queued(A)[0].state.value != "WAITING_FOR_RESOURCES":
        time.sleep(0.02)
    code, text = spile("tpu", "status", "--zones", A)
    assert code == 0
    assert "0 machines of fleet default: none, 1 in the queue" in text
    assert "mine in us-central1-a: WAITING_FOR_RESOURCES: it passed all checks and waits for capacity" in text
    (row,) = json.loads(spile("tpu", "status", "--zones", A, "--json")[1])
    assert (row["name"], row["state"], row["type"]) == ("mine", "WAITING_FOR_RESOURCES", "v5p-8")
    assert "in the queue" not in spile("tpu", "status", "--zones", A, "--fleet", "other")[1]
    fake.admin("stock", {"zone": A, "available": True})
    while client.queued(A)[0].state.value != "ACTIVE":
        time.sleep(0.02)
    code, text = spile("tpu", "status", "--zones", A)
    assert "2 machines of fleet default: 2 READY\n" in text
    assert "mine" not in text
    code, text = spile("tpu", "delete", "--zones", A, "--queued-id", "mine", "--yes")
    assert (code, names(client), client.queued(A)) == (0, [], [])
    code, text = spile("tpu", "create", "--zones", A, "--queued-id", "mine")
    assert (code, "--queued-id: expected --node-prefix as well" in text) == (2, True)


def test_queued_multislice(spile, client: CloudTpu) -> None:
    words = ("--zones", A, "--tpu-type", "v5p-8", "--queued", "--node-prefix", "s", "--node-count", "2")
    code, text = spile("tpu", "create", *words, "--best-effort")
    assert code == 0, text
    assert "s in us-central1-a: ACTIVE" in text
    assert names(client) == ["s-0", "s-1"]
    code, text = spile("tpu", "delete", "--zones", A, "--node-prefix", "s", "--yes")
    assert (code, names(client), client.queued(A)) == (0, [], [])


def test_deleting_an_adopted_machine_takes_no_others_with_it(spile, client: CloudTpu) -> None:
    """A queued resource is deleted as a whole, so it is kept if it contains a machine of another fleet."""
    manage.wait_for_operation(client, client.create_queued(A, "s", NodeRequest("v5p-8", "r"), count=2, prefix="s"))
    wait_for_queued(client, A, "s")
    code, text = spile("tpu", "create", "--zones", A, "--adopt", "s-0")
    assert code == 0, text
    code, text = spile("tpu", "delete", "--zones", A, "--yes")
    assert code == 1
    assert "queued resource s in us-central1-a is not deleted: expected only machines of fleet default" in text
    assert "found also s-1" in text
    assert names(client) == ["s-0", "s-1"]
    assert spile("tpu", "create", "--zones", A, "--adopt", "s-1")[0] == 0
    code, text = spile("tpu", "delete", "--zones", A, "--yes")
    assert (code, names(client)) == (0, []), text


def test_queued_workers(spile, client: CloudTpu) -> None:
    code, text = spile("tpu", "create", "--zones", A, "--workers-per-zone", "2", "--queued", "--reserved")
    assert code == 0, text
    assert [node.queued for node in client.nodes(A)] == ["tpu-us-central1-a-0", "tpu-us-central1-a-1"]
    assert spile("tpu", "create", "--zones", B, "--queued", "--reservation", "mine")[0] == 0
    assert str(client.queued(B)[0].reservation).endswith(f"/locations/{B}/reservations/mine")
    code, text = spile("tpu", "create", "--zones", B, "--reservation", "mine")
    assert (code, "--reservation: expected --queued as well" in text) == (2, True), text
    code, text = spile("tpu", "delete", "--zones", A, "--yes")
    assert (code, client.queued(A)) == (0, [])


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--zones", "us-central1-x"), "zone us-central1-x has no TPUs: expected one of us-central1-a"),
        (("--zones", A, "--tpu-type", "v9-8"), "--topology: expected a machine such as v3-8"),
        (("--zones", f"{A},{A}"), "--zones: expected each zone once"),
        ((), "no zone. Pass --zones us-central1-a,us-central1-b."),
        (("--zones", A, "--best-effort"), "--best-effort: expected --queued as well"),
        (
            ("--zones", A, "--tpu-type", "tpu7x:2x2x1"),
            "--tpu-type tpu7x:2x2x1: the Cloud TPU API has no tpu7x: expected v2 to v6e. Create it on GKE, and use: "
            "spile k8s job --topology tpu7x-8",
        ),
        (("--zones", A, "--fleet", "Big Fleet"), "--fleet: expected a label"),
        (("--zones", A, "--workers-per-zone", "0"), "--workers-per-zone: expected 1 or more, found 0"),
    ],
)
def test_bad_input_is_one_line(spile, client: CloudTpu, words: tuple[str, ...], line: str) -> None:
    code, text = spile("tpu", "create", *words)
    assert code == 2, text
    assert line in text
    assert text.count("\n") == 1
    assert names(client) == []


def test_a_lost_answer_is_looked_up(spile, fake: FakeCloud, client: CloudTpu) -> None:
    fake.admin("fault", {"method": "POST", "path": "/nodes"})
    code, text = spile("tpu", "create", "--zones", A)
    assert code == 0, text
    assert names(client) == ["tpu-us-central1-a-0"]


def test_no_project(spile, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CLOUDSDK_CORE_PROJECT")
    code, text = spile("tpu", "list")
    assert (code, "no Google Cloud project. Pass --project" in text) == (2, True)


def test_ctrl_c_ends_the_wait_but_not_the_requests(fake: FakeCloud, client: CloudTpu, tmp_path: Path) -> None:
    fake.admin("pace", {"create": 3600})
    home = str(a_home(tmp_path / "home"))
    environment = {**os.environ, **fake.environment(), "CLOUDSDK_CONFIG": home, "HOME": home}
    words = [sys.executable, "-m", "spile.cli.main", "tpu", "create", "--zones", f"{A},{B}"]
    with subprocess.Popen(words, env=environment, stderr=subprocess.PIPE, text=True) as process:
        while len(names(client)) < 2:
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(120) == 130
    assert len(names(client)) == 2


def test_an_operation_that_cannot_be_followed_is_not_forgotten(spile, fake: FakeCloud, client: CloudTpu) -> None:
    fake.admin("pace", {"create": 3600})
    fake.admin("fault", {"method": "GET", "path": "/operations/", "status": 403, "message": "denied", "count": 99})
    _, text = spile("tpu", "create", "--zones", A)
    assert "tpu-us-central1-a-0 in us-central1-a: requested: its state is unknown" in text
    assert "check it with spile tpu status" in text


def test_adopting_a_machine_makes_no_other(spile, client: CloudTpu) -> None:
    manage.wait_for_operation(client, client.create_node(A, "theirs", NodeRequest("v3-8", "r")))
    code, text = spile("tpu", "create", "--zones", A, "--adopt", "theirs")
    assert (code, names(client)) == (0, ["theirs"]), text
    code, text = spile("tpu", "create", "--zones", A, "--adopt", "theirs", "--workers-per-zone", "1")
    assert (code, names(client)) == (0, ["theirs", "tpu-us-central1-a-0"]), "asked for, it is made too"


def test_deleting_a_machine_that_is_not_the_fleets_is_no_success(spile, client: CloudTpu) -> None:
    manage.wait_for_operation(client, client.create_node(A, "tpu-us-central1-a-0", NodeRequest("v3-8", "r")))
    code, text = spile("tpu", "delete", "--zones", A, "--workers-per-zone", "1", "--yes")
    assert (code, "it is not of fleet default" in text) == (1, True), text
    assert names(client) == ["tpu-us-central1-a-0"]


def test_two_ways_to_pay_are_a_mistake(spile, client: CloudTpu) -> None:
    code, text = spile("tpu", "create", "--zones", A, "--spot", "--reserved")
    assert (code, "more than one way to pay for machines: expected one of --spot, --reserved" in text) == (2, True), (
        text
    )
    assert names(client) == []
