"""The files of the page, and pages as one self-contained HTML file, which fetches nothing."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import orjson

from spile.errors import SpileError, UserError
from spile.reading.inspection import spread
from spile.view.web.pages import Viewer, listed
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


def request_key(name: str, values: Mapping[str, object]) -> str:
    """Return the name under which the page looks for an answer; the page's ``requestKey`` makes the same."""
    parts = [f"{key}={quote(str(value), safe='!()*')}" for key, value in sorted(values.items()) if value != ""]
    return name + ("?" + "&".join(parts) if parts else "")


def exported_page(
    viewer: Viewer, *, samples: int = 3, tap: str | None = None, pages: Sequence[str] | None = None, start: str = ""
) -> str:
    """Return pages as one HTML file.

    Args:
        viewer: What is shown.
        samples: The number of samples that the file contains, spread over the data.
        tap: The tap that the page of layers shows first.
        pages: The pages; None takes all that there are.
        start: The page that is shown first, such as ``#/layers/0``.
    """
    answers: dict[str, Any] = {}
    for name, values in _requests(viewer, samples, tap, pages):
        key = request_key(name, values)
        try:
            answers[key] = viewer.answer(name, {each: str(value) for each, value in values.items()})
        except SpileError as error:
            answers[key] = {"error": str(error)}
    for number, root in enumerate(viewer.roots):
        key = request_key("samples", {"root": number, "start": 0, "count": 100})
        if key in answers and "error" not in answers[key]:  # The list has only the samples that the file contains.
            rows = [listed(root.dataset().samples[place]) for place in _places(viewer, number, samples)]
            answers[key] = {"total": len(rows), "start": 0, "rows": rows}
    data = {"answers": answers, "start": start}
    return page_template().replace("__DATA__", _embedded_json(data), 1)


def _places(viewer: Viewer, root: int, samples: int) -> list[int]:
    return spread(len(viewer.roots[root].dataset().samples), samples)


def _requests(
    viewer: Viewer, samples: int, tap: str | None, pages: Sequence[str] | None
) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yield what the pages of the file ask for."""
    yield "about", {}
    for number in range(len(viewer.roots)):
        root = {"root": number}
        if pages is not None and "score" in pages:
            yield "score", root
            continue
        yield "run", root
        yield "events", root
        views = viewer.roots[number].snapshot(60.0).streams
        yield from (("stream", {**root, "stream": view.number}) for view in views[:_STREAMS])
        yield "dataset", root
        if not any(view.committed for view in views):
            continue
        facts = viewer.answer("dataset", {"root": str(number)})
        yield from _of_samples(viewer, number, facts["float_taps"], samples)
        yield from _of_layers(number, facts["float_taps"], tap)
        if facts["grids"]:
            yield "score", root
        if viewer.features is not None:
            yield "features", root
            largest = viewer.answer("features", {"root": str(number)})["largest"]
            best = sorted(range(len(largest)), key=lambda place: -largest[place])[:_FEATURES]
            yield from (("feature", {**root, "feature": each}) for each in best)
    if len(viewer.roots) > 1 and (pages is None or "compare" in pages):
        both = {"root": 0, "other": 1}
        yield "compare", both
        found = viewer.answer("compare", {"root": "0", "other": "1"})
        for _, stream, index, *_ in found["by_sample"][: max(1, samples)]:
            yield "difference", {**both, "stream": stream, "index": index, "first": 0}


def _of_samples(
    viewer: Viewer, number: int, taps: Sequence[str], samples: int
) -> Iterator[tuple[str, Mapping[str, object]]]:
    yield "samples", {"root": number, "start": 0, "count": 100}
    dataset = viewer.roots[number].dataset()
    for place in _places(viewer, number, samples):
        stream, index = dataset.samples.address(place)
        one: dict[str, object] = {"root": number, "stream": stream, "index": index}
        yield "sample", one
        yield from (("heat", {**one, "measure": "norm", "tap": each}) for each in taps[:_TAPS])
        yield from (("grid", {**one, "measure": each, "first": 0}) for each in ("norm", "change"))


def _of_layers(number: int, taps: Sequence[str], tap: str | None) -> Iterator[tuple[str, Mapping[str, object]]]:
    if not taps:
        return
    root = {"root": number}
    chosen = tap or taps[len(taps) // 2]
    yield "layers", root
    yield "cosine", root
    for each in dict.fromkeys([chosen, *(taps[place] for place in spread(len(taps), _DETAILED))]):
        yield "tap", {**root, "tap": each}
        yield "space", {**root, "tap": each}


def inspection_page(dataset: Dataset, *, tap: str | None = None, samples: int = 3) -> str:
    """Return the page of ``spile inspect --html``: the layers, a few samples and the run."""
    root = Root(dataset.root.url, dataset=dataset)
    start = "#/layers/0" + (f"?tap={quote(tap)}" if tap else "")
    return exported_page(Viewer([root], live=False), samples=max(0, samples), tap=tap, start=start)


def score_page(root: str, score: Score) -> str:
    """Return the page of ``spile score --html``: each task with its examples, the expected and the answered grids."""
    viewer = Viewer([Root(root)], live=False)
    viewer.scores[0] = score
    return exported_page(viewer, pages=["score"], start="#/score/0")


def write_page(page: str, file: Path, flag: str = "--html") -> None:
    """Write a page to the file that a flag names."""
    try:
        file.expanduser().write_text(page, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{flag} {file}", expected="a file that can be written", found=error.strerror) from error
