"""Measure the web application in Chromium: ``python -m bench.view [--streams 1000] [--samples 100000]``.

Needs Chromium and the packages of ``spile[dev]``. A run of 1,000 streams with 100,000 samples lies on the local disk,
with a heartbeat for each stream. Measured are the first paint, the time until the table of streams and the list of
samples are drawn, the work of an update on the main thread, and the frames while the list of samples is scrolled. Then
a dataset with rows of 4,096 numbers at 32 taps is opened in a fake bucket that answers each request after 50 ms: the
time until the first heat map is drawn, and the requests until then.
"""

from __future__ import annotations

import argparse
import json
import shutil
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from rich.console import Console

from bench import SCRATCH
from bench.ledger import fake_gcs
from bench.overlap import run_identity
from spile.objects import Folder, open_folder
from spile.spec.identity import StreamIdentity
from spile.spec.phase import Phase
from spile.spec.sample import Role, Sample
from spile.spec.taps import Tap
from spile.store.heartbeat import Beat
from spile.store.layout import PROGRESS
from spile.store.run import join_run
from spile.store.writer import join_stream
from spile.view.web.pages import Viewer
from spile.view.web.roots import Root
from spile.view.web.server import WebServer

__all__ = ["main"]

_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip
_SCROLL = """
async () => {
  const grid = document.querySelector('[aria-label=Samples].grid'), times = [];
  for (let n = 0; n < 120; n += 1) {
    await new Promise(requestAnimationFrame);
    const began = performance.now();
    grid.scrollTop += 900;
    grid.dispatchEvent(new Event('scroll'));
    void grid.offsetHeight;
    times.push(performance.now() - began);
  }
  return times.sort((a, b) => a - b);
}
"""
"""Scroll 120 frames; return the milliseconds of work in each, with the layout."""


def write_stream(root: Folder, number: int, samples: int, *, length: int, width: int, taps: int) -> None:
    """Write one stream of a single shard, and its heartbeat."""
    source = np.random.default_rng(number)
    names = tuple(Tap("residual", layer) for layer in range(taps))
    run = replace(run_identity(), d_model=width, model="embedded")
    join_run(root, run)
    store = join_stream(root, number, StreamIdentity("none", "0", samples * 2, samples * 2, names), run)
    store.statistics = True
    roles = np.full(length, Role.USER, np.uint8)
    made = [
        Sample(n, f"task-{number}-{n}", source.integers(0, 200, length).astype(np.int32), roles, f"text {number} {n}")
        for n in range(samples)
    ]
    builder = store.begin(made)
    for tap in range(taps):
        builder.write(tap, 0, source.standard_normal((samples * length, width)).astype(ml_dtypes.bfloat16))
    store.commit([builder.finish()])
    put_beat(store.folder, samples)


def put_beat(folder: Folder, samples: int) -> None:
    now = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    beat = Beat(
        phase=Phase.RUNNING,
        samples=samples,
        samples_committed=samples,
        tokens=samples * 8,
        tokens_per_second=1234.5,
        expected=samples * 2,
        attempt="a",
        host="host",
        started=now,
        updated=now,
        version="1",
        progressed=now,
    )
    folder.put(PROGRESS, json.dumps(beat.to_json()).encode())


def make_run(root: Folder, streams: int, samples: int) -> None:
    with ThreadPoolExecutor(8) as pool:
        each = samples // streams
        write_stream(root, 0, each, length=8, width=8, taps=2)
        for _ in pool.map(lambda n: write_stream(root, n, each, length=8, width=8, taps=2), range(1, streams)):
            pass


@contextmanager
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        made = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=[*_FLAGS])
        yield made
        made.close()


def open_page(chromium: Any, url: str) -> tuple[Any, float, float]:
    """Return the page, and the seconds to the first paint and until it is drawn."""
    page = chromium.new_page(viewport={"width": 1280, "height": 900})
    began = time.perf_counter()
    page.goto(url)
    page.wait_for_selector("main[data-ready=true]", timeout=120_000)
    drawn = time.perf_counter() - began
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime") / 1000
    return page, paint, drawn


