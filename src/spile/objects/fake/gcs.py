"""A Google Cloud Storage for tests: in memory, on loopback, with faults on demand.

obstore, Google's own client and ``gcloud storage`` all take it for the real one (tests prove it). In Python::

    with FakeGcs() as fake:
        fake.add_bucket("b")
        fake.faults.add("reset_after", method="PUT", target="commits/")

or as a process: ``python -m spile.objects.fake.gcs --bucket b`` prints its URL and serves until SIGTERM
(``--with-parent``: or until its parent ends). ``STORAGE_EMULATOR_HOST=URL`` then leads any spile process to it, and
``/_fake/…`` commands it (see ``faulty_http``; also ``POST /_fake/buckets`` ``{"name", "location"}``, ``DELETE
/_fake/buckets/NAME``, and ``POST /_fake/damage`` ``{"bucket", "key", "at"}``, which flips a byte at rest).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import ssl
import sys
import time
from pathlib import Path

from spile.objects.fake.buckets import Buckets, FakeBucket
from spile.objects.fake.certificates import loopback_context
from spile.objects.fake.http import FakeReply, FaultyServer, Request
from spile.objects.fake.json_api import answer_json
from spile.objects.fake.xml_api import answer_xml

__all__ = ["FakeGcs", "main"]


class FakeGcs(FaultyServer):
    """The server. Its buckets live as long as it does."""

    def __init__(
        self,
        port: int = 0,
        host: str = "127.0.0.1",
        known_as: str | None = None,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        """``known_as``: its URL as clients elsewhere reach it, where that is not ``host``."""
        super().__init__(port, host, tls)
        self.buckets = Buckets(known_as or self.url)

    def add_bucket(self, name: str, location: str = "US-CENTRAL1") -> None:
        """Create it, empty."""
        with self.buckets.lock:
            self.buckets.buckets[name] = FakeBucket(location)

    def delete_bucket(self, name: str) -> None:
        """With all that is in it."""
        with self.buckets.lock:
            self.buckets.buckets.pop(name, None)

    def damage(self, bucket: str, key: str, at: int = 0) -> None:
        """Flip a byte at rest; the reported checksums stay as they were."""
        self.buckets.damage(bucket, key, at)

    def answer(self, request: Request) -> FakeReply:
        """JSON below ``/storage/v1``, XML elsewhere."""
        if "/storage/v1/" in request.path:
            return answer_json(self.buckets, request)
        return answer_xml(self.buckets, request)

    def administer(self, request: Request) -> FakeReply:
        """The admin endpoint, with the buckets' part."""
        match request.method, request.path.split("/")[2:]:
            case "POST", ["buckets"]:
                self.add_bucket(**json.loads(request.body))
            case "DELETE", ["buckets", name]:
                self.delete_bucket(name)
            case "POST", ["damage"]:
                self.damage(**json.loads(request.body))
            case _:
                return super().administer(request)
        return FakeReply(200)


def main(arguments: list[str] | None = None) -> int:
    """Serve until told to stop."""
    parser = argparse.ArgumentParser(prog="python -m spile.objects.fake.gcs", description="a fake GCS for tests")
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on")
    parser.add_argument("--url", help="how others reach it, where that is another name")
    parser.add_argument("--bucket", action="append", default=[], help="a bucket to begin with; may be repeated")
    parser.add_argument("--location", default="US-CENTRAL1", help="where those buckets say they are")
    parser.add_argument("--tls", type=Path, help="speak TLS; the authority to trust is put into this folder")
    parser.add_argument("--with-parent", action="store_true", help="end when the process that started this one ends")
    options = parser.parse_args(arguments)
    asked: list[int] = []  # no event: its lock is not for handlers
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: asked.append(number))
    tls = None if options.tls is None else loopback_context(options.tls)[0]
    with FakeGcs(options.port, options.host, options.url, tls) as fake:
        for name in options.bucket:
            fake.add_bucket(name, options.location)
        print(fake.url, flush=True)
        parent = os.getppid()
        while not asked:
            time.sleep(0.1)
            if options.with_parent and os.getppid() != parent:
                break
    return 0


if __name__ == "__main__":
    sys.exit(main())
