"""Draws docs/images/demo.svg: what ``make demo`` and ``spile verify`` print, from a run of them here and now.

python scripts/make_demo_picture.py [OUTPUT]
"""

from __future__ import annotations

import io
import os
import re
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from spile import ExtractSpec, extract
from spile.cli.live import facts, report
from spile.cli.verify import show
from spile.store.proof import verify

OUTPUT = Path(__file__).parent.parent / "docs" / "images" / "demo.svg"
WIDTH = 104


def draw(console: Console) -> None:
    """Both commands, as a terminal would show them when they are done."""
    console.print("[bold green]$[/] make demo")
    console.print(report(facts(extract(ExtractSpec()))))
    console.print("\n[bold green]$[/] spile verify ./activations")
    show(verify("./activations"), console)


def main(target: Path) -> None:
    """Run, record, write."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, highlight=False)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        draw(console)
        os.chdir("/")
    picture = console.export_svg(title="spile", unique_id="demo")
    picture = re.sub(r"\s*@font-face \{.*?\}", "", picture, flags=re.DOTALL)  # no font is fetched from anywhere
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(re.sub(r"[ \t]+$", "", picture, flags=re.MULTILINE), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else OUTPUT)
