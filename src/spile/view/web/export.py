"""The files of the page, and pages as one self-contained HTML file, which fetches nothing."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import orjson

from spile.errors import SpileError, UserError
from spile.reading.inspection import evenly_spaced, tap_widths
from spile.view.web.pages import Viewer, sample_row
from spile.view.web.roots import Root

if TYPE_CHECKING:
    from spile.data.arc.answers import Score
    from spile.reading.dataset import Dataset

_MODULES = (
    "dom.js", "api.js", "plot.js", "runs.js", "samples.js", "layers.js", "compare.js", "features.js", "score.js",
    "app.js",
)  # fmt: skip
"""The modules of the page, each after those that it imports."""
_IMPORT = re.compile(r"^import [^;]*;\n", re.MULTILINE)
_EXPORT = re.compile(r"^export (?=(?:async )?(?:function|const|let|class))", re.MULTILINE)


def to_json(value: Any) -> bytes:
    """Return an answer as JSON. NaN and infinity become null."""
    return orjson.dumps(value, default=_default, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)


def _default(value: Any) -> Any:
    return value.tolist() if hasattr(value, "tolist") else str(value)


@cache
def static_files() -> dict[str, bytes]:
    """Return the files of the page by name."""
    folder = resources.files("spile.view.web") / "static"
    return {entry.name: entry.read_bytes() for entry in folder.iterdir() if entry.is_file()}


@cache
def page_template() -> str:
    """Return the page with its style and scripts in it, and ``__DATA__`` where the answers go.

    The policy names both by their hashes, so that no other script runs.
    """
    files = {name: content.decode() for name, content in static_files().items()}
    script = "\n".join(_EXPORT.sub("", _IMPORT.sub("", files[name])) for name in _MODULES)
    style = files["style.css"]
    policy = f"default-src 'none'; script-src {_digest(script)}; style-src {_digest(style)}; img-src data: blob:"
    page = files["index.html"]
    page = page.replace(
        '<meta charset="utf-8">',
        f'<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" content="{policy}">',
    )
    page = page.replace('<link rel="stylesheet" href="static/style.css">', f"<style>{style}</style>")
    data = '<script type="application/json" id="data">__DATA__</script>'
    return page.replace(
        '<script type="module" src="static/app.js"></script>', f'{data}<script type="module">{script}</script>'
    )


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _embedded_json(data: object) -> str:
    """Return JSON that is safe inside a ``<script>`` element: no character of it can end the element or a comment."""
    text = to_json(data).decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


# -- exported pages ----------------------------------------------------------------------------------------------------

_TAPS = 64
_DETAILED = 12
_STREAMS = 20
_FEATURES = 24


class _Recorder:
    """Asks what the pages of a file would ask, and keeps the answers."""

    def __init__(self, viewer: Viewer) -> None:
        self._viewer = viewer
        self.answers: dict[str, Any] = {}
        self.ask("about")

    def ask(self, name: str, **values: object) -> dict[str, Any]:
        """Keep an answer, or its error, and return it."""
        try:
            found = self._viewer.answer(name, {each: str(value) for each, value in values.items()})
        except SpileError as error:
            found = {"error": str(error)}
        self.answers[_request_key(name, values)] = found
        return found  # type: ignore[no-any-return]

    def page(self, start: str) -> str:
        """Return the file; ``start`` is the page that is shown first, such as ``#/layers/0``."""
        return page_template().replace("__DATA__", _embedded_json({"answers": self.answers, "start": start}), 1)


def _request_key(name: str, values: Mapping[str, object]) -> str:
    """Return the name under which the page looks for an answer; the page's ``requestKey`` makes the same."""
    parts = [f"{key}={quote(str(value), safe='!()*')}" for key, value in sorted(values.items())]
    return name + ("?" + "&".join(parts) if parts else "")


def exported_page(viewer: Viewer, *, samples: int = 3, tap: str | None = None, start: str = "") -> str:
    """Return all pages as one HTML file.

    Args:
        viewer: What is shown.
        samples: The number of samples that the file contains, spread over the data.
        tap: The tap that the page of layers shows first.
        start: The page that is shown first, such as ``#/layers/0``.
    """
    pages = _Recorder(viewer)
    for number, root in enumerate(viewer.roots):
        pages.ask("run", root=number)
        pages.ask("events", root=number)
        streams = root.snapshot(60.0).streams
        for stream in streams[:_STREAMS]:
            pages.ask("stream", root=number, stream=stream.number)
        facts = pages.ask("dataset", root=number)
        if not any(stream.committed for stream in streams):
            continue
        taps = [*tap_widths(root.dataset())]
        _ask_samples(pages, number, root.dataset(), taps, samples)
        _ask_layers(pages, number, taps, tap)
        if facts["grids"]:
            pages.ask("score", root=number)
        if viewer.features is not None:
            largest = pages.ask("features", root=number).get("largest", [])
            for feature in sorted(range(len(largest)), key=lambda place: -largest[place])[:_FEATURES]:
                pages.ask("feature", root=number, feature=feature)
    if len(viewer.roots) > 1:
        found = pages.ask("compare", root=0, other=1).get("by_sample", [])
        for _, stream, index, *_ in found[: max(1, samples)]:
            pages.ask("difference", root=0, other=1, stream=stream, index=index, first=0)
    return pages.page(start)


def _ask_samples(pages: _Recorder, root: int, dataset: Dataset, taps: Sequence[str], samples: int) -> None:
    refs = [dataset.samples[place] for place in evenly_spaced(len(dataset), samples)]
    key = _request_key("samples", {"root": root, "start": 0, "count": 100})
    pages.answers[key] = {"total": len(refs), "start": 0, "rows": [sample_row(ref) for ref in refs]}
    for ref in refs:
        one = {"root": root, "stream": ref.stream, "index": ref.index}
        pages.ask("sample", **one)
        for tap in taps[:_TAPS]:
            pages.ask("heat", **one, measure="norm", tap=tap)
        for measure in ("norm", "change"):
            pages.ask("grid", **one, measure=measure, first=0)


def _ask_layers(pages: _Recorder, root: int, taps: Sequence[str], tap: str | None) -> None:
    if not taps:
        return
    pages.ask("layers", root=root)
    pages.ask("cosine", root=root)
    some = [taps[place] for place in evenly_spaced(len(taps), _DETAILED)]
    for each in dict.fromkeys([tap or taps[len(taps) // 2], *some]):
        pages.ask("tap", root=root, tap=each)
        pages.ask("space", root=root, tap=each)


def inspection_page(dataset: Dataset, *, tap: str | None = None, samples: int = 3) -> str:
    """Return the page of ``spile inspect --html``: the layers, a few samples and the run."""
    root = Root(dataset.root.url, dataset=dataset)
    start = "#/layers/0" + (f"?tap={quote(tap)}" if tap else "")
    return exported_page(Viewer([root]), samples=max(0, samples), tap=tap, start=start)


def score_page(root: str, score: Score) -> str:
    """Return the page of ``spile score --html``: each task with its examples, the expected and the answered grids."""
    viewer = Viewer([Root(root)])
    viewer.scores[0] = score
    pages = _Recorder(viewer)
    pages.ask("score", root=0)
    return pages.page("#/score/0")


def write_page(page: str, file: Path, flag: str = "--html") -> None:
    """Write a page to the file that a flag names."""
    try:
        file.expanduser().write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{flag} {file}", expected="a file that can be written", found=error.strerror) from error
