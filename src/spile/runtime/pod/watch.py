"""The watch: every process keeps a beat and looks at the others', and ends with one line when one of them has ended.

A thread that waits in a collective for a dead host cannot be asked to stop, so the watch ends the whole process.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from spile.runtime.pod.barriers import Coordination
from spile.runtime.pod.identity import Identity

__all__ = ["Beats", "End", "PodWatch", "end_process"]


_NEXT = "this process ends too, and the same command on all hosts resumes"


@dataclass(frozen=True)
class End:
    """Why to stop, and with which exit code."""

    line: str
    code: int = 1


@dataclass
class Beats:
    """The others' beats as they were last seen: pure but for the clock it is handed."""

    identity: Identity
    timeout: float
    seen: dict[int, tuple[str, float]] = field(default_factory=dict)

    def look(self, alive: Mapping[str, str], ended: Mapping[str, str], now: float) -> End | None:
        """Take what the directory says. A reason to end, or None."""
        for number, text in sorted(ended.items()):
            if int(number) != self.identity.process:
                said = json.loads(text)
                return End(f"{self.identity.host(int(number))} ended: {said['line']}", int(said["code"]))
        for process in range(self.identity.count):
            beat = alive.get(str(process), "")
            before = self.seen.get(process)
            if before is None or before[0] != beat:
                self.seen[process] = (beat, now)
            elif now - before[1] > self.timeout and process != self.identity.process:
                report = beat.partition("\t")[2] or "nothing"
                return End(
                    f"{self.identity.host(process)} died or was cut off: no sign of life for {self.timeout:g} s; "
                    f"it last reported: {report}; {_NEXT}"
                )
        return None


def end_process(end: End) -> None:
    """One line, then out: nothing else in this process can be trusted to come back."""
    sys.stdout.flush()
    os.write(2, f"spile: {end.line}\n".encode())
    os._exit(end.code)


class PodWatch:
    """The thread."""

    def __init__(
        self,
        coordination: Coordination,
        *,
        timeout: float,
        every: float | None = None,
        end: Callable[[End], None] = end_process,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._coordination, self._timeout = coordination, timeout
        self._every = every if every is not None else min(1.0, timeout / 4)
        self._end, self._clock = end, clock
        self._report = "joined"
        self._over = threading.Event()
        self._news = threading.Event()
        self._answered = clock()
        self._threads = [
            threading.Thread(target=work, name=name, daemon=True)
            for name, work in (("spile-beat", self._beat), ("spile-watch", self._guard))
        ]
        for thread in self._threads:
            thread.start()

    def report(self, text: str) -> None:
        """What this process does now; the others repeat it should it die."""
        self._report = " ".join(text.split())
        self._news.set()

    def stop(self) -> None:
        """Look no more: the others may go."""
        self._over.set()
        self._news.set()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _beat(self) -> None:
        identity = self._coordination.identity
        beats = Beats(identity, self._timeout)
        number = 0
        while not self._over.is_set():
            number += 1
            try:
                self._coordination.put(f"alive/{identity.process}", f"{number}\t{self._report}")
                alive, ended = self._coordination.entries("alive"), self._coordination.entries("ended")
            except Exception as error:  # noqa: BLE001 - whatever it is, the service does not answer
                if not self._over.is_set():
                    self._lost(str(error))
                return
            self._answered = self._clock()
            end = beats.look(alive, ended, self._answered)
            if end is not None and not self._over.is_set():
                self._end(end)
                return
            self._news.wait(self._every)
            self._news.clear()

    def _guard(self) -> None:
        """A host that vanished without a word leaves our call waiting: notice that from another thread."""
        while not self._over.wait(self._every):
            if self._clock() - self._answered > self._timeout:
                self._lost(f"no answer for {self._timeout:g} s")
                return

    def _lost(self, why: str) -> None:
        identity = self._coordination.identity
        short = " ".join(why.split())[:120]
        self._end(End(f"{identity.host(0)} died or was cut off: its coordination service is gone ({short}); {_NEXT}"))
