"""Compare reading from a bucket for training with parallel range reads of obstore: see ``bench.reading``."""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
import tempfile
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import spile
from bench.rates import BATCH, SHARD_ROWS, D, Read, in_turns, make, show
from spile.objects import open_folder

_FAKE_GCS = ["-m", "tests.fakes.gcs", "--bucket", "bucket", "--with-parent"]
_MOTO = [
    "-c",
    """
import time
from moto.server import ThreadedMotoServer
server = ThreadedMotoServer(port=0, verbose=False)
server.start()
print("http://{}:{}".format(*server.get_host_and_port()), flush=True)
time.sleep(3600)
""",
]


class BucketCase(NamedTuple):
    """A server and its bucket."""

    name: str
    server: list[str]
    opened: Callable[[str], tuple[str, Any]]
    """Return the address of the bucket and obstore's store for a server's URL."""
    rows: int
    shard_rows: int
    later: float = 0.0
    """Additional seconds per reply. A bucket in the same region replies after about 30 ms."""
    tls: bool = False


def read_bucket(case: BucketCase, turns: int) -> None:
    """Compare the reader with plain range reads of the same bytes."""
    with tempfile.TemporaryDirectory() as certificates:
        command = [sys.executable, *case.server, *(["--tls", certificates] if case.tls else [])]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
            try:
                assert process.stdout is not None
                url = process.stdout.readline().strip()
                if case.tls:
                    os.environ["SSL_CERT_FILE"] = str(Path(certificates, "authority.pem"))
                print(f"a bucket ({case.name}; in another process), {case.rows * D * 2 / 1e9:.2f} GB:")
                _read(case, url, turns)
            finally:
                process.terminate()
                os.environ.pop("SSL_CERT_FILE", None)


def _read(case: BucketCase, url: str, turns: int) -> None:
    address, store = case.opened(url)
    make(open_folder(f"{address}/root"), case.rows, case.shard_rows)
    if case.later:
        rule = {"kind": "slow", "method": "GET", "count": -1, "seconds": case.later}
        context = ssl.create_default_context(cafile=os.environ.get("SSL_CERT_FILE"))
        urllib.request.urlopen(f"{url}/_fake/faults", json.dumps([rule]).encode(), context=context).close()
    found = in_turns(_ways(address, store), turns)
    show(found, next(iter(found.values())))


def gcs(url: str) -> tuple[str, Any]:
    from obstore.store import GCSStore

    os.environ["STORAGE_EMULATOR_HOST"] = url
    names = {"client_email": "", "private_key": "", "private_key_id": ""}
    key = json.dumps({"gcs_base_url": url, "disable_oauth": True, **names})
    return "gs://bucket", GCSStore("bucket", service_account_key=key, client_options={"allow_http": True})


def s3(url: str) -> tuple[str, Any]:
    import boto3
    from obstore.store import S3Store

    keys = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}
    os.environ.update(keys, AWS_ENDPOINT_URL=url)
    boto3.client("s3", endpoint_url=url, region_name="us-east-1").create_bucket(Bucket="bucket")
    return "s3://bucket", S3Store("bucket", endpoint=url, client_options={"allow_http": True})


def _ways(address: str, store: Any) -> dict[str, Read]:
    import obstore

    dataset = spile.open(f"{address}/root")
    (stream,) = dataset.streams
    reads = [
        (record.name, at) for record in stream.shards for at in range(4096, record.tokens * D * 2 - (4 << 20), 4 << 20)
    ]

    def one(task: tuple[str, int]) -> Any:
        return obstore.get_range(store, f"root/tpu_0/{task[0]}", start=task[1], length=4 << 20)

    def plain() -> Iterator[int]:
        with ThreadPoolExecutor(8) as pool:
            for data in pool.map(one, reads):
                yield len(data) // (2 * D)

    def ours(memory: int) -> Iterator[int]:
        for batch in dataset.shuffled("residual.0", BATCH, memory=memory):
            yield len(batch)

    return {
        "obstore's range reads, 8 at a time": plain,
        "spile, full permutation": lambda: ours(4 << 30),
        "spile, two levels (1 GiB in memory)": lambda: ours(1 << 30),
        "spile, two levels (256 MiB in memory)": lambda: ours(256 << 20),
    }


BUCKETS = (
    BucketCase("fake GCS, shards of 235 MB", _FAKE_GCS, gcs, 8 * SHARD_ROWS, SHARD_ROWS),
    BucketCase("the same, answers 30 ms later", _FAKE_GCS, gcs, 8 * SHARD_ROWS, SHARD_ROWS, 0.03),
    BucketCase("the same with shards of 29 MB", _FAKE_GCS, gcs, 8 * SHARD_ROWS, SHARD_ROWS // 8, 0.03),
    BucketCase("fake GCS over TLS, shards of 235 MB", _FAKE_GCS, gcs, 8 * SHARD_ROWS, SHARD_ROWS, tls=True),
    # moto reads the whole object for each range
    BucketCase("moto's S3, shards of 29 MB", _MOTO, s3, 2 * SHARD_ROWS, SHARD_ROWS // 8),
)
