"""Where the cloud's settings come from: a flag, else the environment, else gcloud's own configuration files."""

from __future__ import annotations

import configparser
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from spile.errors import UserError

__all__ = ["CloudSettings", "gcloud_value", "read_settings"]

_PROJECT = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]*")
TPU_ENDPOINT = "https://tpu.googleapis.com/"


@dataclass(frozen=True)
class CloudSettings:
    """Which project, and where its API is."""

    project: str
    zone: str | None = None
    endpoint: str = TPU_ENDPOINT
    anonymous: bool = False
    """No credentials are sent: for a local stand-in of the API."""

    def api(self, name: str) -> str:
        """Where another API of Google's is: ``cloudresourcemanager``, ``iam``. A stand-in answers for all."""
        return f"https://{name}.googleapis.com/" if self.endpoint == TPU_ENDPOINT else self.endpoint


def _configuration(environment: Mapping[str, str]) -> configparser.ConfigParser:
    home = Path(environment.get("HOME") or Path.home())
    folder = Path(environment.get("CLOUDSDK_CONFIG") or home / ".config" / "gcloud")
    name = environment.get("CLOUDSDK_ACTIVE_CONFIG_NAME")
    if not name:
        active = folder / "active_config"
        name = active.read_text().strip() if active.is_file() else "default"
    parser = configparser.ConfigParser(interpolation=None)
    parser.read([folder / "properties", folder / "configurations" / f"config_{name}"])
    return parser


def gcloud_value(section: str, key: str, environment: Mapping[str, str]) -> str | None:
    """What ``gcloud config get section/key`` would say: its variable, then its files."""
    variable = environment.get(f"CLOUDSDK_{section}_{key}".upper())
    if variable:
        return variable
    return _configuration(environment).get(section, key, fallback=None) or None


def read_settings(environment: Mapping[str, str], *, project: str | None = None) -> CloudSettings:
    """The settings a command runs with."""
    project = project or gcloud_value("core", "project", environment) or environment.get("GOOGLE_CLOUD_PROJECT")
    if not project:
        raise UserError("no Google Cloud project", fix="pass --project, or run: gcloud config set project NAME")
    if not _PROJECT.fullmatch(project):
        raise UserError("--project", expected="a project's id: letters, digits, - . and :", found=repr(project))
    endpoint = (
        environment.get("SPILE_TPU_ENDPOINT")
        or gcloud_value("api_endpoint_overrides", "tpu", environment)
        or TPU_ENDPOINT
    )
    disabled = (gcloud_value("auth", "disable_credentials", environment) or "").lower() in ("1", "true", "yes", "on")
    return CloudSettings(
        project=project,
        zone=gcloud_value("compute", "zone", environment),
        endpoint=endpoint.rstrip("/") + "/",
        # Plain http is never Google: a token must not travel over it.
        anonymous=disabled or endpoint.startswith("http://"),
    )
