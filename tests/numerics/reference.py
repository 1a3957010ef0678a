"""The reference: transformers itself, tapped with hooks. Imports torch only when it is called."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from spile.spec.taps import Tap

__all__ = ["transformers_taps"]


def transformers_taps(folder: Path, tokens: NDArray[np.int32], taps: Sequence[Tap]) -> dict[str, NDArray[np.generic]]:
    """These taps of every row, in float32 with eager attention.

    By hooks, not ``hidden_states``: its last entry is after the final norm.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from spile.worker.torch_backend import Hooks

    model, loading = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    complaints = {name: list(keys) for name, keys in loading.items() if keys}
    assert not complaints, complaints
    model.eval()
    ids = torch.from_numpy(tokens).long()
    follows = torch.ones_like(ids, dtype=torch.bool)
    follows[:, -1] = False
    found = Hooks(model, taps).run(ids, None, follows)
    kinds = {tap: np.int32 if tap.site == "logits_ids" else np.float32 for tap in taps}
    return {str(tap): found[tap].numpy().astype(kinds[tap]) for tap in taps}
