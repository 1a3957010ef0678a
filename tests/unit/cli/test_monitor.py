from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from producing import produce, run_identity, stream_identity
from spile.cli.main import main
from spile.objects import open_folder
from spile.store.stream import join_stream


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
    assert "total: 45 samples, 5 shards in bucket" in capsys.readouterr().out


def test_mistakes_exit_with_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert spile("monitor", str(tmp_path), "--once") == 2
    assert "no dataset at" in capsys.readouterr().err
    assert spile("monitor", str(tmp_path), "--interval", "0") == 2


def test_a_live_view_waits_for_the_dataset_to_begin(tmp_path: Path) -> None:
    words = [sys.executable, "-m", "spile.cli.main", "monitor", str(tmp_path), "--interval", "0.2"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    assert process.stdout is not None
    assert process.stdout.readline().endswith("yet; waiting for a worker to begin one\n")
    produce(open_folder(str(tmp_path)), 5)
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "tpu_0 done: 5/5 samples" in rest


def test_ctrl_c_ends_the_view_and_nothing_else(tmp_path: Path) -> None:
    root = open_folder(str(tmp_path))
    produce(root, 5)
    join_stream(root, 1, stream_identity(9), run_identity())
    words = [sys.executable, "-m", "spile.cli.main", "monitor", str(tmp_path), "--interval", "0.2"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    assert process.stdout is not None
    assert "tpu_0 done: 5/5 samples" in process.stdout.readline()
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)
    assert process.returncode == 0
