"""Invalid flags: a one-line error, exit code 2, and no file is changed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from unit.cli.refusals import Refuse


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--layers", "6"], "--layers: expected layers 0 to 5 (the model has 6), found 6"),
        (["--layers", "0-99"], "--layers: expected layers 0 to 5 (the model has 6), found 6-99"),
        (["--layers", "-1"], "--layers"),
        (["--layers", "3-1"], "--layers"),
        (["--layers", "many"], "--layers: expected all, or numbers and ranges such as 0-11,20, found 'many'"),
        (["--taps", "thoughts"], "--taps: expected some of residual, attn, mlp, "),
        (["--batch-size", "-3"], "--batch-size: expected from 1 to 1,048,576, found -3"),
        (["--batch-size", "0"], "--batch-size: expected from 1 to 1,048,576, found 0"),
        (["--batch-tokens", "0"], "--batch-tokens: expected from 1 to"),
        (["--max-seq-length", "0"], "--max-seq-length: expected from 1 to 1,048,576, found 0"),
        (["--max-samples", "-1"], "--max-samples: expected from 1 to"),
        (["--shard-size-gb", "0"], "--shard-size-gb: expected from 1e-06 to 64, found 0"),
        (["--shard-size-gb", "nan"], "--shard-size-gb: expected from 1e-06 to 64, found nan"),
        (["--shard-size-gb", "1e300"], "--shard-size-gb: expected from 1e-06 to 64, found 1e+300"),
        (["--commit-every", "-5"], "--commit-every: expected from 0.01 to"),
        (["--seed", "-1"], "--seed: expected from 0 to"),
        (["--worker-id", "-2"], "--worker-id: expected from 0 to 99,999, found -2"),
        (["--predictions-per-task", "0"], "--predictions-per-task: expected from 1 to 4,096, found 0"),
        (["--overwrite"], "--overwrite: expected --no-checkpointing as well, found --overwrite alone"),
        (["--upload-to-gcs"], "--upload-to-gcs: expected --gcs-bucket as well, found no bucket"),
        (["--mesh-shape", "3"], "--mesh-shape"),
        (["--mesh-shape", "7,9"], "mesh"),
        (["--revision", "main"], "--revision: expected a model of the Hugging Face hub, found embedded"),
        (["--grid-encoder", "Nothing()"], "Nothing"),
        (["--dtype", "int3"], "--dtype"),
        (["--store-dtype", "int4"], "--store-dtype"),
    ],
)
def test_an_absurd_flag(refused: Refuse, fresh: Path, words: list[str], line: str) -> None:
    assert line in refused("--output", fresh, *words)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--dataset", "nowhere.jsonl"], "spile: no such dataset: nowhere.jsonl. Check"),
        (["--layers", "77"], "spile: --layers: expected layers 0 to 5"),
    ],
)
def test_as_a_process(tmp_path: Path, words: list[str], line: str) -> None:
    command = [sys.executable, "-m", "spile.cli.main", "extract", *words]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith(line)
    assert not list(tmp_path.iterdir())
