"""HTML reports of ``spile inspect`` and ``spile score``: one self-contained page each, light and dark.

The inspection page is static SVG without scripts. All text from datasets is escaped.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from spile.data.arc.answers import Score, TaskScore
from spile.errors import UserError
from spile.reading.dataset import Dataset
from spile.reading.inspection import NORMS, HeatMap, Inspection, known_stats
from spile.spec.amounts import amount, size
from spile.spec.sample import Role

_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --dim: #66707f; --line: #d9dee6; --page: #ffffff;
  --a: #2864c7; --b: #c7522a; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e8ee; --dim: #98a2b3; --line: #333c49; --page: #12161c; --a: #7aa7f5; --b: #f09a72; } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--page); max-width: 62rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; }
h2 { font-size: 1.05rem; margin-top: 2.2rem; overflow-wrap: anywhere; }
p { color: var(--dim); } figure { margin: 1rem 0; overflow-x: auto; }
table { border-collapse: collapse; }
th, td { text-align: right; padding: .15rem .7rem; border-bottom: 1px solid var(--line); overflow-wrap: anywhere; }
th:first-child, td:first-child { text-align: left; }
svg { max-width: 100%; height: auto; } svg text { fill: var(--dim); font: 11px system-ui, sans-serif; }
.preview { white-space: pre-wrap; overflow-wrap: anywhere; font: 12px/1.4 ui-monospace, monospace; }
"""
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"
_ROLES = {
    Role.SYSTEM: ("system", "#8a6fd1"),
    Role.USER: ("user", "#2f9e62"),
    Role.ASSISTANT: ("assistant", "#c7522a"),
    Role.SPECIAL: ("special", "#8892a0"),
}
_WIDE, _HIGH = 900, 220

_Array = npt.NDArray[Any]


def write_page(page: str, html: Path) -> None:
    """Write a page to the file that ``--html`` names."""
    try:
        html.expanduser().write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"--html {html}", expected="a file that can be written", found=error.strerror) from error


def report_page(dataset: Dataset, found: Inspection) -> str:
    """Return the inspection page as HTML."""
    sections = [
        _section("What it is", _facts(dataset)),
        _section("Norms by tap", _norms(found)),
        _section("Distribution of norms", _distribution(found)),
        _section("Attention sinks", _sinks(found)),
        *(_section(f"Heat map: {heat.title}", _heat(heat, found.taps)) for heat in found.heat),
        _section("Cosine similarity between taps", _matrix(found)),
        _section(f"Main directions of {found.chosen}", _plane(found)),
        _section("When samples were committed", _timeline(found)),
    ]
    title = escape(f"Activations in {dataset.root.url}")
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><meta http-equiv="Content-Security-Policy" '
        f'content="{_POLICY}"><meta name="viewport" content="width=device-width"><title>{title}</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>{title}</h1>\n" + "\n".join(sections) + "\n</body></html>\n"
    )


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
        picture = _norms(found).removeprefix("<figure>").partition("</figure>")[0]
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


