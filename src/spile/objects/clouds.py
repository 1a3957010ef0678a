"""How each cloud is reached: credentials, endpoints, and the few requests that obstore does not offer.

obstore sends everything that reads or writes objects (:mod:`~spile.objects.bucket`). It cannot list or abort
unfinished multipart uploads, and it does not know a bucket's region. Google is asked for these with ``requests``,
Amazon with botocore if that is installed (``pip install 'spile[s3]'``).
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Protocol, TypeVar
from urllib.parse import quote
from xml.etree import ElementTree

from spile.errors import UserError
from spile.objects.folder import Unfinished
from spile.objects.machine import METADATA_SERVER, ask_metadata, positive_number
from spile.objects.retry import RequestFailure, from_status

_log = logging.getLogger(__name__)

Answer = TypeVar("Answer")
Store = Any
"""One of obstore's store classes."""

_CONNECT_SECONDS = 10.0
_VALID = timedelta(seconds=400)
"""Validity of each token as reported to obstore, which asks for a new one 300 s before the end."""


def http_timeout() -> float:
    """Return the seconds without an answer after which a request is given up: ``SPILE_HTTP_TIMEOUT``, 60."""
    return positive_number("SPILE_HTTP_TIMEOUT", 60)


class Cloud(Protocol):
    """One bucket of one cloud."""

    scheme: str
    bucket: str
    create_command: str
    """The command that creates the bucket, with places for its name and region."""

    def check_credentials(self) -> None:
        """Raise :class:`UserError` if there are no credentials, :class:`RequestFailure` if they cannot be renewed."""

    def open(self, stores: Any, seconds: float, retries: int) -> Store:
        """Return a store of obstore. ``seconds`` limits the wait for an answer, ``retries`` obstore's own retries."""

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        """Yield the multipart uploads that were neither completed nor aborted, by their full names."""

    def discard(self, key: str, handle: str) -> None:
        """Abort a multipart upload."""

    def region(self) -> str | None:
        """Return the bucket's region in lower case, or None if the cloud does not tell."""

    def list_any_names(self, prefix: str, after: str) -> list[dict[str, Any]] | None:
        """Return a page of the objects after a name, as obstore describes them, whatever their names are.

        None if this cloud, or this installation, has no client for that.
        """


def cloud_of(scheme: str, bucket: str) -> Cloud:
    kinds: dict[str, Callable[[str], Cloud]] = {"gs": GoogleBucket, "s3": AmazonBucket, "az": AzureContainer}
    return kinds[scheme](bucket)


def _connection(url: str, seconds: float, retries: int) -> dict[str, Any]:
    limit = timedelta(seconds=seconds)
    options = {
        "read_timeout": limit,
        "connect_timeout": min(limit, timedelta(seconds=_CONNECT_SECONDS)),
        "timeout": timedelta(days=1),  # the default of 30 s would cut off large transfers over slow lines
        "allow_http": url.startswith("http:"),
    }
    backoff = {"init_backoff": timedelta(seconds=0.2), "max_backoff": timedelta(seconds=5), "base": 2}
    retry = {"max_retries": retries, "backoff": backoff, "retry_timeout": timedelta(seconds=60)}
    return {"client_options": options, "retry_config": retry}


# --- Google Cloud Storage ---------------------------------------------------------------------------------------------


