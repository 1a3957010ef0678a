"""The old guides' command lines, as written there, after ``spile``: each means what it meant, or says what to type."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from docs.old_guides import INSTEAD, LINES, OldLine
from docs.pages import ROOT
from spile.cli.main import build, main
from spile.cli.shell.aliases import INSTEAD as OTHERS
from spile.cli.shell.aliases import SCRIPTS, modern
from spile.cli.shell.commands import COMMANDS
from spile.errors import SpecError
from spile.spec.run import ExtractSpec

NAMES = [f"{old.guide} {old.line[:70]}" for old in LINES]


@pytest.fixture(autouse=True)
def _streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory as the guides have it, on one machine."""
    from spile.runtime.pod.identity import Identity

    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "streams").mkdir(parents=True)
    monkeypatch.setattr("spile.cli.pod.PodFlags.identity", lambda *_: Identity(0, 1))


def reached(old: OldLine, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the run is given: for extract and infer the spec itself, at the door of the runtime."""
    if old.command not in ("extract", "infer"):
        words = modern(shlex.split(old.line), old.environment)
        function, bound, _ = build().parse_args(words, exit_on_error=False, print_error=False)
        path = next(command.function for command in COMMANDS if command.name == old.command)
        assert f"{function.__module__}:{function.__name__}" == path
        return {name: _value(bound.arguments, name) for name in old.means}
    asked: list[ExtractSpec] = []

    def stop(spec: ExtractSpec, **_: object) -> None:
        asked.append(spec)
        raise SpecError("stopped here")

    monkeypatch.setattr(f"spile.runtime.{old.command}.{old.command}", stop)
    with pytest.raises(SystemExit):
        main(shlex.split(old.line))
    (spec,) = asked
    known = {"location": spec.data.location, "worker": spec.data.worker_id, "output": spec.output, "model": spec.model}
    return {name: known[name] if name in known else getattr(spec, name) for name in old.means}


def _value(arguments: dict[str, Any], name: str) -> Any:
    first, *rest = name.split(".")
    value = arguments[first]
    for part in rest:
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("old", LINES, ids=NAMES)
def test_a_line_of_an_old_guide_has_the_right_model_data_and_worker(
    old: OldLine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in old.environment.items():
        monkeypatch.setenv(name, value)
    assert reached(old, monkeypatch) == old.means
    if old.command == "extract" and "odel" not in old.line:
        assert "no model was named" in capsys.readouterr().out, "a default is said aloud"


@pytest.mark.parametrize("line", INSTEAD)
def test_what_is_another_programs_is_one_line_that_says_what_to_type_instead(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(line))
    said = capsys.readouterr().err
    assert ended.value.code == 2
    assert said.count("\n") == 1
    assert INSTEAD[line] in said


def test_the_guides_table_has_every_script_beside_our_command() -> None:
    text = (ROOT / "docs" / "guides" / "README.md").read_text(encoding="utf-8")
    rows = [row.split(" | ") for row in text.splitlines() if row.startswith("| ") and " | " in row]
    for script, words in SCRIPTS.items():
        name = script.removesuffix(".py") if script.startswith("convert_hf") else script
        named = [row[1] for row in rows if name.replace("_to_arc_format", "_") in row[0] or script in row[0]]
        assert any(f"spile {words[0]}" in cell for cell in named), script
    for program in {words[0] for words, _ in OTHERS}:
        assert any(re.search(rf"`[^`]*{re.escape(program.removesuffix('.sh'))}", row[0]) for row in rows), program


def test_every_script_of_the_guides_is_followed() -> None:
    """The list and the alias table are of the same scripts."""
    used = {Path(word).name for old in LINES for word in shlex.split(old.line)[:2]}
    assert set(SCRIPTS) - used == {"convert_hf_to_arc_format.py"}, "which the guide calls from Python"
