"""What went wrong with one request: whether it may pass, and the few words about it that a user needs.

Only these words reach a message. A server's own text does not: S3's refusals quote keys and signatures.
"""

from __future__ import annotations

import re
from xml.etree import ElementTree

import urllib3.exceptions

__all__ = ["RequestFailure", "from_status", "from_urllib3"]

_TRANSIENT = {408, 409, 425, 429, 500, 502, 503, 504}
_TRANSIENT_CODES = {"BadDigest", "InternalError", "RequestTimeout", "SlowDown"}

_WORDS = {
    401: "no valid credentials",
    403: "permission denied",
    404: "no such object",
    409: "a conflict with another write",
    412: "it exists already",
    429: "too many requests",
}
_CODES = {
    "NoSuchBucket": "no such bucket",
    "AccountProblem": "the account is suspended",
    "QuotaExceeded": "the quota is used up",
    "UserProjectAccountProblem": "billing is disabled",
    "SignatureDoesNotMatch": "a wrong secret key",
    "InvalidAccessKeyId": "an unknown access key",
    "ExpiredToken": "expired credentials",
    "RequestTimeTooSkewed": "this machine's clock is wrong by more than 15 minutes",
    "PermanentRedirect": "the bucket lies in another region",
    "AuthorizationHeaderMalformed": "the bucket lies in another region",
    "EntityTooLarge": "the object is too large",
    "BadDigest": "damaged on the way",
}
# In the order they are looked for, in the text of a connection's error.
_CONNECTION = (
    (r"dns error|name or service not known|failed to resolve|name resolution", "the host's name does not resolve"),
    (r"certificate|tls|ssl", "no secure connection: the certificate was refused"),
    (r"refused", "connection refused"),
    (r"timeout|timed out", "no answer in time"),
    (r"incompletebody|incompleteread|incompletemessage|body", "a reply cut short"),
    (r"", "the connection broke"),
)
_FOR_GOOD = "no secure connection"


class RequestFailure(Exception):
    """One failed request."""

    def __init__(self, cause: str, *, status: int | None = None, code: str = "", transient: bool = False) -> None:
        super().__init__(cause)
        self.cause = cause
        self.status = status
        self.code = code
        self.transient = transient
        self.exhausted = False
        """Tried again for as long as that is worth it; who called for a larger thing does not start it over."""

    @property
    def no_bucket(self) -> bool:
        """The bucket itself is not there."""
        return self.code == "NoSuchBucket"

    @property
    def absent(self) -> bool:
        """The object is not there (its bucket is, as far as the server says)."""
        return self.status == 404 and not self.no_bucket

    @property
    def exists(self) -> bool:
        """A create-if-absent found something."""
        return self.status == 412


def from_status(status: int, body: bytes | str = b"") -> RequestFailure:
    """From a reply's status and the code in its body, if there is one."""
    code = _code(body)
    words = _CODES.get(code) or _WORDS.get(status) or code
    cause = f"{status} {words}".strip()
    return RequestFailure(cause, status=status, code=code, transient=status in _TRANSIENT or code in _TRANSIENT_CODES)


def _code(body: bytes | str) -> str:
    text = body.decode("utf-8", "replace") if isinstance(body, bytes) else body
    found = re.search(r"<Code>(\w{1,64})</Code>", text)
    return found.group(1) if found else ""


def _from_connection(text: str) -> RequestFailure:
    cause = next(words for pattern, words in _CONNECTION if re.search(pattern, text.lower()))
    return RequestFailure(cause, transient=not cause.startswith(_FOR_GOOD))


def from_urllib3(error: urllib3.exceptions.HTTPError | OSError) -> RequestFailure:
    """From a connection that failed."""
    return _from_connection(f"{type(error).__name__} {error}")


def is_error_document(body: bytes) -> bool:
    """S3 may answer 200 to the end of an upload and put the error into the body."""
    try:
        return ElementTree.fromstring(body).tag.rpartition("}")[2] == "Error"  # noqa: S314 - the store's own reply
    except ElementTree.ParseError:
        return False
