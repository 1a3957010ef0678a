"""Our taps of GPT-2 and Pythia against TransformerLens' own hooks. Runs where transformer-lens 4 is installed."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import pytest

try:
    MAJOR = int(version("transformer-lens").split(".")[0])
except PackageNotFoundError:
    MAJOR = 0
if MAJOR < 4:  # sae-lens brings an older one along, whose hooks have other names
    pytest.skip("no transformer-lens 4 here: it needs an environment of its own", allow_module_level=True)
pytestmark = pytest.mark.filterwarnings("default")  # its own imports warn

from numerics import cases  # noqa: E402
from numerics.test_against_transformers import TOLERANCE, load, run  # noqa: E402
from spile.spec.taps import Tap  # noqa: E402


def hooks(folder: Path, tokens: np.ndarray) -> dict[str, np.ndarray]:
    import torch
    from transformer_lens.model_bridge import TransformerBridge

    bridge: Any = TransformerBridge.boot_transformers(str(folder), device="cpu", dtype=torch.float32)
    _, cache = bridge.run_with_cache(torch.from_numpy(tokens).long())
    return {name: np.asarray(value.detach()) for name, value in cache.items()}


def hook_name(tap: Tap) -> str:
    """What docs/taps.md says that TransformerLens calls it."""
    page = (Path(__file__).parents[2] / "docs" / "taps.md").read_text()
    row = next(line for line in page.splitlines() if re.match(rf"\| `{tap.kind}[`.]", line))
    return row.split(" | ")[3].strip("`").replace(".L.", f".{tap.layer}.")


@pytest.mark.parametrize("case", ["gpt2", "gpt-neox"])  # unscaled scores and attention without biases it does not have
def test_every_hook_of_the_table(case: str, tmp_path: Path) -> None:
    tokens = cases.tokens(case)
    ours = dict(zip(cases.taps(case), run(*load(case, tmp_path), tokens, case), strict=True))
    theirs = hooks(tmp_path, tokens)
    compared = [tap for tap in ours if hook_name(tap) in theirs]
    kinds = {tap.kind for tap in compared}
    beyond = {"logits", "logits_ids", "loss"}  # whole logits are kept nowhere
    assert kinds == {tap.kind for tap in ours} - beyond
    for tap in compared:
        expected = theirs[hook_name(tap)].reshape(ours[tap].shape)
        assert cases.error(ours[tap], expected) <= TOLERANCE, tap
