"""The phase of a worker, as heartbeats, supervisors' reports, signals and tables show it.

booting ▸ installing ▸ starting        a machine of a fleet, before its worker runs
looking ▸ loading ▸ compiling ⇄ running ▸ writing | uploading ▸ done | stopped | failed        the worker
"""

from __future__ import annotations

import enum


class Phase(enum.StrEnum):
    """The phase of a worker or of the machine that starts it. The value is the JSON text."""

    UNKNOWN = ""
    """No phase was reported, or one that only a newer version knows."""
    BOOTING = "booting"
    """The machine runs its startup script."""
    INSTALLING = "installing"
    """The machine installs spile."""
    STARTING = "starting"
    """The machine's supervisor starts the worker."""
    LOOKING = "looking"
    """The worker inspects the model and the data. It has written nothing yet, so no heartbeat contains this phase."""
    LOADING = "loading"
    """The worker loads the weights. Only heartbeats of resumed streams contain this phase."""
    COMPILING = "compiling"
    """The next batch waits for its program."""
    RUNNING = "running"
    """Batches are computed, and at the same time written and uploaded."""
    WRITING = "writing"
    """No batch is left to start; the last ones are being written to a disk and committed."""
    UPLOADING = "uploading"
    """No batch is left to start; the last ones are being uploaded to a bucket and committed."""
    DONE = "done"
    """Everything that was requested is committed."""
    STOPPED = "stopped"
    """The worker ended early after a signal or a preemption."""
    FAILED = "failed"
    """The worker ended with an error."""

    @classmethod
    def _missing_(cls, _: object) -> Phase:
        """Return UNKNOWN for any other text, so that records of newer versions can be read."""
        return cls.UNKNOWN

    @property
    def ended(self) -> bool:
        """Whether the worker has ended."""
        return self in (Phase.DONE, Phase.STOPPED, Phase.FAILED)

    @property
    def early(self) -> bool:
        """Whether the worker may not have computed anything yet, so that a signal can end it at once."""
        return self in (Phase.LOOKING, Phase.LOADING, Phase.COMPILING)

    @property
    def slow(self) -> bool:
        """Whether heartbeats may be delayed: no worker runs yet, or a library call blocks it for minutes."""
        return not (self.ended or self in (Phase.RUNNING, Phase.WRITING, Phase.UPLOADING))
