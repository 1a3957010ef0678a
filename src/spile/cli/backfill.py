"""``spile extract --add-taps``: taps added to a dataset that is finished."""

from __future__ import annotations

from typing import TYPE_CHECKING

from spile.errors import SpecError

if TYPE_CHECKING:
    from spile.cli.flags import ExtractFlags
    from spile.cli.pod import PodFlags
    from spile.cli.shell.backfill_flags import BackfillFlags

__all__ = ["add_taps"]


def add_taps(backfill: BackfillFlags, flags: ExtractFlags, pod: PodFlags, verbose: bool) -> int:
    """Add them while a person watches; the exit code."""
    from spile.view.worker import watched
    from spile.worker.backfill import add_taps as run
    from spile.worker.signals import end_soon

    spec = backfill.spec(flags)
    hosts = pod.identity().count
    if hosts > 1:
        raise SpecError("--add-taps", expected="one process, with all of its devices", found=f"a pod of {hosts} hosts")
    with watched(verbose) as watch:
        summary = run(spec, progress=watch.progress, stop=watch.stop)
        watch.finish(summary, spec.max_samples)
    if summary.interrupted:
        end_soon(summary.exit_code)
    return summary.exit_code
