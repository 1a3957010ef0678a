"""The runner over real sshds: exit codes, logs, and no process left after any failure."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest

from fleet.ssh.loopback import Hosts, done, finish, keygen, spile, wait_until
from spile.cli.main import main

STUBBORN = "trap '' TERM INT HUP; setsid sleep 1000 & while :; do sleep 0.2; done"


def results(project: Path) -> tuple[list[dict[str, object]], list[str]]:
    """The table and the logs that came back, in the hosts' order."""
    (folder,) = project.glob("spile-run-*")
    rows = json.loads((folder / "outcome.json").read_text())
    return rows, [(project / row["log"]).read_text() for row in rows]


def up(hosts: Hosts, project: Path) -> bool:
    """Every host has written its first line."""
    logs = list(project.glob("spile-run-*/*.log"))
    return len(logs) == len(hosts.hosts) and all("up" in log.read_text() for log in logs)


def test_every_host_runs_the_directory_with_its_place(hosts: Hosts, project: Path) -> None:
    words = ["--hosts", hosts.named(0, 1), "--hosts", hosts.named(2, 3), *hosts.flags()[2:]]
    slices = "$MEGASCALE_SLICE_ID/$MEGASCALE_NUM_SLICES $MEGASCALE_COORDINATOR_ADDRESS"
    line = f"./tool.sh; cat deep/data.txt; ls -A; echo $TPU_WORKER_ID {slices} $A"
    code, out, err = finish(spile(project, "run", *words, "--env", "A=b c", "--", line))
    assert (code, err) == (0, "")
    rows, logs = results(project)
    assert [row["code"] for row in rows] == [0, 0, 0, 0]
    for number, log in enumerate(logs):
        place = f"{number % 2} {number // 2}/2 127.0.0.1:8080 b c"
        assert log.split("\n") == [
            "tool",
            "data",
            ".gitignore",
            ".spile-copied",
            "deep",
            "main.py",
            "tool.sh",
            place,
            "",
        ]
        assert f"{hosts[number].name} │ {place}\n" in out
    assert hosts.processes() == []


def test_words_keep_their_blanks_and_options(hosts: Hosts, project: Path) -> None:
    code, out, _ = finish(spile(project, "run", *hosts.flags(0), "--", "printf", "%s|", "a b", "--debug", "$HOME"))
    assert code == 0
    assert results(project)[1] == ["a b|--debug|$HOME|"]
    assert "a b|--debug|$HOME|" in out


def test_one_that_fails_ends_all(hosts: Hosts, project: Path, tmp_path: Path) -> None:
    here = tmp_path / "up"
    here.mkdir()
    waits = f"until [ $(ls {here} | wc -l) = 4 ]; do sleep 0.1; done"  # until all are up
    fails = f"if [ $TPU_WORKER_ID = 2 ]; then {waits}; echo sorry >&2; exit 3; fi"
    line = f"echo up; touch {here}/$TPU_WORKER_ID; {fails}; {STUBBORN}"
    code, out, _ = finish(spile(project, "run", *hosts.flags(), "--", line))
    assert code == 3
    rows, logs = results(project)
    assert [row["cause"] for row in rows] == ["stopped", "stopped", "ended", "stopped"]
    assert rows[2]["code"] == 3
    assert logs == ["up\n", "up\n", "up\nsorry\n", "up\n"]
    assert hosts.processes() == []
    assert "stopped" in out


@pytest.mark.slow
def test_a_command_that_is_killed_ends_all(hosts: Hosts, project: Path) -> None:
    runner = spile(project, "run", *hosts.flags(), "--", f"echo up $$; {STUBBORN}")
    assert wait_until(lambda: up(hosts, project))
    (log,) = project.glob(f"spile-run-*/127.0.0.1-{hosts[1].port}.log")
    os.kill(int(log.read_text().split()[1]), signal.SIGKILL)
    assert finish(runner)[0] == 137
    rows, _ = results(project)
    assert (rows[1]["code"], rows[1]["cause"]) == (137, "ended")
    assert hosts.processes() == []


