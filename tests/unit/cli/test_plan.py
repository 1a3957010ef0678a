"""``spile plan`` at the prompt: what it says, what it refuses, what a price file changes."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import date, timedelta
from pathlib import Path

import pytest

import spile
import spile.models
from spile.cli.main import main
from spile.data import lines as lines_module
from spile.data import samples as stream
from spile.data.lines import LineSource
from spile.errors import SpecError
from spile.planning import forecast
from spile.planning.machines import gpus_here, list_prices, parse_machine, parse_planned


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["plan", *words])
    return int(ended.value.code or 0)


def test_what_it_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--topology", "v5e-64", "v3-8", "--no-compile") == 0
    out = capsys.readouterr().out
    assert "48 samples" in out
    assert "all counted" in out
    assert "v5litepod-64" in out
    assert "list prices, US, as of 20" in out


def test_it_says_what_size_shards_have_on_a_slow_machine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    data = tmp_path / "many.jsonl"
    data.write_text('{"text": "1 2 3 4 5 6 7 8"}\n' * 20_000)
    words = ("--dataset", str(data), "--topology", "v3-8", "--no-compile", "--shard-size-gb", "0.1")
    assert run(*words, "--tokens-per-second", "100") == 0
    out = " ".join(capsys.readouterr().out.split())
    found = re.search(r"Shards on v3-8: about ([\d.]+) (kB|MB) instead of (\S+ MB), because --commit-every 60", out)
    assert found is not None, out
    enough = re.search(r"--commit-every (\d+) fills them; a killed worker then loses up to", out)
    assert enough is not None
    for more in (("--tokens-per-second", "100", "--commit-every", enough[1]), ("--tokens-per-second", "1e9")):
        assert run(*words, *more) == 0
        assert "Shards on" not in capsys.readouterr().out


def test_prices_a_year_old_are_said_to_be(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "prices.toml"
    for as_of, old in (("2020-01-31", True), ("2999-01", False), ("of our contract", False)):
        file.write_text(f'as_of = "{as_of}"\n')
        assert run("--topology", "v3-8", "--no-compile", "--prices", str(file)) == 0
        out = " ".join(capsys.readouterr().out.split())
        assert (f"These prices are from {as_of}, a year ago or more" in out) == old, as_of
    prices = list_prices()
    year, month = map(int, prices.as_of.split("-"))
    assert prices.warning(date(year + 1, month, 1))
    assert not prices.warning(date(year + 1, month, 1) - timedelta(1))


def test_brackets_in_a_path_are_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Brackets are not markup of the terminal library."""
    data = tmp_path / "[old]" / "texts.jsonl"
    data.parent.mkdir()
    data.write_text('{"text": "1 2 3"}\n')
    assert run("--dataset", str(data), "--topology", "v3-8", "--no-compile") == 0
    assert f"{data}: 1 sample" in capsys.readouterr().out