def _section(title: str, body: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{body}</section>"


def _svg(parts: Iterable[str], width: int = _WIDE, height: int = _HIGH, label: str = "") -> str:
    inside = "".join(parts)
    drawing = f'viewBox="0 0 {width} {height}" width="{width}" role="img" aria-label="{escape(label, quote=True)}"'
    return f"<figure><svg {drawing}>{inside}</svg></figure>"


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


def _facts(dataset: Dataset) -> str:
    rows = _about(dataset)
    lines = "".join(f"<tr><td>{escape(name)}</td><td>{escape(value)}</td></tr>" for name, value in rows.items())
    return f"<table>{lines}</table>"


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
    return _svg(parts, label="norms by tap") + "<p>From the 1 % to the 99 % quantile; the mark is the median.</p>"


def _distribution(found: Inspection) -> str:
    stats = found.stats[found.chosen]
    bins = sorted(place for place in stats.norms if place > -1_000_000)
    if not bins:
        return "<p>No rows.</p>"
    most, step = max(stats.norms.values()), (_WIDE - 20) / (bins[-1] - bins[0] + 1)
    parts = []
    for place in bins:
        high = (_HIGH - 40) * np.log1p(stats.norms[place]) / np.log1p(most)
        x = 10 + (place - bins[0]) * step
        title = f"{stats.norms[place]:,} rows"
        parts.append(_rect(x, _HIGH - 25 - high, step - 0.5, high, "var(--a)", title))
    parts += [
        _text(10, _HIGH - 8, f"{1.04 ** bins[0]:.3g}"),
        _text(_WIDE - 10, _HIGH - 8, f"{1.04 ** (bins[-1] + 1):.3g}", "end"),
    ]
    return _svg(parts, label="distribution of norms") + f"<p>{escape(found.chosen)}; both axes logarithmic.</p>"


def _sinks(found: Inspection) -> str:
    lines = [
        f"<tr><td>{escape(tap)}</td><td>{stats.norm_quantile(0.5):.4g}</td><td>{stats.sinks:,}</td>"
        f"<td>{stats.top[0].norm:.4g}</td><td>{', '.join(map(str, stats.summary()['sink_tokens']))}</td></tr>"
        for tap, stats in found.stats.items()
        if stats.top
    ]
    titles = ("tap", "median norm", "rows above ten times it", "largest norm", "their token ids")
    head = "".join(f"<th>{title}</th>" for title in titles)
    return f"<table><tr>{head}</tr>{''.join(lines)}</table>"


def _heat(heat: HeatMap, taps: Sequence[str]) -> str:
    count, length = heat.norms.shape
    wide, high = (_WIDE - 110) / max(1, length), max(6, min(18, 300 / max(1, count)))
    logs = np.log(np.maximum(heat.norms, 1e-9))
    low, spread = float(logs.min()), float(np.ptp(logs)) or 1.0
    parts = [
        _rect(100 + column * wide, row * high, wide + 0.3, high + 0.3, _shade((logs[row, column] - low) / spread))
        for row in range(count)
        for column in range(length)
    ]
    parts += [
        _text(95, row * high + high * 0.75, tap, "end") for row, tap in enumerate(taps) if count <= 24 or row % 4 == 0
    ]
    picture = _svg(parts, height=int(count * high) + 6, label="norms of one sample")
    caption = "Norm of each token (across) at each tap (down), on a logarithmic scale."
    return f'{picture}<p>{caption}</p><p class="preview">{escape(heat.preview)}</p>'


def _shade(part: float) -> str:
    """Map a value to a colour from dark blue through green to yellow, readable on light and dark backgrounds."""
    stops = np.array([[48, 40, 110], [45, 130, 140], [120, 200, 90], [250, 225, 70]])
    place = min(max(part, 0.0), 1.0) * (len(stops) - 1)
    first = min(int(place), len(stops) - 2)
    mixed = stops[first] + (stops[first + 1] - stops[first]) * (place - first)
    return "#" + "".join(f"{round(value):02x}" for value in mixed)


def _matrix(found: Inspection) -> str:
    count = len(found.cosine)
    cell = max(4.0, min(40.0, 400 / max(1, count)))
    parts = [
        _rect(column * cell, row * cell, cell, cell, _shade((value + 1) / 2), f"{value:.3f}")
        for row, values in enumerate(found.cosine)
        for column, value in enumerate(values)
    ]
    side = int(count * cell) + 2
    return (
        _svg(parts, side, side, "cosine similarity between taps")
        + "<p>The same token at two taps, mean over random rows; taps in their order.</p>"
    )


def _plane(found: Inspection) -> str:
    if not len(found.plane):
        return "<p>No rows.</p>"
    low, high = found.plane.min(0), found.plane.max(0)
    scaled = (found.plane - low) / np.maximum(high - low, 1e-12)
    parts = []
    for (x, y), role in zip(scaled, found.roles, strict=True):
        color = next((color for bit, (_, color) in _ROLES.items() if int(role) & bit), "#8892a0")
        parts.append(
            f'<circle cx="{20 + x * (_WIDE - 40):.1f}" cy="{400 - y * 380:.1f}" r="2.2" fill="{color}" opacity=".6"/>'
        )
    parts += [
        _text(20 + 110 * n, 415, f"● {name}").replace("<text", f'<text style="fill:{color}"')
        for n, (name, color) in enumerate(_ROLES.values())
    ]
    held = ", ".join(f"{100 * part:.0f} %" for part in found.explained)
    return (
        _svg(parts, height=422, label="main directions")
        + f"<p>Random rows on the first two principal directions ({held} of the variance), coloured by role.</p>"
    )


def _timeline(found: Inspection) -> str:
    times = [when for commits in found.timeline.values() for when, _ in commits]
    if not times:
        return "<p>No commit records a time.</p>"
    first, spread = min(times), max(max(times) - min(times), 1.0)
    parts = []
    for row, (stream, commits) in enumerate(sorted(found.timeline.items())):
        y = 14 + row * 16
        parts.append(_text(0, y + 4, f"worker {stream}"))
        parts += [
            _rect(90 + (when - first) / spread * (_WIDE - 110), y - 5, 2, 10, "var(--a)", f"{amount(total)} samples")
            for when, total in commits
        ]
    begin, end = (datetime.fromtimestamp(when, UTC).strftime("%Y-%m-%d %H:%M:%S") for when in (first, max(times)))
    height = 20 + 16 * len(found.timeline)
    return (
        _svg(parts, height=height, label="commits by worker")
        + f"<p>From {begin} to {end} UTC; each mark is a commit.</p>"
    )


_TEMPLATE = "score_page.html"


def score_page(score: Score, title: str) -> str:
    """Return the score page: each task with its examples, the expected and the predicted grids."""
    summary = {name: value for name, value in score.record().items() if name != "by_task"}
    data = {"title": title, "summary": summary, "tasks": [_task(task) for task in score.tasks]}
    template = (resources.files("spile.view") / _TEMPLATE).read_text(encoding="utf-8")
    script = template.partition("<script>")[2].partition("</script>")[0]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return template.replace("__POLICY__", policy).replace("__DATA__", embedded_json(data))


def embedded_json(data: object) -> str:
    """Return JSON that is safe inside a ``<script>`` element: no character of it can end the element or a comment."""
    text = json.dumps(data, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _task(task: TaskScore) -> dict[str, object]:
    known = task.task
    return {
        "id": task.answers.task_id,
        "state": "unscored" if task.expected is None else "right" if task.right else "wrong",
        "train": [] if known is None else [{"input": pair.input, "output": pair.output} for pair in known.train],
        "test": None if known is None else known.test[0],
        "expected": task.expected,
        "attempts": list(task.answers.grids[:2]),
        "votes": list(task.answers.votes[:2]),
        "predictions": task.answers.predictions,
        "unreadable": task.answers.unreadable,
    }
