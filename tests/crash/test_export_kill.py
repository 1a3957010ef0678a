"""An export that is killed at any step leaves no output, and the next one starts clean and is complete."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from spile.objects import open_folder
from spile.reading.dataset import open as open_dataset
from world import produce

TAP = "residual.1"
_EXPORT = """
import os, signal, sys
import spile.reading.export as export
from spile.reading.dataset import open as open_dataset

form, step = sys.argv[1], int(sys.argv[2])
steps = 0

def stepped(real):
    def call(*words, **options):
        global steps
        if steps == step:
            os.kill(os.getpid(), signal.SIGKILL)
        steps += 1
        return real(*words, **options)
    return call

# Every part that is read, every file that is made durable, and the renaming.
export.Export.convert = stepped(export.Export.convert)
export.os.fsync = stepped(os.fsync)
export.sync_folder = stepped(export.sync_folder)
export.Path.rename = stepped(export.Path.rename)
export.export_dataset(open_dataset("root"), "out", to=form, taps=["residual.1"])
print(steps)
"""


def run(folder: Path, form: str, step: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", _EXPORT, form, str(step)]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)


def exported(folder: Path, form: str) -> list[Path]:
    suffix = {"npy": "residual.1.npy", "pickle": "*.pkl.gz", "parquet": "*.parquet"}.get(form, "*.arrow")
    return sorted(folder.rglob(suffix))


@pytest.mark.parametrize(
    "form",
    ["npy", *(pytest.param(form, marks=pytest.mark.slow) for form in ("parquet", "pickle", "hf", "saelens"))],
)
def test_a_killed_export_leaves_no_output(tmp_path: Path, form: str) -> None:
    if form in ("parquet", "hf", "saelens"):
        pytest.importorskip("datasets")
    produce(open_folder(str(tmp_path / "root")), 30, shard=10)
    whole = run(tmp_path, form, -1)
    assert whole.returncode == 0, whole.stderr
    steps, files = int(whole.stdout), [path.relative_to(tmp_path) for path in exported(tmp_path / "out", form)]
    assert steps >= 4
    assert files
    (tmp_path / "out").rename(tmp_path / "wanted")
    # The last two steps sync the folder around the output, which is complete by then; the one before renames it.
    moments = sorted({0, 1, steps // 2, steps - 4, steps - 3})
    for step in moments:
        assert run(tmp_path, form, step).returncode == -signal.SIGKILL
        assert not (tmp_path / "out").exists()
        assert [each.name for each in tmp_path.glob(".*")] == [".out.spile-export"]
    again = run(tmp_path, form, -1)
    assert again.returncode == 0, again.stderr
    assert [path.relative_to(tmp_path) for path in exported(tmp_path / "out", form)] == files
    assert not list(tmp_path.glob(".*"))
    left, right = (
        sorted(path.stat().st_size for path in exported(tmp_path / name, form)) for name in ("out", "wanted")
    )
    assert left == right
    if form == "npy":
        rows = np.concatenate(list(open_dataset(str(tmp_path / "root")).rows(TAP))).astype(np.float32)
        assert np.array_equal(np.load(tmp_path / "out/residual.1.npy"), rows)


def test_an_export_that_was_killed_after_its_last_step_is_complete(tmp_path: Path) -> None:
    produce(open_folder(str(tmp_path / "root")), 30, shard=10)
    steps = int(run(tmp_path, "npy", -1).stdout)
    (tmp_path / "out").rename(tmp_path / "wanted")
    assert run(tmp_path, "npy", steps - 2).returncode == -signal.SIGKILL
    names = {name: sorted(each.name for each in (tmp_path / name).iterdir()) for name in ("out", "wanted")}
    assert names["out"] == names["wanted"]
    for name in names["out"]:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "wanted" / name).read_bytes()
