"""``spile pod check``: every host passes every barrier, sees its devices, and computes one tiny forward pass."""

from __future__ import annotations

from collections.abc import Callable

from spile.errors import PodError
from spile.worker.pod.pod import BARRIERS, WorkerGroup

_LENGTH = 64
_TOLERANCE = 0.02
"""More than the rounding of bfloat16; a wrong collective differs by far more."""


def log_devices(hosts: WorkerGroup, log: Callable[[str], None]) -> None:
    """Log the devices of this host."""
    import jax

    local, every = jax.local_devices(), jax.device_count()
    ids = ", ".join(str(device.id) for device in local)
    log(f"✓ {hosts.name or 'This process'} sees {len(local)} of {every} devices: {local[0].device_kind}, ids {ids}")


def check_pod(hosts: WorkerGroup, log: Callable[[str], None]) -> None:
    """Check barriers, devices, and a forward pass over all devices against one on this host."""
    if not hosts.name:
        log("One host: nothing between hosts is tested. On every host: spile run --tpu-prefix NAME -- spile pod check")
    log_devices(hosts, log)
    for name in BARRIERS[1:-1]:
        if name == "extraction_start":
            _forward(hosts, log)
        hosts.barrier(name)
        log(f"✓ Passed '{name}' barrier")
    hosts.barrier(BARRIERS[-1])
    log(f"✓ Passed '{BARRIERS[-1]}' barrier")
    log(f"✓ {hosts.name or 'This process'}: all checks passed")


def _forward(hosts: WorkerGroup, log: Callable[[str], None]) -> None:
    """Compare the embedded model on the whole mesh with the same model on one device."""
    import jax
    import numpy as np

    from spile.models import model_files
    from spile.models.weights import load
    from spile.spec.run import EMBEDDED
    from spile.spec.sample import Sample
    from spile.spec.taps import Tap
    from spile.worker.batches import Batch
    from spile.worker.device import DeviceProducer
    from spile.worker.mesh import make_mesh, plan_mesh
    from spile.worker.resolve import compute_dtype_for

    files = model_files.find(EMBEDDED)
    taps = (Tap("residual", files.config.n_layers - 1),)
    dtype = compute_dtype_for(jax.default_backend())

    def producer(devices: list[jax.Device], shape: tuple[int, int]) -> DeviceProducer:
        mesh = make_mesh(shape, devices)
        params = load(files, dtype, None, plan_mesh(files.config, shape).place(mesh))
        return DeviceProducer(
            params, files.config, taps, store_dtype="float32", mesh=mesh, attention="xla", dtype=dtype
        )

    tokens = np.arange(_LENGTH, dtype=np.int32) % files.config.vocab_size
    sample = Sample(0, "check", tokens, np.zeros(_LENGTH, np.uint8))
    everyone = producer(jax.devices(), _shape(jax.device_count()))
    together = everyone.fetch(everyone.start(Batch((((sample,),),) * everyone.groups, 1, _LENGTH)))[0]
    alone = producer([jax.local_devices()[0]], (1, 1))
    reference = alone.fetch(alone.start(Batch((((sample,),),), 1, _LENGTH)))[0][0].rows.astype(np.float64)
    scale = float(np.sqrt(np.mean(np.square(reference))))
    worst = max(float(np.max(np.abs(block.rows.astype(np.float64) - reference))) for block in together) / scale
    if worst > _TOLERANCE:
        raise PodError(
            f"{hosts.name or 'this process'}: the forward over all devices",
            expected=f"rows as one device computes them, to {_TOLERANCE:g} of their size",
            found=f"{worst:.3g}",
            fix="recreate this slice; one of its chips or links is broken",
        )
    log(f"✓ Forward over {jax.device_count()} devices agrees with one device (largest difference {worst:.1e})")


def _shape(devices: int) -> tuple[int, int]:
    """Return a mesh shape that uses both axes if possible, so that collectives are tested too."""
    return (devices // 2, 2) if devices % 2 == 0 else (devices, 1)
