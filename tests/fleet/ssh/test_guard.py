"""The guard over plain pipes: no process is left, whichever process dies first."""

from __future__ import annotations

import ast
import inspect
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from fleet.ssh.loopback import end, marked, wait_until
from spile.hosts import guard

STUBBORN = "trap '' TERM; while :; do sleep 0.2; done"


class Guarded:
    """A guard at work and the pipes to it."""

    def __init__(self, silence: float = 30.0) -> None:
        self.mark = f"SPILE_TEST_MARK={uuid.uuid4().hex}"
        name, _, value = self.mark.partition("=")
        self.process = subprocess.Popen(
            [sys.executable, "-uc", inspect.getsource(guard) + f"\nmain({silence})"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, name: value},
            start_new_session=True,
        )

    def say(self, word: bytes) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word + b"\n")
        self.process.stdin.flush()

    def go(self, command: str, folder: str = "/", keep: bool = False) -> None:
        job = {"argv": ["bash", "-c", command], "folder": folder, "env": {"COLOUR": "blue"}, "keep": keep}
        self.say(json.dumps({**job, "grace": 1.0}).encode())

    def read(self) -> tuple[bytes, list[dict[str, object]]]:
        out, err = self.process.stdout.read(), self.process.stderr.read()  # type: ignore[union-attr]
        self.process.wait(120)
        return out, [json.loads(line.removeprefix(guard.MARK)) for line in err.decode().split("\n") if line]

    def line(self) -> bytes:
        return self.process.stdout.readline()  # type: ignore[union-attr]

    def close(self) -> None:
        for pid in marked(self.mark):
            end(pid)
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            try:
                pipe.close()  # type: ignore[union-attr]
            except BrokenPipeError:
                continue


@pytest.fixture
def guarded() -> Iterator[Guarded]:
    one = Guarded()
    yield one
    one.close()


@pytest.mark.parametrize(
    ("command", "code", "output"),
    [
        ("echo $COLOUR; pwd", 0, b"blue\n/\n"),
        ("echo to-errors >&2; exit 3", 3, b"to-errors\n"),
        ("kill -KILL $$", 137, b""),
        ("exit 255", 255, b""),
        ("cat", 0, b""),
        ("head -c 3000000 /dev/zero | tr '\\0' x", 0, b"x" * 3_000_000),
        ("printf no-newline", 0, b"no-newline"),
    ],
)
def test_code_and_output_come_through(guarded: Guarded, command: str, code: int, output: bytes) -> None:
    guarded.go(command)
    out, events = guarded.read()
    assert out == output
    assert guarded.process.returncode == code
    assert [event["event"] for event in events] == ["ready", "ended", "exit"]
    assert (events[-1]["code"], events[-1]["cause"], events[-1]["left"]) == (code, "ended", [])


def test_what_the_command_leaves_is_ended(guarded: Guarded) -> None:
    guarded.go(f"setsid sleep 1000 & ( ( {STUBBORN} ) & ) & nohup sleep 1000 & sleep 0.3; echo done; exit 4")
    out, events = guarded.read()
    assert out == b"done\n"
    assert events[-1]["code"] == 4
    assert marked(guarded.mark) == []


@pytest.mark.parametrize("redirect", ["", ">/dev/null 2>&1"])
def test_what_was_started_to_stay_is_kept(guarded: Guarded, redirect: str) -> None:
    guarded.go(f"echo up; setsid sleep 1000 {redirect} & sleep 0.3", keep=True)
    assert guarded.line() == b"up\n"
    assert wait_until(lambda: guarded.process.poll() is not None)
    assert (guarded.process.returncode, len(marked(guarded.mark))) == (0, 1)


def test_what_a_failed_start_left_is_not_kept(guarded: Guarded) -> None:
    guarded.go("setsid sleep 1000 & sleep 0.3; exit 5", keep=True)
    _, events = guarded.read()
    assert events[-1]["code"] == 5
    assert marked(guarded.mark) == []


def test_stop_asks_first(guarded: Guarded) -> None:
    guarded.go("trap 'echo asked; exit 7' TERM; echo up; while :; do sleep 0.1; done")
    assert guarded.line() == b"up\n"
    guarded.say(b"s")
    out, events = guarded.read()
    assert out.endswith(b"asked\n")
    assert (events[-1]["code"], events[-1]["cause"]) == (7, "stopped")
    assert marked(guarded.mark) == []


def test_stop_kills_containers_that_ignore_the_request(guarded: Guarded) -> None:
    guarded.go(f"trap '' TERM; echo up; {STUBBORN}")  # It ignores SIGTERM before it prints.
    assert guarded.line() == b"up\n"
    guarded.say(b"s")
    _, events = guarded.read()
    assert (events[-1]["code"], events[-1]["cause"]) == (137, "stopped")
    assert marked(guarded.mark) == []


@pytest.mark.parametrize("how", ["input ends", "inner killed", "outer killed", "terminated", "before the job"])
def test_nothing_is_left(guarded: Guarded, how: str) -> None:
    if how != "before the job":
        guarded.go(f'setsid bash -c "{STUBBORN}" & echo up; {STUBBORN}')
        assert guarded.line() == b"up\n"
    outer = guarded.process.pid
    inner = int(Path(f"/proc/{outer}/task/{outer}/children").read_text().split()[0]) if how == "inner killed" else 0
    if how in ("input ends", "before the job"):
        guarded.process.stdin.close()  # type: ignore[union-attr]
    else:
        victim, number = {
            "inner killed": (inner, signal.SIGKILL),
            "outer killed": (outer, signal.SIGKILL),
            "terminated": (outer, signal.SIGTERM),
        }[how]
        os.kill(victim, number)
    assert wait_until(lambda: marked(guarded.mark) == [])
    if how == "inner killed":
        assert guarded.read()[1][-1] == {
            "event": "exit", "code": 137, "cause": "the guard was killed", "left": []
        }  # fmt: skip


def test_silence_ends_it_and_heartbeats_do_not() -> None:
    one = Guarded(silence=4.0)  # a busy machine is not that late with a heartbeat
    try:
        one.go("echo up; sleep 1000")
        for _ in range(20):
            time.sleep(0.25)
            one.say(b".")
        assert one.process.poll() is None
        _, events = one.read()
        assert events[-1]["cause"] == "the link is silent"
        assert marked(one.mark) == []
    finally:
        one.close()


def test_silence_ends_the_command_even_if_its_output_is_not_read() -> None:
    one = Guarded(silence=1.0)
    try:
        one.go("yes")
        assert wait_until(lambda: one.process.poll() is not None)
        assert marked(one.mark) == []
    finally:
        one.close()


def test_a_folder_that_is_not_there(guarded: Guarded) -> None:
    guarded.go("true", folder="/no/such/folder")
    _, events = guarded.read()
    assert events[-1]["event"] == "refused"
    assert "/no/such/folder" in str(events[-1]["reason"])


def test_it_is_python_3_8_and_small() -> None:
    text = inspect.getsource(guard)
    tree = ast.parse(text, feature_version=(3, 8))
    imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    imported |= {str(node.module) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert imported <= sys.stdlib_module_names
    assert len(text) < 100_000  # one word of a command line holds 128 KiB