def test_a_config_is_enough_and_arithmetic_says_whether_it_fits(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """No weights, no TPU compiler; and the time to boot, install, load and compile is paid for."""
    source = Path(spile.models.__file__).parent / "embedded"
    for file in source.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    assert run("--model", str(tmp_path), "--dataset", "embedded", "--topology", "v3-8", "--no-compile") == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "v3-8, by arithmetic: weights 5.27 MB, rows" in out
    assert "on a device: fits" in out
    assert "10 min to boot, install, load and compile" in out
    words = ("--topology", "v3-8", "--no-compile", "--batch-tokens", "100000000")
    assert run(*words) == 0
    assert "does not fit: fewer --batch-tokens" in " ".join(capsys.readouterr().out.split())


def test_the_estimate_divides_weights_as_the_worker_does(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A model of 15 GB on devices of 16 GB: the worker's mesh is 16 × 4 (tests/pod/test_mesh.py)."""
    source = Path(spile.models.__file__).parent / "embedded"
    for file in source.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((source / "config.json").read_text())
    config |= {"hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28}
    config |= {"num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064}
    (tmp_path / "config.json").write_text(json.dumps(config))
    words = ("--dataset", "embedded", "--topology", "v5litepod-64", "--no-compile", "--layers", "1")
    assert run("--model", str(tmp_path), *words) == 0
    assert ", 1/4 of them on each device" in " ".join(capsys.readouterr().out.split())


def test_json_and_a_counted_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--json", "--topology", "v5e:8x8", "--count", "12", "--layers", "1", "--no-compile") == 0
    part = json.loads(capsys.readouterr().out)
    assert run("--json", "--topology", "v5e-64", "--layers", "1", "--no-compile") == 0
    whole = json.loads(capsys.readouterr().out)
    assert (part["run"]["samples"], part["run"]["samples_counted"]) == (48, 12)
    assert whole["run"]["tokens_standard_error"] == 0 < part["run"]["tokens_standard_error"]
    error = abs(part["run"]["tokens"] / whole["run"]["tokens"] - 1)
    assert error < 4 * part["run"]["tokens_standard_error"]
    assert whole["run"]["bytes_per_token"] == 192 * 2 + 5
    assert whole["machines"][0]["topology"] == part["machines"][0]["topology"] == "v5e:8x8"


def test_over_budget(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    prices = tmp_path / "prices.toml"
    prices.write_text('as_of = "today"\nmachine_hour = { v3-8 = { on_demand = 1e9, preemptible = 1e3 } }')
    words = ("--topology", "v3-8", "--prices", str(prices), "--budget", "200")
    assert run(*words) == 2
    output = capsys.readouterr()
    assert "as of today" in output.out
    assert "over budget on 1 × v3-8 on demand: expected at most $200.00, found $" in output.err
    assert "--preemptible would fit" in output.err
    assert run(*words, "--preemptible") == 0


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--topology", "v9-8"), "--topology: expected a machine such as v3-8"),
        (("--prices", "nowhere.toml"), "--prices: expected a TOML file, found nowhere.toml"),
        (("--workers", "0"), "--workers: expected at least 1, found 0"),
        (("--efficiency", "2"), "--efficiency: expected at most 1"),
    ],
)
def test_mistakes_are_one_line(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], says: str) -> None:
    assert run(*words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


# -- large data, and this machine --------------------------------------------------------------------------------------


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A dataset of 2,000 rows, of which 100 are few enough to be read before a run, in parts of 20 rows."""
    monkeypatch.setattr(stream, "HEAD_ROWS", 100)
    monkeypatch.setattr(lines_module, "_PART_ROWS", 20)
    data = tmp_path / "large.jsonl"
    data.write_text("".join(json.dumps({"text": "word " * (1 + n % 7)}) + "\n" for n in range(2000)))
    return data


def test_large_data_is_not_read_to_its_end(
    large: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    lines = LineSource.lines

    def counting(self: LineSource, *words: object) -> object:
        for line in lines(self, *words):  # type: ignore[arg-type]
            read.append(line.index)
            yield line

    monkeypatch.setattr(LineSource, "lines", counting)
    assert run("--dataset", str(large), "--topology", "v3-8", "--no-compile") == 0
    assert max(read) < 200
    out = " ".join(capsys.readouterr().out.split())
    assert "large.jsonl: about 2,000 samples (an estimate from the first 100 rows)" in out
    assert "100 counted" in out


def test_an_estimate_is_close_and_exact_if_the_data_is_small(large: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    estimated = spile.plan("embedded", str(large), layers=0)
    monkeypatch.undo()
    counted = spile.plan("embedded", str(large), layers=0, count=2000)
    assert estimated.lengths.head == 100
    assert counted.lengths.exact
    assert counted.tokens == sum(counted.lengths.counted)
    assert abs(estimated.tokens / counted.tokens - 1) < 0.1
    assert repr(estimated).startswith("<plan for embedded: about 2,000 samples")


@pytest.mark.parametrize(("suffix", "start"), [("csv", "text,n\n"), ("txt", "")])
def test_rows_of_other_files_are_estimated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, start: str
) -> None:
    monkeypatch.setattr(stream, "HEAD_ROWS", 100)
    cells = '"two\nlines",{n}\n' if suffix == "csv" else "one line {n}\n"
    data = tmp_path / f"data.{suffix}"
    data.write_text(start + "".join(cells.format(n=n) for n in range(1000)))
    assert 990 <= spile.plan("embedded", str(data), layers=0).samples <= 1010


def test_packed_data_and_limits_are_estimated(large: Path) -> None:
    one = spile.plan("embedded", str(large), layers=0)
    packed = spile.plan("embedded", str(large), layers=0, pack=True, prompt="text", max_seq_length=64)
    assert packed.lengths.head == 100
    assert abs(packed.tokens / one.tokens - 1) < 0.1
    assert spile.plan("embedded", str(large), layers=0, max_samples=50).samples == 50
    few = spile.plan("embedded", str(large), layers=0, max_tokens=500)
    assert 500 <= few.tokens < 600


@pytest.mark.parametrize("positions", ["all", "last"])
def test_more_samples_store_more(positions: str) -> None:
    """``spile deploy --dry-run`` multiplies the samples of one stream by the number of streams."""
    one = spile.plan("embedded", "embedded", layers=0, positions=positions)
    four = replace(one, lengths=replace(one.lengths, samples=4 * one.samples))
    assert (four.samples, four.tokens, four.bytes) == (4 * one.samples, 4 * one.tokens, 4 * one.bytes)
    assert one.bytes > 0


def test_this_machine_comes_first_then_gpus_then_tpus(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forecast, "_gpu_names", lambda: ["NVIDIA H200", "NVIDIA H200"])
    assert run("--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["this_machine"]["gpus"] == ["NVIDIA H200", "NVIDIA H200"]
    names = [each["machine"] for each in found["machines"]]
    assert names[:3] == ["this machine", "L4", "A100"]
    assert found["machines"][0]["chips"] == 2
    assert found["machines"][0]["start_hours"] == 0
    assert all(not names[place].startswith("v") for place in range(5))
    assert names[5].startswith("v5")
    monkeypatch.setattr(forecast, "_gpu_names", list)
    assert run("--max-samples", "2") == 0
    out = capsys.readouterr().out
    assert "no GPU" in out
    assert re.search(r"this machine +1 +1 ", out)
    assert run("--budget", "100") == 0, "machines without a price are not compared with the budget"


def test_gpus_by_name() -> None:
    assert parse_planned("h100-8").name == "8 × H100"
    assert parse_planned("v5e-64").chips == 64
    assert gpus_here(["NVIDIA A100-SXM4-80GB"] * 4).chips == 4  # type: ignore[union-attr]
    assert gpus_here(["NVIDIA GeForce RTX 4090"]).tflops == 165  # type: ignore[union-attr]
    assert gpus_here(["An unknown card"]) is None
    with pytest.raises(SpecError):
        parse_machine("h100-8")  # a fleet has TPUs only
