"""``spile dev fake-cloud``: a local stand-in for the Cloud TPU API, to try a fleet without a cloud."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

__all__ = ["fake_cloud"]


def fake_cloud(
    *,
    port: Annotated[int, Parameter(help="Where to listen; 0 picks a free one.")] = 0,
    folder: Annotated[
        Path | None, Parameter(help="Where the machines' folders are. [default: a temporary one]")
    ] = None,
    create_seconds: Annotated[float, Parameter(help="How long a machine takes to become READY.")] = 2.0,
    delete_seconds: Annotated[float, Parameter(help="How long a machine takes to go.")] = 1.0,
) -> None:
    """Serve the TPU API on a loopback port, with machines that are processes of this computer.

    Prints the variables that point spile and gcloud at it, then serves until Ctrl+C, which ends every machine.
    Admin calls: ``curl -d '{"zone": Z, "name": N}' $SPILE_TPU_ENDPOINT/admin/preempt``, and likewise ``stock``
    (zone, available), ``quota`` (zone, limit), ``fault`` (method, path, count, status, message), ``pace``, ``clock``.
    """
    import signal
    import tempfile
    import time

    from spile.fleet.fake_cloud.cloud import CloudTimes
    from spile.fleet.fake_cloud.server import FakeCloud

    asked: list[int] = []  # no event: its lock is not for handlers, and a second signal would wait for it for ever
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: asked.append(number))
    with tempfile.TemporaryDirectory(prefix="spile-cloud-", ignore_cleanup_errors=True) as temporary:
        pace = CloudTimes(create_seconds, delete_seconds)
        with FakeCloud(folder or Path(temporary), port=port, pace=pace) as cloud:
            for name, value in cloud.environment().items():
                print(f"export {name}={value}", flush=True)
            while not asked:
                time.sleep(0.1)
