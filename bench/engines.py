"""Measure the overhead of an engine compared with workers that are started by hand, and the cost of failures.

``python -m bench.engines`` processes the same streams of the embedded model with the same number of workers on one
machine: by hand (``xargs -P``, one process per stream) and with ``--engine local``. Each run starts without compiled
programs, the runs take turns, and figures are medians: elapsed seconds, and seconds of processor time, which other
work on the machine changes less. ``--ray`` also measures ``--engine ray`` on a cluster that is started here, with a
head and one node per worker in network namespaces (requires root and Ray). ``--ray-address HOST:PORT`` uses an
existing cluster. ``--trouble`` repeats the run on a cluster that was started here while one node is killed, another is
disconnected and a third joins. ``--only hand,ray`` measures only these.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.fakes.gcs import FakeGcs

from bench.meter import ProcessorMeter
from spile.data.split import make_streams
from spile.objects import open_folder
from spile.proof.verification import verify
from spile.store.layout import find_streams

SPILE = [sys.executable, "-m", "spile.cli.main", "extract", "--model", "embedded", "--shard-size-gb", "0.01"]
BUCKET = "gs://bench"
KINDS = {"hand": "by hand", "local": "--engine local", "ray": "--engine ray", "trouble": "in trouble"}
AGAINST = {"local": "hand", "ray": "hand", "trouble": "ray"}
PROGRAMS = {
    "raylet/raylet": "raylets",
    "src/ray/gcs/gcs_server": "gcs_server",
    "--engine": "the command",
    f"{BUCKET}/": "workers",
    "--worker-id": "workers",
    "cli.main worker": "workers",
    "bench.engines": "bucket and bench",
    "ray::DashboardAgent": "dashboard agents",
    "ray::RuntimeEnvAgent": "runtime environment agents",
    "ray::": "Ray's task processes",
    "default_worker.py": "Ray's task processes",
    "dashboard/": "dashboard agents",
    "runtime_env/agent": "runtime environment agents",
    "log_monitor.py": "log monitors",
    "monitor.py": "autoscaler monitor",
    "ray.scripts": "ray start",
}
"""Parts of command lines, and the name under which their time is counted. The first match counts."""


@dataclass
class Place:
    """The folders of the streams and the output, and the cluster if there is one."""

    streams: str
    output: str
    environment: Mapping[str, str]
    address: str | None = None
    cluster: Any = None
    variants: int = 8
    made: list[str] = field(default_factory=list)
    running: set[subprocess.Popen[str]] = field(default_factory=set)

    def flags(self, name: str) -> list[str]:
        """Return the flags of a run into a new folder."""
        self.made.append(f"{self.output}/{name}")
        return ["--dataset-dir", self.streams, "--output", self.made[-1], "--predictions-per-task", str(self.variants)]

    def extract(self, *words: str) -> None:
        process = subprocess.Popen(
            [*SPILE, *words], env=dict(self.environment), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self.running.add(process)
        message, _ = process.communicate()
        self.running.discard(process)
        if process.returncode:
            raise SystemExit(f"failed: {' '.join(words)}\n{message[-2000:]}")

    def end(self) -> None:
        """End processes that are still running. The workers of an engine end with it."""
        for process in list(self.running):
            process.terminate()
        for process in list(self.running):
            process.wait()


def by_hand(place: Place, flags: list[str], streams: int, workers: int) -> None:
    """Run the streams as ``seq 0 15 | xargs -P 4 -I{} spile extract … --worker-id {}`` does."""
    left = iter(range(streams))

    def work() -> None:
        for stream in left:
            place.extract(*flags, "--worker-id", str(stream))

    threads = [threading.Thread(target=work, daemon=True) for _ in range(workers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def on_ray(place: Place, flags: list[str], workers: int) -> None:
    place.extract(*flags, "--engine", "ray", "--num-workers", str(workers), "--ray-address", str(place.address))


def in_trouble(place: Place, flags: list[str], streams: int, workers: int) -> None:
    """Kill one node, disconnect another and add a third during the run."""
    root = open_folder(flags[flags.index("--output") + 1])
    run = threading.Thread(target=on_ray, args=(place, flags, workers), daemon=True)
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
    """Return local folders, without a cluster."""
    yield Place(f"{folder}/streams", folder, os.environ)


@contextlib.contextmanager
def ray_cluster(folder: str, nodes: int, address: str | None) -> Iterator[Place]:
    """Return a bucket that every node can reach, and a cluster: an existing one, or one that is started here."""
    from spile.data.manifest import upload

    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    parts = importlib.import_module("fleet.ray_nodes")  # The cluster of the tests.
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
    """Verify the dataset of every run: a fast result with missing samples does not count."""
    for root in place.made:
        report = verify(root)
        if not report.ok:
            raise SystemExit(f"{root}: {report.all_problems[0].line()}")


def program(words: str) -> str | None:
    """Return the name under which a process's time is counted. Threads of the kernel have no command line."""
    return next((name for part, name in PROGRAMS.items() if part in words), "others") if words else None