class GoogleToken:
    """Google's application default credentials, renewed when needed. Threads share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._credentials: Any = None
        self._worked = False

    def token(self) -> str:
        """Return a valid access token.

        Raises:
            UserError: There are no credentials.
            RequestFailure: Credentials that worked before cannot be renewed now. That is temporary.

        """
        import google.auth
        import google.auth.exceptions
        import google.auth.transport.requests

        with self._lock:
            try:
                if self._credentials is None:
                    scope = "https://www.googleapis.com/auth/devstorage.read_write"
                    self._credentials, _ = google.auth.default(scopes=[scope])
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


class GoogleBucket:
    """A bucket of Google Cloud Storage, or of an emulator (``STORAGE_EMULATOR_HOST``), which needs no credentials."""

    scheme = "gs"
    create_command = "gcloud storage buckets create gs://{name} --location={region}"

    def __init__(self, bucket: str) -> None:
        self.bucket = bucket
        emulator = os.environ.get("STORAGE_EMULATOR_HOST", "")
        if emulator and "://" not in emulator:
            emulator = f"http://{emulator}"
        self.emulated = bool(emulator)
        self._url = emulator.rstrip("/") or "https://storage.googleapis.com"
        self.credentials = GoogleToken()

    def check_credentials(self) -> None:
        if not self.emulated:
            self.credentials.token()

    def open(self, stores: Any, seconds: float, retries: int) -> Store:
        def token() -> dict[str, Any]:
            return {"token": self.credentials.token(), "expires_at": datetime.now(UTC) + _VALID}

        # A service account with OAuth disabled gives obstore an address and prevents a search for credentials.
        account = {"gcs_base_url": self._url, "disable_oauth": True}
        account |= {"client_email": "", "private_key": "", "private_key_id": ""}
        known = {} if self.emulated else {"credential_provider": token}
        options = _connection(self._url, seconds, retries)
        return stores.GCSStore(self.bucket, service_account_key=json.dumps(account), **known, **options)

    def request(self, method: str, path: str, query: Mapping[str, str | Sequence[str]]) -> bytes:
        """Send one request that obstore does not offer, and return the reply's body."""
        import requests

        headers = {} if self.emulated else {"Authorization": f"Bearer {self.credentials.token()}"}
        url = f"{self._url}/{quote(path)}"
        trusted = os.environ.get("SSL_CERT_FILE") or True  # as obstore does; requests has a variable of its own
        try:
            reply = requests.request(method, url, params=query, headers=headers, timeout=http_timeout(), verify=trusted)
        except requests.exceptions.SSLError as error:
            raise RequestFailure("no secure connection: the certificate was refused") from error
        except requests.Timeout as error:
            raise RequestFailure("no answer in time", transient=True) from error
        except requests.RequestException as error:
            raise RequestFailure("the connection broke", transient=True) from error
        if not reply.ok:
            raise from_status(reply.status_code, reply.content)
        return reply.content

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:
        query = {"uploads": "", "prefix": prefix}
        while True:
            uploads, markers = parse_uploads(self.request("GET", self.bucket, query))
            yield from uploads
            if markers is None:
                return
            query["key-marker"], query["upload-id-marker"] = markers

    def discard(self, key: str, handle: str) -> None:
        self.request("DELETE", f"{self.bucket}/{key}", {"uploadId": handle})

    def list_any_names(self, prefix: str, after: str) -> list[dict[str, Any]]:
        query = {"list-type": "2", "prefix": prefix, "start-after": after}
        return [
            {
                "path": found.findtext("{*}Key", ""),
                "size": int(found.findtext("{*}Size", "0")),
                "last_modified": datetime.fromisoformat(found.findtext("{*}LastModified", "").replace("Z", "+00:00")),
                "e_tag": found.findtext("{*}ETag"),
            }
            for found in _parse_xml(self.request("GET", self.bucket, query)).iterfind("{*}Contents")
        ]

    def region(self) -> str | None:
        return (_parse_xml(self.request("GET", self.bucket, {"location": ""})).text or "us").lower()


def parse_uploads(body: bytes) -> tuple[list[Unfinished], tuple[str, str] | None]:
    """Return a page of unfinished uploads, and the markers of the next page if there is one."""
    page = _parse_xml(body)
    uploads = []
    for upload in page.iterfind("{*}Upload"):
        key, handle, started = (upload.findtext(f"{{*}}{name}", "") for name in ("Key", "UploadId", "Initiated"))
        try:
            seconds = datetime.fromisoformat(started.replace("Z", "+00:00")).timestamp()
        except (ValueError, OverflowError) as error:
            raise RequestFailure("an unreadable reply", transient=True) from error
        uploads.append(Unfinished(key, handle, seconds))
    if page.findtext("{*}IsTruncated") != "true":
        return uploads, None
    return uploads, (page.findtext("{*}NextKeyMarker", ""), page.findtext("{*}NextUploadIdMarker", ""))


def _parse_xml(body: bytes) -> ElementTree.Element:
    try:
        return ElementTree.fromstring(body)  # noqa: S314 - the store's own reply
    except ElementTree.ParseError as error:
        raise RequestFailure("an unreadable reply", transient=True) from error


# --- Amazon S3 and servers that speak its protocol --------------------------------------------------------------------

