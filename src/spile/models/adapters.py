"""LoRA adapters in PEFT's format: find them, check them, and merge them into the weights as these are read."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from spile.errors import ModelError, untrusted
from spile.models.safetensors_files import DTYPES, Entry, Piece, Values, read_header
from spile.objects.local import LocalFolder

_CONFIG, _TENSORS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_NAME = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(?:\.default)?\.weight")
_SAVE_AGAIN = "if PEFT saved embedding layers too, save the adapter again with save_embedding_layers=False"
_LARGEST_ALPHA = 1e6
_HARMLESS = frozenset({
    "auto_mapping", "base_model_name_or_path", "bias", "corda_config", "eva_config",
    "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform",
    "loftq_config", "lora_alpha", "lora_dropout", "megatron_config", "megatron_core", "peft_type", "peft_version",
    "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config", "target_modules", "task_type", "use_rslora",
})  # fmt: skip
"""Fields that spile reads, or that only determine which tensors the adapter has."""


@dataclass(frozen=True)
class LoraChange:
    """The change scale · B·A of one matrix."""

    down: Values
    up: Values
    scale: float
    transposed: bool
    """Whether the file stores the matrix as ``[in, out]``."""

    def __call__(self, values: Values) -> Values:
        """Return the sum in float32, so that it is rounded once."""
        change = self.scale * (self.up.astype(np.float32) @ self.down.astype(np.float32))
        merged: Values = values.astype(np.float32) + (change.T if self.transposed else change)
        return merged


@dataclass(frozen=True)
class Adapter:
    """An adapter that was found."""

    name: str
    folder: Path
    alpha: float
    rank_stabilized: bool
    """Whether the scale is alpha / √r instead of alpha / r."""

    def digest(self) -> str:
        """Return a hash over its files: 64 hex digits."""
        return hashlib.sha256(b"".join((self.folder / name).read_bytes() for name in (_CONFIG, _TENSORS))).hexdigest()

    def changes(self, entries: dict[str, tuple[int, ...]]) -> dict[str, LoraChange]:
        """Return the change to each tensor, by its name in the file; ``entries`` has the shapes of all tensors."""
        folder = LocalFolder(self.folder)
        sides: dict[str, dict[str, Values]] = {}
        for module, side, entry in self._tensors():
            sides.setdefault(module, {})[side] = Piece(entry, entry.shape).read(folder)
        return dict(self._change(module, pair, entries) for module, pair in sides.items())

    def modules(self) -> set[str]:
        return {module for module, _, _ in self._tensors()}

    def _tensors(self) -> Iterator[tuple[str, str, Entry]]:
        """Yield each tensor with its module and its side, A or B."""
        for entry in read_header(LocalFolder(self.folder), _TENSORS):
            found = _NAME.fullmatch(entry.name.removeprefix(_PREFIX))
            if found is None:
                raise ModelError(
                    f"the adapter {self.name} has a tensor that is not part of a LoRA",
                    found=entry.name,
                    fix=_SAVE_AGAIN,
                )
            if entry.code not in DTYPES or len(entry.shape) != 2 or 0 in entry.shape:
                raise ModelError(
                    f"the adapter {self.name} has a tensor that is not a matrix of floating-point numbers",
                    found=f"{entry.name} of type {entry.code} and shape {list(entry.shape)}",
                )
            yield found["module"], found["side"], entry

    def _change(
        self, module: str, pair: dict[str, Values], entries: dict[str, tuple[int, ...]]
    ) -> tuple[str, LoraChange]:
        if set(pair) != {"A", "B"}:
            raise ModelError(f"the adapter {self.name} has only one half of {module}", expected="lora_A and lora_B")
        # Files of a bare decoder have names without the first part (``transformer.``, ``model.``).
        names = (f"{module}.weight", f"{module.partition('.')[2]}.weight")
        name = next((each for each in names if each in entries), None)
        down, up = pair["A"], pair["B"]
        plain, transposed = (up.shape[0], down.shape[1]), (down.shape[1], up.shape[0])
        if name is None or entries[name] not in (plain, transposed) or up.shape[1] != down.shape[0]:
            raise ModelError(
                f"the adapter {self.name} is not for this model",
                expected=f"a tensor {module}.weight of shape {plain}",
                found="none" if name is None else f"{entries[name]}",
            )
        rank = down.shape[0]
        scale = self.alpha / (math.sqrt(rank) if self.rank_stabilized else rank)
        return name, LoraChange(down, up, scale, transposed=entries[name] != plain)


def find_adapter(name: str) -> Adapter:
    """Find an adapter in a folder or on the hub; one that cannot be merged is refused with the reason."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        from spile.models.model_files import download

        folder, _ = download(name, None, files=(_CONFIG, _TENSORS))
    missing = [file for file in (_CONFIG, _TENSORS) if not (folder / file).is_file()]
    if missing:
        raise ModelError(f"no adapter in {name}", expected=f"{_CONFIG} and {_TENSORS}", found=f"no {missing[0]}")
    with untrusted(ModelError, f"{_CONFIG} of {name} is not JSON"):
        raw = json.loads((folder / _CONFIG).read_bytes())
    _check_config(name, raw)
    alpha = raw.get("lora_alpha", 8)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not abs(alpha) <= _LARGEST_ALPHA:
        raise ModelError(f"{_CONFIG}'s lora_alpha", expected="a number", found=repr(alpha))
    return Adapter(name, folder, float(alpha), bool(raw.get("use_rslora")))


def _check_config(name: str, raw: Any) -> None:
    if not isinstance(raw, dict) or raw.get("peft_type") != "LORA":
        kind = raw.get("peft_type") if isinstance(raw, dict) else raw
        raise ModelError(f"the adapter {name}", expected="a LoRA (peft_type LORA)", found=repr(kind))
    if raw.get("bias", "none") != "none":
        raise ModelError(f"{_CONFIG}'s bias", expected="none", found=repr(raw["bias"]))
    unknown = sorted(key for key, value in raw.items() if value and key not in _HARMLESS)
    if unknown:
        raise ModelError(
            f"{_CONFIG}'s {unknown[0]}",
            expected="a plain LoRA",
            found=repr(raw[unknown[0]])[:80],
            fix="merge it with PEFT (merge_and_unload, save_pretrained) and give --model the merged folder",
        )
