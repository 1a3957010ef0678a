"""One bucket: its connections, its memory, its counters, which all folders in it share."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

from obstore.exceptions import BaseError
from obstore.store import GCSStore, S3Store

from spile.objects.cloud.aws import aws_keys
from spile.objects.cloud.failures import from_obstore
from spile.objects.cloud.rest import GoogleDialect, RestClient, S3Dialect, http_timeout
from spile.objects.cloud.upload import Buffers, Uploader
from spile.objects.retry import Retry
from spile.objects.stats import Stats

__all__ = ["Bucket"]

Result = TypeVar("Result")


class Bucket:
    """What all folders of one bucket share: the connections, the memory, the counters."""

    def __init__(self, scheme: str, name: str, retry: Retry | None = None) -> None:
        self.name = name
        self.url = f"{scheme}://{name}"
        self.stats = Stats()
        self.retry = retry if retry is not None else Retry.from_environment()
        self.dialect = GoogleDialect() if scheme == "gs" else S3Dialect(name)
        self.rest = RestClient(self.dialect, name)
        self.store = (
            _google_store(name, self.dialect)
            if isinstance(self.dialect, GoogleDialect)
            else _s3_store(name, self.dialect)
        )
        self.buffers = Buffers()
        self.uploader = Uploader(self.rest, self.again)

    def again(self, attempt: Callable[[], Result]) -> Result:
        """Until it succeeds or is hopeless; :class:`Trouble` then."""
        return self.retry.call(attempt, self.stats)

    def obstore(self, operation: Callable[[], Result]) -> Result:
        """One attempt through obstore, its errors in our words."""
        self.sign_in()
        try:
            return operation()
        except (BaseError, FileNotFoundError) as error:
            raise from_obstore(error) from error

    def sign_in(self) -> None:
        """Fail here, in a sentence, when there are no credentials; obstore would wrap it beyond recognition."""
        if isinstance(self.dialect, S3Dialect):
            aws_keys()
        elif not self.dialect.emulated:
            self.dialect.credentials.token()


def _options(base: str) -> dict[str, Any]:
    seconds = http_timeout()
    client = {
        "allow_http": base.startswith("http://"),
        "connect_timeout": timedelta(seconds=min(10.0, seconds)),
        "read_timeout": timedelta(seconds=seconds),
        "timeout": timedelta(seconds=max(900.0, seconds)),  # a long range over a slow line is no failure
    }
    return {"client_options": client, "retry_config": {"max_retries": 0, "retry_timeout": timedelta(seconds=seconds)}}


def _google_store(name: str, dialect: GoogleDialect) -> GCSStore:
    if not dialect.emulated:
        return GCSStore(name, credential_provider=dialect.credentials.for_obstore, **_options(dialect.base))  # type: ignore[arg-type]
    key = {
        "gcs_base_url": dialect.base,
        "disable_oauth": True,
        "client_email": "",
        "private_key": "",
        "private_key_id": "",
    }
    return GCSStore(name, service_account_key=json.dumps(key), **_options(dialect.base))


def _s3_store(name: str, dialect: S3Dialect) -> S3Store:
    return S3Store(
        name,
        endpoint=dialect.base,
        region=dialect.region,
        virtual_hosted_style_request=False,
        credential_provider=lambda: aws_keys().for_obstore(),  # type: ignore[arg-type]
        **_options(dialect.base),
    )
