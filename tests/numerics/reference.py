"""The reference: transformers itself, with hooks at the taps. Imports torch only when it is called."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from spile.spec.taps import Tap

__all__ = ["transformers_taps"]


@contextlib.contextmanager
def _without_float32() -> Iterator[None]:
    """Let norms and softmax, which ask for float32, compute in float64."""
    import torch

    narrow: Any = torch.float32
    torch.float32 = torch.float64  # type: ignore[misc]
    try:
        yield
    finally:
        torch.float32 = narrow  # type: ignore[misc]


def transformers_taps(
    folder: Path, tokens: NDArray[np.int32], taps: Sequence[Tap], *, wide: bool = False
) -> dict[str, NDArray[Any]]:
    """Return these taps of every row with eager attention, in float32, or in float64 if ``wide``.

    It uses hooks instead of ``hidden_states``, whose last entry is after the final norm.
    """
    import torch
    from transformers import AutoModelForCausalLM

    from spile.compute.torch_backend import Hooks

    dtype = torch.float64 if wide else torch.float32
    model, loading = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=dtype,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    complaints = {name: list(keys) for name, keys in loading.items() if keys}
    assert not complaints, complaints
    model.eval()
    ids = torch.from_numpy(tokens).long()
    with _without_float32() if wide else contextlib.nullcontext():
        found = Hooks(model, taps).run(ids, None)
    kind: Any = np.float64 if wide else np.float32
    return {str(tap): found[tap].numpy().astype(np.int32 if tap.kind == "logits_ids" else kind) for tap in taps}
