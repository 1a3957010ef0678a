"""One answer for all: the pipeline's control on a pod.

The hosts run the same programs in the same order or wait for each other for ever, so nothing local may decide when a
shard ends. Process 0 decides before each batch, for its own signals and clock and for what the others wish; and it
waits for those that fall behind, so that a wish is heard within a few batches.
"""

from __future__ import annotations

import time

from spile.errors import PodError
from spile.runtime.flow import Control, Verdict
from spile.runtime.pod.pod import Pod

__all__ = ["PodControl"]

_AHEAD = 4
"""Batches that process 0 may decide on before the slowest host has asked."""
_KEPT = 64
"""Verdicts that stay in the directory; no host is ever that far behind."""


class PodControl:
    """A :class:`~spile.runtime.pipeline.Control` that says the same on every host."""

    def __init__(self, pod: Pod, local: Control) -> None:
        self._pod, self._local = pod, local
        self._number = 0

    def verdict(self) -> Verdict:
        """Asked once before each batch, by every host."""
        self._number += 1
        mine = self._local.verdict()
        return self._decide(mine) if self._pod.identity.first else self._ask(mine)

    def stopping(self) -> bool:
        """A signal came here. Process 0, which decides, looks for one on any host; the others for its decision."""
        if self._local.stopping():
            return True
        if self._pod.identity.first:
            return any("stop" in said for said in self._asked().values())
        return self._pod.coordination.entries("verdict").get(f"{self._number + 1}") == "stop"

    def committed(self) -> None:
        """The clock starts again; process 0's is the one that counts."""
        self._local.committed()

    def _decide(self, mine: Verdict) -> Verdict:
        verdict: Verdict = "stop" if self._others_wish_to_stop() else mine
        directory = self._pod.coordination
        directory.put(f"verdict/{self._number}", verdict)
        if self._number > _KEPT:
            directory.delete(f"verdict/{self._number - _KEPT}")
        return verdict

    def _others_wish_to_stop(self) -> bool:
        """What the others said when they last asked, once none of them is too far behind."""
        until = time.monotonic() + self._pod.times.barrier
        pause = 0.001
        while True:
            asked = self._asked()
            behind = [
                process
                for process in range(1, self._pod.identity.count)
                if int(asked.get(process, ["0"])[0]) < self._number - _AHEAD
            ]
            if not behind:
                return any("stop" in said for said in asked.values())
            if time.monotonic() > until:
                raise PodError(
                    f"{', '.join(map(self._pod.identity.host, behind))} fell behind by {_AHEAD} batches "
                    f"for {self._pod.times.barrier:g} s",
                    fix="see those hosts' logs, then run the same command again",
                )
            time.sleep(pause)
            pause = min(2 * pause, 0.05)

    def _asked(self) -> dict[int, list[str]]:
        return {int(process): said.split() for process, said in self._pod.coordination.entries("asked").items()}

    def _ask(self, mine: Verdict) -> Verdict:
        directory = self._pod.coordination
        wish = " stop" if mine == "stop" else ""
        directory.put(f"asked/{self._pod.identity.process}", f"{self._number}{wish}")
        said = directory.get(f"verdict/{self._number}", self._pod.times.barrier)
        if said not in ("go", "commit", "stop"):
            raise PodError(
                f"{self._pod.identity.host(0)} did not say how to go on after batch {self._number - 1} "
                f"within {self._pod.times.barrier:g} s",
                fix="see that host's log, then run the same command again",
            )
        return said  # type: ignore[return-value]
