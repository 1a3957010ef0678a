"""Measure the cost of allocating pinned memory by size and method: ``python -m bench.pinned`` (a GPU)."""

from __future__ import annotations

import subprocess
import sys
import time

_WAYS = ("host", "device")
_SIZES = (1, 4, 8)
"""GiB."""


def once(way: str, size: int) -> None:
    """Allocate ``size`` bytes twice in one piece; the second time they come from the pool."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.sharding import SingleDeviceSharding

    device = jax.devices()[0]
    away = SingleDeviceSharding(device, memory_kind="pinned_host")
    jax.block_until_ready(jax.device_put(np.zeros(1024, np.uint8), device))
    times = []
    for _ in range(2):
        began = time.perf_counter()
        source = np.zeros(size, np.uint8) if way == "host" else jnp.zeros(size, jnp.uint8)
        jax.block_until_ready(jax.device_put(source, away))
        times.append(time.perf_counter() - began)
    print(f"{size >> 30} GiB from the {way}: {times[0]:.2f} s, again {times[1]:.2f} s", flush=True)


def main() -> None:
    if len(sys.argv) == 3:
        once(sys.argv[1], int(sys.argv[2]))
        return
    for way in _WAYS:
        for size in _SIZES:
            subprocess.run([sys.executable, "-m", "bench.pinned", way, str(size << 30)], check=False)


if __name__ == "__main__":
    main()
