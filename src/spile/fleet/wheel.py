"""The wheel of this very code, as it is installed here: what machines run is what was tried."""

from __future__ import annotations

import base64
import hashlib
import io
import zipfile
from importlib import metadata
from pathlib import Path

import spile
from spile.version import __version__

__all__ = ["build_wheel"]

_WHEEL = "Wheel-Version: 1.0\nGenerator: spile\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
_LEFT_OUT = ("__pycache__",)


def build_wheel() -> tuple[str, bytes]:
    """Its file name and its bytes: the same bytes for the same code. The version carries the code's hash."""
    package = Path(spile.__file__).parent
    files = {
        f"spile/{path.relative_to(package).as_posix()}": path.read_bytes()
        for path in sorted(package.rglob("*"))
        if path.is_file() and not set(path.parts).intersection(_LEFT_OUT)
    }
    digest = hashlib.sha256()
    for name, data in files.items():
        digest.update(f"{name}\0{len(data)}\0".encode())
        digest.update(data)
    version = f"{__version__}+{digest.hexdigest()[:12]}"
    info = f"spile-{version}.dist-info"
    files[f"{info}/METADATA"] = _metadata(version).encode()
    files[f"{info}/WHEEL"] = _WHEEL.encode()
    files[f"{info}/entry_points.txt"] = b"[console_scripts]\nspile = spile.cli.main:main\n"
    files[f"{info}/RECORD"] = _record(files, f"{info}/RECORD")
    return f"spile-{version}-py3-none-any.whl", _zip(files)


def _metadata(version: str) -> str:
    """The installed distribution's own, with the version changed: the requirements are those of this installation."""
    text = (
        metadata.distribution("spile").read_text("METADATA")
        or f"Metadata-Version: 2.4\nName: spile\nVersion: {version}\n"
    )
    head, blank, body = text.partition("\n\n")
    lines = [f"Version: {version}" if line.startswith("Version:") else line for line in head.splitlines()]
    # A licence file that is named but not packed would make the wheel invalid.
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
            # A fixed date, so that the same code gives the same bytes.
            entry = zipfile.ZipInfo(name, (2020, 1, 1, 0, 0, 0))
            entry.external_attr = 0o644 << 16
            archive.writestr(entry, data, zipfile.ZIP_DEFLATED)
    return buffer.getvalue()