@pytest.mark.slow
def test_a_host_that_dies_ends_all(hosts: Hosts, project: Path) -> None:
    runner = spile(project, "run", *hosts.flags(), "--", f"echo up; {STUBBORN}")
    assert wait_until(lambda: up(hosts, project))
    victims = hosts[3].processes()
    for number in (signal.SIGSTOP, signal.SIGKILL):  # all at once, as a machine goes
        for pid in victims:
            os.kill(pid, number)
    assert finish(runner)[0] == 255
    rows, _ = results(project)
    assert [row["cause"] for row in rows[:3]] == ["stopped"] * 3
    assert rows[3]["cause"] == "the connection was lost"
    assert wait_until(lambda: hosts.processes() == [])


@pytest.mark.parametrize(
    "number", [signal.SIGINT, *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGTERM, signal.SIGHUP))]
)
def test_an_interrupt_ends_all_and_still_brings_back(hosts: Hosts, project: Path, number: int) -> None:
    runner = spile(
        project, "run", *hosts.flags(0, 1), "--", "trap 'echo bye; exit 0' TERM; echo up; while :; do sleep 0.1; done"
    )
    assert wait_until(lambda: len(list(project.glob("spile-run-*/*.log"))) == 2)
    assert wait_until(lambda: all("up" in log.read_text() for log in project.glob("spile-run-*/*.log")))
    os.killpg(runner.pid, number)  # as a terminal does: to all of its foreground processes
    assert finish(runner)[0] == 130
    rows, logs = results(project)
    assert [row["cause"] for row in rows] == ["stopped", "stopped"]
    assert all(log.startswith("up\n") and log.endswith("bye\n") for log in logs)
    assert hosts.processes() == []


@pytest.mark.slow
def test_a_second_interrupt_does_not_wait(hosts: Hosts, project: Path) -> None:
    runner = spile(project, "run", *hosts.flags(0), "--", f"echo up; {STUBBORN}")
    assert wait_until(lambda: any("up" in log.read_text() for log in project.glob("spile-run-*/*.log")))
    runner.send_signal(signal.SIGINT)
    time.sleep(0.3)
    runner.send_signal(signal.SIGINT)
    assert finish(runner)[0] == 130
    rows, _ = results(project)
    assert rows[0]["code"] == 137
    assert hosts.processes() == []


def test_a_runner_that_is_killed_leaves_nothing(hosts: Hosts, project: Path) -> None:
    runner = spile(project, "run", *hosts.flags(), "--", f"echo up; {STUBBORN}")
    assert wait_until(lambda: up(hosts, project))
    assert len(hosts.processes()) > 8
    runner.kill()
    finish(runner)
    assert wait_until(lambda: hosts.processes() == [])


@pytest.mark.slow
def test_the_copy_is_a_mirror_that_keeps_what_the_host_made(hosts: Hosts, project: Path) -> None:
    first, out, _ = finish(
        spile(project, "run", *hosts.flags(0), "--quiet", "--", "mkdir .venv; echo made > .venv/made; echo x > main.py")
    )
    assert first == 0
    assert "copied 4 files" in out
    (project / "deep" / "data.txt").unlink()
    (project / "new.txt").write_text("new\n")
    second, out, _ = finish(
        spile(project, "run", *hosts.flags(0), "--logs", "back", "--", "find . -type f | sort; cat main.py")
    )
    assert second == 0
    (log,) = (project / "back").glob("*.log")
    assert log.read_text().split() == [
        "./.gitignore", "./.spile-copied", "./.venv/made", "./main.py", "./new.txt", "./tool.sh",
        "print('hello')",
    ]  # fmt: skip
    third, out, _ = finish(spile(project, "run", *hosts.flags(0), "--no-copy", "--quiet", "--", "test -e new.txt"))
    assert third == 0
    assert "copied" not in out


