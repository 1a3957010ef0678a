"""Look for known vulnerabilities of dependencies with ``pip-audit``, if it is installed and has a network.

A vulnerability is a failure. A missing pip-audit or network is not, because such a check would be disabled soon.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

_SECONDS = 120


def main() -> int:
    """Return 0 if nothing was found or the database could not be asked."""
    if importlib.util.find_spec("pip_audit") is None:
        print("audit: left out, no pip-audit here (pip install pip-audit)")
        return 0
    requirements = Path(__file__).parent.parent / "requirements.txt"
    words = [sys.executable, "-m", "pip_audit", "--requirement", str(requirements), "--disable-pip", "--no-deps"]
    try:
        ended = subprocess.run(  # noqa: S603 - our own words
            [*words, "--format", "json"], capture_output=True, text=True, timeout=_SECONDS, check=False
        )
        found = json.loads(ended.stdout)["dependencies"]
    except (subprocess.TimeoutExpired, ValueError, KeyError):
        print("audit: left out, the database of known holes does not answer")
        return 0
    asked = [each for each in found if "vulns" in each]  # a mirror of the index may know of none: those have a reason
    if not asked:
        print(f"audit: left out, the database of known holes has nothing about any of {len(found)} packages")
        return 0
    holes = [(each["name"], each["version"], hole["id"]) for each in asked for hole in each["vulns"]]
    for name, version, hole in holes:
        print(f"audit: {name} {version} has {hole}")
    print(f"audit: {len(asked)} of {len(found)} packages looked up, {len(holes)} known holes")
    return 1 if holes else 0


if __name__ == "__main__":
    sys.exit(main())
