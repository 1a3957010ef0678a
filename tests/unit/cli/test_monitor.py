from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from spile.cli.main import main
from spile.objects import open_folder
from spile.store.writer import join_stream
from world import produce, run_identity, stream_identity


def spile(*words: str) -> int:
    with pytest.raises(SystemExit) as exit_:
        main(words)
    assert isinstance(exit_.value.code, int)
    return exit_.value.code


def test_once_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    produce(open_folder(str(tmp_path)), 45)
    assert spile("monitor", str(tmp_path), "--once") == 0
    assert "45/45" in capsys.readouterr().out
    assert spile("monitor", str(tmp_path), "--json") == 0
    assert json.loads(capsys.readouterr().out)["totals"]["samples"] == 45
    assert spile("monitor", str(tmp_path)) == 0  # done, so it ends by itself
    assert "total: 42 samples (3 skipped), 5 shards committed" in capsys.readouterr().out


def test_mistakes_exit_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert spile("monitor", str(tmp_path), "--once") == 2
    assert "no dataset at" in capsys.readouterr().err
    assert spile("monitor", str(tmp_path), "--interval", "0") == 2


@pytest.fixture
def watching(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A live view of ``tmp_path`` in a process of its own."""
    words = [sys.executable, "-m", "spile.cli.main", "monitor", str(tmp_path), "--interval", "0.2"]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=environment) as process:
        yield process
        process.kill()


def test_a_live_view_waits_for_the_dataset_to_begin(tmp_path: Path, watching: subprocess.Popen[str]) -> None:
    assert watching.stdout is not None
    assert watching.stdout.readline().endswith("yet; waiting for a worker to begin one\n")
    produce(open_folder(str(tmp_path)), 5)
    rest, _ = watching.communicate(timeout=120)
    assert watching.returncode == 0
    assert "tpu_0 done: 5/5 samples" in rest


def test_ctrl_c_ends_the_view_and_nothing_else(tmp_path: Path, watching: subprocess.Popen[str]) -> None:
    assert watching.stdout is not None
    watching.stdout.readline()
    root = open_folder(str(tmp_path))
    join_stream(root, 1, stream_identity(9), run_identity())
    produce(root, 5)
    while "tpu_1 waiting: 0/9 samples" not in watching.stdout.readline():
        assert watching.poll() is None
    watching.send_signal(signal.SIGINT)
    watching.communicate(timeout=120)
    assert watching.returncode == 0