def measure_run(chromium: Any, folder: Path, streams: int, samples: int, console: Console) -> None:
    root = open_folder(str(folder))
    make_run(root, streams, samples)
    viewer = Viewer([Root(str(folder))])
    with WebServer(viewer, port=0, interval=1.0).in_background() as server:
        first, again = (open_page(chromium, f"{server.url}#/runs/0") for _ in range(2))
        for name, (page, paint, drawn) in (("first visit", first), ("second visit", again)):
            console.print(f"run, {streams:,} streams, {name}: first paint {paint:.2f} s, table drawn {drawn:.2f} s")
            console.print(f"  rows of the table in the document: {page.locator('.grid .body .line').count()}")
        page = again[0]
        first[0].close()
        updates = []
        for turn in range(5):
            put_beat(root.child("stream_0" if (folder / "stream_0").exists() else "tpu_0"), 10 + turn)
            page.wait_for_timeout(1500)
            updates.append(float(page.evaluate("document.getElementById('main').dataset.update")))
        console.print(f"  update on the main thread: median {np.median(updates):.0f} ms, largest {max(updates):.0f} ms")
        page.close()
        page, paint, drawn = open_page(chromium, f"{server.url}#/samples/0")
        count = len(viewer.roots[0].dataset().samples)
        console.print(f"samples, {count:,}: first paint {paint:.2f} s, list and heat map drawn {drawn:.2f} s")
        times = page.evaluate(_SCROLL)
        console.print(f"  work in a frame of scrolling: median {times[60]:.1f} ms, 95 % {times[114]:.1f} ms")
        began = time.perf_counter()
        page.locator("input[type=search]").fill(f"task-{streams - 1}-3")
        page.keyboard.press("Enter")
        page.wait_for_selector("p:has-text('samples match'):not(:has-text('so far'))", timeout=120_000)
        console.print(f"  search through all samples: {time.perf_counter() - began:.1f} s")


def measure_bucket(chromium: Any, delay: float, console: Console) -> None:
    with fake_gcs() as url:
        root = open_folder("gs://bench/view")
        write_stream(root, 0, 4, length=512, width=4096, taps=32)
        fault = {"kind": "slow", "seconds": delay, "count": -1}
        request = urllib.request.Request(f"{url}/_fake/faults", json.dumps([fault]).encode(), method="POST")
        urllib.request.urlopen(request).close()
        with urllib.request.urlopen(f"{url}/_fake/stats") as reply:
            before = json.load(reply)["requests"]
        viewer = Viewer([Root("gs://bench/view")])
        page = chromium.new_page(viewport={"width": 1280, "height": 900})  # The browser is open.
        with WebServer(viewer, port=0).in_background() as server:
            began = time.perf_counter()
            page.goto(f"{server.url}#/samples/0")
            page.wait_for_selector(".tokens span[data-value]", timeout=120_000)
            drawn = time.perf_counter() - began
            with urllib.request.urlopen(f"{url}/_fake/stats") as reply:
                requests = json.load(reply)["requests"] - before
            size = sum(file.size for stream in viewer.roots[0].dataset().streams for file in stream.files)
            console.print(
                f"bucket, {delay * 1000:.0f} ms: first heat map {drawn:.2f} s with {requests} requests; dataset of "
                f"{size / 1e6:.0f} MB"
            )
            page.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--delay", type=float, default=0.05, help="seconds before each answer of the bucket")
    asked = parser.parse_args()
    console, folder = Console(highlight=False, soft_wrap=True), SCRATCH / "view"
    shutil.rmtree(folder, ignore_errors=True)
    with browser() as chromium:
        measure_bucket(chromium, asked.delay, console)
        measure_run(chromium, folder, asked.streams, asked.samples, console)
    shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
