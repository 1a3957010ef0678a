"""Who we are to the cloud: Google's tokens, and signatures for S3.

Google: application default credentials (``google.auth``); against an emulator (``STORAGE_EMULATOR_HOST``) nobody.
Amazon's keys come from ``aws``.
"""

from __future__ import annotations

import hashlib
import hmac
import threading
from collections.abc import Mapping
from datetime import datetime
from typing import Any
from urllib.parse import quote, urlsplit

from spile.errors import UserError
from spile.objects.cloud.aws import AwsKeys
from spile.objects.cloud.failures import RequestFailure

__all__ = ["GoogleToken", "quoted", "sign_v4"]

_SCOPE = "https://www.googleapis.com/auth/devstorage.read_write"


class GoogleToken:
    """An access token, fresh whenever it is asked for. Threads share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._credentials: Any = None
        self._worked = False
        """A token came once: what fails after that is the world's, not its owner's."""

    def token(self) -> str:
        """The token in force now."""
        import google.auth
        import google.auth.exceptions
        import google.auth.transport.requests

        with self._lock:
            try:
                if self._credentials is None:
                    self._credentials, _ = google.auth.default(scopes=[_SCOPE])
                if not self._credentials.valid:
                    self._credentials.refresh(google.auth.transport.requests.Request())
            except google.auth.exceptions.GoogleAuthError as error:
                if self._worked or isinstance(error, google.auth.exceptions.TransportError) or error.retryable:
                    raise RequestFailure("the credentials could not be refreshed", transient=True) from error
                raise UserError(
                    "no Google credentials",
                    expected="application default credentials",
                    found=type(error).__name__,
                    fix="run: gcloud auth application-default login",
                ) from error
            self._worked = True
            return str(self._credentials.token)

    def __repr__(self) -> str:
        return "GoogleToken(…)"


def _hmac(key: bytes, text: str) -> bytes:
    return hmac.new(key, text.encode(), hashlib.sha256).digest()


def sign_v4(
    method: str, url: str, headers: Mapping[str, str], keys: AwsKeys, region: str, now: datetime
) -> dict[str, str]:
    """The headers, signed for S3 (AWS Signature Version 4, body unsigned: TLS and checksums guard it)."""
    parts = urlsplit(url)
    stamp = now.strftime("%Y%m%dT%H%M%SZ")
    signed = {
        **{name.lower(): value.strip() for name, value in headers.items()},
        "host": parts.netloc,
        "x-amz-content-sha256": "UNSIGNED-PAYLOAD",
        "x-amz-date": stamp,
        **({"x-amz-security-token": keys.session} if keys.session else {}),
    }
    names = ";".join(sorted(signed))
    query = "&".join(sorted(part if "=" in part else part + "=" for part in parts.query.split("&") if part))
    head = "".join(f"{name}:{signed[name]}\n" for name in sorted(signed))
    canonical = "\n".join([method, parts.path or "/", query, head, names, "UNSIGNED-PAYLOAD"])
    scope = f"{stamp[:8]}/{region}/s3/aws4_request"
    text = "\n".join(["AWS4-HMAC-SHA256", stamp, scope, hashlib.sha256(canonical.encode()).hexdigest()])
    key = ("AWS4" + keys.secret).encode()
    for part in (stamp[:8], region, "s3", "aws4_request"):
        key = _hmac(key, part)
    signature = hmac.new(key, text.encode(), hashlib.sha256).hexdigest()
    signed["authorization"] = (
        f"AWS4-HMAC-SHA256 Credential={keys.access}/{scope}, SignedHeaders={names}, Signature={signature}"
    )
    return signed


def quoted(text: str, *, slash: bool = False) -> str:
    """Percent-encoded as the signature wants it."""
    return quote(text, safe="-_.~/" if slash else "-_.~")
