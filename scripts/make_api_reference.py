"""Write docs/reference/api.md: the public names of ``spile`` with their signatures and docstrings.

python scripts/make_api_reference.py [OUTPUT]
"""

from __future__ import annotations

import ast
import dataclasses
import enum
import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any

import spile
from spile import errors

__all__ = ["reference"]

OUTPUT = Path(__file__).parent.parent / "docs" / "reference" / "api.md"

HEAD = """\
# Python

*Written by `python scripts/make_api_reference.py`; a test fails when it is out of date.*

"""


def reference() -> str:
    """Return the whole page."""
    parts = [HEAD, _indented(inspect.getdoc(spile) or "")]
    for name in spile.__all__:
        thing = getattr(spile, name)
        if name == "__version__":
            continue
        if isinstance(thing, ModuleType):
            parts.append(_errors())
        elif inspect.isclass(thing):
            parts.append("\n".join(_class(name, thing)))
        else:
            parts.append("\n".join(_function(f"spile.{name}", thing, 2)))
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def _indented(text: str) -> str:
    """Return the module's docstring with its example as a code block."""
    lines, code = [], False
    for line in text.split("\n"):
        if line.startswith("    ") and not code:
            lines.append("```python")
            code = True
        elif code and line and not line.startswith("    "):
            while lines[-1] == "":
                lines.pop()
            lines += ["```", ""]
            code = False
        lines.append(line.removeprefix("    ") if code else line.replace("::", ":").replace("``", "`"))
    return "\n".join(lines)


def _signature(name: str, function: Any) -> str:
    signature = inspect.signature(function)
    kept = [part for part in signature.parameters.values() if part.name != "self"]
    one = _unquoted(f"{name}{signature.replace(parameters=kept)}")
    if len(one) <= 100:
        return one
    rows, star = [], False
    for part in kept:
        if part.kind is part.KEYWORD_ONLY and not star:
            rows.append("    *,")
            star = True
        rows.append(f"    {_unquoted(str(part))},")
    back = "" if signature.return_annotation is signature.empty else f" -> {signature.return_annotation}"
    return "\n".join([f"{name}(", *rows, f"){back}"])


def _unquoted(text: str) -> str:
    """Return annotations as written, and functions in defaults without their address."""
    return re.sub(r"(: |-> )'([^']*)'", r"\1\2", re.sub(r"<function .*? at 0x\w+>", "…", text))


def _function(name: str, function: Any, level: int) -> Iterator[str]:
    yield f"{'#' * level} {name.rpartition('.')[2]}"
    yield ""
    yield f"```python\n{_signature(name, function)}\n```"
    yield ""
    yield _text(function)


def _text(thing: Any) -> str:
    text = inspect.getdoc(thing) or ""
    for role in (":class:", ":meth:", ":func:"):
        text = text.replace(f"{role}`~", "`").replace(f"{role}`", "`")
    return text.replace("``", "`")


def _class(name: str, kind: type) -> Iterator[str]:
    yield f"## {name}"
    yield ""
    yield _text(kind)
    if issubclass(kind, enum.Enum):
        yield ""
        yield from (f"- `{name}.{member.name}` = {member.value}" for member in kind)
        return
    if dataclasses.is_dataclass(kind):
        yield from _fields(kind)
    for member, value in vars(kind).items():
        if member.startswith("_"):
            continue
        if inspect.isfunction(value):
            yield ""
            yield from _function(f"{name}.{member}", value, 3)
        elif isinstance(value, property) or hasattr(value, "func"):
            yield ""
            yield f"### {member}"
            yield ""
            yield _text(value)


def _fields(kind: type) -> Iterator[str]:
    words = _field_words(kind)
    yield ""
    yield "| field | type | default | |"
    yield "|---|---|---|---|"
    for part in dataclasses.fields(kind):
        if part.name.startswith("_"):
            continue
        kind_of = str(part.type).replace("|", "\\|")
        yield f"| `{part.name}` | `{kind_of}` | {_default(part)} | {words.get(part.name, '')} |"


def _field_words(kind: type) -> dict[str, str]:
    """Return the docstring below each field."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    body = tree.body if isinstance(tree, ast.ClassDef) else []
    found = {}
    for field, below in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
            text = below.value.value if isinstance(below.value, ast.Constant) else ""
            found[field.target.id] = " ".join(str(text).replace("``", "`").replace("|", "\\|").split())
    return found


def _default(part: dataclasses.Field[Any]) -> str:
    if part.default is not dataclasses.MISSING:
        return f"`{part.default!r}`"
    if part.default_factory is not dataclasses.MISSING:
        name = getattr(part.default_factory, "__name__", "")
        return f"`{name}()`" if name and name != "<lambda>" else "made anew"
    return "required"


def _errors() -> str:
    return f"## errors\n\n```text\n{inspect.getdoc(errors)}\n```"


if __name__ == "__main__":
    output = Path(sys.argv[1]) if len(sys.argv) > 1 else OUTPUT
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(reference(), encoding="utf-8")