_BOTH_KEYS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
_CHECK = "check with: aws sts get-caller-identity"
_LOGIN = ("an SSO session that has ended", "run: aws sso login")
_BOTOCORE_ERRORS = {
    "ProfileNotFound": ("no such profile", "set AWS_PROFILE to one of: aws configure list-profiles"),
    "PartialCredentialsError": ("half of a key", "run: aws configure"),
    "ConfigParseError": ("a config file that cannot be read", "correct ~/.aws/config"),
    "InvalidConfigError": ("an incomplete profile", "correct ~/.aws/config"),
    "CredentialRetrievalError": ("a source of keys that failed", _CHECK),
    "TokenRetrievalError": _LOGIN,
    "SSOError": _LOGIN,
}
"""Causes and fixes for botocore's exceptions, by the name of the class or one of its bases."""
_BOTOCORE_TEMPORARY = ("ConnectionError", "HTTPClientError", "MetadataRetrievalError")

_lock = threading.Lock()
_session: Any = None
_session_with_keys: Any = None
"""The session that provided keys before."""


def _botocore_session() -> Any:
    global _session
    with _lock:
        if _session is None:
            try:
                import botocore.session
            except ImportError:
                return None
            _session = botocore.session.Session()
        return _session


def _ask_botocore(question: Callable[[Any], Answer]) -> Answer | None:
    """Return what botocore answers, or None if it is not installed. Its errors become one-line errors."""
    session = _botocore_session()
    if session is None:
        return None
    from botocore.exceptions import BotoCoreError, ClientError

    try:
        return question(session)
    except (BotoCoreError, ClientError) as error:
        kinds = [kind.__name__ for kind in type(error).__mro__]
        # Keys that worked before and cannot be renewed now are a temporary failure and not the user's mistake.
        if session is _session_with_keys or any(kind in _BOTOCORE_TEMPORARY for kind in kinds):
            raise RequestFailure("the credentials could not be refreshed", transient=True) from error
        code = error.response.get("Error", {}).get("Code") if isinstance(error, ClientError) else None
        found, fix = next((_BOTOCORE_ERRORS[kind] for kind in kinds if kind in _BOTOCORE_ERRORS), (code, _CHECK))
        profile = os.environ.get("AWS_PROFILE") or os.environ.get("AWS_DEFAULT_PROFILE")
        raise UserError(
            f"no AWS credentials{f' from the profile {profile}' if profile else ''}",
            expected=f"a profile or a role that works, or {_BOTH_KEYS}",
            found=found or kinds[0],
            fix=fix,
        ) from error


def aws_keys() -> dict[str, Any]:
    """Return the current AWS keys: those of the environment, otherwise those that botocore finds.

    Raises:
        UserError: There are no keys, or they cannot be keys.
        RequestFailure: Keys that worked before cannot be renewed now.

    """
    environment = os.environ
    if environment.get("AWS_ACCESS_KEY_ID") and environment.get("AWS_SECRET_ACCESS_KEY"):
        keys = {
            "access_key_id": environment["AWS_ACCESS_KEY_ID"],
            "secret_access_key": environment["AWS_SECRET_ACCESS_KEY"],
            "token": environment.get("AWS_SESSION_TOKEN"),
        }
    elif (found := _ask_botocore(_botocore_keys)) is not None:
        keys = found
    elif _botocore_session() is not None:
        raise UserError("no AWS credentials", expected=f"a profile, a role, or {_BOTH_KEYS}", fix="run: aws configure")
    else:
        raise UserError(
            "no AWS credentials",
            expected=_BOTH_KEYS,
            found="neither",
            fix="set both, or install botocore for profiles, SSO and roles: pip install 'spile[s3]'",
        )
    for name, variable in (
        ("access_key_id", "AWS_ACCESS_KEY_ID"),
        ("secret_access_key", "AWS_SECRET_ACCESS_KEY"),
        ("token", "AWS_SESSION_TOKEN"),
    ):
        value = keys[name] or ""
        if not value.isascii() or not value.isprintable() or " " in value:
            raise UserError(  # without the value, which is a secret
                f"{variable} contains a space, a line break or a non-ASCII character",
                fix="copy the key again without surrounding text",
            )
    return keys


def _botocore_keys(session: Any) -> dict[str, Any] | None:
    found = session.get_credentials()
    if found is None:
        return None
    frozen = found.get_frozen_credentials()
    global _session_with_keys
    _session_with_keys = session
    return {"access_key_id": frozen.access_key, "secret_access_key": frozen.secret_key, "token": frozen.token}


