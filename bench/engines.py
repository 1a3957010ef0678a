"""What an engine costs against the same workers started by hand, and what trouble costs it.

``python -m bench.engines``: the same streams of the embedded model, the same number of workers, on one machine: by hand
(a loop for each worker) and with ``--engine local``. Their turns alternate. ``--ray``: with ``--engine ray`` too, on a
cluster that it starts here, a head and a node for each worker in network namespaces (root, and Ray installed);
``--ray-address HOST:PORT``: on one that is there. ``--trouble``: then the same run once more on that cluster while one
node is killed, another's cable is cut and a third joins, against the run that met nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spile.data.make.split import make_streams
from spile.objects import open_folder
from spile.objects.fake.gcs import FakeGcs
from spile.store.streams import find_streams
from spile.store.verification import verify

SPILE = [sys.executable, "-m", "spile.cli.main", "extract", "--model", "embedded", "--shard-size-gb", "0.01"]
BUCKET = "gs://bench"


@dataclass
class Place:
    """Where the streams are, where the output goes, and the cluster, if there is one."""

    streams: str
    output: str
    environment: Mapping[str, str]
    address: str | None = None
    cluster: Any = None
    variants: int = 8
    made: list[str] = field(default_factory=list)

    def flags(self, name: str) -> list[str]:
        """Of a run into a folder of its own."""
        self.made.append(f"{self.output}/{name}")
        return ["--dataset-dir", self.streams, "--output", self.made[-1], "--predictions-per-task", str(self.variants)]

    def extract(self, *words: str) -> None:
        done = subprocess.run([*SPILE, *words], env=dict(self.environment), capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"failed: {' '.join(words)}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def by_hand(place: Place, flags: list[str], streams: int, workers: int) -> None:
    """Each worker has every so-many-th stream, one process after the other."""

    def work(first: int) -> None:
        for stream in range(first, streams, workers):
            place.extract(*flags, "--worker-id", str(stream))

    threads = [threading.Thread(target=work, args=(first,)) for first in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def on_ray(place: Place, flags: list[str], workers: int) -> None:
    place.extract(*flags, "--engine", "ray", "--num-workers", str(workers), "--ray-address", str(place.address))


def in_trouble(place: Place, flags: list[str], streams: int, workers: int) -> None:
    """One node is killed, one cut off, one joins, while the run is on."""
    root = open_folder(flags[flags.index("--output") + 1])
    run = threading.Thread(target=on_ray, args=(place, flags, workers))
    run.start()

    def begun(count: int) -> None:
        while run.is_alive() and not (any(root.list("tpu_")) and len(find_streams(root)) >= count):
            time.sleep(0.5)

    begun(workers)
    place.cluster.kill(1)
    begun(max(workers + 2, streams // 2))
    place.cluster.cut(2)
    place.cluster.start(workers + 1)
    run.join()


@contextlib.contextmanager
def here(folder: str) -> Iterator[Place]:
    """No cluster: folders of this machine."""
    yield Place(f"{folder}/streams", folder, os.environ)


@contextlib.contextmanager
def ray_cluster(folder: str, nodes: int, address: str | None) -> Iterator[Place]:
    """A bucket that every node reaches, and a cluster: the one at the address, or one that is started here."""
    from spile.data.make.upload import upload

    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    parts = importlib.import_module("fleet.ray_nodes")  # the cluster that the tests have
    if address is not None:
        yield Place(f"{folder}/streams", folder, os.environ, address)
        return
    if not parts.RAY or not parts.can_make_namespaces():
        raise SystemExit("a cluster here needs Ray (pip install 'spile[ray]'), root and network namespaces")
    cluster = parts.RayNodes()
    try:
        with FakeGcs(host=cluster.gateway) as gcs:
            gcs.add_bucket(BUCKET.removeprefix("gs://"))
            os.environ["STORAGE_EMULATOR_HOST"] = cluster.env["STORAGE_EMULATOR_HOST"] = gcs.url
            upload(Path(folder) / "streams", open_folder(f"{BUCKET}/streams"))
            for number in range(nodes + 1):
                cluster.start(number)
            yield Place(f"{BUCKET}/streams", BUCKET, cluster.env, cluster.address, cluster)
    finally:
        cluster.close()


def prove(place: Place) -> None:
    """Every run's dataset is whole: a fast engine that loses samples is none."""
    for root in place.made:
        report = verify(root)
        if not report.ok:
            raise SystemExit(f"{root}: {report.all_problems[0].line()}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--variants", type=int, default=8, help="of each of the 48 embedded tasks")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--ray", action="store_true", help="on a cluster that is started here")
    parser.add_argument("--ray-address", default=os.environ.get("RAY_ADDRESS"))
    parser.add_argument("--trouble", action="store_true", help="with --ray: a node dies, a link is cut, a node joins")
    options = parser.parse_args()
    streams, workers, ray = options.streams, options.workers, options.ray or options.ray_address
    kinds = ["by hand", "--engine local", *(["--engine ray"] if ray else [])]
    best = dict.fromkeys(kinds, float("inf"))
    with tempfile.TemporaryDirectory() as folder:
        make_streams("embedded", Path(folder) / "streams", streams)
        with ray_cluster(folder, workers, options.ray_address) if ray else here(folder) as place:
            place.variants = options.variants
            for turn in range(options.turns):
                for kind in kinds:
                    flags = place.flags(f"{kind.replace(' ', '-')}-{turn}")
                    began = time.perf_counter()
                    if kind == "by hand":
                        by_hand(place, flags, streams, workers)
                    elif kind == "--engine local":
                        place.extract(*flags, "--engine", "local", "--num-workers", str(workers))
                    else:
                        on_ray(place, flags, workers)
                    best[kind] = min(best[kind], time.perf_counter() - began)
            for kind, seconds in best.items():
                print(f"{kind:16} {seconds:6.1f} s  {seconds / best['by hand']:.2f} of by hand", flush=True)
            if options.trouble and place.cluster is not None:
                flags = place.flags("trouble")
                began = time.perf_counter()
                in_trouble(place, flags, streams, workers)
                seconds = time.perf_counter() - began
                print(
                    f"{'in trouble':16} {seconds:6.1f} s  {seconds / best['--engine ray']:.2f} of without", flush=True
                )
            prove(place)
    print(f"every sample of {len(place.made)} runs is there once", flush=True)


if __name__ == "__main__":
    main()
