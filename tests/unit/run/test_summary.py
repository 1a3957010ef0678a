"""The facts behind a run's last lines."""

from __future__ import annotations

import subprocess
import sys

import numpy as np

from spile.compute.progress import Progress, Summary, peak_memory

_PEAK = "from spile.compute.progress import peak_memory; print(peak_memory())"


def test_the_peak_memory_is_that_of_this_process_and_not_of_its_parent() -> None:
    held = np.ones(300 << 20, np.uint8)
    peak = int(subprocess.run([sys.executable, "-c", _PEAK], capture_output=True, check=True).stdout)
    assert 5e6 < peak < held.nbytes < peak_memory()


def test_an_interruption_has_its_own_exit_code() -> None:
    facts = {"root": "r", "stream": "r/tpu_0", "complete": False, "progress": Progress().snapshot(), "samples": 0}
    facts |= {"tokens": 0, "bytes": 0, "shards": 0, "skipped": 0, "device": "", "sink": "disk", "peak_memory": 0}
    assert Summary(**facts, interrupted=True).exit_code == 130
    assert Summary(**facts, interrupted=False).exit_code == 0
    assert Summary(**facts, interrupted=False).limited_by is None
