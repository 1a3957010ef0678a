"""What a worker is doing: the word that heartbeats, agents' reports, signals and tables share.

booting ▸ installing ▸ starting        a fleet's machine, before its worker runs: its startup script and its agent
looking ▸ loading ▸ compiling ⇄ running ▸ writing | uploading ▸ done | stopped | failed        the worker
"""

from __future__ import annotations

import enum

__all__ = ["Phase"]


class Phase(enum.StrEnum):
    """A member is its own JSON text."""

    UNKNOWN = ""
    """Nothing was said, or a word that only a newer version knows."""
    BOOTING = "booting"
    """A machine's startup script runs."""
    INSTALLING = "installing"
    """It installs spile."""
    STARTING = "starting"
    """The machine's agent launches the worker; older workers' heartbeats said so too."""
    LOOKING = "looking"
    """At the model and the data. Nothing was written yet, so no heartbeat says this."""
    LOADING = "loading"
    """The weights; in the heartbeat of a stream that was begun before."""
    COMPILING = "compiling"
    """The next batch waits for its program."""
    RUNNING = "running"
    """Batches are computed, and written and uploaded meanwhile."""
    WRITING = "writing"
    """No batch is left to start; the last ones are being written to a disk and committed."""
    UPLOADING = "uploading"
    """No batch is left to start; the last ones are being uploaded to a bucket and committed."""
    DONE = "done"
    """All that it was asked for is committed."""
    STOPPED = "stopped"
    """Ended early because somebody asked: a signal, a preemption."""
    FAILED = "failed"
    """Ended with an error."""

    @classmethod
    def read(cls, text: object) -> Phase:
        """From a record; a newer version's word is no reason to lose the record."""
        return next((phase for phase in cls if phase.value == text), cls.UNKNOWN)

    @property
    def ended(self) -> bool:
        """Whether the worker has left."""
        return self in (Phase.DONE, Phase.STOPPED, Phase.FAILED)

    @property
    def early(self) -> bool:
        """Whether a worker may have computed nothing yet that a signal must not lose."""
        return self in (Phase.LOOKING, Phase.LOADING, Phase.COMPILING)

    @property
    def slow(self) -> bool:
        """Whether a heartbeat may be long in coming: no worker runs yet, or it is inside a library for minutes."""
        return not (self.ended or self in (Phase.RUNNING, Phase.WRITING, Phase.UPLOADING))
