"""Granite 3 and 4 (dense): Llama with scaled embeddings, residuals, scores and logits."""

from __future__ import annotations

from spile.models.families.base import Family, sizes

FAMILY = Family(
    model_types=("granite",),
    models="Granite 3 and 4 (dense)",
    differs="as `llama`, with factors on embeddings, scores, what attention and MLP add, and logits",
    example=(
        "ibm-granite/granite-3.3-2b-base",
        sizes(2048, 40, 32, 8, 8192, vocab_size=49_152, tie_word_embeddings=True),
    ),
)
