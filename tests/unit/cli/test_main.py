"""The program itself: one line for a mistake, the right exit code, flags from files and variables."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from spile import errors
from spile.cli import main as program
from spile.cli.flags import ExtractFlags
from spile.cli.program import COMMANDS, SECTIONS
from spile.errors import SpecError, UserError
from spile.version import __version__


@pytest.fixture
def spile(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Run ``spile`` in this process; return its exit code, output and errors."""

    def run(*words: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as exit_:
            program.main(words)
        printed = capfd.readouterr()
        assert isinstance(exit_.value.code, int)
        return exit_.value.code, printed.out, printed.err

    return run


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[ExtractFlags]:
    """What ``spile extract`` was asked for, without a model being run."""
    from spile.cli import flags as extract

    seen: list[ExtractFlags] = []

    def spec(self: ExtractFlags) -> Any:
        seen.append(self)
        raise SpecError("stopped here")

    monkeypatch.setattr(extract.ExtractFlags, "spec", spec)
    return seen


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["extrct"], "spile: unknown command extrct. Did you mean extract? See spile --help"),
        (
            ["extract", "--modle", "x"],
            "spile: Unknown option: --modle. Did you mean --model? See spile extract --help",
        ),
        (["extract", "5"], "spile: extract: expected flags only, found 5. Did you mean --worker-id 5?"),
        (
            ["extract", "--force"],
            "spile: unknown option --force. Leave it out: extract always resumes",
        ),
        (
            ["extract", "--max_output_tokens", "9"],
            "spile: unknown option --max-new-tokens. Generate answers with: spile infer --max-new-tokens …",
        ),
        (["run", "--zonee", "x", "--", "ls"], "spile: no flag --zonee. Put the flags of the command itself after --"),
        (["extract", "x"], "spile: extract: expected flags only, found x. See spile extract --help."),
        (
            ["extract", "--batch-size", "many"],
            'spile: Invalid value for --batch-size: unable to convert "many" into int. See',
        ),
        (
            ["extract", "--batch-size"],
            'spile: Command "extract" parameter --batch-size requires an argument. See spile extract',
        ),
        (
            ["verify", "--older-than", "soon"],
            'spile: Invalid value for --older-than: unable to convert "soon" into float. See',
        ),
        (["extract", "--batch-size", "-3"], "spile: --batch-size: expected from 1 to 1,048,576, found -3"),
        (
            ["extract", "--prompt", "poem"],
            'spile: Invalid value "poem" for --prompt. Choose from: "auto", "arc", "chat", "text", "tokens". See spile',
        ),
        (["extract", "--mesh-shape", "big"], "spile: --mesh-shape"),
        (["extract", "--layers", "a-b"], "spile: --layers"),
        (["data", "streams"], 'spile: Command "data streams" parameter --num-streams requires an argument. See spile'),
        (["data", "convrt"], "spile: unknown command data convrt. Did you mean convert? See spile data --help"),
        (["frobnicate"], "spile: unknown command frobnicate. See spile --help"),
        (["--frobnicate"], "spile: unknown option --frobnicate. See spile --help"),
        (["logs"], 'spile: Command "logs" parameter --worker requires an argument. See spile logs --help'),
        (["verify", "--yes"], "spile: --yes: expected --gc or --repair as well, found --yes alone"),
        (["verify", "no-such-folder"], "spile: "),
        (["verify", "--recompute", "-1"], "spile: --recompute: expected 0 or more, found -1"),
        (["verify", "--older-than", "nan"], "spile: --older-than: expected 0 or more, found nan"),
        (["verify", "--max-samples", "0"], "spile: --max-samples: expected 1 or more, found 0"),
        (["plan", "--tokens-per-second", "0"], "spile: --tokens-per-second: expected more than 0, found 0"),
        (["plan", "--tokens-per-second", "nan"], "spile: --tokens-per-second: expected more than 0, found nan"),
        (["plan", "--efficiency", "-1"], "spile: --efficiency: expected more than 0, found -1"),
        (["plan", "--count", "0"], "spile: --count: expected 1 or more, found 0"),
        (["plan", "--budget", "-1"], "spile: --budget: expected 0 or more, found -1"),
        (
            ["data", "upload", "--bucket", ""],
            "spile: --bucket: expected a bucket's name, or gs://… or s3://…, found ''",
        ),
        (["data", "upload", "--bucket", "gs://"], "spile: --bucket: expected a bucket's name"),
        (["extract", "--config"], "spile: --config: expected a TOML file after it, found nothing"),
        (["extract", "--config", "none.toml"], "spile: --config: expected a TOML file, found no none.toml"),
        (["extract", "--config=none.toml"], "spile: --config: expected a TOML file, found no none.toml"),
        (["extract", "--dataset", "none.jsonl"], "spile: no such dataset: none.jsonl. Check --dataset"),
        (["extract", "--model", "./none"], "spile: "),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_is_one_line_and_exit_code_2(
    words: list[str],
    line: str,
    spile: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = spile(*words)
    assert code == 2
    assert err.startswith(line)
    assert err.count("\n") == 1
    assert "Traceback" not in err
    assert out == ""
    assert list(tmp_path.iterdir()) == []


def test_help_and_version(spile: Callable[..., tuple[int, str, str]]) -> None:
    assert spile("--version") == (0, f"spile {__version__}\n", "")
    for words in (("--help",), (), ("extract", "--help"), ("data", "--help")):
        code, out, err = spile(*words)
        assert (code, err) == (0, "")
        assert out.startswith("Usage: spile")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("model = ", "spile: --config: expected a TOML file, found bad.toml: Invalid value"),
        ("modle = 'x'", "spile: Unknown option: --modle from bad.toml. Did you mean --model? See spile extract --help"),
        (
            "batch-size = 'many'",
            'spile: Invalid value for --batch-size from bad.toml: unable to convert "many" into int. See',
        ),
        ("batch-size = 0", "spile: --batch-size: expected from 1 to 1,048,576, found 0"),
    ],
)
def test_a_mistake_in_the_file(
    text: str,
    line: str,
    spile: Callable[..., tuple[int, str, str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.toml").write_text(text)
    code, _, err = spile("extract", "--config", "bad.toml")
    assert code == 2
    assert err.startswith(line)
    assert err.count("\n") == 1


def test_a_file_that_is_no_text(
    spile: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("bad.toml").write_bytes(b"\xff\xfe")
    assert spile("extract", "--config", "bad.toml")[2].startswith(
        "spile: --config: expected a TOML file, found bad.toml"
    )


def test_flags_win_over_variables_and_those_over_the_file(
    spile: Callable[..., tuple[int, str, str]],
    asked: list[ExtractFlags],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = tmp_path / "run.toml"
    run.write_text(
        "model = 'file'\nbatch-size = 1\nmax_seq_length = 111\nseed = 1\n"
        "layers = ['0-2', '5']\npack = true\nprompt = 'text'\n"
    )
    for name, value in {
        "SPILE_MODEL": "variable",
        "SPILE_BATCH_SIZE": "2",
        "BATCH_SIZE": "4",
        "SPILE_TAPS": "attn mlp",
    }.items():
        monkeypatch.setenv(name, value)
    spile("extract", "--model", "flag", "--config", str(run))
    (flags,) = asked
    assert (flags.model, flags.batch_size, flags.max_seq_length, flags.seed) == ("flag", 2, "111", 1)
    assert (flags.layers, flags.taps, flags.pack, flags.prompt) == (["0-2", "5"], ["attn", "mlp"], True, "text")


def test_the_file_may_come_before_the_command_and_the_variables_still_count(
    spile: Callable[..., tuple[int, str, str]],
    asked: list[ExtractFlags],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = tmp_path / "run.toml"
    run.write_text("seed = 5\n")
    monkeypatch.setenv("SPILE_MODEL", "old")
    spile("--config", str(run), "extract")
    assert (asked[0].model, asked[0].seed) == ("old", 5)


def test_a_variable_that_is_wrong_is_named(
    spile: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPILE_BATCH_SIZE", "many")
    code, _, err = spile("extract")
    assert code == 2
    assert err.startswith('spile: Invalid value for SPILE_BATCH_SIZE from env: unable to convert "many" into int. See')


TREE = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.SpileError)]


@pytest.mark.parametrize("kind", TREE, ids=lambda kind: kind.__name__)
def test_every_error_is_one_line_and_its_own_code(
    kind: type[errors.SpileError], spile: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        ExtractFlags, "spec", lambda _: (_ for _ in ()).throw(kind("a [bold]thing\nhappened", fix="do it"))
    )
    assert spile("extract") == (kind.exit_code, "", "spile: a [bold]thing happened. Do it.\n")
    codes = {errors.UserError: 2, errors.Failure: 1, errors.Fenced: 3, errors.Interrupted: 130, errors.SpileError: 1}
    assert kind.exit_code == next(code for base, code in codes.items() if issubclass(kind, base))


def test_a_traceback_only_with_debug(spile: Callable[..., tuple[int, str, str]], asked: list[ExtractFlags]) -> None:
    assert spile("extract")[0] == 2
    with pytest.raises(SpecError, match="stopped here"):
        program.main(["extract", "--debug"])
    assert len(asked) == 2


def test_ctrl_c_is_130(spile: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_: ExtractFlags) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ExtractFlags, "spec", interrupted)
    assert spile("extract") == (130, "", "spile: interrupted\n")


def test_debug_after_two_dashes_is_another_programs(
    spile: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from spile.cli import hosts as run

    seen: list[tuple[str, ...]] = []

    def line(_: object, words: tuple[str, ...]) -> str:
        seen.append(words)
        raise SpecError("stopped here")

    monkeypatch.setattr(run.HostCommandFlags, "line", line)
    spile("run", "--tpu-prefix", "p", "--", "train", "--debug", "--config", "x")
    assert seen == [("train", "--debug", "--config", "x")]


def test_a_reader_that_has_gone_is_no_failure() -> None:
    """``spile … --help | head -1``."""
    read, write = os.pipe()
    os.close(read)
    words = [sys.executable, "-m", "spile.cli.main", "extract", "--help"]
    ended = subprocess.run(words, stdout=write, stderr=subprocess.PIPE, text=True, timeout=120, check=False)
    os.close(write)
    assert (ended.returncode, ended.stderr) == (0, "")


def test_another_pipe_that_breaks_is_a_failure(
    spile: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broken pipe of a server or a child process: a command that did half of its work must not report success."""

    def broken(_: ExtractFlags) -> None:
        read, write = os.pipe()
        os.close(read)
        try:
            os.write(write, b"x")
        finally:
            os.close(write)

    monkeypatch.setattr(ExtractFlags, "spec", broken)
    code, out, err = spile("extract")
    assert (code, out, "BrokenPipeError: [Errno 32] Broken pipe" in err) == (1, "", True), err


def test_help_names_every_command_once_and_begins_with_the_main_one(
    spile: Callable[..., tuple[int, str, str]],
) -> None:
    words = [row.name for rows in SECTIONS.values() for row in rows if " " not in row.name]
    assert sorted(words) == sorted({command.name.split(" ")[0] for command in COMMANDS})
    first = [line.split()[1] for line in spile("--help")[1].splitlines() if re.match(r"│ \w+  ", line)]
    assert first == words
    assert first[0] == "extract"


def test_a_fault_of_our_own_is_one_line_too(
    spile: Callable[..., tuple[int, str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(_: ExtractFlags) -> None:
        raise ZeroDivisionError("a [bold]thing\nhappened")

    monkeypatch.setattr(ExtractFlags, "spec", faulty)
    code, out, err = spile("extract")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith(
        "spile: an unexpected error in spile or a library: ZeroDivisionError: a [bold]thing happened (test_main"
    )
    assert err.endswith("; the same command with --debug shows more\n")
    with pytest.raises(ZeroDivisionError):
        program.main(["extract", "--debug"])


@pytest.mark.parametrize(
    "words",
    [
        ("run", "--hosts", "h", "--logs", "gs://b/logs", "--", "true"),
        ("docker", "pod", "--hosts", "h", "--logs", "gs://b/logs", "--", "true"),
        ("collect", "/tmp/x", "--hosts", "h", "--into", "s3://b/x"),
        ("score", "gs://b/activations", "--html", "gs://b/page.html"),
        ("inspect", "gs://b/activations", "--html", "gs://b/page.html"),
        ("export", "gs://b/activations", "--to", "npy", "--output", "gs://b/npy"),
        ("extract", "--engine", "local", "--log-dir", "gs://b/logs"),
    ],
    ids=lambda words: words[0],
)
def test_an_output_that_cannot_be_in_a_bucket_is_refused_and_no_folder_named_gs_is_made(
    words: tuple[str, ...], spile: Callable[..., tuple[int, str, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = spile(*words)
    flag, where = next((flag, word) for flag, word in pairwise(words) if flag.startswith("--") and "://" in word)
    assert (code, out) == (2, "")
    assert err == f"spile: {flag}: expected a path on this machine, found {where}\n"
    assert list(tmp_path.iterdir()) == []


def test_a_page_that_cannot_be_written_is_the_users_mistake(tmp_path: Path) -> None:
    from spile.view.web.export import write_page

    with pytest.raises(UserError, match=r"--html .*page: expected a file that can be written, found No such file"):
        write_page("<html>", tmp_path / "no" / "page")
