"""``spile docker`` on real sshds with a stand-in runtime: the failure of one host ends all, and no process is left."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from fleet.ssh.loopback import Hosts, finish, spile, wait_until
from fleet.ssh.test_ssh_run import results, up
from spile.cli.main import main

STAND_IN = Path(__file__).with_name("stand_in.py")
RUNTIME = "stand-in"
COMMITS = "trap 'echo committed; exit 0' TERM; echo up; while :; do sleep 0.1; done"


@pytest.fixture
def pod(hosts: Hosts) -> Hosts:
    """Four hosts with a runtime on their path, as /usr/bin/docker would be."""
    for host in hosts.hosts:
        (host.home / "bin").mkdir()
        shutil.copy(STAND_IN, host.home / "bin" / RUNTIME)
        (host.home / "bin" / RUNTIME).chmod(0o755)
        (host.home / ".bash_profile").write_text('export PATH="$HOME/bin:$PATH"\n')
    return hosts


def containers(pod: Hosts) -> list[str]:
    return [path.name for host in pod.hosts for path in (host.home / "containers").glob("[!.]*")]


def start(pod: Hosts, project: Path, command: str, *flags: str):  # type: ignore[no-untyped-def]
    words = ["docker", "pod", *pod.flags(), "--runtime", RUNTIME, "--image", "spile:test", "--grace", "5", *flags]
    return spile(project, *words, "--", "bash", "-c", command)


def test_every_host_runs_one_with_its_place(pod: Hosts, project: Path, tmp_path: Path) -> None:
    line = "echo up $TPU_WORKER_ID of $TPU_WORKER_HOSTNAMES $A; exit 0"
    code, out, err = finish(start(pod, project, line, "--env", "A=b c", "--mount", f"{tmp_path}/data:/data"))
    assert (code, err) == (0, ""), out
    rows, logs = results(project)
    assert [row["code"] for row in rows] == [0, 0, 0, 0]
    assert logs == [f"up {number} of 127.0.0.1,127.0.0.1,127.0.0.1,127.0.0.1 b c\n" for number in range(4)]
    text = json.loads((pod[0].home / "containers" / ".spile.json").read_text())
    assert text["options"]["--privileged"] == [""]
    assert text["options"]["--network"] == ["host"]
    assert text["options"]["--volume"] == [f"{tmp_path}/data:/data"]
    assert text["options"]["--rm"] == [""]
    assert containers(pod) == []
    assert pod.processes() == []


@pytest.mark.slow
def test_one_that_fails_stops_all_after_a_chance_to_commit(pod: Hosts, project: Path, tmp_path: Path) -> None:
    here = tmp_path / "up"
    here.mkdir()
    waits = f"until [ $(ls {here} | wc -l) = 3 ]; do sleep 0.1; done"  # until the others are up
    commits = COMMITS.replace("echo up;", f"echo up; touch {here}/$TPU_WORKER_ID;")
    line = f"if [ $TPU_WORKER_ID = 2 ]; then {waits}; echo sorry; exit 3; fi; {commits}"
    code, _, _ = finish(start(pod, project, line))
    assert code == 3
    rows, logs = results(project)
    assert [row["cause"] for row in rows] == ["stopped", "stopped", "ended", "stopped"]
    assert rows[2]["code"] == 3
    assert logs[2] == "sorry\n"
    assert all(log.startswith("up\n") and log.endswith("committed\n") for log in logs if log != logs[2])
    assert containers(pod) == []
    assert pod.processes() == []


def test_ctrl_c_stops_all(pod: Hosts, project: Path) -> None:
    run = start(pod, project, COMMITS)
    assert wait_until(lambda: up(pod, project))
    os.killpg(run.pid, signal.SIGINT)
    assert finish(run)[0] == 130
    assert all("committed" in log for log in results(project)[1])
    assert containers(pod) == []
    assert pod.processes() == []


@pytest.mark.slow
def test_a_runner_that_is_killed_leaves_no_container(pod: Hosts, project: Path) -> None:
    run = start(pod, project, COMMITS)
    assert wait_until(lambda: up(pod, project))
    run.kill()
    finish(run)
    assert wait_until(lambda: pod.processes() == [] and containers(pod) == [])


@pytest.mark.slow
def test_stop_from_elsewhere(pod: Hosts, project: Path) -> None:
    run = start(pod, project, COMMITS)
    assert wait_until(lambda: up(pod, project))
    code, out, _ = finish(spile(project, "docker", "stop", *pod.flags(), "--runtime", RUNTIME, "--grace", "5"))
    assert code == 0
    assert out.count("stopped spile") == 4
    finish(run)
    assert containers(pod) == []
    assert pod.processes() == []


def test_missing_parts_of_hosts_are_reported_before_anything_starts(pod: Hosts, project: Path) -> None:
    (pod[1].home / ".bash_profile").unlink()
    code, _, err = finish(start(pod, project, "echo never"))
    assert code == 2
    assert err.startswith("spile: 1 of 4 hosts cannot run the container: found ")
    assert f"{pod[1].name}: no {RUNTIME}" in err
    words = ["docker", "pod", *pod.flags(0), "--runtime", RUNTIME, "--image", "other:1", "--", "true"]
    code, _, err = finish(spile(project, *words))
    assert (code, f"{pod[0].name}: no image other:1" in err) == (2, True)
    assert list(project.glob("spile-run-*")) == []


def test_print_shows_what_would_be_run(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def shown(*words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["docker", *words])
        assert ended.value.code == 0
        return capsys.readouterr().out

    out = shown(
        "run", "--print", "--target", "cuda", "--image", "i", "--mount", f"{tmp_path}:/data", "--", "spile", "plan"
    )
    user = f"{os.getuid()}:{os.getgid()}"
    assert out.startswith(
        f"docker run --rm --init --name spile --label spile=1 --gpus all --user {user} --volume {tmp_path}:/data"
    )
    assert out.rstrip().endswith(" i spile plan")
    assert "--device nvidia.com/gpu=all" in shown(
        "run", "--print", "--target", "cuda", "--runtime", "podman", "--image", "i"
    )
    assert shown("build", "--print", "--target", "tpu", "--image", "i") == "docker build --target tpu --tag i .\n"
    assert "--privileged --network=host" in shown(
        "pod", "--print", "--target", "tpu", "--image", "i", "--", "spile", "extract"
    )
    assert "docker stop -t 60" in shown("stop", "--print")


def test_a_grace_that_is_none_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["docker", "run", "--print", "--grace", "-1"])
    line = "spile: --grace: expected from 0 to 3,600, found -1\n"
    assert (ended.value.code, capsys.readouterr().err) == (2, line)


def test_no_runtime_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    for words in (["run"], ["stop"]):
        with pytest.raises(SystemExit) as ended:
            main(["docker", *words])
        assert ended.value.code == 2
        assert capsys.readouterr().err == (
            "spile: no docker here: expected docker, podman or nerdctl. Install one, or name it with --runtime.\n"
        )
    with pytest.raises(SystemExit) as ended:
        main(["docker", "build", "--context", str(tmp_path)])
    assert (
        f"no Dockerfile in {tmp_path}: expected a checkout of spile. Name one with --context."
        in capsys.readouterr().err
    )


DAEMON = """#!/bin/bash
case "$1" in
  ps) if [ -e {folder}/down ]; then echo "Cannot connect to the Docker daemon" >&2; exit 1; fi; cat {folder}/names ;;
  stop) [ "${{@: -1}}" = stuck ] && exit 1; exit 0 ;;
