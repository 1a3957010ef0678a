"""The command lines of the old guides after ``spile``: each keeps its meaning, or the error names the replacement."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from docs.old_guides import INSTEAD, LINES, OldLine
from docs.pages import ROOT
from spile.cli.aliases import OTHER_PROGRAMS as OTHERS
from spile.cli.aliases import SCRIPTS, translate
from spile.cli.main import main
from spile.cli.program import COMMANDS, build_app
from spile.errors import SpecError
from spile.spec.run import RunSpec

NAMES = [f"{old.guide} {old.line[:70]}" for old in LINES]


@pytest.fixture(autouse=True)
def _streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A working directory as the guides have it, on one machine."""
    from spile.run.pod.identity import Identity

    monkeypatch.chdir(tmp_path)
    (tmp_path / "data" / "streams").mkdir(parents=True)
    monkeypatch.setattr("spile.cli.flags.PodFlags.identity", lambda *_: Identity(0, 1))


def reached(old: OldLine, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What the run is given: for extract and infer the spec itself, at the door of the runtime."""
    if old.command not in ("extract", "infer"):
        words = translate(shlex.split(old.line), old.environment)
        function, bound, _ = build_app().parse_args(words, exit_on_error=False, print_error=False)
        path = next(command.function for command in COMMANDS if command.name == old.command)
        assert f"{function.__module__}:{function.__name__}" == f"spile.cli.{path}"
        return {name: _value(bound.arguments, name) for name in old.means}
    asked: list[RunSpec] = []

    def stop(spec: RunSpec, **_: object) -> None:
        asked.append(spec)
        raise SpecError("stopped here")

    monkeypatch.setattr("spile.run.worker.run_stream", stop)
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
        assert "no model was given" in capsys.readouterr().out, "a default is said aloud"


@pytest.mark.parametrize("line", INSTEAD)
def test_what_is_another_programs_is_one_line_that_says_what_to_type_instead(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(line))
    message = capsys.readouterr().err
    assert ended.value.code == 2
    assert message.count("\n") == 1
    assert INSTEAD[line] in message


def table(title: str) -> list[list[str]]:
    """The rows below a heading of the guides' own page, cell by cell."""
    text = (ROOT / "docs" / "guides" / "README.md").read_text(encoding="utf-8")
    part = text.partition(f"### {title}\n")[2].partition("\n### ")[0]
    return [re.split(r"(?<!\\) \| ", row.strip("| ")) for row in part.splitlines() if row.startswith("| `")]


def script_of(line: str) -> str:
    """The script that a line calls."""
    return next(Path(word).name for word in shlex.split(line) if word not in ("python", "python3", "bash", "sudo"))


@pytest.mark.parametrize("old", LINES, ids=NAMES)
def test_the_guides_table_has_every_line_next_to_our_command(old: OldLine) -> None:
    named = [row[1] for row in table("Commands") if script_of(old.line) in row[0]]
    assert any(f"spile {old.command}" in cell for cell in named), (script_of(old.line), named)


@pytest.mark.parametrize("line", INSTEAD)
def test_the_guides_table_has_what_to_type_instead_of_other_programs(line: str) -> None:
    program = script_of(line)
    program = "curl" if program.isdecimal() else program
    verbs = {"docker", "gcloud"} & {program}
    words = [word for word in shlex.split(line)[1:] if word.isalpha() and word not in ("compute", "tpus", "alpha")]
    rows = [row for row in table("Commands") if re.search(rf"`[^`]*\b{re.escape(program)}\b", row[0])]
    assert rows, program
    if verbs:
        assert any(word in row[0] for row in rows for word in (*words, "scp", "ssh", "queued-resources")), words


def test_the_guides_table_has_no_script_that_is_not_followed() -> None:
    named = {Path(word).name for row in table("Commands") for word in re.findall(r"[\w./-]+\.(?:sh|py)\b", row[0])}
    others = {line.split()[0] for line in OTHERS}
    assert named <= {*SCRIPTS, *others}, named - {*SCRIPTS, *others}


def test_the_guides_table_has_every_flag_that_a_line_uses() -> None:
    listed = " ".join(row[0] for row in table("Flags"))
    used = {word.partition("=")[0] for old in LINES for word in shlex.split(old.line) if word.startswith("--")}
    known = {flag for flag in used if re.search(rf"{re.escape(flag)}\b", listed)}
    assert used - known == {"--model", "--dataset", "--no_checkpointing"} - known, used - known


def test_the_guides_conversion_is_imported_as_there(tmp_path: Path) -> None:
    from convert_hf_to_arc_format import convert_hf_dataset_to_arc_format

    rows = [{"examples": [[[[number]], [[1]]], [[[2]], [[number]]]]} for number in range(9)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    done = convert_hf_dataset_to_arc_format(
        dataset_name=str(tmp_path / "rows.jsonl"), column_name="examples",
        output_filename="data/custom_stream_1.jsonl", start_index=5, end_index=8,
    )  # fmt: skip
    tasks = [json.loads(line) for line in (tmp_path / "data" / "custom_stream_1.jsonl").read_text().splitlines()]
    assert (done, [task["train"][0]["input"] for task in tasks]) == (3, [[[5]], [[6]], [[7]]])


def test_the_fleet_guide_shows_the_columns_of_the_monitor() -> None:
    from spile.view.fleet import _COLUMNS

    text = (ROOT / "docs" / "guides" / "fleet.md").read_text(encoding="utf-8")
    titles = [column.title for column in _COLUMNS]
    assert titles in [line.split() for line in text.splitlines() if line.startswith("NAME ")]
    assert set(re.findall(r"the column ([A-Z/]+)", text)) <= set(titles)


def test_every_script_of_the_guides_is_followed() -> None:
    """The list and the alias table are of the same scripts."""
    used = {Path(word).name for old in LINES for word in shlex.split(old.line)[:2]}
    assert set(SCRIPTS) - used == {"convert_hf_to_arc_format.py"}, "which the guide calls from Python"