def bad(project: Path, *words: str) -> tuple[int, str]:
    """The code and the one line."""
    code, _, err = done(project, *words)
    assert err.count("\n") == 1, err
    assert "Traceback" not in err
    assert list(project.glob("spile-run-*")) == []
    return code, err


def test_bad_input_is_one_line(hosts: Hosts, project: Path, tmp_path: Path) -> None:
    flags = hosts.flags(0)
    login = flags[2:]
    other = tmp_path / "other"
    keygen(other)
    tail = ["--", "true"]
    code, err = bad(project, "run", "--hosts", "no-such-host.invalid", *login, *tail)
    assert code == 2
    assert err.startswith("spile: no-such-host.invalid: no such host: found ssh: Could not resolve hostname")
    code, err = bad(project, "run", *[str(other) if word == str(hosts.key) else word for word in flags], *tail)
    assert (code, "refused the login" in err, "Check --user and --ssh-key" in err) == (2, True, True)
    code, err = bad(project, "run", *["none" if word == str(hosts.key) else word for word in flags], *tail)
    assert (code, "no such ssh key" in err) == (2, True)
    code, err = bad(project, "run", "--hosts", f"127.0.0.1:1,{hosts.named(0)}", *login, *tail)
    assert (code, "127.0.0.1:1: nothing listens there" in err) == (1, True)
    code, err = bad(project, "run", *flags, "--ssh-option", "Nonsense=1", *tail)
    assert (code, "ssh refuses an option" in err) == (2, True)


BAD = {
    ("--hosts", "a", "--"): "no command: expected one, after -- or with --command",
    ("--hosts", "a", "--command", "x", "--", "y"): "two commands: expected one, after -- or with --command",
    ("--", "true"): "no hosts: expected either --tpu-prefix or --hosts",
    ("--hosts", "a", "--tpu-prefix", "b", "--", "x"): "hosts named twice: expected either --tpu-prefix or --hosts",
    ("--hosts", "a,a", "--", "x"): "a host is named twice: expected each host once, found a",
    ("--hosts=-oA=x", "--", "x"): "--hosts contains an invalid host: expected user@address:port, found '-oA=x'",
    ("--hosts", "a:99999", "--", "x"): "--hosts contains an invalid port: expected 1 to 65535, found 99999",
    ("--hosts", "a", "--env", "1", "--", "x"): "--env: expected NAME=value, found '1'",
    ("--hosts", "a", "--logs", ".", "--", "x"): "--logs names an existing folder: expected a new folder, found .",
}


@pytest.mark.parametrize("words", BAD)
def test_bad_flags_are_one_line(
    words: tuple[str, ...], project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(project)
    with pytest.raises(SystemExit) as ended:
        main(["run", *words])
    assert (ended.value.code, capsys.readouterr().err) == (2, f"spile: {BAD[words]}\n")
    assert list(project.glob("spile-run-*")) == []


def test_a_changed_host_key_is_one_line(hosts: Hosts, project: Path) -> None:
    public = (hosts[1].home / "host_key.pub").read_text()
    (hosts.folder / "known_hosts").write_text(f"[127.0.0.1]:{hosts[0].port} {public}")
    code, err = bad(project, "run", *hosts.flags(0), "--", "true")
    assert (code, "the host's key is not the one known" in err, "ssh-keygen -R" in err) == (2, True, True)


def test_a_host_without_python_is_one_line(empty_hosts: Hosts, project: Path) -> None:
    empty_hosts.start(0, config="SetEnv PATH=/nowhere")
    code, err = bad(project, "run", *empty_hosts.flags(0), "--", "true")
    assert (code, "neither rsync nor tar on the host" in err, "Install rsync" in err) == (2, True, True)
    code, err = bad(project, "run", *empty_hosts.flags(0), "--no-copy", "--", "true")
    assert (code, "no python3 on the host" in err) == (2, True)
