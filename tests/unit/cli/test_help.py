"""The help of the commands, and completion in a shell."""

from __future__ import annotations

import re
import subprocess
from dataclasses import fields
from pathlib import Path

import pytest

from spile.cli import program
from spile.cli.aliases import translate
from spile.cli.flags import ExtractFlags, InferFlags, RunFlags, given_flags
from spile.spec.run import CommandName, spec_fields
from unit.cli.refusals import spile

COMMANDS: tuple[CommandName, ...] = ("extract", "infer")
FLAGS: dict[str, type[RunFlags]] = {"extract": ExtractFlags, "infer": InferFlags}
each_command = pytest.mark.parametrize("command", COMMANDS)


@pytest.fixture(autouse=True)
def _width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


def shown(capfd: pytest.CaptureFixture[str], *words: str) -> str:
    capfd.readouterr()
    assert spile(*words) == 0
    return capfd.readouterr().out


def listed(text: str) -> list[str]:
    """Return the first name of each flag in the panels of a help."""
    return re.findall(r"^│ (--[a-z0-9-]+)", text, re.MULTILINE)


@each_command
def test_help_lists_the_ten_common_flags(command: CommandName, capfd: pytest.CaptureFixture[str]) -> None:
    text = shown(capfd, command, "--help")
    common = [each.name for each in spec_fields() if command in each.option.common]
    assert len(common) == 10
    assert listed(text) == [f"--{name.replace('_', '-')}" for name in common]
    assert f"spile {command} --help-all lists every flag." in text
    assert "env var" not in text


@each_command
def test_help_all_lists_every_flag_once(command: CommandName, capfd: pytest.CaptureFixture[str]) -> None:
    text = shown(capfd, command, "--help-all")
    found = listed(text)
    assert len(found) == len(set(found))
    named = {each.name for each in fields(FLAGS[command])} - {"guide_script"}
    assert set(found) >= {f"--{name.replace('_', '-')}" for name in named}
    assert "--guide-script" not in found, "the name of a script sets it"
    assert "--coordinator-address" in found
    assert program.COMMON_FLAGS not in text
    assert "SPILE_BATCH_SIZE" in text


@each_command
def test_help_shows_three_examples_that_are_right(command: CommandName, capfd: pytest.CaptureFixture[str]) -> None:
    text = shown(capfd, command, "--help")
    lines = [line.strip() for line in text.splitlines() if line.startswith(f"  spile {command}")]
    assert lines == [line for _, line in program.EXAMPLES[command]]
    assert len(lines) == 3
    for line in lines:
        _, *words = line.split()
        _, bound, _ = program.build_app(command=command).parse_args(translate(words, {}), exit_on_error=False)
        flags = bound.arguments.get("flags") or FLAGS[command]()
        assert (flags.spec().generation is not None) == (command == "infer")
        assert len(given_flags(flags)) == sum(word.startswith("--") for word in words)


def test_other_commands_have_one_help(capfd: pytest.CaptureFixture[str]) -> None:
    text = shown(capfd, "plan", "--help")
    assert "--batch-size" in listed(text)
    assert program.COMMON_FLAGS not in text
    assert "SPILE_BATCH_SIZE" in text
    assert shown(capfd, "plan", "--help-all") == text


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("ZSH", "ZSH_CUSTOM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.slow
def test_bash_completes_commands_flags_and_values(home: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert "completions/spile. A new shell completes" in shown(capfd, "--install-completion", "--shell", "bash")

    def completed(*words: str) -> list[str]:
        script = '. "$HOME/.bashrc"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _spile; echo "${COMPREPLY[@]}"'
        ended = subprocess.run(
            ["bash", "--norc", "-c", script, "bash", *words], capture_output=True, text=True, timeout=60, check=True
        )
        assert ended.stderr == ""
        return ended.stdout.split()

    assert completed("spile", "ext") == ["extract"]
    assert completed("spile", "extract", "--max-b") == ["--max-bytes"]
    assert completed("spile", "fleet", "st") == ["status", "stop"]
    assert completed("spile", "extract", "--store-dtype", "flo") == ["float32", "float16", "float8_e4m3"]


def test_a_shell_that_is_not_known_is_one_line(
    home: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("BASH_VERSION", "ZSH_VERSION", "FISH_VERSION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("SHELL", "/bin/other")
    monkeypatch.setenv("PATH", str(home))  # without ps, which would name the shell that runs the tests
    assert spile("--install-completion") == 2
    assert capfd.readouterr().err == (
        "spile: --install-completion: expected --shell bash, zsh or fish, found no known shell\n"
    )
    assert list(home.iterdir()) == []
