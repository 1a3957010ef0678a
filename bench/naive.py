"""The loop that people write today: transformers, batches as they come, padded, every hidden state to the host, saved.

Run beside spile in the same process or machine, on the same weights, prompts and threads, counted in real tokens.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np


class Naive(NamedTuple):
    """What it came to."""

    tokens: int
    computed: int
    seconds: float

    @property
    def rate(self) -> float:
        """Real tokens a second."""
        return self.tokens / self.seconds


def run(
    model_folder: Path,
    prompts: Sequence[np.ndarray],
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

    model = AutoModelForCausalLM.from_pretrained(
        model_folder, dtype=getattr(torch, dtype), attn_implementation=attention
    ).to(device)
    model.eval()
    batches = [prompts[i : i + batch_size] for i in range(0, len(prompts), batch_size)]
    tokens = computed = 0
    began = 0.0
    with torch.inference_mode():
        for number, batch in enumerate([*batches[:warm], *batches]):
            if number == warm:
                if device == "cuda":
                    torch.cuda.synchronize()
                began, tokens, computed = time.perf_counter(), 0, 0
            longest = max(map(len, batch))
            ids = torch.zeros((len(batch), longest), dtype=torch.long)
            mask = torch.zeros_like(ids)
            for row, prompt in enumerate(batch):
                ids[row, : len(prompt)] = torch.from_numpy(prompt.astype(np.int64))
                mask[row, : len(prompt)] = 1
            result = model(
                input_ids=ids.to(device), attention_mask=mask.to(device), output_hidden_states=True, use_cache=False
            )
            states = [state.cpu() for state in result.hidden_states[1:]]
            if output is not None:
                torch.save(states, output / "naive.pt")
            tokens += int(mask.sum())
            computed += ids.numel()
    return Naive(tokens, computed, time.perf_counter() - began)
