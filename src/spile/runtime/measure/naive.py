"""The loop that people write today: transformers, batches as they come, padded, every hidden state to the host, saved.

Run beside spile in the same process or machine, on the same weights, prompts and threads, counted in real tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

__all__ = ["Naive", "run"]


class Naive(NamedTuple):
    """What it came to."""

    tokens: int
    computed: int
    seconds: float

    @property
    def rate(self) -> float:
        """Real tokens per second."""
        return self.tokens / self.seconds


def run(
    model_folder: Path,
    prompts: Sequence[npt.NDArray[np.int32]],
    *,
    device: str,
    dtype: str,
    batch_size: int,
    output: Path | None,
    attention: str = "sdpa",
    warm: int = 2,
) -> Naive:
    """``output_hidden_states`` over padded batches; ``.cpu()`` of each layer; ``torch.save`` of each batch."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        model_folder, dtype=getattr(torch, dtype), attn_implementation=attention
    ).to(device)
    model.eval()
    batches = [prompts[i : i + batch_size] for i in range(0, len(prompts), batch_size)]
    with torch.inference_mode():
        for batch in batches[:warm]:
            _step(model, batch, device, output)
        began = time.perf_counter()
        computed = sum(_step(model, batch, device, output) for batch in batches)
        seconds = time.perf_counter() - began  # each step ends with its rows on the host: nothing is left to wait for
    return Naive(sum(map(len, prompts)), computed, seconds)


def _step(model: Any, batch: Sequence[npt.NDArray[np.int32]], device: str, output: Path | None) -> int:
    """One padded batch: how many tokens were computed."""
    import torch

    longest = max(map(len, batch))
    ids = torch.zeros((len(batch), longest), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(batch):
        ids[row, : len(prompt)] = torch.from_numpy(prompt.astype(np.int64))
        mask[row, : len(prompt)] = 1
    result = model(input_ids=ids.to(device), attention_mask=mask.to(device), output_hidden_states=True, use_cache=False)
    states = [state.cpu() for state in result.hidden_states[1:]]
    if output is not None:
        torch.save(states, output / "naive.pt")
    return int(ids.numel())
