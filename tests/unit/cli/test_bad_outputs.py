"""Outputs that ``spile extract`` cannot write to: a one-line error, exit code 2, and no file is changed."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from spile.store.ledger import seal, unseal
from unit.cli.refusals import SMALL, Refuse, lines, listing, spile
from unit.models.toy_models import copy_model, edit_tensors


def test_an_output_of_another_run_names_the_fields(refused: Refuse, made: Path, run: Path) -> None:
    data = made / "texts.jsonl"
    line = refused("--dataset", data, "--output", run, *SMALL, "--store-dtype", "float32", "--seed", "7")
    for word in ("store_dtype", "bfloat16", "float32", "seed", "7"):
        assert word in line


def test_an_output_of_another_model(refused: Refuse, tmp_path: Path, made: Path, run: Path) -> None:
    model = edit_tensors(copy_model(tmp_path / "model"), model__norm__weight=np.zeros(64, np.float32))
    line = refused("--model", model, "--dataset", made / "texts.jsonl", "--output", run, *SMALL)
    assert "weights" in line


def test_an_output_of_another_dataset_or_other_taps(refused: Refuse, tmp_path: Path, made: Path, run: Path) -> None:
    other = lines(tmp_path / "other.jsonl", {"text": "1 2 3"}, {"text": "x y z"})
    assert "sha256" in refused("--dataset", other, "--output", run, *SMALL)
    line = refused("--dataset", made / "texts.jsonl", "--output", run, "--layers", "1", "--max-seq-length", "64")
    assert "taps" in line


def test_starting_over_is_refused_where_commits_are(refused: Refuse, made: Path, run: Path) -> None:
    line = refused("--dataset", made / "texts.jsonl", "--output", run, *SMALL, "--no-checkpointing")
    assert line.startswith(f"--no-checkpointing: expected streams without commits, found commits of 1 stream in {run}")


def test_starting_over_removes_nothing_before_all_else_is_right(refused: Refuse, made: Path, run: Path) -> None:
    words = ("--dataset", made / "texts.jsonl", "--output", run, *SMALL, "--no-checkpointing", "--overwrite")
    assert "mesh" in refused(*words, "--mesh-shape", "7,9")


def test_starting_over(made: Path, run: Path) -> None:
    before = listing(run)
    words = ("--dataset", made / "texts.jsonl", "--output", run, *SMALL, "--no-checkpointing", "--overwrite")
    assert spile("extract", *words) == 0
    assert not before.keys() & {name for name in listing(run) if "shard_" in name and name.endswith("safetensors")}
    assert spile("verify", run) == 0


def test_a_stream_without_commits_can_be_started_over(refused: Refuse, tmp_path: Path, made: Path, run: Path) -> None:
    """With the flags that the error message recommends."""
    other = lines(tmp_path / "other.jsonl", {"text": "1 2 3"}, {"text": "x y z"})
    shutil.rmtree(run / "stream_0" / "commits")
    line = refused("--dataset", other, "--output", run, *SMALL)
    assert "--worker-id" in line
    assert "--overwrite" not in line, "no hint offers to remove what another worker made"
    assert spile("extract", "--dataset", other, "--output", run, *SMALL, "--no-checkpointing", "--overwrite") == 0
    assert spile("verify", run) == 0


def test_a_damaged_run_record(refused: Refuse, made: Path, run: Path) -> None:
    (run / "run.json").write_text("{}")
    line = refused("--dataset", made / "texts.jsonl", "--output", run, *SMALL, code=1)
    assert "run.json" in line


def test_a_gap_in_the_ledger(refused: Refuse, made: Path, run: Path) -> None:
    first, second = (run / "stream_0" / "commits" / name for name in ("0001.json", "0002.json"))
    second.write_bytes(seal({**unseal(first.read_bytes(), "commit"), "number": 2}))
    first.unlink()
    line = refused("--dataset", made / "texts.jsonl", "--output", run, *SMALL, code=1)
    assert "has a gap: expected commits 1 to 2, found none numbered 1" in line


def test_a_file_where_the_output_should_be(refused: Refuse, texts: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    line = refused("--dataset", texts, "--output", tmp_path / "file")
    assert "found a file where a folder should be. Choose another --output." in line


@contextmanager
def mounted(folder: Path, options: str) -> Iterator[Path]:
    """A file system of one's own, where that is allowed."""
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", folder], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("nothing can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


needs_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0 or shutil.which("mount") is None, reason="mounts need root"
)


@needs_root
def test_a_full_disk(refused: Refuse, texts: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=64k") as disk:
        (disk / "mine").write_bytes(b"x" * 65536)
        line = refused("--dataset", texts, "--output", disk / "out", *SMALL)
    assert line.startswith(f"cannot write {disk}/out: expected a folder with room, found a full disk. Free some room")


@needs_root
def test_a_disk_that_fills_up_during_the_run(
    texts: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], made: Path
) -> None:
    """Commits are kept, partial files are removed, and with more space the same command continues."""
    rows = [{"text": " ".join(map(str, range(n, n + 40)))} for n in range(60)]
    data = lines(tmp_path / "many.jsonl", *rows)
    words = ("extract", "--dataset", data, *SMALL, "--shard-size-gb", "5e-5", "--batch-tokens", "64", "--output")
    with mounted(tmp_path / "disk", "size=400k") as disk:
        assert spile(*words, disk / "out") == 1, "nobody's mistake"
        (line,) = capfd.readouterr().err.splitlines()
        assert "found a full disk. Free some room or choose another --output, then run the same command again." in line
        assert not list(disk.rglob(".tmp-*"))
        commits = sorted(path.name for path in disk.glob("out/stream_0/commits/*"))
        assert commits
        assert spile("verify", disk / "out") == 1
        assert "damaged" not in capfd.readouterr().out, "what is there is whole"
        assert spile(*words, disk / "out") in (1, 2), "still no room"
        capfd.readouterr()
        subprocess.run(["mount", "-o", "remount,size=16m", disk], check=True)
        assert spile(*words, disk / "out") == 0
        assert spile("verify", disk / "out") == 0


@needs_root
def test_a_read_only_folder(refused: Refuse, texts: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", "size=64k,ro") as disk:
        line = refused("--dataset", texts, "--output", disk / "out", *SMALL)
    assert line == (
        f"cannot write {disk}/out: expected a folder with room, found a read-only file system. Choose another --output."
    )
