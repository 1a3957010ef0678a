#!/usr/bin/env bash
# What is released is what was tried: builds sdist and wheel, installs the wheel into an empty environment with an empty
# HOME, and runs the demo and its proof from there, far from this checkout.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

"$python" -m venv "$work/build"
"$work/build/bin/pip" install --quiet build
rm -rf dist
"$work/build/bin/python" -m build --outdir dist . >"$work/build.log" 2>&1 || { cat "$work/build.log"; exit 1; }

# The wheel from the sdist must be the wheel from the tree.
"$python" - dist <<'PY'
import sys, tarfile, zipfile
from pathlib import Path

(wheel,), (sdist,) = Path(sys.argv[1]).glob("*.whl"), Path(sys.argv[1]).glob("*.tar.gz")
names = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
source = {name.partition("/src/")[2] for name in tarfile.open(sdist).getnames() if "/src/spile/" in name}
alone = "convert_hf_to_arc_format.py"
tree = {alone} | {str(path.relative_to("src")) for path in Path("src/spile").rglob("*") if path.is_file() and "__pycache__" not in path.parts}
assert names == tree, f"the wheel lacks {sorted(tree - names)[:5]}, or has more: {sorted(names - tree)[:5]}"
assert tree - {alone} <= source, f"the sdist lacks {sorted(tree - source)[:5]}"
assert "spile/py.typed" in names
print(f"{wheel.name}: {len(names)} files, {wheel.stat().st_size / 1e6:.1f} MB")
PY

"$python" -m venv "$work/clean"
"$work/clean/bin/pip" install --quiet dist/*.whl
sbom="dist/$(basename dist/*.tar.gz .tar.gz).cdx.json"
"$work/clean/bin/python" scripts/make_sbom.py dist/*.whl dist/*.tar.gz > "$sbom"
"$python" -c 'import json, sys; print(len(json.load(open(sys.argv[1]))["components"]), "components in", sys.argv[1])' "$sbom"
grep -q '^ARG BASE=.*@sha256:' Dockerfile || echo "the base image is not pinned by digest: run make base-image (needs docker) before images are released"
mkdir "$work/home" "$work/here"
cd "$work/here"
export HOME="$work/home" PATH="$work/clean/bin:$PATH"
unset PYTHONPATH
spile extract
spile verify ./activations
python -c "import spile; help(spile)" >"$work/help.txt"
grep -q "spile.extract(" "$work/help.txt"
pip list 2>/dev/null | tail -n +3 | wc -l | sed 's/$/ packages/'
du -sm "$work/clean" | cut -f1 | sed 's/$/ MB installed/'
echo "release-check: passed"