def timed(place: Place, kind: str, turn: int, streams: int, workers: int) -> tuple[float, float]:
    """Run one contender's turn without compiled programs; return the elapsed and the processor seconds."""
    flags = place.flags(f"{kind}-{turn}")
    shutil.rmtree(Path(os.environ["XDG_CACHE_HOME"]), ignore_errors=True)
    began = time.perf_counter()
    with ProcessorMeter(program) as meter:
        if kind == "hand":
            by_hand(place, flags, streams, workers)
        elif kind == "local":
            place.extract(*flags, "--engine", "local", "--num-workers", str(workers))
        elif kind == "ray":
            on_ray(place, flags, workers)
        else:
            in_trouble(place, flags, streams, workers)
    seconds = time.perf_counter() - began
    spent = dict(meter.seconds)
    others = spent.pop("others", 0.0)
    used = ", ".join(f"{name} {each:.1f}" for name, each in spent.items() if each >= 0.5)
    print(
        f"{kind:8} {seconds:6.1f} s; processor {sum(spent.values()):.0f} s: {used}; not ours {others:.1f}", flush=True
    )
    return seconds, sum(spent.values())


def compare(place: Place, kinds: list[str], options: argparse.Namespace) -> None:
    """Run all contenders in turns, then the run with failures, which changes the cluster; return the results."""
    place.variants = options.variants
    times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in kinds}
    turns = [kind for _ in range(options.turns) for kind in kinds if kind != "trouble"]
    for kind in [*turns, *(["trouble"] if "trouble" in kinds else [])]:
        times[kind].append(timed(place, kind, len(times[kind]), options.streams, options.workers))
    for kind, measured in times.items():
        base = AGAINST.get(kind, "")
        for unit, place_of in (("elapsed", 0), ("processor", 1)):
            median = statistics.median(each[place_of] for each in measured)
            answer_text = ""
            if base in times:
                answer_text = (
                    f"  {median / statistics.median(each[place_of] for each in times[base]):.2f} of {KINDS[base]}"
                )
            print(f"{KINDS[kind]:16} {median:6.1f} s {unit}{answer_text}", flush=True)
    prove(place)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--variants", type=int, default=8, help="variants of each of the 48 embedded tasks")
    parser.add_argument("--turns", type=int, default=1)
    parser.add_argument("--ray", action="store_true", help="also measure Ray, on a cluster that is started here")
    parser.add_argument("--ray-address", default=os.environ.get("RAY_ADDRESS"))
    parser.add_argument("--trouble", action="store_true", help="with --ray: a node dies, a link is cut, a node joins")
    parser.add_argument("--only", help="contenders: some of hand,local,ray")
    options = parser.parse_args()
    ray = options.ray or options.ray_address
    kinds = options.only.split(",") if options.only else ["hand", "local", *(["ray"] if ray else [])]
    if options.trouble and options.ray:
        kinds = [*kinds, "trouble"]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # After a timeout, too, the cluster is removed.
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = f"{folder}/cache"
        make_streams("embedded", Path(folder) / "streams", options.streams)
        with ray_cluster(folder, options.workers, options.ray_address) if ray else here(folder) as place:
            try:
                compare(place, kinds, options)
            finally:
                place.end()
    print(f"every sample of {len(place.made)} runs is there once", flush=True)


if __name__ == "__main__":
    main()