def aws_region() -> str | None:
    """Return the region that the environment or the profile names."""
    found = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    return found or _ask_botocore(lambda session: session.get_config_variable("region"))


def aws_endpoint() -> str | None:
    """Return the address of a server other than Amazon's, if the environment or the profile names one."""
    found = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    return found or _ask_botocore(_configured_endpoint)


def _configured_endpoint(session: Any) -> Any:
    from botocore.configprovider import ConfiguredEndpointProvider

    if session.get_config_variable("ignore_configured_endpoint_urls"):
        return None
    return ConfiguredEndpointProvider(session.full_config, session.get_scoped_config(), "s3").provide()


def _amazon_url(region: str | None = None) -> str:
    """Return the address of S3 in a region, or the one that knows the regions of all buckets."""
    china = ".cn" if region is not None and region.startswith("cn-") else ""
    return f"https://s3.{region}.amazonaws.com{china}" if region else "https://s3.amazonaws.com"


def _ask_region(bucket: str) -> str | None:
    """Ask S3 for a bucket's region. It tells anyone, even in a refusal; None if there is no answer."""
    import requests

    try:
        reply = requests.head(f"{_amazon_url()}/{quote(bucket)}", timeout=_CONNECT_SECONDS)
    except requests.RequestException:
        return None
    return reply.headers.get("x-amz-bucket-region")


_REGIONS: dict[str, str | None] = {}
"""The answers of :func:`_ask_region` in this process, so that each bucket is asked about once."""


class AmazonBucket:
    """A bucket of S3 or of a server that speaks its protocol (``AWS_ENDPOINT_URL``, or the profile's)."""

    scheme = "s3"
    create_command = "aws s3 mb s3://{name} --region {region}"

    def __init__(self, bucket: str) -> None:
        self.bucket = bucket
        self._endpoint = aws_endpoint()

    def region(self) -> str:
        """Return the region that S3 reports for the bucket, otherwise that of the environment or the profile."""
        if not self._endpoint and self.bucket not in _REGIONS:
            _REGIONS[self.bucket] = _ask_region(self.bucket)
        return (None if self._endpoint else _REGIONS[self.bucket]) or aws_region() or "us-east-1"

    def _url(self) -> str:
        return (self._endpoint or _amazon_url(self.region())).rstrip("/")

    def check_credentials(self) -> None:
        aws_keys()

    def open(self, stores: Any, seconds: float, retries: int) -> Store:
        """Return obstore's store. It signs the SHA-256 of each body, which the server compares with what arrives."""

        def keys() -> dict[str, Any]:
            return {**aws_keys(), "expires_at": datetime.now(UTC) + _VALID}

        return stores.S3Store(
            self.bucket,
            credential_provider=keys,
            endpoint=self._url(),
            region=self.region(),
            virtual_hosted_style_request=False,
            disable_bulk_delete=True,  # one DELETE per object; not every server has the bulk request
            **_connection(self._url(), seconds, retries),
        )

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:

        def pages(client: Any) -> list[Any]:
            found = client.get_paginator("list_multipart_uploads").paginate(Bucket=self.bucket, Prefix=prefix)
            return [upload for page in found for upload in page.get("Uploads", ())]

        try:
            uploads = self._with_botocore(pages)
        except ImportError:
            _log.warning(
                "unfinished uploads in s3://%s are not listed, because botocore is not installed; "
                "pip install 'spile[s3]', or let a lifecycle rule of the bucket abort them",
                self.bucket,
            )
            return
        for upload in uploads:
            yield Unfinished(upload["Key"], upload["UploadId"], upload["Initiated"].timestamp())

    def list_any_names(self, prefix: str, after: str) -> list[dict[str, Any]] | None:
        try:
            page = self._with_botocore(lambda c: c.list_objects_v2(Bucket=self.bucket, Prefix=prefix, StartAfter=after))
        except ImportError:
            return None
        names = {"path": "Key", "size": "Size", "last_modified": "LastModified", "e_tag": "ETag"}
        return [{name: found[key] for name, key in names.items()} for found in page.get("Contents", ())]

    def discard(self, key: str, handle: str) -> None:
        self._with_botocore(lambda c: c.abort_multipart_upload(Bucket=self.bucket, Key=key, UploadId=handle))

    def _with_botocore(self, use: Callable[[Any], Answer]) -> Answer:
        import botocore.config
        import botocore.exceptions
        import botocore.session

        keys, limit = aws_keys(), http_timeout()
        client = botocore.session.Session().create_client(
            "s3",
            endpoint_url=self._endpoint,
            region_name=self.region(),
            aws_access_key_id=keys["access_key_id"],
            aws_secret_access_key=keys["secret_access_key"],
            aws_session_token=keys["token"],
            config=botocore.config.Config(
                connect_timeout=min(limit, _CONNECT_SECONDS), read_timeout=limit, retries={"total_max_attempts": 1}
            ),
        )
        try:
            return use(client)
        except botocore.exceptions.ClientError as error:
            code = error.response.get("Error", {}).get("Code", "")
            status = error.response["ResponseMetadata"]["HTTPStatusCode"]
            raise from_status(status, f"<Code>{code}</Code>") from error
        except botocore.exceptions.BotoCoreError as error:
            raise RequestFailure("the connection broke", transient=True) from error


