"""Packed rows on meshes: every sample's rows are those of one device, to float32's rounding."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import numpy as np
from spile.models import model_files, weights
from spile.compute.batches import Sizes, batches
from spile.compute.device import DeviceProducer
from spile.compute.mesh import MeshPlan, make_mesh
from spile.spec.sample import Sample
from spile.spec.taps import Tap
from spile.models.weights import load
import jax

FILES, TAPS = model_files.find("embedded"), (Tap("attn", 0), Tap("residual", 1))
draw = np.random.default_rng(0)
SAMPLES = [
    Sample(i, str(i), draw.integers(0, 100, n).astype(np.int32), np.zeros(n, np.uint8))
    for i, n in enumerate([1, 63, 64, 30, 34, 2, 17, 40, 5, 64, 1, 8])
]

def rows(shape):
    devices = jax.devices()[: shape[0] * shape[1]]
    mesh, plan = make_mesh(shape, devices), MeshPlan(FILES.config, *shape)
    producer = DeviceProducer(
        load(FILES, "float32", 2, plan.place(mesh)), FILES.config, TAPS, store_dtype="float32", mesh=mesh,
        attention="xla", dtype="float32",
    )
    found = {}
    for batch in batches(SAMPLES, Sizes(128, None, 64, groups=producer.groups)):
        assert batch.length == 64
        for tap, blocks in enumerate(producer.fetch(producer.start(batch))):
            for block in blocks:
                start = 0
                for sample in batch.samples_of(block.group):
                    found[tap, sample.index] = np.array(block.rows[start : start + len(sample)])
                    start += len(sample)
    producer.close()
    return found

alone = rows((1, 1))
assert len(alone) == len(TAPS) * len(SAMPLES)
for shape in ((4, 1), (2, 2), (1, 4)):
    for key, found in rows(shape).items():
        scale = np.sqrt(np.mean(alone[key] ** 2))
        assert np.abs(found - alone[key]).max() <= 1e-4 * scale, (shape, key)
print("same")
"""


@pytest.mark.slow
def test_any_mesh_gives_the_same_rows() -> None:
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "same", done.stderr[-2000:]
