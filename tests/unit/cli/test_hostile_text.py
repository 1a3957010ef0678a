"""Names and texts from outside never command the terminal: escape sequences are printed as text."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path

import pytest
from rich.live import Live
from rich.table import Table
from rich.text import Text

from spile.cli.flags import log
from spile.errors import DataError, printable
from spile.objects import open_folder
from spile.store.run import read_run
from spile.view.table import PipeSafeConsole, SafeConsole
from unit.cli.refusals import spile
from unit.models.toy_models import copy_model

EVIL = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e"
RAW = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e]")


def test_control_characters_are_shown_as_text() -> None:
    assert printable(f"a{EVIL}b\tc\nd") == r"a\x1b]0;owned\x07\x1b[2J\x9b31m\u202eb" + "\tc\nd"
    assert printable("\udc80 é 漢 🙂") == r"\udc80 é 漢 🙂"
    assert RAW.search(DataError(f"no {EVIL}", found=EVIL, fix=EVIL).line()) is None


@pytest.mark.parametrize("kind", [SafeConsole, PipeSafeConsole])
def test_a_terminal_gets_only_the_programs_own_sequences(kind: type[SafeConsole]) -> None:
    console = kind(file=io.StringIO(), force_terminal=True, color_system="standard", width=200)
    table = Table(EVIL)
    table.add_row(EVIL, Text(EVIL, style="red"))
    with Live(table, console=console, transient=True):
        console.print(EVIL, Text(EVIL, style="bold"), table)
        console.print(f"{EVIL} [red]", soft_wrap=True)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "[red]" in text
    assert "\x1b[31m" in text, "its own colours are there"
    assert r"\x1b]0;owned" in text
    assert not any(code in text for code in ("\x1b]", "\x07", "\x1b[2J", "\x9b", "\u202e"))


def test_a_line_of_the_log(capsys: pytest.CaptureFixture[str]) -> None:
    log(f"worker {EVIL}")
    assert RAW.search(capsys.readouterr().out) is None


def test_every_command_prints_hostile_names_as_text(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Ids, columns, files, folders and the name of the model; in what is printed and in errors."""
    place = tmp_path / f"here{EVIL}"
    model = copy_model(place / "model")
    data, root = place / "rows.jsonl", place / "out"
    rows = [{"task_id": f"id{EVIL}{number}", "text": f"{EVIL} one two"} for number in range(3)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("extract", "--dataset", data, "--model", model, "--layers", 0, "--max-seq-length", 32)
    assert spile(*words, "--output", root, "--verbose") == 0
    run = read_run(open_folder(str(root)))
    assert run is not None
    assert EVIL in run.model, "the record itself is as it was given"
    for command in (
        ("verify", root),
        ("inspect", root),
        ("monitor", root, "--once"),
        ("plan", "--dataset", data, "--model", model, "--no-compile"),
        ("export", root, "--to", "npy", "--output", place / "npy"),
    ):
        assert spile(*command) == 0, command
    next(root.glob("*/*.safetensors")).write_bytes(b"damaged")
    assert spile("verify", root) == 1
    (place / "bad.jsonl").write_text(json.dumps({EVIL: EVIL}) + "\n")
    for command in (
        ("extract", "--dataset", place / "bad.jsonl", "--output", place / "x", "--model", "embedded"),
        ("extract", "--dataset", place / "none", "--output", place / "x"),
        ("extract", "--model", f"no{EVIL}", "--dataset", data, "--output", place / "x"),
        ("verify", place / "none"),
        (f"no{EVIL}",),
        ("extract", f"--{EVIL}", EVIL),
    ):
        assert spile(*command) in (1, 2), command
    said = capfd.readouterr()
    assert r"\x1b]0;owned" in said.out
    assert r"\x1b]0;owned" in said.err
    for text in (said.out, said.err):
        assert RAW.search(text) is None, text[max(0, RAW.search(text).start() - 80) :][:200]  # type: ignore[union-attr]
