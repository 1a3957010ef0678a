"""One answer for all: the pipeline's control on a pod.

The hosts run the same programs in the same order or wait for each other for ever, so nothing local may decide when a
shard ends. Process 0 decides before each batch, for its own signals and clock and for what the others wish.
"""

from __future__ import annotations

from spile.errors import PodError
from spile.runtime.pipeline import Control, Verdict
from spile.runtime.pod.pod import Pod

__all__ = ["PodControl"]

_KEPT = 64
"""Verdicts that stay in the directory; no host is ever that far behind."""


class PodControl:
    """A :class:`~spile.runtime.pipeline.Control` that says the same on every host."""

    def __init__(self, pod: Pod, local: Control) -> None:
        self._pod, self._local = pod, local
        self._asked = 0
        self._wished = False

    def verdict(self) -> Verdict:
        """Asked once before each batch, by every host."""
        self._asked += 1
        mine = self._local.verdict()
        key = f"verdict/{self._asked}"
        directory = self._pod.coordination
        if self._pod.identity.first:
            verdict: Verdict = "stop" if directory.entries("wish") else mine
            directory.put(key, verdict)
            if self._asked > _KEPT:
                directory.delete(f"verdict/{self._asked - _KEPT}")
            return verdict
        if mine == "stop" and not self._wished:
            directory.put(f"wish/{self._pod.identity.process}", "stop")
            self._wished = True
        said = directory.get(key, self._pod.times.barrier)
        if said not in ("go", "commit", "stop"):
            raise PodError(
                f"{self._pod.identity.host(0)} did not say how to go on after batch {self._asked - 1} "
                f"within {self._pod.times.barrier:g} s"
            )
        return said  # type: ignore[return-value]

    def committed(self) -> None:
        """The clock starts again; process 0's is the one that counts."""
        self._local.committed()
