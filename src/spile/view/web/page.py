"""The page itself: its files, the page as one file, and JSON for both."""

from __future__ import annotations

import base64
import hashlib
import re
from functools import cache
from importlib import resources
from typing import Any

import orjson

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


def embedded_json(data: object) -> str:
    """Return JSON that is safe inside a ``<script>`` element: no character of it can end the element or a comment."""
    text = to_json(data).decode()
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text
