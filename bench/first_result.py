"""From a fresh clone to the first result, and the size of an installation: ``python -m bench.first_result``.

The clone, the environment and HOME are new and empty; only what pip finds locally (its cache, or an index on this
machine) is there already. CPU seconds are given too, because they do not depend on what else the machine does.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from spile.spec.amounts import size

_ROOT = Path(__file__).parents[1]
_LARGEST = 12


def run(*words: str, folder: Path, home: Path) -> tuple[float, float]:
    """Run a command with an empty HOME; return its time and the CPU seconds of it and its children."""
    cache = os.environ.get("PIP_CACHE_DIR", str(Path.home() / ".cache" / "pip"))
    kept = {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    environment = {"HOME": str(home), "PATH": os.environ["PATH"], "PIP_CACHE_DIR": cache, "LANG": "C.UTF-8", **kept}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(words, cwd=folder, env=environment, check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return time.perf_counter() - began, used


def bytes_below(folder: Path) -> int:
    """Return the disk space of the files below a folder."""
    return sum(path.lstat().st_blocks * 512 for path in folder.rglob("*") if not path.is_symlink())


def demo(clone: Path, home: Path, python: str) -> None:
    """Print the time of the first command of the README."""
    wall, cpu = run("make", "demo", f"PYTHON={python}", folder=clone, home=home)
    print(f"make demo         {wall:.0f} s, {cpu:.0f} CPU seconds")
    wall, cpu = run(str(clone / ".venv/bin/spile"), "verify", "activations", folder=clone, home=home)
    print(f"spile verify      {wall:.1f} s, {cpu:.1f} CPU seconds")


def install(clone: Path, home: Path, python: str) -> None:
    """Print the time and the size of an installation without extras."""
    place = clone / "build" / "installed"
    run(python, "-m", "venv", str(place), folder=clone, home=home)
    (packages,) = place.glob("lib/python*/site-packages")
    before = bytes_below(packages)  # pip itself
    wall, cpu = run(str(place / "bin/pip"), "install", "--quiet", ".", folder=clone, home=home)
    added = size(bytes_below(packages) - before)
    print(f"pip install .     {wall:.0f} s, {cpu:.0f} CPU seconds; {added} more in site-packages:")
    sizes = sorted(((bytes_below(each), each.name) for each in packages.iterdir() if each.is_dir()), reverse=True)
    print("                  " + ", ".join(f"{name} {size(count)}" for count, name in sizes[:_LARGEST]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", choices=["demo", "install"], help="one of both")
    words = parser.parse_args()
    # The interpreter without its environment: this one may be a virtual environment.
    python = str(Path(sys.base_prefix) / "bin" / "python3")
    with tempfile.TemporaryDirectory() as place:
        clone, home = Path(place) / "clone", Path(place) / "home"
        home.mkdir()
        wall, _ = run("git", "clone", "--quiet", str(_ROOT), str(clone), folder=Path(place), home=home)
        print(f"git clone         {wall:.1f} s")
        if words.only != "install":
            demo(clone, home, python)
        if words.only != "demo":
            install(clone, home, python)


if __name__ == "__main__":
    main()
