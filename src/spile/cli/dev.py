"""``spile dev fake-cloud``: a local stand-in for the Cloud TPU API, to try a fleet without a cloud."""

from __future__ import annotations

from pathlib import Path

__all__ = ["fake_cloud"]


def fake_cloud(
    *,
    port: int = 0,
    folder: Path | None = None,
    create_seconds: float = 2.0,
    delete_seconds: float = 1.0,
) -> None:
    """Serve the TPU API on a loopback port, with machines that are processes of this computer.

    Prints the variables that point spile and gcloud at it, then serves until Ctrl+C, which ends every machine.
    Admin calls: ``curl -d '{"zone": Z, "name": N}' $SPILE_TPU_ENDPOINT/admin/preempt``, and likewise ``stock``
    (zone, available), ``quota`` (zone, limit), ``fault`` (method, path, count, status, message), ``pace``, ``clock``.

    :param port: Where to listen; 0 picks a free one.
    :param folder: Where the machines' folders are; a temporary one if not given.
    :param create_seconds: How long a machine takes to become READY.
    :param delete_seconds: How long a machine takes to go.
    """
    import signal
    import tempfile
    import threading

    from spile.fleet.fake_cloud.cloud import Pace
    from spile.fleet.fake_cloud.server import FakeCloud

    done = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: done.set())
    with tempfile.TemporaryDirectory(prefix="spile-cloud-", ignore_cleanup_errors=True) as temporary:
        pace = Pace(create_seconds, delete_seconds)
        with FakeCloud(folder or Path(temporary), port=port, pace=pace) as cloud:
            for name, value in cloud.environment().items():
                print(f"export {name}={value}", flush=True)
            done.wait()
