from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spile.cli.main import main
from spile.objects import open_folder


def spile(words: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(["data", *words])
    output = capsys.readouterr()
    return caught.value.code, output.out, output.err


@pytest.fixture
def rows(tmp_path: Path) -> str:
    grid = [[1, 2]]
    good: list[Any] = [{"examples": [[grid, [[number]]]] * 3} for number in range(10)]
    bad: list[Any] = [{"examples": [[grid, grid, grid]] * 2}, {"other": 1}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [*good, *bad]))
    return str(tmp_path / "rows.jsonl")


def test_convert_says_what_it_read_and_what_it_could_not_use(rows: str, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / "t.jsonl"
    code, output, _ = spile(["convert", "--dataset", rows, "--output", str(out), "--bad-rows", "skip"], capsys)
    assert code == 0
    assert output.splitlines() == [
        "12 rows read, 10 samples, 2 could not be used:",
        "  1 × a pair of 3",
        "  1 × no column 'examples'",
        "  first seen at line 11: a pair of 3",
        "  first seen at line 12: no column 'examples'",
        f"wrote {out} ({out.stat().st_size:,} bytes)",
        f"next: spile data streams --dataset {out} --num-streams 32 --output-dir data/streams",
    ]


def test_the_guides_spelling_writes_the_challenge_pair(rows: str, tmp_path: Path, capsys: Any) -> None:
    code, output, _ = spile(
        ["convert", "--dataset", rows, "--output_dir", str(tmp_path / "o"), "--max_samples", "3"], capsys
    )
    assert code == 0
    assert "3 rows read, 3 samples\n" in output
    assert sorted(path.name for path in (tmp_path / "o").iterdir()) == [
        "arc_format_train.json",
        "test_outputs_train.json",
    ]
    assert len(json.loads((tmp_path / "o" / "arc_format_train.json").read_text())) == 3


def test_equal_rows_without_ids_are_one_task_of_the_challenge_pair(tmp_path: Path, capsys: Any) -> None:
    row = json.dumps({"examples": [[[[1]], [[2]]]] * 3})
    (tmp_path / "rows.jsonl").write_text(f"{row}\n{row}\n")
    words = ["convert", "--dataset", str(tmp_path / "rows.jsonl"), "--output_dir", str(tmp_path / "o")]
    code, output, _ = spile(words, capsys)
    assert code == 0
    assert "2 rows read, 1 samples, 1 could not be used:\n  1 × the same task as an earlier row\n" in output
    assert len(json.loads((tmp_path / "o" / "arc_format_train.json").read_text())) == 1


def test_streams_then_some_again_then_upload(rows: str, tmp_path: Path, capsys: Any) -> None:
    folder = tmp_path / "s"
    make = ["streams", "--dataset", rows, "--num-streams", "4", "--output-dir", str(folder), "--bad-rows", "skip"]
    code, output, _ = spile(make, capsys)
    assert code == 0
    assert f"wrote 4 of 4 streams to {folder}, 3 samples each, " in output
    (folder / "stream_002.jsonl").unlink()
    code, output, _ = spile([*make, "--streams", "2-3"], capsys)
    assert (code, "wrote 2 of 4 streams" in output) == (0, True)
    put = ["upload", "--bucket", f"file://{tmp_path}/b", "--prefix", "datasets", "--local-dir", str(folder)]
    code, output, _ = spile(put, capsys)
    assert code == 0
    assert "5/5 streams.json uploaded\n5 uploaded (" in output
    assert (tmp_path / "b" / "datasets" / "stream_003.jsonl").is_file()
    code, output, _ = spile(put, capsys)
    assert "0 uploaded (0 bytes), 5 already there, in" in output


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            ["convert"],
            "spile: the output: expected --output tasks.jsonl, or --output-dir DIR for the JSON pair, found none",
        ),
        (
            ["convert", "--format", "arc-json"],
            "spile: the output: expected --output-dir DIR with --format arc-json, found none",
        ),
        (
            ["convert", "--output", "a", "--output-dir", "b"],
            "spile: the output: expected --output tasks.jsonl, or --output-dir DIR for the JSON pair, found both",
        ),
        (
            ["streams", "--num-streams", "2", "--streams", "9-5"],
            "spile: --streams: expected all, or numbers and ranges such as 0-11,20, found '9-5'",
        ),
        (["streams", "--num-streams", "2", "--end-index", "0"], "spile: --end-index: expected 1 or more, found 0"),
        (
            ["upload", "--bucket", "b", "--local-dir", "none"],
            "spile: no such folder: none. Make streams first: spile data streams",
        ),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(
    words: list[str], line: str, capsys: Any, monkeypatch: Any, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    code, output, wrong = spile(words, capsys)
    assert (code, output, wrong) == (2, "", line + "\n")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("cloud_url", ["gs"], indirect=True)
def test_streams_in_a_bucket_are_replaced_by_none_of_another_dataset(
    rows: str, tmp_path: Path, cloud_url: str, capsys: Any
) -> None:
    """As many and of the same seed, but of other rows."""
    make = ["streams", "--bad-rows", "skip", "--num-streams", "2", "--output-dir", cloud_url, "--dataset"]
    assert spile([*make, rows], capsys)[0] == 0
    before = open_folder(cloud_url).get("stream_000.jsonl")
    other = tmp_path / "other.jsonl"
    other.write_text("".join(Path(rows).read_text().splitlines(keepends=True)[:6]))
    code, _, wrong = spile([*make, str(other)], capsys)
    assert code == 2
    assert f"{cloud_url}/streams.json lists a different stream_000.jsonl: the source or the selection has" in wrong
    assert open_folder(cloud_url).get("stream_000.jsonl") == before
    assert spile([*make, rows], capsys)[0] == 0
    assert spile([*make, str(other), "--overwrite"], capsys)[0] == 0
    assert open_folder(cloud_url).get("stream_000.jsonl") != before
