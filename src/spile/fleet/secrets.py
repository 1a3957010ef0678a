"""A worker's secrets: brought by reference, and struck out of what is told.

``--env HF_TOKEN=secret:projects/P/secrets/S`` keeps the reference in the bucket; the machine asks Secret Manager for
the value with its own service account, and the value lives in the worker's environment alone.
"""

from __future__ import annotations

import base64
import os
import re
from collections.abc import Iterable, Mapping

from spile.errors import CloudError, SpecError, untrusted

__all__ = ["resolve", "secret_values", "struck_out"]

PREFIX = "secret:"
_NAME = re.compile(r"projects/[A-Za-z0-9._:-]+/secrets/[A-Za-z0-9_-]+(/versions/[A-Za-z0-9_-]+)?")
_SECRET = re.compile(r"TOKEN|SECRET|PASSWORD|CREDENTIAL|PRIVATE|_KEY$|^KEY", re.IGNORECASE)
_SHORTEST = 6
"""Shorter values are left alone: to strike out every ``0`` of a log says nothing and hides everything."""
_ENDPOINT = "https://secretmanager.googleapis.com"


def resolve(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables, with what they refer to in the place of references."""
    return {
        name: _fetch(name, value.removeprefix(PREFIX)) if value.startswith(PREFIX) else value
        for name, value in environment.items()
    }


def secret_values(environment: Mapping[str, str], given: Mapping[str, str]) -> frozenset[str]:
    """The values that nobody else shall read: those that came by reference, and those whose name says so."""
    named = {value for name, value in given.items() if _SECRET.search(name)}
    brought = {given[name] for name, value in environment.items() if value.startswith(PREFIX) and name in given}
    return frozenset(value for value in named | brought if len(value) >= _SHORTEST)


def struck_out(text: str, values: Iterable[str]) -> str:
    """The text without these values."""
    for value in sorted(values, key=len, reverse=True):
        text = text.replace(value, "***")
    return text


def _fetch(variable: str, name: str) -> str:
    if not _NAME.fullmatch(name):
        raise SpecError(f"--env {variable}", expected=f"{PREFIX}projects/P/secrets/S", found=PREFIX + name)
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
