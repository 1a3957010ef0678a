"""Machines that are real processes: each VM has a private folder, an environment and a startup script that runs there.

The startup script runs as in the cloud, with two replacements: a ``systemctl`` on its path, which starts the command of
a unit in the background, and a metadata server (``/vm/ZONE/NAME/HOST`` of the fake API). Every process of a VM has a
mark in its environment, so that all of them can be found and killed when the VM is preempted.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_MARK = "SPILE_FAKE_VM"
_HANDED_ON = (
    "PYTHONPATH",
    "STORAGE_EMULATOR_HOST",
    "JAX_PLATFORMS",
    "JAX_COMPILATION_CACHE_DIR",
    "HF_HOME",
    "HF_HUB_OFFLINE",
)
"""Variables of this process that its machines inherit."""

_SYSTEMCTL = """#!/bin/bash
# Starts what a unit says, in the background; restarts nothing.
unit="${@: -1}"
case "$*" in
  *restart*|*--now*|start*) ;;
  *) exit 0 ;;
esac
file="$SPILE_UNIT_DIR/$unit"
[ -f "$file" ] || file="$file.service"
[ -f "$file" ] || { echo "Unit $unit not found." >&2; exit 5; }
while IFS= read -r line; do
  case "$line" in
    Environment=*) value="${line#Environment=}"; value="${value%\\"}"; export "${value#\\"}" ;;
    WorkingDirectory=*) cd "${line#WorkingDirectory=}" ;;
    ExecStart=*) command="${line#ExecStart=}" ;;
  esac
done < "$file"
bash -c "exec $command" >> "$HOME/unit.log" 2>&1 < /dev/null &
"""


def processes_marked(mark: str) -> list[int]:
    """Return the living processes whose environment contains the mark."""
    wanted = f"{_MARK}={mark}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            if wanted in (entry / "environ").read_bytes().split(b"\0") and _alive(entry):
                found.append(int(entry.name))
        except OSError:  # The process has ended meanwhile, or belongs to another user.
            continue
    return found


def _alive(entry: Path) -> bool:
    return (entry / "stat").read_text().rpartition(")")[2].split()[0] != "Z"


class Vms:
    """The machines of one fake cloud."""

    def __init__(self, folder: Path, address: str, environment: Mapping[str, str] | None = None) -> None:
        """Create the folder of the machines; ``address`` is that of the fake cloud, ``127.0.0.1:PORT``."""
        self.folder, self._address = folder, address
        self.environment = dict(environment or {})
        self._children: dict[str, list[subprocess.Popen[bytes]]] = {}
        self._lock = threading.Lock()
        self._stubs = folder / "bin"
        self._stubs.mkdir(parents=True, exist_ok=True)
        systemctl = self._stubs / "systemctl"
        systemctl.write_text(_SYSTEMCTL)
        systemctl.chmod(0o755)

    def start(self, raw: Mapping[str, Any]) -> None:
        """Boot every host of a node by running its startup script. Called when a node becomes READY."""
        script = raw.get("metadata", {}).get("startup-script")
        if not script:
            return
        for host in range(len(raw["networkEndpoints"])):
            self._boot(raw, host, script)

    def _boot(self, raw: Mapping[str, Any], host: int, script: str) -> None:
        words = raw["name"].split("/")
        zone, name = words[3], words[5]
        home = self.folder / zone / f"{name}-{raw['id'][-6:]}" / f"host{host}"
        (home / "units").mkdir(parents=True, exist_ok=True)
        path = home / "startup-script"
        path.write_text(script)
        environment = {
            "HOME": str(home),
            "PATH": f"{self._stubs}:{os.environ.get('PATH', '/usr/bin:/bin')}",
            "LANG": "C.UTF-8",
            _MARK: raw["id"],
            "GCE_METADATA_HOST": f"{self._address}/vm/{zone}/{name}/{host}",
            "SPILE_TPU_ENDPOINT": f"http://{self._address}/",
            "SPILE_UNIT_DIR": str(home / "units"),
            "SPILE_HOME": str(home / "spile"),
            # The Python of this machine replaces the one that the script would install.
            "SPILE_PYTHON": sys.executable,
            # There are no chips here, so the worker runs on any device.
            "SPILE_EXPECT": "any",
            **_slice_environment(raw, host),
            **{name: os.environ[name] for name in _HANDED_ON if name in os.environ},
            **self.environment,
        }
        with (home / "serial.log").open("ab") as log:
            child = subprocess.Popen(
                ["/bin/bash", str(path)],
                cwd=home,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        with self._lock:
            self._children.setdefault(raw["id"], []).append(child)

    def stop(self, raw: Mapping[str, Any], notice: float = 0.0) -> None:
        """End the processes of a VM: SIGTERM and a wait if there is notice, then SIGKILL."""
        if notice > 0:
            _signal(raw["id"], signal.SIGTERM)
            threading.Thread(target=self._kill_after, args=(raw["id"], notice), daemon=True).start()
        else:
            self._kill(raw["id"])

    def _kill_after(self, mark: str, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and processes_marked(mark):
            time.sleep(0.05)
        self._kill(mark)

    def _kill(self, mark: str) -> None:
        # A process may fork meanwhile, so repeat until none is left.
        while _signal(mark, signal.SIGKILL):
            time.sleep(0.01)
        with self._lock:
            children = self._children.pop(mark, [])
        for child in children:
            child.wait()

    def running(self) -> dict[str, int]:
        """Return the number of processes of each VM, by node id."""
        with self._lock:
            marks = list(self._children)
        counts = {mark: len(processes_marked(mark)) for mark in marks}
        return {mark: count for mark, count in counts.items() if count}

    def close(self) -> None:
        with self._lock:
            marks = list(self._children)
        for mark in marks:
            self._kill(mark)


def _slice_environment(raw: Mapping[str, Any], host: int) -> dict[str, str]:
    """Return the variables that describe a slice to its hosts: JAX asks no metadata server if there are no chips."""
    addresses = [end["ipAddress"] for end in raw["networkEndpoints"]]
    if len(addresses) == 1:
        return {}
    return {"TPU_WORKER_ID": str(host), "TPU_WORKER_HOSTNAMES": ",".join(addresses)}


def _signal(mark: str, number: int) -> int:
    found = processes_marked(mark)
    for process in found:
        try:
            os.kill(process, number)
        except ProcessLookupError:  # The process has already ended.
            continue
    return len(found)