esac
"""


@pytest.mark.parametrize(
    ("names", "code", "output"),
    [
        ("spile\nother\n", 0, "stopped spile\nstopped other\n"),
        ("", 1, "no container spile here"),
        ("stuck\n", 1, ""),
        (None, 1, "docker does not answer: is its daemon running?"),
    ],
)
def test_stop_says_whether_it_stopped_anything(
    names: str | None,
    code: int,
    output: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "docker").write_text(DAEMON.format(folder=tmp_path))
    (tmp_path / "docker").chmod(0o755)
    if names is None:
        (tmp_path / "down").touch()
    else:
        (tmp_path / "names").write_text(names)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with pytest.raises(SystemExit) as ended:
        main(["docker", "stop"])
    text = capfd.readouterr()
    assert (ended.value.code, output in text.out + text.err) == (code, True), text


def test_build_run_and_pod_mean_the_same_image(capsys: pytest.CaptureFixture[str]) -> None:
    def image(*words: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["docker", *words])
        assert ended.value.code == 0
        (name,) = set(re.findall(r"spile:\S+", capsys.readouterr().out))
        return name

    for flags in ([], ["--target", "tpu"]):
        build, pod = image("build", "--print", *flags), image("pod", "--print", *flags, "--", "true")
        assert build == pod == image("run", "--print", *flags, "--", "true")
    assert build.endswith("-tpu")
