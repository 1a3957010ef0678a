"""Spile itself, this very version, onto hosts that were made by hand: with a Python that is new enough, and on PATH.

The installer is the fleet's own startup script, told to stop after the installation; what it reads from a bucket on a
fleet's machine is here a folder that was copied to the host.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

from spile.fleet.heal.monitor import startup_script
from spile.fleet.home import FLEET, STARTUP
from spile.fleet.pins import REQUIREMENTS, REQUIREMENTS_CUDA, machine_requirements, sha256
from spile.fleet.ssh.copy import copy_to, load
from spile.fleet.ssh.hosts import Access, Host
from spile.fleet.ssh.launch import Launched, launch
from spile.fleet.wheel import build_wheel

__all__ = ["INSTALLED", "install_on"]

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
# A shell that is no login shell (gcloud … --command) reads no profile: where one may, the whole machine gets it.
if [ "$(id -u)" = 0 ] || sudo -n true 2> /dev/null; then
  as_root=sudo; [ "$(id -u)" != 0 ] || as_root=''
  [ -n "${SPILE_NO_SYSTEM_LINK:-}" ] || $as_root ln -sf "$HOME/.spile/venv/bin/spile" /usr/local/bin/spile || true
fi
bash -lc 'spile --version'
"""


def install_on(
    hosts: Sequence[Host], access: Access, *, force: bool = False, env: dict[str, str] | None = None
) -> tuple[str, list[Launched]]:
    """The wheel's name, and how it went on each host. The same wheel again installs nothing, unless forced."""
    name, data = build_wheel()
    with tempfile.TemporaryDirectory(prefix="spile-install-") as text:
        folder = Path(text)
        files = {name: data, STARTUP: startup_script().encode()}
        files |= {each: machine_requirements(each) for each in (REQUIREMENTS, REQUIREMENTS_CUDA)}
        for each, content in files.items():
            (folder / each).write_bytes(content)
        hashes = {each: sha256(content) for each, content in files.items()}
        (folder / FLEET).write_text(json.dumps({"wheel": name, "hashes": hashes}))
        copy_to(hosts, load(folder, _LIMIT), f"{INSTALLED}/home", access)
    script = _SCRIPT.replace("FORCE", "--force" if force else "")
    return name, launch(hosts, lambda _: script, access=access, env=env)
