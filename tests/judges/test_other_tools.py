"""Our taps beside those of other tools: interp-engine, and every name of docs/taps.md in TransformerLens and nnsight.

They run in an environment of their own: ``make judges``.
"""

from __future__ import annotations

import functools
import json
import logging
import re
import shutil
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

MISSING = []
for package, major in (("transformer-lens", 4), ("interp-engine", 1), ("nnsight", 0)):
    try:
        MISSING += [package] if int(version(package).split(".")[0]) < major else []
    except PackageNotFoundError:
        MISSING.append(package)
if MISSING:
    pytest.skip(f"no {', '.join(MISSING)} here: make judges-install", allow_module_level=True)
pytestmark = pytest.mark.filterwarnings("default")  # their own imports warn

from numerics import cases  # noqa: E402
from numerics.test_edits import dense  # noqa: E402
from spile.models import model_files, weights  # noqa: E402
from spile.models.architecture import ModelConfig  # noqa: E402
from spile.models.decoder import forward  # noqa: E402
from spile.spec.taps import Tap  # noqa: E402

TOLERANCE = 1e-5
"""The largest distance found is 4e-6."""
TOKENIZER = Path(model_files.__file__).parent / "embedded"
FAMILIES = (
    *("gpt2", "gpt-neox", "qwen2-sites", "qwen3-sites", "llama-sites", "mistral-sites", "gemma", "gemma2", "gemma3"),
    *("phi", "phi3", "olmo2", "olmo3", "qwen3-moe", "mixtral", "gpt-oss", "granite", "glm4", "smollm3"),
)
"""Cases of TransformerLens."""
LLAMA_NAMES = (
    *("qwen2-sites", "qwen3-sites", "llama-sites", "mistral-sites", "gemma", "gemma2", "gemma3", "olmo2", "olmo3"),
    *("qwen3-moe", "mixtral", "gpt-oss", "granite", "glm4", "smollm3"),
)
"""Cases of nnsight: families whose modules have the names of Llama."""


class World(NamedTuple):
    """One model, its tokens, and our values of its taps."""

    folder: Path
    model: Any
    config: ModelConfig
    tokens: np.ndarray
    ours: dict[Tap, np.ndarray]


@functools.cache
def world(case: str, folder: Path) -> World:
    import torch
    from transformers import AutoModelForCausalLM

    logging.getLogger("transformers").setLevel(logging.ERROR)
    files, tokens = model_files.find(str(cases.write_model(case, folder))), cases.tokens(case)
    config, taps = files.config, cases.taps(case)
    if case not in cases.FIRST_KINDS:
        more = [("head_out", None), ("pattern", 64), ("pattern_ids", 64)]
        taps = (*taps, *(Tap(kind, layer, top=top) for kind, top in more for layer in range(config.n_layers)))
    params = weights.load(files, jnp.float32, head=True)
    step = jax.jit(lambda p, t: forward(p, t, config=config, taps=taps))
    found = [np.asarray(each, np.float64) for each in step(params, tokens)]
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **eager).eval()
    return World(folder, model, config, tokens, dict(zip(taps, found, strict=True)))


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def grouped(names: Sequence[str]) -> Any:
    """Run the tests of one case in one process, which makes its model once."""
    marked = [pytest.param(case, marks=pytest.mark.xdist_group(case)) for case in names]
    return pytest.mark.parametrize("case", marked)


def compare(tap: Tap, ours: np.ndarray, theirs: Any, name: str) -> None:
    theirs = np.asarray(theirs, np.float64)
    assert theirs.size == ours.size, (tap, name, theirs.shape)
    assert cases.distance(ours, theirs.reshape(ours.shape)) <= TOLERANCE, (tap, name)


def pattern(world: World, layer: int) -> np.ndarray:
    """Return our attention weights ``[rows, heads, queries, keys]``."""
    parts = (world.ours[Tap(kind, layer, top=64)] for kind in ("pattern", "pattern_ids"))
    heads, length = world.config.n_heads, world.tokens.shape[1]
    return np.stack([dense(*each, heads, length) for each in zip(*parts, strict=True)])


# -- interp-engine ----------------------------------------------------------------------------------------------------

POINTS = {
    "residual": "resid_post",
    "attn": "attn_out_post",
    "mlp": "mlp_out_post",
    "embed": "embeddings",
    "resid_pre": "resid_pre",
    "resid_mid": "resid_mid",
    "attn_in": "attn_in",
    "mlp_in": "mlp_in",
    "mlp_hidden": "mlp_act",
    "q": "q_norm_in",
    "k": "k_norm_in",
    "v": "value",
    "z": "z",
    "router": "router_logits",
    "final_norm": "final_norm",
    "logits": "lm_head",
}


