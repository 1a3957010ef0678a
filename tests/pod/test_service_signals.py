"""The coordination service outlives a signal to all processes of a job, as Slurm and systemd send it."""

from __future__ import annotations

import signal
import time

from spile.run.pod.coordination import Service


def test_the_service_ignores_signals_and_ends_with_its_parents_word() -> None:
    service = Service("127.0.0.1", 1, 1.0)
    process = service.process
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        process.send_signal(number)
    time.sleep(0.3)
    assert process.poll() is None
    service.stop()
    assert process.wait(30) == 0
