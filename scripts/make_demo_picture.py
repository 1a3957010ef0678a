"""Draw docs/images/demo.svg: an extraction that is interrupted, resumed and verified, recorded from a real terminal.

python scripts/make_demo_picture.py [OUTPUT]
"""

from __future__ import annotations

import fcntl
import io
import os
import pty
import re
import struct
import sys
import tempfile
import termios
from pathlib import Path

from rich.console import Console
from rich.text import Text

OUTPUT = Path(__file__).parent.parent / "docs" / "images" / "demo.svg"
WIDTH = 100
INTERRUPT = re.compile(rb" (?:1[6-9]|[2-4]\d)/48 samples[^\r]*\r")
"""The end of a progress line that shows at least 16 samples."""


def record(*words: str, interrupt: bool = False) -> str:
    """Run ``spile`` in a terminal and return what it shows; ``interrupt`` presses Ctrl+C during the run."""
    process, terminal = pty.fork()
    if process == 0:
        os.environ.update(TERM="xterm-256color", COLUMNS=str(WIDTH), LINES="40")
        os.execv(sys.executable, [sys.executable, "-m", "spile.cli.main", *words])  # noqa: S606
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, WIDTH, 0, 0))
    shown, before = b"", ""
    while True:
        try:
            shown += os.read(terminal, 65536)
        except OSError:  # Linux reports the end of the other side as an error.
            break
        if interrupt and not before and INTERRUPT.search(shown):
            before, shown = screen(shown) + "\n", b""
            os.write(terminal, b"\x03")
    os.close(terminal)
    os.waitpid(process, 0)
    return before + screen(shown)


def screen(output: bytes) -> str:
    """Apply the control sequences that move the cursor or erase; colours remain."""
    lines = [""]
    for part in re.split(r"(\r\n|\x1b\[2K|\x1b\[1A|\x1b\[\?25[lh]|\r)", output.decode(errors="ignore")):
        if part == "\r\n":
            lines.append("")
        elif part == "\x1b[2K":
            lines[-1] = ""
        elif part == "\x1b[1A":
            lines.pop()
        elif part != "\r" and not part.startswith("\x1b[?25"):
            lines[-1] += part
    return "\n".join(lines).rstrip("\n")


def main(target: Path) -> None:
    """Run the commands, record their output and write the picture."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, highlight=False)
    commands = [(["extract"], True), (["extract"], False), (["verify", "./activations"], False)]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for number, (words, interrupt) in enumerate(commands):
            console.print(("\n" if number else "") + "[bold green]$[/] spile " + " ".join(words))
            console.print(Text.from_ansi(record(*words, interrupt=interrupt)))
        os.chdir("/")
    picture = console.export_svg(title="spile", unique_id="demo")
    picture = re.sub(r"\s*@font-face \{.*?\}", "", picture, flags=re.DOTALL)  # No font is downloaded.
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(re.sub(r"[ \t]+$", "", picture, flags=re.MULTILINE), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else OUTPUT)
