"""Print a software bill of materials of the running environment: spile and everything it depends on, as CycloneDX JSON.

``python scripts/make_sbom.py [DIST…] > spile.cdx.json`` reads the metadata of the installed distributions. Files in
``DIST`` (the wheel and the sdist of spile) are added with their sha256.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import sys
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

ROOT = "spile"


def main(files: list[str]) -> None:
    """Print the bill."""
    json.dump(bill([Path(file) for file in files]), sys.stdout, indent=1, sort_keys=True)
    print()


def bill(files: list[Path]) -> dict[str, Any]:
    """Return the bill of materials of spile in this environment."""
    installed = {_plain(each.name): each for each in importlib.metadata.distributions()}
    needed, waiting = dict[str, list[str]](), [ROOT]
    while waiting:
        name = waiting.pop()
        if name not in needed:
            needed[name] = sorted(other for other in _requirements(installed[name]) if other in installed)
            waiting += needed[name]
    parts = {name: _component(installed[name]) for name in needed}
    parts[ROOT]["externalReferences"] = [
        {"type": "distribution", "url": file.name, "hashes": [{"alg": "SHA-256", "content": _sha256(file)}]}
        for file in files
    ]
    components = [parts[name] for name in sorted(parts) if name != ROOT]
    depends = [
        {"ref": parts[name]["bom-ref"], "dependsOn": [parts[other]["bom-ref"] for other in needed[name]]}
        for name in sorted(needed)
    ]
    content = json.dumps([parts[ROOT], components, depends], sort_keys=True)
    moment = datetime.fromtimestamp(int(os.environ.get("SOURCE_DATE_EPOCH", datetime.now(UTC).timestamp())), UTC)
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, content)}",
        "version": 1,
        "metadata": {"timestamp": moment.isoformat(), "component": {**parts[ROOT], "type": "application"}},
        "components": components,
        "dependencies": depends,
    }


def _requirements(distribution: importlib.metadata.Distribution) -> set[str]:
    """Return the names that a distribution requires. Markers are not evaluated: what is not installed is left out."""
    words = (re.match(r"[\w.-]+", text) for text in distribution.requires or () if "extra ==" not in text)
    return {_plain(word[0]) for word in words if word}


def _component(distribution: importlib.metadata.Distribution) -> dict[str, Any]:
    name, version = _plain(distribution.name), distribution.version
    purl = f"pkg:pypi/{name}@{version}"
    found: dict[str, Any] = {"type": "library", "name": name, "version": version, "purl": purl, "bom-ref": purl}
    fields = distribution.metadata
    expression, text = fields.get("License-Expression"), (fields.get("License") or "").strip()
    kinds = [
        each.rpartition(" :: ")[2] for each in fields.get_all("Classifier") or () if each.startswith("License :: ")
    ]
    if expression:
        found["licenses"] = [{"expression": expression}]
    elif kinds or text:
        found["licenses"] = [{"license": {"name": kinds[0] if kinds else text.splitlines()[0][:100]}}]
    return found


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _sha256(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


if __name__ == "__main__":
    main(sys.argv[1:])
