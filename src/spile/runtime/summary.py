"""What a visit to a stream came to: the facts behind the last lines that a user sees."""

from __future__ import annotations

import resource
import sys
from dataclasses import dataclass
from pathlib import Path

from spile.errors import Interrupted
from spile.planning.amounts import amount, duration, size
from spile.runtime.progress import ProgressSnapshot

__all__ = ["Summary", "peak_memory"]


def peak_memory() -> int:
    """The most host memory this process ever held, in bytes."""
    status = Path("/proc/self/status")
    if status.exists():  # rusage would count what the process that started this one held then
        fields = dict(line.split(":", 1) for line in status.read_text().splitlines())
        return int(fields["VmHWM"].split()[0]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@dataclass(frozen=True)
class Summary:
    """One visit, and what the stream holds after it."""

    root: str
    stream: str
    complete: bool
    """Nothing of the stream is left (or of its first ``--max-samples``)."""
    interrupted: bool
    visit: ProgressSnapshot
    """What this visit did."""
    samples: int
    """What the stream holds now, earlier visits included."""
    tokens: int
    bytes: int
    shards: int
    skipped: int
    device: str
    sink: str
    """``disk`` or ``bucket``."""
    peak_memory: int
    retries: int = 0

    @property
    def exit_code(self) -> int:
        """0, or that of an interruption: what is left waits for the next visit."""
        return Interrupted.exit_code if self.interrupted else 0

    @property
    def limited_by(self) -> str | None:
        """``disk, 1.31 GB/s`` or ``model, 12,345 tokens/s``: the stage that all others waited for."""
        stage = self.visit.limit
        if stage is None or not self.visit.tokens:
            return None
        if stage == "compiling":
            return f"compiling, {duration(self.visit.compile_seconds)}"
        busy = self.visit.busy[stage]
        if stage in ("host copy", "sink"):
            name = self.sink if stage == "sink" else stage
            return f"{name}, {size(self.visit.bytes / busy)}/s"
        return f"{stage}, {amount(self.visit.tokens / busy)} tokens/s"
