"""Compare clients of an object store on loopback: ``python -m bench.clients [--tls] [--later SECONDS]``.

The server is as simple as possible (``sendfile`` out, ``recv`` in) and runs in its own process, so the comparison shows
what each client costs: large ranges read and large objects written, many at a time, as a run does. The clients take
turns for several rounds; the best round counts, with the CPU seconds of this process. Real buckets use TLS and answer
after tens of milliseconds: ``--tls``, ``--later 0.03``. With TLS this server receives only as fast as Python reads, but
the client's CPU seconds are right.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate
from pathlib import Path
from typing import Any

import numpy as np
from tests.fakes.server import make_tls_context

from spile.objects import Folder, open_folder

SIZE = 8 << 20
Transfer = Callable[[int], int]
"""A function that transfers data once and returns the number of bytes."""


def serve(path: str, later: float, certificates: str | None) -> None:
    """Serve ranges of one file for GET, and discard the body of PUT."""
    file = Path(path).open("rb")  # noqa: SIM115
    context = make_tls_context(Path(certificates))[0] if certificates is not None else None
    listener = socket.create_server(("127.0.0.1", 0), backlog=128)
    print(listener.getsockname()[1], flush=True)
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_answer, args=(connection, file.fileno(), later, context), daemon=True).start()


def _answer(connection: socket.socket, file: int, later: float, context: ssl.SSLContext | None) -> None:
    if context is not None:
        connection = context.wrap_socket(connection, server_side=True)
    stream = connection.makefile("rb")
    scratch = bytearray(1 << 20)
    date = formatdate(usegmt=True)
    while line := stream.readline():
        headers = {}
        while (header := stream.readline().strip()) != b"":
            name, _, value = header.decode("latin-1").partition(":")
            headers[name.lower()] = value.strip()
        time.sleep(later)
        if line.startswith(b"GET"):
            first, _, last = headers["range"].partition("=")[2].partition("-")
            start, count = int(first), int(last) - int(first) + 1
            size = os.fstat(file).st_size
            connection.sendall(
                f'HTTP/1.1 206 Partial Content\r\nContent-Length: {count}\r\nETag: "x"\r\nLast-Modified: {date}\r\n'
                f"Content-Range: bytes {first}-{last}/{size}\r\n\r\n".encode()
            )
            if context is not None:
                connection.sendall(os.pread(file, count, start))
                count = 0
            while count:
                sent = os.sendfile(connection.fileno(), file, start, count)
                start, count = start + sent, count - sent
        else:
            left = int(headers["content-length"])
            if "expect" in headers:
                connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            while left:
                left -= stream.readinto(memoryview(scratch)[:left])
            connection.sendall(b'HTTP/1.1 200 OK\r\nContent-Length: 0\r\nETag: "x"\r\n\r\n')


def readers(url: str) -> dict[str, Transfer]:
    """Return the functions that read a range, for the installed packages."""
    import obstore

    folder, store = _spile(url), _obstore(url)
    found: dict[str, Transfer] = {
        "spile": lambda n: len(folder.get_range("key", n % 4 * SIZE, SIZE)),
        "obstore": lambda n: len(obstore.get_range(store, "key", start=n % 4 * SIZE, length=SIZE)),
    }
    if importlib.util.find_spec("boto3"):
        client = _boto(url)

        def with_boto(number: int) -> int:
            start = number % 4 * SIZE
            reply = client.get_object(Bucket="bucket", Key="key", Range=f"bytes={start}-{start + SIZE - 1}")
            return len(reply["Body"].read())

        found["boto3"] = with_boto
    return found


def writers(url: str) -> dict[str, Transfer]:
    """Return the functions that write an object with a checksum that the server checks."""
    import obstore

    from spile.objects.crc import crc32c, to_base64

    data = np.random.default_rng(0).integers(0, 256, SIZE, np.uint8).tobytes()
    folder, store = _spile(url), _obstore(url)

    def with_spile(_: int) -> int:
        folder.put("key", data)
        return SIZE

    def with_obstore(_: int) -> int:
        obstore.put(store, "key", data, use_multipart=False)
        return SIZE

    found: dict[str, Transfer] = {"spile, sha256": with_spile, "obstore, sha256": with_obstore}
    if importlib.util.find_spec("boto3"):
        client = _boto(url)

        def with_boto(_: int) -> int:
            client.put_object(Bucket="bucket", Key="key", Body=data, ChecksumCRC32C=to_base64(crc32c(data)))
            return SIZE

        found["boto3, crc32c"] = with_boto
    return found


def _spile(url: str) -> Folder:
    keys = {"AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x", "AWS_REGION": "us-east-1"}
    os.environ.update(keys, AWS_ENDPOINT_URL=url)
    return open_folder("s3://bucket")


def _obstore(url: str) -> Any:
    from obstore.store import S3Store

    return S3Store(
        "bucket",
        endpoint=url,
        region="us-east-1",
        access_key_id="x",
        secret_access_key="x",
        client_options={"allow_http": True},
        virtual_hosted_style_request=False,
    )


def _boto(url: str) -> Any:
    import boto3
    from botocore.config import Config

    config = Config(
        max_pool_connections=64, s3={"addressing_style": "path"}, response_checksum_validation="when_required"
    )
    keys = {"aws_access_key_id": "x", "aws_secret_access_key": "x", "region_name": "us-east-1"}
    return boto3.client("s3", endpoint_url=url, config=config, **keys)


def measure(ways: dict[str, Transfer], threads: int, transfers: int, rounds: int) -> dict[str, dict[str, float]]:
    """Return the GB/s of the best round and its CPU seconds per GB in this process."""
    best: dict[str, dict[str, float]] = {}
    for _ in range(rounds):
        for name, way in ways.items():
            with ThreadPoolExecutor(threads) as pool:
                began, busy = time.perf_counter(), time.process_time()
                moved = sum(pool.map(way, range(transfers)))
            seconds, spent = time.perf_counter() - began, time.process_time() - busy
            row = {"GB/s": moved / seconds / 1e9, "CPU s/GB": spent / moved * 1e9}
            if name not in best or row["GB/s"] > best[name]["GB/s"]:
                best[name] = row
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--transfers", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tls", action="store_true")
    parser.add_argument("--later", type=float, default=0.0, help="additional seconds before each reply")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows: dict[str, Any] = {}
    with tempfile.NamedTemporaryFile() as file, tempfile.TemporaryDirectory() as certificates:
        file.write(os.urandom(4 * SIZE))
        file.flush()
        command = [sys.executable, "-m", "bench.clients", "--serve", file.name, str(args.later)]
        if args.tls:
            command.append(certificates)
            authority = str(Path(certificates, "authority.pem"))
            os.environ.update(SSL_CERT_FILE=authority, AWS_CA_BUNDLE=authority)
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None
            url = f"http{'s' if args.tls else ''}://127.0.0.1:{server.stdout.readline().strip()}"
            try:
                for threads in args.threads:
                    for verb, ways in (("read", readers(url)), ("write", writers(url))):
                        for name, row in measure(ways, threads, args.transfers, args.rounds).items():
                            rows[f"{verb}, {threads} at a time, {name}"] = row
                            print(f"{verb:5} {threads:3} at a time  {name:24} "
                                  f"{row['GB/s']:5.2f} GB/s  {row['CPU s/GB']:5.2f} CPU s/GB", flush=True)  # fmt: skip
            finally:
                server.kill()
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2], float(sys.argv[3]), (*sys.argv[4:], None)[0])
    else:
        main()