@grouped(tuple(cases.CASES))
def test_every_tap_of_every_case_equals_interp_engine(case: str, models: Path) -> None:
    import torch
    from interp_engine import Address, capture
    from interp_engine.model import EagerModel

    here = world(case, models / case)
    engine: Any = EagerModel(
        str(here.folder), device="cpu", attn_implementation="eager", hf_model=here.model, tokenizer=object()
    )
    points = {tap: Address(POINTS[tap.kind], tap.layer) for tap in here.ours if tap.kind in POINTS}
    refused = {tap.kind for tap, point in points.items() if engine.refuses(point)}
    # It has queries and keys at their norm only.
    assert refused == (set() if here.config.qk_norm else {"q", "k"}) & {tap.kind for tap in points}
    points = {tap: point for tap, point in points.items() if tap.kind not in refused}
    found = capture(engine, torch.from_numpy(here.tokens).long(), list(points.values()))
    for tap, point in points.items():
        compare(tap, here.ours[tap], _as_ours(tap, found[point].double().numpy(), here.config), str(point))


def _as_ours(tap: Tap, theirs: np.ndarray, config: ModelConfig) -> np.ndarray:
    """Apply what follows two of its points: Granite's factor on the embedding, and all that follows the LM head."""
    if tap.kind == "embed" and config.architecture == "granite":
        return theirs * (config.embedding_scale or 1.0)
    if tap.kind == "logits":
        theirs = -np.sort(-theirs / (config.logits_divisor or 1.0), axis=-1)[..., : tap.top]
        cap = config.final_softcap
        return theirs if cap is None else cap * np.tanh(theirs / cap)
    return theirs


# -- the names of docs/taps.md ----------------------------------------------------------------------------------------

SELECTED = {
    "Gemma 2 and 3": ("gemma2", "gemma3_text"),
    "GLM-4-0414": ("glm4",),
    "OLMo 2 and 3": ("olmo2", "olmo3"),
    "gpt-oss": ("gpt_oss",),
    "Granite": ("granite",),
}
"""Families that a cell of the table names."""
_NAME = re.compile(r"(?:([^`:]+): )?`([^`]+)`(?: times `(\w+)`)?")


def column(title: str, tap: Tap, here: World) -> tuple[str, float]:
    """Return the name of a tap in a column of docs/taps.md for this family, and the factor that the cell states."""
    page = (Path(__file__).parents[2] / "docs" / "taps.md").read_text().splitlines()
    titles = next(line for line in page if line.startswith("| tap |")).split(" | ")
    row = next(line for line in page if re.match(rf"\| `{tap.kind}[`.]", line)).split(" | ")
    chosen: tuple[str, float] | None = None
    for part in row[titles.index(title)].strip(" |").split("; "):
        found = _NAME.fullmatch(part)
        assert found is not None, part
        who, name, field = found.groups()
        applies = who is None or any(here.config.architecture in SELECTED[each] for each in who.split(", "))
        if applies:
            factor = getattr(here.model.config, field) if field else 1.0
            chosen = re.sub(r"(?<=[.\[])L(?=[.\]])", str(tap.layer), name), factor
    assert chosen is not None, (title, tap)
    return chosen


@grouped(FAMILIES)
def test_every_name_of_transformer_lens(case: str, models: Path) -> None:
    import torch
    from transformer_lens.model_bridge import TransformerBridge

    here = world(case, models / case)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(TOKENIZER / name, here.folder)
    config = json.loads((here.folder / "config.json").read_text())
    (here.folder / "config.json").write_text(json.dumps({**config, "architectures": [type(here.model).__name__]}))
    bridge: Any = TransformerBridge.boot_transformers(str(here.folder), device="cpu", dtype=torch.float32)
    bridge.set_use_attn_result(True)
    _, theirs = bridge.run_with_cache(torch.from_numpy(here.tokens).long())
    for tap, ours in here.ours.items():
        if tap.kind in ("logits", "logits_ids", "loss", "pattern_ids"):  # they have no hook
            continue
        name, _ = column("TransformerLens", tap, here)
        compare(tap, pattern(here, tap.layer or 0) if tap.kind == "pattern" else ours, theirs[name].detach(), name)


@grouped(LLAMA_NAMES)
def test_every_name_of_nnsight(case: str, models: Path) -> None:
    import torch
    from nnsight import NNsight

    here = world(case, models / case)
    model, ids = NNsight(here.model), torch.from_numpy(here.tokens).long()
    for tap, ours in here.ours.items():
        if not column_is_code(tap):
            continue
        name, factor = column("nnsight", tap, here)
        code = compile(f"sight.{name}", name, "eval")
        with model.trace(ids):
            found = eval(code, {"sight": model}).save()
        compare(tap, ours, found.detach().double().numpy() * factor, name)


def column_is_code(tap: Tap) -> bool:
    return tap.kind not in ("head_out", "pattern", "pattern_ids", "logits", "logits_ids", "loss")
