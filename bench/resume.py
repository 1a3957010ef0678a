"""Check that this version finishes a stream of an older checkout: ``python -m bench.resume --old PATH``.

PATH is a checkout of the same repository (``git worktree add PATH COMMIT``). Its ``spile extract`` is stopped with
SIGTERM after its second commit. This version finishes the stream, and ``spile verify --recompute`` checks all of it.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

_SPILE = (sys.executable, "-m", "spile.cli.main")
_COMMITS = 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, required=True, help="a checkout to begin with")
    old = parser.parse_args().old.resolve()
    here = Path(__file__).parents[1]
    model, tasks = old / "src/spile/weights/embedded", old / "src/spile/data/embedded/tasks.jsonl"
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder, "out")
        words = ["extract", "--model", str(model), "--dataset", str(tasks), "--output", str(root)]
        words += ["--shard-size-gb", "0.01"]
        begun = subprocess.Popen([*_SPILE, *words], env={**os.environ, "PYTHONPATH": str(old / "src")})
        while begun.poll() is None and len(list(root.glob("*/commits/*.json"))) < _COMMITS:
            time.sleep(0.05)
        begun.send_signal(signal.SIGTERM)
        if begun.wait() == 0:
            print("the older one was done before it could be stopped: nothing is shown")
            return 1
        environment = {**os.environ, "PYTHONPATH": str(here / "src")}
        for more in (words, ["verify", str(root), "--recompute", "4"]):
            code = subprocess.run([*_SPILE, *more], check=False, env=environment).returncode
            if code:
                return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
