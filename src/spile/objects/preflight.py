"""Before anything is computed: can the output be written, and is it where the machine is?"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from spile.errors import StoreError
from spile.objects.cloud.failures import RequestFailure
from spile.objects.cloud.folder import CloudFolder
from spile.objects.cloud.regions import PRICES_OF, Region, egress_price, machine_place
from spile.objects.disk import writing
from spile.objects.folder import Folder, Unwritable

__all__ = ["preflight"]

_MAKE = {
    "gs": "gcloud storage buckets create {bucket} --location={region}",
    "s3": "aws s3 mb {bucket} --region {region}",
}
_DEFAULT_REGION = {"gs": "us-central1", "s3": "us-east-1"}


def preflight(folder: Folder, *, need: int = 0, environment: Mapping[str, str] = os.environ) -> list[str]:
    """Warnings, or an error with exit code 2 where the folder cannot be written. Leaves nothing behind.

    ``need`` is the room for what will be in flight (a shard or two), in bytes; a disk with less is full already.
    """
    if folder.local_path is not None:
        _try_disk(folder.local_path, folder.url, need)
        return []
    if isinstance(folder, CloudFolder):
        with ThreadPoolExecutor(1) as beside:  # a machine in no cloud takes a second to know it
            machine = beside.submit(machine_place, environment)
            _try_bucket(folder, machine.result)
            return [*_probe_checksums(folder), *_compare_regions(folder, machine.result())]
    return []


def _try_disk(path: Path, url: str, need: int) -> None:
    """Write where the folder is or will be."""
    there = path.absolute()
    while not there.exists() and there != there.parent:
        there = there.parent
    with writing(path, full=Unwritable):
        if not there.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        with tempfile.NamedTemporaryFile(dir=there, prefix=".tmp-") as probe:
            probe.write(b"spile")
            probe.flush()
            os.fsync(probe.fileno())
        free = shutil.disk_usage(there).free
    if free < need:
        raise Unwritable(
            f"no room in {url}",
            expected=f"{need / 1e9:.1f} GB free",
            found=f"{free / 1e9:.1f} GB",
            fix="free some room, choose another --output or a smaller --shard-size-gb",
        )


def _try_bucket(folder: CloudFolder, find_machine: Callable[[], Region | None]) -> None:
    """Create an object, fail to create it again, delete it."""
    key = f".spile-probe-{secrets.token_hex(8)}"
    try:
        folder.create(key, b"first")
        overwritten = folder.create(key, b"second")
        folder.delete(key)
    except StoreError as error:
        trouble = error.__cause__
        if not isinstance(trouble, RequestFailure) or trouble.transient:
            raise
        if trouble.no_bucket:
            bucket = folder.bucket_url
            cloud, machine = bucket.partition(":")[0], find_machine()
            region = machine.region if machine and machine.cloud == cloud else _DEFAULT_REGION[cloud]
            fix = "make it: " + _MAKE[cloud].format(bucket=bucket, region=region)
            raise Unwritable(f"there is no bucket {bucket}", fix=fix) from error
        expected = "an account that may create and delete objects"
        raise Unwritable(f"cannot write {folder.url}", expected=expected, found=trouble.cause, fix=error.fix) from error
    if overwritten:  # some servers that speak S3 ignore the condition, and two workers would both win
        raise Unwritable(
            f"cannot use {folder.bucket_url}",
            expected="a store that creates an object only if it is absent (If-None-Match: *)",
            found="one that overwrites it",
            fix="use another store: without this nothing keeps two workers from doing one stream twice",
        )


def _probe_checksums(folder: CloudFolder) -> list[str]:
    """A warning where the store takes what is not what it says it is: then each object is read back."""
    if folder.compares_checksums(f".spile-probe-{secrets.token_hex(8)}"):
        return []
    return [
        f"{folder.bucket_url} does not compare the checksums that are sent along: "
        "what is written is read back and compared, which takes the line twice"
    ]


def _compare_regions(folder: CloudFolder, machine: Region | None) -> list[str]:
    """A warning where bytes cross a border that costs."""
    cloud = folder.url.partition(":")[0]
    if machine is None:
        return []
    try:
        bucket = Region(cloud, folder.location())
    except StoreError as error:
        if isinstance(error.__cause__, RequestFailure) and error.__cause__.status == 403:
            return []  # an account that may write objects need not be allowed to read the bucket's own data
        raise
    price = egress_price(machine, bucket)
    if not price:
        return []
    make = _MAKE[cloud].format(bucket=f"{cloud}://NAME", region=machine.region)
    advice = f"; a bucket beside it costs nothing: {make}" if machine.cloud == cloud else ""
    return [
        f"{folder.bucket_url} lies in {bucket.region} and this machine in {machine.region}: "
        f"every TiB written costs about ${price * 1024:.0f} of egress "
        f"(${price:.2f} per GiB, list prices of {PRICES_OF}){advice}"
    ]
