"""Every family on meshes of four devices: packed rows equal transformers', and answers are those of one device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from numerics import cases
from spile.models.families import FAMILIES

QUICK = ("gemma2", "mixtral")
SLOW = (
    "gpt-neox",
    "gemma",
    "gemma3",
    "phi3",
    "gpt2",
    "olmo2",
    "qwen3-moe",
    "qwen3-moe-mixed",
    "qwen2-sites",
    "llama-sites",
    "gpt-oss",
    "phi",
    "glm4",
    "smollm3",
    "granite",
    "olmo3",
)

SCRIPT = """
import json, sys
from pathlib import Path
import jax
import numpy as np
from safetensors.numpy import load_file
from numerics import cases
from numerics.test_generation import PLAN, prompts
from spile.models import model_files, weights
from spile.models.decoder import head_needed
from spile.compute.batches import Sizes, batches
from spile.compute.device import DeviceProducer
from spile.data.tokens import load_tokenizer
from spile.compute.progress import Progress
from spile.compute.generator import GenerationPrograms, Generator
from spile.compute.mesh import MeshPlan, make_mesh
from spile.spec.run import GenerationSpec
from spile.spec.sample import Sample
from spile.spec.taps import Tap
from spile.models.weights import load

def lying(files, shape, head):
    mesh, plan = make_mesh(shape, jax.devices()[: shape[0] * shape[1]]), MeshPlan(files.config, *shape)
    return mesh, load(files, "float32", None, plan.place(mesh), head=head)

def check_rows(case, files, shape):
    golden, taps = load_file(cases.golden_path(case)), cases.taps(case)
    samples = [
        Sample(n, str(n), golden["tokens"][n % 2][: 9 - n], np.zeros(9 - n, np.uint8)) for n in range(8)
    ]
    mesh, params = lying(files, shape, head_needed(taps))
    producer = DeviceProducer(
        params, files.config, taps, store_dtype="float32", mesh=mesh, attention="xla", dtype="float32"
    )
    seen = 0
    for batch in batches(samples, Sizes(64, None, 16, groups=producer.groups)):
        for tap, blocks in zip(taps, producer.fetch(producer.start(batch)), strict=True):
            for block in blocks:
                start = 0
                for sample in batch.samples_of(block.group):
                    found = np.asarray(block.rows[start : start + len(sample)])
                    wanted = golden[str(tap)][sample.index % 2][: len(sample)].copy()
                    if tap.kind == "loss":
                        wanted[-1] = 0  # nothing follows
                    scale = np.sqrt(np.mean(np.square(golden[str(tap)], dtype=np.float64)))
                    assert np.abs(found - wanted.reshape(found.shape)).max() <= 1e-4 * scale, (case, shape, str(tap))
                    start += len(sample)
                    seen += 1
    producer.close()
    assert seen == len(taps) * len(samples)

def answer_tokens(case, files, shape):
    mesh, params = lying(files, shape, True)
    programs = GenerationPrograms(
        params, files.config, (Tap("residual", 1),), mesh=mesh, plan=PLAN,
        generation=GenerationSpec(max_new_tokens=12), seed=0, dtype="float32", store_dtype="float32",
    )
    generator = Generator(programs, load_tokenizer(model_files.find("embedded").tokenizer_folder), Progress())
    found = {a.sample.index: a.tokens for turn in generator.answers(iter(prompts(case))) for a in turn}
    generator.close()
    return found

home, names = Path(sys.argv[1]), json.loads(sys.argv[2])
for case in names:
    files = model_files.find(str(cases.write_model(case, home / case)))
    for shape in ((2, 2), (1, 4)):
        check_rows(case, files, shape)
    alone = answer_tokens(case, files, (1, 1))
    assert len(alone) == 7
    assert answer_tokens(case, files, (2, 2)) == alone, case
print("same")
"""


def run(names: tuple[str, ...], home: Path) -> None:
    here = Path(__file__).parents[1]
    environment = {
        **os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": str(here),
    }  # fmt: skip
    words = [sys.executable, "-c", SCRIPT, str(home), json.dumps(names)]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
    assert done.stdout.strip() == "same", done.stderr[-3000:]


@pytest.mark.slow
def test_gemma2_and_experts(tmp_path: Path) -> None:
    run(QUICK, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_other_families(tmp_path: Path) -> None:
    models = {cases.CASES[case]["model_type"] for case in (*QUICK, *SLOW)}
    left_out = {"qwen3", "mistral", "glm", "gemma3"}  # variants of others, without tensors of their own
    assert models >= set(FAMILIES) - left_out
    run(SLOW, tmp_path)
