"""Build a wheel of the code that is installed here, so that machines run the same code."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import tempfile
import zipfile
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import spile
from spile.fleet.home import (
    FLEET,
    REQUIREMENTS,
    REQUIREMENTS_CUDA,
    STARTUP,
    machine_requirements,
    sha256,
    startup_script,
)
from spile.hosts.files import copy_to, files_to_copy
from spile.hosts.hosts import Access, Host
from spile.hosts.run import Launched, launch
from spile.version import __version__

_WHEEL = "Wheel-Version: 1.0\nGenerator: spile\nRoot-Is-Purelib: true\nTag: py3-none-any\n"


def build_wheel() -> tuple[str, bytes]:
    """Return the wheel's file name and bytes. The same code gives the same bytes, and its hash is in the version."""
    package = Path(spile.__file__).parent
    files = {
        f"spile/{path.relative_to(package).as_posix()}": path.read_bytes()
        for path in sorted(package.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
    digest = hashlib.sha256()
    for name, data in files.items():
        digest.update(f"{name}\0{len(data)}\0".encode())
        digest.update(data)
    version = f"{__version__}+{digest.hexdigest()[:12]}"
    info = f"spile-{version}.dist-info"
    files[f"{info}/METADATA"] = _metadata(version).encode()
    files[f"{info}/WHEEL"] = _WHEEL.encode()
    files[f"{info}/entry_points.txt"] = b"[console_scripts]\nspile = spile.cli.main:run_process\n"
    files[f"{info}/RECORD"] = _record(files, f"{info}/RECORD")
    return f"spile-{version}-py3-none-any.whl", _zip(files)


def _metadata(version: str) -> str:
    """Return the metadata of the installed distribution with a changed version; the requirements stay the same."""
    text = (
        metadata.distribution("spile").read_text("METADATA")
        or f"Metadata-Version: 2.4\nName: spile\nVersion: {version}\n"
    )
    head, blank, body = text.partition("\n\n")
    lines = [f"Version: {version}" if line.startswith("Version:") else line for line in head.splitlines()]
    # A licence file that is named in the metadata but missing would make the wheel invalid.
    return "\n".join(line for line in lines if not line.startswith("License-File:")) + blank + body


def _record(files: dict[str, bytes], own: str) -> bytes:
    lines = []
    for name, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        lines.append(f"{name},sha256={digest},{len(data)}")
    return ("\n".join([*lines, f"{own},,"]) + "\n").encode()


def _zip(files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            # The date is fixed so that the same code gives the same bytes.
            entry = zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0))
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()


INSTALLED = "~/.spile"
_LIMIT = 1 << 30
_SCRIPT = """
set -e
home="$HOME/.spile/home"
extras=''
for each in /dev/accel[0-9]* /dev/vfio/[0-9]*; do [ ! -e "$each" ] || extras='[tpu]'; done
[ -n "$extras" ] || ! command -v nvidia-smi > /dev/null || extras='[cuda]'
SPILE_HOME="$HOME/.spile" SPILE_UNIT_DIR="$HOME/.spile" SPILE_EXPECT=any SPILE_EXTRAS="${SPILE_EXTRAS-$extras}" \\
  bash "$home/startup.sh" --home "$home" --node "$(hostname)" --zone none --host 0 --pin none --install-only FORCE
mkdir -p "$HOME/.local/bin"
ln -sf "$HOME/.spile/venv/bin/spile" "$HOME/.local/bin/spile"
for profile in "$HOME/.bash_profile" "$HOME/.bash_login" "$HOME/.profile"; do [ -f "$profile" ] && break; done
grep -qs 'spile install' "$profile" || echo 'PATH="$HOME/.local/bin:$PATH"  # spile install' >> "$profile"
# A shell that is not a login shell (gcloud … --command) reads no profile, so link it for all users if possible.
if [ "$(id -u)" = 0 ] || sudo -n true 2> /dev/null; then
  as_root=sudo; [ "$(id -u)" != 0 ] || as_root=''
  [ -n "${SPILE_NO_SYSTEM_LINK:-}" ] || $as_root ln -sf "$HOME/.spile/venv/bin/spile" /usr/local/bin/spile || true
fi
bash -lc 'spile --version'
"""


def install_on(hosts: Sequence[Host], access: Access, *, force: bool = False) -> tuple[str, list[Launched]]:
    """Return the wheel's name and the result on each host. The same wheel is installed again only if forced."""
    name, data = build_wheel()
    with tempfile.TemporaryDirectory(prefix="spile-install-") as text:
        folder = Path(text)
        files = {name: data, STARTUP: startup_script().encode()}
        files |= {each: machine_requirements(each) for each in (REQUIREMENTS, REQUIREMENTS_CUDA)}
        for each, content in files.items():
            (folder / each).write_bytes(content)
        hashes = {each: sha256(content) for each, content in files.items()}
        (folder / FLEET).write_text(json.dumps({"wheel": name, "hashes": hashes}))
        copy_to(hosts, files_to_copy(folder, _LIMIT), f"{INSTALLED}/home", access)
    script = _SCRIPT.replace("FORCE", "--force" if force else "")
    return name, launch(hosts, lambda _: script, access=access)
