"""Who we are to Amazon: the environment's keys, else botocore's chain where it is installed.

Profiles, SSO, roles, processes, web identity and instance metadata are botocore's (``pip install 'spile[s3]'``).
Of what it says, only words of ours reach a message.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from spile.errors import UserError
from spile.objects.cloud.failures import RequestFailure

__all__ = ["AwsKeys", "aws_endpoint", "aws_keys", "aws_region"]

Answer = TypeVar("Answer")

_BOTH = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
_INSTALL = f"pip install 'spile[s3]', or set {_BOTH}"
_CHAIN = (
    "AWS_PROFILE",
    "AWS_DEFAULT_PROFILE",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
)
"""Variables that only botocore's chain understands."""
_FILES = (("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"), ("AWS_CONFIG_FILE", "~/.aws/config"))
_CHECK = "check with: aws sts get-caller-identity"
_LOGIN = ("an SSO session that has ended", "run: aws sso login")
_WORDS = {
    "ProfileNotFound": ("no such profile", "set AWS_PROFILE to one of: aws configure list-profiles"),
    "PartialCredentialsError": ("half of a key", "run: aws configure"),
    "ConfigParseError": ("a config file that cannot be read", "correct ~/.aws/config"),
    "InvalidConfigError": ("a profile that is not complete", "correct ~/.aws/config"),
    "CredentialRetrievalError": ("a source of keys that failed", _CHECK),
    "TokenRetrievalError": _LOGIN,
    "SSOError": _LOGIN,
}
"""What botocore's errors, or their parents, mean, and what to do."""
_PASSING = ("ConnectionError", "HTTPClientError", "MetadataRetrievalError")


@dataclass(frozen=True)
class AwsKeys:
    """One set of AWS keys; its repr shows none of them."""

    access: str = field(repr=False)
    secret: str = field(repr=False)
    session: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        names = {"access": "AWS_ACCESS_KEY_ID", "secret": "AWS_SECRET_ACCESS_KEY", "session": "AWS_SESSION_TOKEN"}
        for name, variable in names.items():
            value = getattr(self, name) or ""
            if not value.isascii() or not value.isprintable() or " " in value:
                # The value itself is in no message: an HTTP library would quote it.
                raise UserError(
                    f"{variable} cannot be", expected="one line of letters, digits and signs", found="another"
                )


_lock = threading.Lock()
_session: Any = None
_worked: Any = None
"""The session that gave keys once."""


def _botocore() -> Any:
    """Botocore's session, or None where it is not installed."""
    global _session
    with _lock:
        if _session is None:
            try:
                import botocore.session
            except ImportError:
                return None
            _session = botocore.session.Session()
        return _session


def _asked(question: Callable[[Any], Answer]) -> Answer | None:
    """What botocore's session answers; None where it is not installed. Its errors in our words."""
    session = _botocore()
    if session is None:
        return None
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        return question(session)
    except (BotoCoreError, ClientError) as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        if any(kind in _PASSING for kind in kinds):
            raise RequestFailure("the credentials could not be refreshed", transient=True) from error
        code = error.response.get("Error", {}).get("Code") if isinstance(error, ClientError) else None
        if (
            session is _worked
        ):  # an hour ago they did: a run is not ended for what may pass, and its owner made no mistake
            raise RequestFailure("the credentials could not be refreshed", transient=True) from error
        found, fix = next((_WORDS[kind] for kind in kinds if kind in _WORDS), (code or kinds[0], _CHECK))
        profile = _profile(os.environ)
        raise UserError(
            f"no AWS credentials{f' from the profile {profile}' if profile else ''}",
            expected=f"a profile or a role that works, or {_BOTH}",
            found=found,
            fix=fix,
        ) from error


def _profile(environment: Mapping[str, str]) -> str | None:
    return environment.get("AWS_PROFILE") or environment.get("AWS_DEFAULT_PROFILE")


def aws_keys() -> AwsKeys:
    """The keys in force now."""
    environment = os.environ
    if environment.get("AWS_ACCESS_KEY_ID") and environment.get("AWS_SECRET_ACCESS_KEY"):
        session_token = environment.get("AWS_SESSION_TOKEN")
        return AwsKeys(environment["AWS_ACCESS_KEY_ID"], environment["AWS_SECRET_ACCESS_KEY"], session_token)
    keys = _asked(_frozen)
    if keys is not None:
        return keys
    if _botocore() is not None:
        raise UserError("no AWS credentials", expected=f"a profile, a role, or {_BOTH}", fix="run: aws configure")
    seen = _chain_seen(environment)
    if seen is not None:
        raise UserError(f"{seen} takes botocore", expected="botocore", found="none", fix=_INSTALL)
    raise UserError("no AWS credentials", expected=_BOTH, found="neither", fix=f"{_INSTALL}; a profile takes the first")


def _frozen(session: Any) -> AwsKeys | None:
    found = session.get_credentials()
    if found is None:
        return None
    frozen = found.get_frozen_credentials()
    global _worked
    _worked = session
    return AwsKeys(frozen.access_key, frozen.secret_key, frozen.token)


def _chain_seen(environment: Mapping[str, str]) -> str | None:
    """What on this machine only botocore can make keys of."""
    for name in _CHAIN:
        if environment.get(name):
            return f"{name}={environment[name]}"
    for name, usual in _FILES:
        place = environment.get(name) or usual
        if Path(place).expanduser().is_file():
            return place
    return None


def aws_region() -> str | None:
    """What the environment or the profile says."""
    found = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    return found or _asked(lambda session: session.get_config_variable("region"))


def aws_endpoint() -> str | None:
    """Another server than Amazon's, as the environment or the profile says: for S3 alone, then for all services."""
    found = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return found or _asked(_configured_endpoint)


def _configured_endpoint(session: Any) -> Any:
    profile = session.get_scoped_config()
    ignored = os.environ.get("AWS_IGNORE_CONFIGURED_ENDPOINT_URLS") or profile.get("ignore_configured_endpoint_urls")
    if str(ignored).lower() == "true":
        return None
    services = session.full_config.get("services", {}).get(profile.get("services"), {})
    own = services.get("s3", {})
    found = own.get("endpoint_url") if isinstance(own, dict) else None
    return found or profile.get("endpoint_url") or None