# --- Azure Blob Storage -----------------------------------------------------------------------------------------------

_AZURE_CREDENTIALS = (
    *("AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_ACCESS_KEY", "AZURE_STORAGE_MASTER_KEY", "AZURE_STORAGE_KEY"),
    *("AZURE_STORAGE_SAS_KEY", "AZURE_STORAGE_SAS_TOKEN", "AZURE_STORAGE_TOKEN", "AZURE_USE_AZURE_CLI"),
    *("AZURE_STORAGE_CLIENT_ID", "AZURE_CLIENT_ID", "AZURE_FEDERATED_TOKEN_FILE", "AZURE_SKIP_SIGNATURE"),
    *("AZURE_MSI_ENDPOINT", "AZURE_IDENTITY_ENDPOINT", "IDENTITY_ENDPOINT", "AZURE_STORAGE_USE_EMULATOR"),
)
"""Variables that obstore takes credentials from."""


class AzureContainer:
    """A container of Azure Blob Storage. obstore finds the credentials itself."""

    scheme = "az"
    create_command = "az storage container create --name {name}"

    def __init__(self, bucket: str) -> None:
        self.bucket = bucket
        self._checked = False

    def check_credentials(self) -> None:
        """Check that the environment, or the machine that this is, provides an account and credentials."""
        if self._checked:
            return
        if not self._account() and not os.environ.get("AZURE_STORAGE_USE_EMULATOR"):
            raise UserError(
                f"no storage account for az://{self.bucket}",
                expected="AZURE_STORAGE_ACCOUNT_NAME",
                fix="run: export AZURE_STORAGE_ACCOUNT_NAME=NAME",
            )
        if not any(os.environ.get(name) for name in _AZURE_CREDENTIALS) and not _is_azure_machine():
            raise UserError(
                "no Azure credentials",
                expected="AZURE_STORAGE_ACCOUNT_KEY, AZURE_STORAGE_SAS_TOKEN, or AZURE_CLIENT_ID with a secret",
                found="none of them",
                fix="set one, or run az login and export AZURE_USE_AZURE_CLI=true",
            )
        self._checked = True

    def _account(self) -> str | None:
        return os.environ.get("AZURE_STORAGE_ACCOUNT_NAME") or os.environ.get("AZURE_STORAGE_ACCOUNT")

    def open(self, stores: Any, seconds: float, retries: int) -> Store:
        names = ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT")
        endpoint = next((value for name in names if (value := os.environ.get(name))), "")
        emulated = "http:" if os.environ.get("AZURE_STORAGE_USE_EMULATOR") else endpoint
        account = {"account_name": name} if (name := self._account()) else {}
        return stores.AzureStore(self.bucket, **account, **_connection(emulated, seconds, retries))

    def unfinished(self, prefix: str) -> Iterator[Unfinished]:  # noqa: ARG002
        """Yield nothing: Azure removes the blocks of unfinished uploads itself after a week."""
        return iter(())

    def discard(self, key: str, handle: str) -> None:
        """Do nothing, see :meth:`unfinished`."""

    def list_any_names(self, prefix: str, after: str) -> None:
        """Return None: obstore is the only client here."""

    def region(self) -> str | None:
        """Return None: the storage account's region is not part of the blob API."""
        return None


def _is_azure_machine() -> bool:
    """Return whether this machine can have a managed identity."""
    url = f"http://{METADATA_SERVER}/metadata/instance?api-version=2021-02-01"
    return ask_metadata("GET", url, {"Metadata": "true"}, 1.0) is not None
