"""The card of a dataset on the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Mapping
from html import escape
from typing import Any

import numpy.typing as npt

from spile.reading.dataset import Dataset
from spile.reading.inspection import NORMS, known_stats, norm_lines
from spile.spec.amounts import size
from spile.store.statistics import TapStatistics

_WIDE, _HIGH = 900, 220

_Array = npt.NDArray[Any]


def dataset_card(dataset: Dataset, url: str) -> dict[str, bytes]:
    """Return the card of a dataset for the Hugging Face hub, ``README.md``, and the picture that it shows."""
    run, found = dataset.run, dataset.summary()
    facts = {
        "model": run.model,
        "stored as": run.store_dtype,
        **{name: f"{found[name]:,}" for name in ("streams", "samples", "tokens")},
        "bytes": size(found["bytes"]),
        "taps": ", ".join(dataset.taps),
    }
    known = {tap: known_stats(dataset, tap) for tap in dataset.taps}
    stats = {tap: each for tap, each in known.items() if each is not None}
    code = f'import spile\n\ndataset = spile.open("{url}")\nprint(dataset[0].text)\n'
    code += f'print(dataset[0]["{dataset.taps[0]}"].shape)\n'
    code += f'for batch in dataset.shuffled("{dataset.taps[0]}", batch_rows=4096, seed=0):\n    ...'
    parts = [
        "---\ntags:\n- spile\n- activations\n- interpretability\nviewer: false\n---",
        f"# Activations of {_markdown(run.model)}",
        "Written by spile. Each sample is stored exactly once, with checksums.",
        "| | |\n|---|---|\n" + "\n".join(f"| {name} | {_markdown(value)} |" for name, value in facts.items()),
        f"## How to read it\n\n```python\n{code}\n```",
        f"`spile verify {url}` checks every sample and checksum.",
    ]
    files = {}
    if stats:
        titles = "| " + " | ".join(NORMS) + " |\n|" + "---|" * len(NORMS)
        rows = "\n".join("| " + " | ".join(map(_markdown, row)) + " |" for row in norm_lines(stats))
        parts.append(f"## Norms of the rows\n\n![Norms by tap](norms.svg)\n\n{titles}\n{rows}")
        files["norms.svg"] = _norms(stats).encode()
    return {"README.md": ("\n\n".join(parts) + "\n").encode(), **files}


def _markdown(text: str) -> str:
    """Escape text for a cell of a Markdown table."""
    plain = "".join(each if each.isprintable() else " " for each in text)
    return re.sub(r"([\\`*_{}\[\]<>#|!])", r"\\\1", plain)


def _rect(x: float, y: float, width: float, height: float, fill: str, opacity: float = 1) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.2f}" height="{max(height, 0.5):.2f}"'
    return f'<rect {place} fill="{fill}" opacity="{opacity}"/>'


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" fill="#666" font-family="sans-serif" font-size="11">{escape(text)}</text>'


def _norms(stats: Mapping[str, TapStatistics]) -> str:
    """Draw a bar from the 1 % to the 99 % quantile and a mark at the median for each tap."""
    quantiles = {tap: [each.norm_quantile(q) for q in (0.01, 0.5, 0.99)] for tap, each in stats.items()}
    most = max((each[2] for each in quantiles.values()), default=1.0) or 1.0
    step = (_WIDE - 60) / max(1, len(stats))
    parts = [_text(0, 12, f"{most:.3g}"), _text(0, _HIGH - 34, "0")]
    for place, (tap, (low, middle, high)) in enumerate(quantiles.items()):
        x, scale = 50 + place * step, (_HIGH - 50) / most
        wide = step * 0.7
        parts.append(_rect(x, _HIGH - 40 - high * scale, wide, (high - low) * scale, "#2f6fdf", 0.45))
        parts.append(_rect(x, _HIGH - 41 - middle * scale, wide, 2, "#d9480f"))
        if len(stats) <= 16 or place % (len(stats) // 12) == 0:
            parts.append(_text(x, _HIGH - 22, tap))
    shape = f'viewBox="0 0 {_WIDE} {_HIGH}" width="{_WIDE}" role="img" aria-label="norms by tap"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {shape}>{"".join(parts)}</svg>'
