"""Draw docs/images/demo.svg: an extraction that is interrupted, resumed and verified, recorded from a real run.

python scripts/make_demo_picture.py [OUTPUT]
"""

from __future__ import annotations

import io
import os
import re
import signal
import sys
import tempfile
import threading
from pathlib import Path

from rich.console import Console
from rich.text import Text

from spile.cli.verify import show
from spile.spec.run import ExtractSpec
from spile.store.verification import verify
from spile.view.worker import facts, report
from spile.worker.extract import extract
from spile.worker.progress import Progress
from spile.worker.signals import handling_signals

OUTPUT = Path(__file__).parent.parent / "docs" / "images" / "demo.svg"
WIDTH = 104
INTERRUPTED_AT = 16
"""Samples."""


def draw(console: Console) -> None:
    """Print the commands with their output, as a terminal would show them."""
    console.print("[bold green]$[/] spile extract")
    run(console, interrupt=True)
    console.print("\n[bold green]$[/] spile extract")
    run(console, interrupt=False)
    console.print("\n[bold green]$[/] spile verify ./activations")
    show(verify("./activations"), console)


def run(console: Console, *, interrupt: bool) -> None:
    """Run ``spile extract`` without its progress bar; a real signal interrupts it."""
    stop, over = threading.Event(), threading.Event()
    progress = Progress(log=lambda text: console.print(Text.assemble(("^C\n· " if interrupt else "· ", "dim"), text)))

    def press() -> None:
        while not over.wait(0.01):
            if progress.snapshot().samples >= INTERRUPTED_AT:
                os.kill(os.getpid(), signal.SIGINT)
                return

    with handling_signals(stop, progress):
        presser = threading.Thread(target=press)
        if interrupt:
            presser.start()
        summary = extract(ExtractSpec(), progress=progress, stop=stop)
        over.set()
        if interrupt:
            presser.join()
    console.print(report(facts(summary)))


def main(target: Path) -> None:
    """Run the commands, record their output and write the picture."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, highlight=False)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        draw(console)
        os.chdir("/")
    picture = console.export_svg(title="spile", unique_id="demo")
    picture = re.sub(r"\s*@font-face \{.*?\}", "", picture, flags=re.DOTALL)  # No font is downloaded.
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(re.sub(r"[ \t]+$", "", picture, flags=re.MULTILINE), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else OUTPUT)
