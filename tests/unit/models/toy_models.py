"""Small model folders to break."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from spile.models import weights

__all__ = ["EMBEDDED", "copy_model", "edit_tensors", "shard_model", "small_model"]

EMBEDDED = Path(weights.__file__).parent / "embedded"


def copy_model(folder: Path) -> Path:
    """Copy the embedded model to a folder that a test may change."""
    shutil.copytree(EMBEDDED, folder)
    return folder


def small_model(folder: Path, layers: int, width: int = 16) -> Path:
    """A model of the embedded one's kind and tokenizer, with as many layers as asked for and next to no width."""
    copy_model(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {
        "num_hidden_layers": layers,
        "hidden_size": width,
        "intermediate_size": width,
        "max_window_layers": layers,
    }
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    (folder / "config.json").write_text(json.dumps(config))
    head, sizes = width // 2, np.random.default_rng(0)
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], width), "model.norm.weight": (width,)}
    for layer in range(layers):
        block = {
            "self_attn.q_proj.weight": (width, width), "self_attn.q_proj.bias": (width,),
            "self_attn.k_proj.weight": (head, width), "self_attn.k_proj.bias": (head,),
            "self_attn.v_proj.weight": (head, width), "self_attn.v_proj.bias": (head,),
            "self_attn.o_proj.weight": (width, width),
            "mlp.gate_proj.weight": (width, width), "mlp.up_proj.weight": (width, width),
            "mlp.down_proj.weight": (width, width),
            "input_layernorm.weight": (width,), "post_attention_layernorm.weight": (width,),
        }  # fmt: skip
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in block.items()}
    drawn = {name: sizes.normal(0.0, 0.1, shape).astype(np.float32) for name, shape in shapes.items()}
    save_file(drawn, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def tensors(folder: Path) -> dict[str, np.ndarray]:
    """The weights by the file's names."""
    return load_file(folder / "model.safetensors")


def edit_tensors(folder: Path, **changes: np.ndarray | None) -> Path:
    """Replace, add or (None) remove tensors; ``__`` in a name stands for a dot."""
    found = tensors(folder)
    for name, value in changes.items():
        key = name.replace("__", ".")
        if value is None:
            del found[key]
        else:
            found[key] = value
    save_file(found, folder / "model.safetensors")
    return folder


def shard_model(folder: Path, parts: int = 3) -> Path:
    """Split the single file into an index of several."""
    found = tensors(folder)
    names = [f"model-{part + 1:05d}-of-{parts:05d}.safetensors" for part in range(parts)]
    where = {name: names[number % parts] for number, name in enumerate(sorted(found))}
    for file in names:
        save_file({name: found[name] for name in where if where[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    (folder / "model.safetensors").unlink()
    return folder
