"""The program that renders chat templates, in a child process with limits on CPU time and memory.

Templates come from the hub and are programs: they can loop, recurse and allocate without end. The parent process
(:class:`spile.data.chat.TemplateProcess`) starts this file as a script. Each request is one line of JSON with a
template and its variables; each answer is one line with the text or the error. A template that exceeds a limit ends
this process.

The dialect is the one of transformers, except that ``strftime_now`` always returns the same date: a prompt must not
depend on the day on which it was rendered.
"""

from __future__ import annotations

import json
import resource
import signal
import sys
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

CPU_SECONDS = 2
"""Maximum CPU time of one rendering. A chat of a thousand messages takes a few milliseconds."""
MEMORY_BYTES = 1 << 30
"""Address space of the process."""
MAX_TEXT = 1 << 26
"""Characters of one rendered text."""
MAX_MESSAGE = 500
"""Characters of the message of an error, which a template can make as long as a text."""
FAILS = "fails on"
"""The error of a template that raises an exception or exceeds a limit."""
TODAY = datetime(2024, 7, 26)
"""The date that ``strftime_now`` returns."""


class _Generation(Extension):
    """``{% generation %}`` marks the text that a model is trained on; it renders as its contents."""

    tags = {"generation"}  # noqa: RUF012  declared like this in the base class

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **more: Any) -> str:
    """Serialise without the HTML escapes of Jinja's own filter."""
    options = {key: more[key] for key in ("separators", "sort_keys") if key in more}
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


@lru_cache(maxsize=16)
def _compile(source: str) -> Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.globals.pop("lipsum")
    environment.filters.pop("random")  # a prompt must be the same each time it is rendered
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = TODAY.strftime
    return environment.from_string(source)


def _render(source: str, variables: dict[str, Any]) -> str:
    pieces, length = [], 0
    for piece in _compile(source).generate(**variables):
        length += len(piece)
        if length > MAX_TEXT:
            raise MemoryError
        pieces.append(piece)
    return "".join(pieces)


def _answer(request: dict[str, Any]) -> dict[str, str]:
    try:
        return {"text": _render(request["source"], request["variables"])}
    except TemplateSyntaxError as error:
        return {"error": "syntax", "message": str(error)[:MAX_MESSAGE]}
    except (TemplateError, TypeError, ValueError) as error:
        return {"error": "refuses", "message": str(error)[:MAX_MESSAGE]}
    except (MemoryError, RecursionError) as error:
        limit = "memory" if isinstance(error, MemoryError) else "recursion depth"
        return {"error": FAILS, "message": f"it exceeds the {limit}"}
    except Exception as error:  # noqa: BLE001  a template is a program and can raise anything
        return {"error": FAILS, "message": f"{type(error).__name__}: {error}"[:MAX_MESSAGE]}


def main() -> None:
    """Answer requests from standard input until it is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl+C in a terminal reaches the whole process group
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    for line in sys.stdin.buffer:
        usage = resource.getrusage(resource.RUSAGE_SELF)
        limit = int(usage.ru_utime + usage.ru_stime) + CPU_SECONDS
        resource.setrlimit(resource.RLIMIT_CPU, (limit, hard))  # SIGXCPU ends the process
        try:
            answer = json.dumps(_answer(json.loads(line)))
        except (MemoryError, RecursionError):
            answer = json.dumps({"error": FAILS, "message": "it exceeds the memory"})
        sys.stdout.write(f"{answer}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
