"""The documentation as data: its pages, links, commands and examples."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
BLOCK = re.compile(r"^( *)```(\S*)\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
PLACEHOLDER = re.compile(r"[…<]|\.\.\.")


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path, *languages: str) -> list[str]:
    """The fenced blocks of these languages."""
    return [body for _, language, body in BLOCK.findall(page.read_text(encoding="utf-8")) if language in languages]


def prose(page: Path) -> str:
    """The page without its fenced blocks."""
    return BLOCK.sub("", page.read_text(encoding="utf-8"))


def lines(block: str) -> Iterator[str]:
    """A shell block's lines, continued ones joined."""
    for line in block.replace("\\\n", " ").splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            yield line.strip()


def commands(page: Path) -> Iterator[list[str]]:
    """The words of every ``spile …`` that a reader could paste: of shell blocks, within quotes for ssh too."""
    for block in blocks(page, "bash", "sh", "console", ""):
        for line in lines(block):
            for quoted in re.findall(r'--command="(?:cd [^&]*&& )?(spile [^"]*)"', line):
                yield shlex.split(quoted, comments=True)
            found = re.match(r"(?:\$ )?(?:[A-Z_]+=\S* )*(spile (?![│·]).*)", line)
            if found:
                yield _without_shell(shlex.split(found[1], comments=True))


def mentions(page: Path) -> Iterator[list[str]]:
    """The words of every `spile …` in the text, but for those that leave something out."""
    for span in re.findall(r"(?<!`)`(spile [^`]*)`(?!`)", prose(page)):
        if not PLACEHOLDER.search(span):
            yield _without_shell(shlex.split(span.replace("\\|", "|"), comments=True))


def _without_shell(words: list[str]) -> list[str]:
    """The words up to a pipe, an ``&`` or a redirection."""
    ends = [place for place, word in enumerate(words) if word in ("|", "&", "&&", ">", "2>&1")]
    return words[: ends[0]] if ends else words


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    found = set()
    for heading in re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE):
        text = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower())
        found.add(text.replace(" ", "-"))
    return found


def links(page: Path) -> Iterator[str]:
    """Every link to another file, or to a heading."""
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if not re.match(r"[a-z]+:", target):
            yield target
    yield from re.findall(r'(?:src|href)="((?![a-z]+:)[^"]+)"', prose(page))
