"""A worker's secrets, brought by reference.

``--env HF_TOKEN=secret:projects/P/secrets/S`` keeps the reference in the bucket; the machine asks Secret Manager for
the value with its own service account, and the value lives in the worker's environment alone.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Mapping

from spile.errors import CloudError, SpecError, untrusted
from spile.spec.hiding import REFERENCE

__all__ = ["resolve"]

_NAME = re.compile(r"projects/[A-Za-z0-9._:-]+/secrets/[A-Za-z0-9_-]+(/versions/[A-Za-z0-9_-]+)?")
_ENDPOINT = "https://secretmanager.googleapis.com"


def resolve(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables, with what they refer to in the place of references."""
    return {
        name: _fetch(name, value.removeprefix(REFERENCE)) if value.startswith(REFERENCE) else value
        for name, value in environment.items()
    }


def _fetch(variable: str, name: str) -> str:
    if not _NAME.fullmatch(name):
        raise SpecError(f"--env {variable}", expected=f"{REFERENCE}projects/P/secrets/S", found=REFERENCE + name)
    where = name if "/versions/" in name else f"{name}/versions/latest"
    endpoint = os.environ.get("SPILE_SECRETS_ENDPOINT", _ENDPOINT).rstrip("/")
    import google.auth
    import requests
    from google.auth.transport.requests import AuthorizedSession

    with untrusted(CloudError, f"the secret {name} for {variable} cannot be read", fix="see the machine's account"):
        if endpoint.startswith("http://"):  # never Google: a token must not travel over it
            session: requests.Session = requests.Session()
        else:
            credentials, _ = google.auth.default(scopes=["https://www.googleapis.com/auth/cloud-platform"])
            session = AuthorizedSession(credentials)
        reply = session.get(f"{endpoint}/v1/{where}:access", timeout=30)
        if reply.status_code != 200:
            raise CloudError(f"the secret {name} for {variable} cannot be read", found=f"status {reply.status_code}")
        return base64.b64decode(reply.json()["payload"]["data"]).decode().rstrip("\n")
