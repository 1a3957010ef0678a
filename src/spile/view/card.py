"""The card of a dataset on the Hugging Face hub."""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape
from typing import Any

import numpy.typing as npt

from spile.reading.dataset import Dataset
from spile.reading.inspection import NORMS, Inspection, known_stats
from spile.spec.amounts import size

_WIDE, _HIGH = 900, 220

_Array = npt.NDArray[Any]


def dataset_card(dataset: Dataset, url: str) -> dict[str, bytes]:
    """Return the card of a dataset for the Hugging Face hub, ``README.md``, and the picture that it shows."""
    run = dataset.run
    taps = [tap for tap in dataset.taps if known_stats(dataset, tap)]
    found = Inspection(tuple(taps), {tap: dataset.stats(tap) for tap in taps})
    code = f'import spile\n\ndataset = spile.open("{url}")\nprint(dataset[0].text)\n'
    code += f'print(dataset[0]["{dataset.taps[0]}"].shape)\n'
    code += f'for batch in dataset.shuffled("{dataset.taps[0]}", batch_rows=4096, seed=0):\n    ...'
    parts = [
        "---\ntags:\n- spile\n- activations\n- interpretability\nviewer: false\n---",
        f"# Activations of {_markdown(run.model)}",
        "Written by spile. Each sample is stored exactly once, with checksums.",
        "| | |\n|---|---|\n" + "\n".join(f"| {name} | {_markdown(value)} |" for name, value in _about(dataset).items()),
        f"## How to read it\n\n```python\n{code}\n```",
        f"`spile verify {url}` checks every sample and checksum.",
    ]
    files = {}
    if taps:
        titles = "| " + " | ".join(NORMS) + " |\n|" + "---|" * len(NORMS)
        rows = "\n".join("| " + " | ".join(map(_markdown, row)) + " |" for row in found.lines())
        parts.append(f"## Norms of the rows\n\n![Norms by tap](norms.svg)\n\n{titles}\n{rows}")
        colours = "svg { --a: #2f6fdf; --b: #d9480f; } text { fill: #666; font: 11px sans-serif; }"
        picture = _norms(found)
        files["norms.svg"] = (
            picture.replace("<svg", '<svg xmlns="http://www.w3.org/2000/svg"', 1)
            .replace(">", f"><style>{colours}</style>", 1)
            .encode()
        )
    return {"README.md": ("\n\n".join(parts) + "\n").encode(), **files}


def _markdown(text: str) -> str:
    """Return text that shows as it is in a cell of a Markdown table."""
    plain = "".join(each if each.isprintable() else " " for each in text)
    return re.sub(r"([\\`*_{}\[\]<>#|!])", r"\\\1", plain)


def _svg(parts: Iterable[str], width: int = _WIDE, height: int = _HIGH, label: str = "") -> str:
    inside = "".join(parts)
    drawing = f'viewBox="0 0 {width} {height}" width="{width}" role="img" aria-label="{escape(label, quote=True)}"'
    return f"<svg {drawing}>{inside}</svg>"


def _rect(x: float, y: float, width: float, height: float, fill: str, title: str = "", opacity: float = 1) -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" width="{max(width, 0.5):.2f}" height="{max(height, 0.5):.2f}"'
    inside = f"<title>{escape(title)}</title>" if title else ""
    return f'<rect {place} fill="{fill}" opacity="{opacity}">{inside}</rect>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _about(dataset: Dataset) -> dict[str, str]:
    return {
        "model": dataset.run.model,
        "stored as": dataset.run.store_dtype,
        "streams": f"{len(dataset.streams):,}",
        "samples": f"{sum(stream.samples for stream in dataset.streams):,}",
        "tokens": f"{sum(stream.tokens for stream in dataset.streams):,}",
        "bytes": size(sum(shard.size for stream in dataset.streams for shard in stream.shards)),
        "taps": ", ".join(dataset.taps),
    }


def _norms(found: Inspection) -> str:
    """Draw a bar from the 1 % to the 99 % quantile and a mark at the median for each tap."""
    quantiles = {tap: [found.stats[tap].norm_quantile(q) for q in (0.01, 0.5, 0.99)] for tap in found.taps}
    most = max((each[2] for each in quantiles.values()), default=1.0) or 1.0
    step = (_WIDE - 60) / max(1, len(found.taps))
    parts = [_text(0, 12, f"{most:.3g}"), _text(0, _HIGH - 34, "0")]
    for place, (tap, (low, middle, high)) in enumerate(quantiles.items()):
        x, scale = 50 + place * step, (_HIGH - 50) / most
        wide = step * 0.7
        parts.append(_rect(x, _HIGH - 40 - high * scale, wide, (high - low) * scale, "var(--a)", tap, 0.45))
        parts.append(_rect(x, _HIGH - 41 - middle * scale, wide, 2, "var(--b)"))
        if len(found.taps) <= 16 or place % (len(found.taps) // 12) == 0:
            parts.append(_text(x, _HIGH - 22, tap))
    return _svg(parts, label="norms by tap")
