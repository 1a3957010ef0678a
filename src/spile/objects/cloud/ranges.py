"""Large ranges, read by obstore, which needs the interpreter's lock for none of it.

Python's TLS gives 16 KiB at a time and takes the lock after each: a process has half a gigabyte a second, however many
threads it reads with. What fails here is asked for again by the client that everything else goes through (``rest``):
that one knows what a failure means, and waits, and tells. See ``docs/design/0009-object-store-client.md``.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import threading
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any

from spile.objects.cloud.aws import aws_keys
from spile.objects.cloud.rest import CONNECT_SECONDS, GoogleDialect, S3Dialect, http_timeout
from spile.objects.environment import this_machines_cores
from spile.objects.stats import Stats

if TYPE_CHECKING:
    from obstore.store import GCSCredential, S3Credential

__all__ = ["LARGE", "FastRanges"]

LARGE = 1 << 20
"""Bytes from which on it is worth it."""
_FEW_CORES = 4
"""With so many, what is not encrypted costs less to read through Python, and the lock is not what is waited for."""
_LONGEST_PAUSE = 64.0
_VALID = timedelta(seconds=400)
"""That keys are said to be: obstore asks anew 300 s before they end, and ours are good for longer than what is left."""

_log = logging.getLogger(__name__)
_process: int | None = None
"""Which one obstore's threads belong to: one that was forked from it has none, and would wait for them for ever."""


class FastRanges:
    """Of one bucket. Threads share it."""

    def __init__(self, dialect: GoogleDialect | S3Dialect, bucket: str, stats: Stats) -> None:
        self._dialect, self._bucket, self._stats = dialect, bucket, stats
        self._lock = threading.Lock()
        self._stores: dict[str, Any] = {}
        self._pause, self._not_before = 1.0, 0.0

    def get(self, key: str, start: int, length: int) -> memoryview | None:
        """Exactly these bytes; None where another way must be taken to them."""
        if length < LARGE or not self._worth_it():
            return None
        import obstore
        from obstore.exceptions import BaseError

        began = time.monotonic()
        try:
            data = obstore.get_range(self._store(), key, start=start, length=length)
        except (BaseError, ValueError, OSError) as error:
            self._failed(type(error).__name__, began)
            return None
        if len(data) != length:
            self._failed(f"{len(data)} bytes", began)
            return None
        self._pause = 1.0
        self._stats.add(requests=1)
        return memoryview(data)

    def _worth_it(self) -> bool:
        if _process not in (None, os.getpid()) or time.monotonic() < self._not_before:
            return False
        if not self._dialect.base.startswith("https:") and len(this_machines_cores()) <= _FEW_CORES:
            return False
        return importlib.util.find_spec("obstore") is not None

    def _failed(self, why: str, began: float) -> None:
        """Leave it for a while: what this client cannot do (a proxy, a certificate) it cannot do the next time.

        What was under way together fails together, and is one failure.
        """
        _log.debug("a range of %s by obstore: %s", self._bucket, why)
        self._stats.add(requests=1, retries=1)
        with self._lock:
            if began >= self._not_before:
                self._not_before = time.monotonic() + self._pause
                self._pause = min(2 * self._pause, _LONGEST_PAUSE)

    def _store(self) -> Any:
        """For where the bucket lies, which may become known later than this began."""
        global _process
        where = self._dialect.base
        with self._lock:
            if where not in self._stores:
                _process = os.getpid()
                self._stores[where] = _opened(self._dialect, self._bucket)
            return self._stores[where]


def _opened(dialect: GoogleDialect | S3Dialect, bucket: str) -> Any:
    return _amazons(dialect, bucket) if isinstance(dialect, S3Dialect) else _googles(dialect, bucket)


def _connection(url: str) -> dict[str, Any]:
    """One attempt each, as long as an attempt of ours takes; what begins encrypted stays so."""
    limit, plain = timedelta(seconds=http_timeout()), url.startswith("http:")
    options = {"timeout": limit, "connect_timeout": min(limit, timedelta(seconds=CONNECT_SECONDS)), "allow_http": plain}
    return {"client_options": options, "retry_config": {"max_retries": 0, "retry_timeout": limit}}


def _googles(dialect: GoogleDialect, bucket: str) -> Any:
    from obstore.store import GCSStore

    def token() -> GCSCredential:
        return {"token": dialect.credentials.token(), "expires_at": datetime.now(UTC) + _VALID}

    # The one way to name a server's address, and to keep it from looking for credentials by itself.
    account = {"gcs_base_url": dialect.base, "disable_oauth": True}
    account |= {"client_email": "", "private_key": "", "private_key_id": ""}
    known: dict[str, Any] = {} if dialect.emulated else {"credential_provider": token}
    return GCSStore(bucket, service_account_key=json.dumps(account), **known, **_connection(dialect.base))


def _amazons(dialect: S3Dialect, bucket: str) -> Any:
    from obstore.store import S3Store

    def keys() -> S3Credential:
        found, until = aws_keys(), datetime.now(UTC) + _VALID
        return {
            "access_key_id": found.access,
            "secret_access_key": found.secret,
            "token": found.session,
            "expires_at": until,
        }

    return S3Store(
        bucket,
        credential_provider=keys,
        endpoint=dialect.base,
        region=dialect.region,
        virtual_hosted_style_request=False,
        **_connection(dialect.base),
    )
