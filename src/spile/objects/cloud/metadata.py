"""The metadata server that a cloud's machine has beside it, and no other machine has."""

from __future__ import annotations

from collections.abc import Mapping

import urllib3

__all__ = ["METADATA_SERVER", "ask_metadata", "google_metadata_url"]

METADATA_SERVER = "169.254.169.254"
"""Of both clouds. By its number: where no name server answers, to ask for Google's name takes ten seconds."""


def google_metadata_url(path: str, environment: Mapping[str, str]) -> str:
    """Where a Google machine's server says this, such as ``instance/zone``; Google's own variables name another."""
    host = environment.get("GCE_METADATA_HOST") or environment.get("GCE_METADATA_IP") or METADATA_SERVER
    return f"http://{host}/computeMetadata/v1/{path}"


def ask_metadata(method: str, url: str, headers: dict[str, str], patience: urllib3.Timeout | float) -> str | None:
    """The server's answer; None where there is no such server, which is most machines. It is behind no proxy."""
    try:
        with urllib3.PoolManager() as pool:
            reply = pool.request(method, url, headers=headers, timeout=patience, retries=False)
    except urllib3.exceptions.HTTPError:
        return None
    return reply.data.decode().strip() if reply.status == 200 else None
