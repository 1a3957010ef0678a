"""The commands at the prompt: a single host, and the mistakes and leftovers that must end with one line."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Mapping

import pytest

from pod.launching import Ended, clean_environment, started
from ports import free_port
from spile.cli.flags import log
from spile.cli.main import main


def spile(*words: str, more: Mapping[str, str] | None = None, devices: int = 1) -> Ended:
    with started([[sys.executable, "-m", "spile.cli.main", *words]], [clean_environment(devices, more)]) as group:
        return group.wait(120)[0]


def test_one_host_checks_itself() -> None:
    ended = spile("pod", "check", devices=4, more={"PYTHONUTF8": "1"})
    assert ended.code == 0, ended.err
    assert "One host: nothing between hosts is tested. On every host: spile run --tpu-prefix" in ended.out
    assert "This process sees 4 of 4 devices: cpu" in ended.out
    assert "Forward over 4 devices agrees with one device" in ended.out
    assert ended.out.endswith("This process: all checks passed\n")


def test_a_terminal_without_the_signs(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    log("✓ Passed 'complete' barrier")
    assert raw.getvalue() == b" Passed 'complete' barrier\n"


def test_an_exit_code_counts_even_if_the_line_is_not_read() -> None:
    """The agent of a worker, or a person's ssh, may die first."""
    reader, writer = os.pipe()
    os.close(reader)
    words = [sys.executable, "-m", "spile.cli.main", "pod", "check", "--topology", "v5e-9"]
    try:
        code = subprocess.run(words, env=clean_environment(), stdout=writer, stderr=writer, check=False).returncode
    finally:
        os.close(writer)
    assert code == 2


@pytest.mark.parametrize(
    ("words", "variables", "code", "says"),
    [
        (
            ("--topology", "v5litepod-64"),
            {},
            2,
            "Run it on every host of the slice: spile run --tpu-prefix NAME",
        ),
        (
            (),
            {"CLOUD_TPU_TASK_ID": "3"},
            2,
            "CLOUD_TPU_TASK_ID says that this is worker 3, but the number of workers is unknown",
        ),
        (("--topology", "v5litepod-64"), {}, 2, "16 processes, but the number of this one is unknown"),
        (("--topology", "v5e-9"), {}, 2, "v5e has no such slice"),
        (
            ("--topology", "v5e-64"),
            {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "a,b,c,d"},
            2,
            "the topology's hosts: expected 16 (--topology), found 4",
        ),
        (
            ("--barrier-timeout", "0.5", "--coordinator-address", f"127.0.0.1:{free_port()}"),
            {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "old-0,old-1"},
            1,
            "worker 0 is unreachable at 127.0.0.1",
        ),
        (
            ("--barrier-timeout", "0.5"),
            {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "gone.invalid,here.invalid"},
            1,
            "worker 0 is unreachable at gone.invalid:5555",
        ),
    ],
)
def test_leftovers_and_mistakes_end_with_one_line(
    words: tuple[str, ...],
    variables: dict[str, str],
    code: int,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit) as ended:
        main(["pod", "check", *words])
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line
    assert ended.value.code == code
