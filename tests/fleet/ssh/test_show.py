"""What comes from the hosts, on a terminal and in files."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from spile.hosts.hosts import parse_hosts
from spile.hosts.run import HostOutcome
from spile.view.hosts import Logs, print_outcomes
from spile.view.table import SafeConsole

ONE, TWO = parse_hosts(["one,second"])


def console(terminal: bool) -> SafeConsole:
    system = "standard" if terminal else None
    return SafeConsole(file=io.StringIO(), force_terminal=terminal, color_system=system, width=200)


def shown(one: Console) -> str:
    return one.file.getvalue()  # type: ignore[attr-defined, no-any-return]


def test_lines_with_their_hosts_and_bytes_in_their_files(tmp_path: Path) -> None:
    out = console(terminal=False)
    with Logs([ONE, TWO], tmp_path / "logs", out) as logs:
        for host, data in ((ONE, b"a\nb"), (TWO, b"10%\r50%\r100%\r\n"), (ONE, b"c [bold]\n"), (TWO, b"\xff no end")):
            logs.write(host, data)
    assert shown(out) == "one    │ a\nsecond │ 100%\none    │ bc [bold]\nsecond │ \ufffd no end\n"
    assert (tmp_path / "logs" / "one.log").read_bytes() == b"a\nbc [bold]\n"
    assert (tmp_path / "logs" / "second.log").read_bytes() == b"10%\r50%\r100%\r\n\xff no end"


def test_colours_on_a_terminal_and_no_foreign_cursor(tmp_path: Path) -> None:
    out = console(terminal=True)
    with Logs([ONE, TWO], None, out) as logs:
        logs.write(ONE, b"plain\n")
        logs.write(TWO, b"\x1b[31mred\x1b[0m \x1b[2Jclear \x1b]0;title\x07x\n")
    text = shown(out)
    assert "\x1b[36mone    │ \x1b[0mplain\n" in text
    assert "\x1b[32msecond │ \x1b[0m\x1b[31mred\x1b[0m clear" in text
    assert not any(code in text for code in ("\x1b[2J", "\x1b]", "\x07"))


def test_characters_that_hide_text_or_command_the_terminal_are_escaped() -> None:
    out = console(terminal=True)
    with Logs([ONE], None, out) as logs:
        logs.write(ONE, "rm \u202egnp.exe\u2066 \x9b2J \x1bc \x1b[31mred\x1b[0m\n".encode())
    assert shown(out) == "\x1b[36mone │ \x1b[0mrm \\u202egnp.exe\\u2066 \\x9b2J \\x1bc \x1b[31mred\x1b[0m\n"


def test_nothing_is_made_for_hosts_never_reached(tmp_path: Path) -> None:
    with Logs([ONE], tmp_path / "logs", None):
        pass
    assert not (tmp_path / "logs").exists()


def test_the_table(tmp_path: Path) -> None:
    out = console(terminal=False)
    with Logs([ONE, TWO], tmp_path / "logs", None) as logs:
        logs.open()
    print_outcomes([HostOutcome(ONE, 3, "ended", 1.25), HostOutcome(TWO, 143, "stopped", 2.0, (7, 8))], logs, out)
    lines = [line.split() for line in shown(out).splitlines() if line.strip()]
    assert lines[0] == ["host", "code", "seconds", "log"]
    assert lines[1] == ["one", "3", "1.2", str(tmp_path / "logs" / "one.log")]
    assert lines[2][:3] == ["second", "143", "2.0"]
    assert lines[2][4:] == ["stopped;", "still", "running:", "7,", "8"]
    rows = json.loads((tmp_path / "logs" / "outcome.json").read_text())
    assert [(row["host"], row["code"], row["left"]) for row in rows] == [("one", 3, []), ("second", 143, [7, 8])]


@pytest.mark.parametrize("terminal", [True, False])
def test_codes_and_host_numbers_are_whole_at_80_columns_and_in_a_pipe(tmp_path: Path, terminal: bool) -> None:
    hosts = [
        replace(ONE, node="a-slice-with-a-rather-long-name-in-europe-west4-a", worker=number) for number in (0, 11)
    ]
    out = Console(file=io.StringIO(), width=80, force_terminal=terminal, color_system=None)
    with Logs(hosts, tmp_path / "a-folder-for-logs", None) as logs:
        logs.open()
    print_outcomes([HostOutcome(host, 137, "killed by the kernel for its memory", 3.0) for host in hosts], logs, out)
    text = out.file.getvalue()  # type: ignore[attr-defined]
    for host in hosts:
        assert any(host.label in line and " 137 " in line for line in text.splitlines()), text
