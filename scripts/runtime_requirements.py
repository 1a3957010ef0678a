"""Print the part of requirements.txt that an installation needs, with hashes and without the developers' tools.

``python scripts/runtime_requirements.py [NAME…] [--extra=NAME…] > runtime.txt`` prints the dependencies of the project
and of these extras, or the named packages, with everything that they depend on by pip-compile's notes ("# via").
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path


def main(names: list[str]) -> None:
    """Print the pins."""
    project = tomllib.loads(Path("pyproject.toml").read_text())["project"]
    extras = [name.removeprefix("--extra=") for name in names if name.startswith("--extra=")]
    texts = [*project["dependencies"], *(text for extra in extras for text in project["optional-dependencies"][extra])]
    named = [name for name in names if not name.startswith("--")]
    wanted = named or [re.match(r"[\w.-]+", text)[0] for text in texts]  # type: ignore[index]
    pins = dict(_pins(Path("requirements.txt").read_text()))
    needed, waiting = set(), [_plain(name) for name in wanted]
    while waiting:
        name = waiting.pop()
        if name not in pins:
            sys.exit(f"no {name} in requirements.txt: run make requirements")
        if name not in needed:
            needed.add(name)
            waiting += [other for other, (_, users) in pins.items() if name in users]
    for name in sorted(needed):
        print(pins[name][0])


def _pins(text: str) -> list[tuple[str, tuple[str, set[str]]]]:
    """Each package's lines, and who needs it."""
    found = []
    for block in re.findall(r"^[a-zA-Z0-9][^\n]*==.*?(?=^[a-zA-Z0-9]|\Z)", text, re.MULTILINE | re.DOTALL):
        lines = [line for line in block.splitlines() if not line.lstrip().startswith("#")]
        notes = " ".join(line.lstrip(" #") for line in block.splitlines() if line.startswith("    #"))
        users = {_plain(word) for word in re.findall(r"[\w.-]+", notes.partition("via")[2])}
        found.append((_plain(lines[0].partition("==")[0]), ("\n".join(lines).rstrip(), users)))
    return found


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    main(sys.argv[1:])
