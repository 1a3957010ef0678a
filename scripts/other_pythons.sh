#!/usr/bin/env bash
# Install spile for each other supported Python on this machine, import every module, run the demo and verify it.
set -euo pipefail
cd "$(dirname "$0")/.."
for version in 3.12 3.13 3.14; do
  python=""
  for candidate in "python$version" "$HOME"/.pyenv/versions/"$version".*/bin/python; do
    if "$candidate" -c 'import ensurepip, venv' 2>/dev/null; then python=$candidate; break; fi
  done
  if [ -z "$python" ]; then echo "Python $version: not on this machine"; continue; fi
  folder=$(mktemp -d); trap 'rm -rf "$folder"' EXIT
  "$python" -m venv "$folder/venv"
  "$python" scripts/runtime_requirements.py > "$folder/runtime.txt"
  "$folder/venv/bin/pip" install --quiet --disable-pip-version-check --require-hashes -r "$folder/runtime.txt"
  export PYTHONPATH=$PWD/src PYTHONDONTWRITEBYTECODE=1
  "$folder/venv/bin/python" - <<'PYTHON'
import importlib, pkgutil, spile

OPTIONAL = {"torch", "transformers", "ray", "grain", "datasets", "pyarrow"}
for module in pkgutil.walk_packages(spile.__path__, "spile."):
    try:
        importlib.import_module(module.name)
    except ModuleNotFoundError as error:
        if error.name not in OPTIONAL:
            raise
PYTHON
  (cd "$folder" && venv/bin/python -m spile.cli.main extract --output out && venv/bin/python -m spile.cli.main verify out) > "$folder/log" 2>&1 || { cat "$folder/log"; exit 1; }
  unset PYTHONPATH
  echo "Python $version: modules imported, demo extracted and verified"
  rm -rf "$folder"
done
