"""Failed requests and retries: exponential backoff with jitter, counted, for a bounded time."""

from __future__ import annotations

import logging
import random
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from spile.objects.folder import Stats
from spile.objects.machine import positive_number

_log = logging.getLogger(__name__)

Result = TypeVar("Result")

_TEMPORARY = {408, 409, 425, 429, 500, 502, 503, 504}
_TEMPORARY_CODES = {
    *("BadDigest", "XAmzContentSHA256Mismatch", "Md5Mismatch"),  # the body was damaged on its way to the server
    *("InternalError", "OperationTimedOut", "RequestTimeout", "ServerBusy", "SlowDown"),
    "NoSuchUpload",  # the reply to the request that completed an upload was lost
}
_STATUS_WORDS = {
    401: "no valid credentials",
    403: "permission denied",
    404: "no such object",
    409: "a conflict with another write",
    412: "it exists already",
    429: "too many requests",
}
_CODE_WORDS = {
    "NoSuchBucket": "no such bucket",
    "ContainerNotFound": "no such container",
    "AccountProblem": "the account is suspended",
    "AccountIsDisabled": "the account is disabled",
    "QuotaExceeded": "the quota is used up",
    "UserProjectAccountProblem": "billing is disabled",
    "SignatureDoesNotMatch": "a wrong secret key",
    "InvalidAccessKeyId": "an unknown access key",
    "AuthenticationFailed": "a wrong or expired account key or token",
    "ExpiredToken": "expired credentials",
    "RequestTimeTooSkewed": "this machine's clock is wrong by more than 15 minutes",
    "PermanentRedirect": "the bucket is in another region",
    "AuthorizationHeaderMalformed": "the bucket is in another region",
    "EntityTooLarge": "the object is too large",
    "BadDigest": "damaged on the way",
    "XAmzContentSHA256Mismatch": "damaged on the way",
}
# Patterns in obstore's description of a connection error. The first match gives the words.
_CONNECTION_WORDS = (
    (r"dns error|failed to lookup", "the host's name does not resolve"),
    (r"certificate|tls|handshake", "no secure connection: the certificate was refused"),
    (r"connectionrefused", "connection refused"),
    (r"timedout|timeout", "no answer in time"),
    (r"incompletebody|unexpectedeof", "a reply cut short"),
    (r"httperror|reqwest|hyper", "the connection broke"),
    (r"", "an unreadable reply"),
)
_PERMANENT = "no secure connection"
_SHORT_SECONDS = 10.0
"""Seconds of retries for a name that may be a mistyped path, or while a person waits."""


class RequestFailure(Exception):
    """One failed request.

    ``cause`` contains only words from this module. The server's own text is never shown, because S3 quotes access
    keys and signatures in its replies.
    """

    def __init__(self, cause: str, *, status: int | None = None, code: str = "", transient: bool = False) -> None:
        super().__init__(cause)
        self.cause = cause
        self.status = status
        self.code = code
        self.transient = transient

    @property
    def no_bucket(self) -> bool:
        return self.code in ("NoSuchBucket", "ContainerNotFound")

    @property
    def absent(self) -> bool:
        return self.status == 404 and not self.no_bucket

    @property
    def exists(self) -> bool:
        """Whether a conditional write found another object in place. Azure answers 409 where the others answer 412."""
        return self.status == 412 or self.code == "BlobAlreadyExists"


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield an error and what it was raised from."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def from_status(status: int, body: bytes | str = b"") -> RequestFailure:
    """Return the failure that an HTTP status and the error code in the reply's XML body describe."""
    text = body.decode("utf-8", "replace") if isinstance(body, bytes) else body
    found = re.search(r"<Code>(\w{1,64})</Code>", text)
    code = found.group(1) if found else ""
    words = _CODE_WORDS.get(code) or _STATUS_WORDS.get(status) or code
    transient = (status in _TEMPORARY and code != "BlobAlreadyExists") or code in _TEMPORARY_CODES
    return RequestFailure(f"{status} {words}".strip(), status=status, code=code, transient=transient)


def from_obstore(error: Exception) -> RequestFailure:
    """Return the failure that one of obstore's exceptions describes.

    obstore puts the status and the reply into the exception's text and nowhere else.
    """
    text = str(error)
    if found := re.search(r"(?:non-2xx status code: |\(code: )(\d{3})(.*)", text, re.DOTALL):
        return from_status(int(found[1]), found[2])
    if "redirect without LOCATION" in text:
        return RequestFailure("301 the bucket is in another region", status=301, code="PermanentRedirect")
    if found := re.search(r"object with invalid path: (?:Error parsing )?Path (\".*?\")", text):
        return RequestFailure(f"an object whose name cannot be used: {found[1]}", code="InvalidPath")
    # What precedes "HttpError" can contain the object's key, which could be mistaken for a cause.
    cause = text[max(0, text.find("HttpError")) :].lower()
    words = next(words for pattern, words in _CONNECTION_WORDS if re.search(pattern, cause))
    permanent = words.startswith(_PERMANENT) or isinstance(error, ValueError)  # a ValueError is about our arguments
    return RequestFailure(words, transient=not permanent)


@dataclass(frozen=True)
class Retry:
    """How often and how long a failed request is retried."""

    first: float = 0.2
    """Upper bound of the first wait in seconds; it doubles with each retry."""
    cap: float = 15.0
    """Upper bound of every wait."""
    total: float = 180.0
    """No attempt starts later than this many seconds after the first failure."""
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic

    @classmethod
    def from_environment(cls) -> Retry:
        """Return the defaults, with ``total`` taken from ``SPILE_RETRY_SECONDS`` if that is set."""
        total = positive_number("SPILE_RETRY_SECONDS", cls.total)
        return cls(first=min(cls.first, total / 10), total=total)

    @classmethod
    def for_name(cls, name: str, *, patient: bool = True) -> Retry:
        """Return the retry for a name on the Hugging Face hub.

        The time is short for a name without an owner, which may be a mistyped local path, and if ``patient`` is False
        because a person waits for the answer.
        """
        found = cls.from_environment()
        return found if patient and "/" in name else replace(found, total=min(found.total, _SHORT_SECONDS))

    def call(self, attempt: Callable[[], Result], stats: Stats) -> Result:
        """Call ``attempt`` until it succeeds, and count the retries in ``stats``.

        Raises:
            RequestFailure: The failure is permanent, or the time is used up.

        """
        failed: float | None = None
        tries = 0
        while True:
            try:
                stats.add(requests=1)
                return attempt()
            except RequestFailure as failure:
                # The time counts from the first failure: an upload may take longer than the whole allowance.
                failed = self.clock() if failed is None else failed
                # Full jitter: workers that failed together do not retry together.
                wait = random.uniform(0, min(self.cap, self.first * 2**tries))
                if not failure.transient or self.clock() - failed + wait > self.total:
                    raise
                tries += 1
                stats.add(retries=1)
                self.sleep(wait)


def retry_while_unavailable(name: str, attempt: Callable[[], Result], retry: Retry) -> Result:
    """Call ``attempt``, which reads ``name`` from the Hugging Face hub, until the hub is available.

    Logs one warning when the first temporary failure occurs.

    Raises:
        RequestFailure: The failure is permanent, or the time is used up.

    """
    warned = False

    def one() -> Result:
        nonlocal warned
        try:
            return attempt()
        except RequestFailure as outage:
            if outage.transient and not warned:
                warned = True
                _log.warning("the hub does not give %s (%s); retrying for %.0f s", name, outage.cause, retry.total)
            raise

    return retry.call(one, Stats())
