"""Check, before anything is computed, that the output can be written and that its bucket is near this machine."""

from __future__ import annotations

import errno
import os
import secrets
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from spile.errors import StoreError
from spile.objects.bucket import BucketFolder
from spile.objects.folder import Folder, Unwritable
from spile.objects.local import write_errors
from spile.objects.machine import PRICE_YEAR, Region, egress_price, machine_region
from spile.objects.retry import RequestFailure

_DEFAULT_REGION = {"gs": "us-central1", "s3": "us-east-1", "az": ""}


def preflight(folder: Folder, *, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Try to write to a folder and return warnings. Leaves nothing behind.

    Args:
        folder: The output.
        environment: Where ``SPILE_MACHINE_REGION`` and the clouds' variables are looked up.
    """
    if folder.local_path is not None:
        _try_disk(folder.local_path)
        return []
    if isinstance(folder, BucketFolder):
        with ThreadPoolExecutor(1) as pool:  # outside a cloud it takes a second to find that out
            machine = pool.submit(machine_region, environment)
            _try_bucket(folder, machine.result)
            return _compare_regions(folder, machine.result())
    return []


def _try_disk(path: Path) -> None:
    """Write a file in the folder, or in the nearest folder above it that exists."""
    existing = path.absolute()
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    with write_errors(path, full=Unwritable):
        if not existing.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        with tempfile.NamedTemporaryFile(dir=existing, prefix=".tmp-") as probe:
            probe.write(b"spile")
            probe.flush()
            os.fsync(probe.fileno())


def _try_bucket(folder: BucketFolder, find_machine: Callable[[], Region | None]) -> None:
    """Create an object, check that it cannot be created again, and delete it."""
    key = f".spile-probe-{secrets.token_hex(8)}"
    url = folder.bucket.url
    try:
        folder.create(key, b"first")
        overwritten = folder.create(key, b"second")
        folder.delete(key)
    except StoreError as error:
        failure = error.__cause__
        if not isinstance(failure, RequestFailure) or failure.transient:
            raise
        if failure.no_bucket:
            cloud, machine = folder.bucket.cloud, find_machine()
            region = machine.region if machine and machine.cloud == cloud.scheme else _DEFAULT_REGION[cloud.scheme]
            fix = "create it: " + cloud.create_command.format(name=cloud.bucket, region=region)
            raise Unwritable(f"there is no bucket {url}", fix=fix) from error
        expected = "an account that may create and delete objects"
        raise Unwritable(f"cannot write {folder.url}", expected=expected, found=failure.cause, fix=error.fix) from error
    if overwritten:  # some servers that speak S3 ignore the condition, and two workers would both succeed
        raise Unwritable(
            f"cannot use {url}",
            expected="a store that creates an object only if it is absent (If-None-Match: *)",
            found="one that overwrites it",
            fix="use another store, because with this one two workers could process the same stream",
        )


def _compare_regions(folder: BucketFolder, machine: Region | None) -> list[str]:
    """Return a warning if writing to the bucket from this machine costs money."""
    cloud = folder.bucket.cloud
    if machine is None:
        return []
    try:
        name = folder.region()
    except StoreError as error:
        if isinstance(error.__cause__, RequestFailure) and error.__cause__.status == 403:
            return []  # an account that may write objects need not be allowed to read the bucket's properties
        raise
    if name is None:
        return []
    price = egress_price(machine, Region(cloud.scheme, name))
    if not price:
        return []
    command = cloud.create_command.format(name="NAME", region=machine.region)
    advice = f"; a bucket in the same region costs nothing: {command}" if machine.cloud == cloud.scheme else ""
    return [
        f"{folder.bucket.url} is in {name} and this machine in {machine.region}: "
        f"every TiB written costs about ${price * 1024:.0f} of egress "
        f"(${price:.2f} per GiB, list prices of {PRICE_YEAR}){advice}"
    ]
