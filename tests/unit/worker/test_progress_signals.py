"""A signal's handler looks at the counters wherever the main thread is: inside them too."""

from __future__ import annotations

import subprocess
import sys

_PROGRAM = """
import os, signal
from spile.worker.progress import Progress

seen = []

def clock():
    if not seen:
        os.kill(os.getpid(), signal.SIGUSR1)  # heard here, where snapshot() has the lock
    return 1.0

progress = Progress(clock=clock)
signal.signal(signal.SIGUSR1, lambda *_: seen.append(1) or seen.append(progress.snapshot().samples))
progress.start()
progress.snapshot()
print(seen)
"""


def test_a_handler_never_waits_for_the_thread_that_it_interrupts() -> None:
    ended = subprocess.run([sys.executable, "-c", _PROGRAM], capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout == "[1, 0]\n"
