"""The reference: transformers itself, tapped with hooks. Imports torch only when it is called."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["transformers_taps"]


def transformers_taps(folder: Path, tokens: NDArray[np.int32]) -> dict[str, NDArray[np.float32]]:
    """Every tap of every layer, in float32 with eager attention.

    By hooks, not ``hidden_states``: its last entry is after the final norm.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model, loading = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    complaints = {name: list(keys) for name, keys in loading.items() if keys}
    assert not complaints, complaints
    model.eval()
    kept: dict[str, NDArray[np.float32]] = {}

    def keep(name: str) -> Any:
        def hook(_module: Any, _inputs: Any, output: Any) -> None:
            kept[name] = (output[0] if isinstance(output, tuple) else output).detach().numpy().copy()

        return hook

    for number, layer in enumerate(model.model.layers):
        layer.register_forward_hook(keep(f"residual.{number}"))
        layer.self_attn.register_forward_hook(keep(f"attn.{number}"))
        layer.mlp.register_forward_hook(keep(f"mlp.{number}"))
    with torch.no_grad():
        model(torch.from_numpy(tokens).long())
    return kept
