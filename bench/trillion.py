"""Simulate a run of 10^12 tokens on 1,000 preemptible workers: ``python -m bench.trillion``.

The simulation uses the planner's estimate, the claims and the ledger of spile itself on a virtual clock and a virtual
bucket: each request takes 50 ms of virtual time, and 1 % of them are answered with 429 and retried by spile's own
policy. Workers are lost at a rate of 5 % per hour, without notice; a few of them are only suspended, and continue after
other workers have taken their streams over. At the end every ledger is read: each sample must be stored exactly once.

One simulated commit stands for many real ones (``--commits`` per stream). The table scales the requests accordingly.
"""

from __future__ import annotations

import argparse
import heapq
import random
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from rich.console import Console
from rich.table import Table

from bench.scale import run_identity
from bench.virtual import VirtualBucket, VirtualFolder
from spile.errors import Fenced
from spile.objects.bucket import PART
from spile.objects.retry import Retry, from_status
from spile.planning.cost import START_SECONDS, Estimate, Rates, Volume, estimate
from spile.planning.machines import list_prices, parse_machine
from spile.run.claiming import PlannedStream, take_unfinished
from spile.spec.amounts import size
from spile.spec.identity import StreamIdentity
from spile.spec.ranges import Ranges
from spile.spec.taps import Tap
from spile.store.claims import Claim, ClaimBook
from spile.store.heartbeat import INTERVAL
from spile.store.index import write_entry
from spile.store.layout import INDEX
from spile.store.ledger import ShardRecord, read_ledger
from spile.store.run import join_run
from spile.store.snapshot import SnapshotReader
from spile.store.writer import StreamWriter, join_stream, read_stream

_D, _LAYERS, _LAYER, _PARAMETERS = 3584, 28, 14, 7.6e9
_SAMPLE_TOKENS = 2000
_LATENCY = 0.05
_PARALLEL = 32
_REFUSED = 0.01
_CLASS_A, _CLASS_B = 5e-6, 0.4e-6
"""Dollars per request that writes or lists, and per request that reads (GCS, standard storage in one region)."""


@dataclass
class World:
    """The size of the run, and what is counted during it."""

    tokens: float = 1e12
    workers: int = 1000
    streams: int = 4000
    commits: int = 10
    """Simulated commits of each stream."""
    lost_per_hour: float = 0.05
    suspended_share: float = 0.1
    """The share of lost machines that come back after a while and continue as if nothing had happened."""
    expiry: float = 300.0
    seed: int = 0
    now: float = 0.0
    spent: float = 0.0
    """Seconds that the requests of the current step took."""
    requests: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    per_second: Counter[tuple[str, int]] = field(default_factory=Counter)
    lost: int = 0
    suspended: int = 0
    fenced: int = 0
    orphans: int = 0
    """Simulated commits whose work was lost or done twice."""
    machine_seconds: float = 0.0

    def __post_init__(self) -> None:
        self.dice = random.Random(self.seed)
        self.retry = Retry(sleep=self.wait, clock=lambda: self.now + self.spent)
        self.bucket = VirtualBucket(self.request, lambda: self.now + self.spent)
        self.root = VirtualFolder(self.bucket, "run")
        self.samples = round(self.tokens / _SAMPLE_TOKENS / self.streams)

    def wait(self, seconds: float) -> None:
        """Let virtual time pass. Requests of a pool of threads run at the same time."""
        self.spent += seconds / (1 if threading.current_thread() is threading.main_thread() else _PARALLEL)

    def request(self, kind: str, key: str) -> None:
        """Count a request, let it take its time, and refuse some; spile's retry policy repeats those."""
        prefix = key.split("/")[1]

        def attempt() -> None:
            self.wait(_LATENCY)
            self.requests[kind] += 1
            self.per_second[prefix.partition("_")[0], int(self.now + self.spent)] += 1
            if self.dice.random() < _REFUSED:
                self.refused += 1
                raise from_status(429)

        self.retry.call(attempt, self.root.stats)


def plan(world: World) -> Estimate:
    """Return the planner's estimate for this run on TPU v5e machines of four chips."""
    volume = Volume(world.samples * world.streams, int(world.tokens), _D * 2, 1e9)
    flops = 2 * _PARAMETERS * (_LAYER + 1) / _LAYERS
    prices = list_prices()
    return estimate(
        volume,
        parse_machine("v5litepod-4"),
        flops_per_token=flops,
        rates=Rates(start_seconds=START_SECONDS),
        workers=world.workers,
        storage_gb_month=prices.storage_gb_month,
    )


class _Pause(Exception):
    """A worker waits; the others continue in the meantime."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


def _pause(seconds: float) -> None:
    raise _Pause(seconds)


class Worker:
    """One machine: it claims streams, commits, renews its claim, and is lost at some time."""

    def __init__(self, run: Run, name: str) -> None:
        self.run, self.world, self.name = run, run.world, name
        self.speed = run.world.dice.lognormvariate(0, 0.05)
        self.epoch = 0
        """The number of restarts. Events of an earlier epoch are ignored."""
        self.claim: Claim | None = None
        self.store: StreamWriter | None = None

    def boot(self) -> None:
        self.epoch += 1
        self.began = self.world.now
        self.claim = self.store = None
        self.book = ClaimBook(
            self.world.root,
            self.name,
            expiry=self.world.expiry,
            clock=lambda: self.world.now + self.world.spent,
            rng=random.Random(self.world.dice.random()),
        )
        samples = self.world.samples
        self.left = {number: PlannedStream(samples, "") for number in range(self.world.streams)}
        self.snapshots = SnapshotReader(self.world.root, lambda: self.world.now + self.world.spent)
        self.later(START_SECONDS * self.world.dice.uniform(0.4, 1.0), self.take)
        self.later(self.world.dice.expovariate(self.world.lost_per_hour / 3600), self.lose)

    def later(self, seconds: float, step: Callable[[], None]) -> None:
        epoch = self.epoch
        self.run.at(seconds, lambda: step() if epoch == self.epoch else None)

    def take(self) -> None:
        try:
            claim = take_unfinished(self.book, self.snapshots, self.left, _pause)
        except _Pause as pause:
            self.later(self.world.spent + pause.seconds, self.take)
            return
        if claim is None:
            self.end()
            return
        self.claim = claim
        identity = StreamIdentity(
            "data", f"{claim.stream:064x}", self.world.samples, self.world.samples, (Tap("residual", _LAYER),)
        )
        self.store = join_stream(self.world.root, claim.stream, identity, self.run.identity)
        self.later(self.world.spent + self.world.expiry / 4, lambda: self.renew(claim))
        self.compute()

    def renew(self, claim: Claim) -> None:
        if self.claim is claim and claim.renew():
            self.later(self.world.spent + self.world.expiry / 4, lambda: self.renew(claim))

    def compute(self) -> None:
        """Compute the next samples that are not committed."""
        assert self.store is not None
        todo = Ranges([(0, self.world.samples)]) - self.store.ledger.done
        if not todo:
            self.finish()
            return
        first, stop = todo.pairs()[0]
        part = -(-self.world.samples // self.world.commits)
        stop = min(stop, (first // part + 1) * part)
        seconds = (stop - first) * _SAMPLE_TOKENS / self.run.rate / self.speed
        self.later(self.world.spent + seconds, lambda: self.commit(first, stop))

    def commit(self, first: int, stop: int) -> None:
        assert self.store is not None
        assert self.claim is not None
        number = self.store.ledger.commits + 1
        name = f"shard_{number:04d}-{self.store.attempt}.safetensors"
        rows = (stop - first) * _SAMPLE_TOKENS
        shard = ShardRecord(
            name, rows * _D * 2, first, (8192, 1), {"residual": first}, Ranges([(first, stop)]), stop - first, rows
        )
        self.world.bucket.store(f"run/stream_{self.claim.stream}/{name}", b"x", shard.size)
        try:
            self.store.commit([shard])
        except Fenced:
            self.world.fenced += 1
            self.world.orphans += 1
            self.take()
            return
        self.compute()

    def finish(self) -> None:
        assert self.store is not None
        assert self.claim is not None
        self.store.finish()
        write_entry(self.world.root, self.claim.stream)
        self.claim.finished = True
        self.claim.release()
        self.claim = self.store = None
        self.later(self.world.spent, self.take)

    def lose(self) -> None:
        """Lose the machine. The monitor creates it again under the same name. Some were only suspended."""
        world = self.world
        world.lost += 1
        world.orphans += self.store is not None
        if self.store is not None and world.dice.random() < world.suspended_share:
            world.suspended += 1
            self.resume_later()
        self.end()
        self.run.live += 1
        self.run.at(world.dice.uniform(30, 120), self.boot)

    def resume_later(self) -> None:
        """Let a copy of this worker continue after its claim has expired, as if its network had failed for a while."""
        ghost = Worker(self.run, f"{self.name}-suspended")
        ghost.claim, ghost.store, ghost.book = self.claim, self.store, self.book
        ghost.left, ghost.snapshots, ghost.began = {}, self.snapshots, self.world.now
        self.run.live += 1
        ghost.later(self.world.expiry * self.world.dice.uniform(0.2, 6), ghost.compute)

    def end(self) -> None:
        """Stop: nothing is left to claim, or the machine is gone."""
        self.world.machine_seconds += self.world.now - self.began
        self.epoch += 1
        self.run.live -= 1


class Run:
    """The events of a simulated run in the order of their times."""

    def __init__(self, world: World) -> None:
        self.world, self.identity = world, replace(run_identity(), folders="stream")
        self.estimate = plan(world)
        self.rate = self.estimate.tokens_per_second / world.workers
        self.live = world.workers
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, seconds: float, step: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.world.now + seconds, self._count, step))

    def simulate(self) -> None:
        """Run until the last worker has ended."""
        join_run(self.world.root, self.identity)
        for number in range(self.world.workers):
            self.at(self.world.dice.uniform(0, 300), Worker(self, f"w{number:04d}").boot)
        while self.live:
            self.world.now, _, step = heapq.heappop(self._events)
            self.world.spent = 0.0
            step()

    def prove(self) -> tuple[int, int]:
        """Return the bytes and the number of all commits; raise unless each sample is stored exactly once."""
        quiet = VirtualFolder(replace(self.world.bucket, request=lambda _kind, _key: None), "run")
        commits = 0
        for number in range(self.world.streams):
            folder = quiet.child(f"stream_{number}")
            record = read_stream(folder)
            assert record is not None
            ledger = read_ledger(folder, record.id)
            if ledger.done != Ranges([(0, self.world.samples)]) or ledger.doubled:
                raise AssertionError(f"stream {number}: {ledger.done.text()} of {self.world.samples}")
            if ledger.samples != self.world.samples:
                raise AssertionError(f"stream {number} has {ledger.samples} samples")
            commits += ledger.commits
        return sum(stored.size for key, stored in self.world.bucket.objects.items() if "/commits/" in key), commits


def report(run: Run, console: Console, seconds: float) -> None:
    """Print the table of bytes, requests, dollars, hours and ledger sizes."""
    world, guess, volume = run.world, run.estimate, run.estimate.volume
    ledger_bytes, commits = run.prove()
    hours = world.now / 3600
    scale = volume.shards / commits
    """Real commits for each simulated one."""
    writes = sum(world.requests[kind] for kind in ("put", "list", "delete"))
    uploads = volume.shards * (-(-int(volume.shard_bytes) // PART) + 2)
    beats = world.machine_seconds / INTERVAL
    real = {
        "uploads of shards": (uploads, uploads * _CLASS_A),
        "commits, with a look at stream.json": (2 * volume.shards, volume.shards * (_CLASS_A + _CLASS_B)),
        "heartbeats": (beats, beats * _CLASS_A),
        "claims, ledgers and index": (
            sum(world.requests.values()) - 2 * commits,
            (writes - commits) * _CLASS_A + (world.requests["get"] - commits) * _CLASS_B,
        ),
    }
    machines = world.machine_seconds / 3600 * guess.machine.price.preemptible
    table = Table(show_header=False)
    for name, text in (
        ("tokens, samples", f"{volume.tokens:.0e}, {volume.samples:,}"),
        ("stored", f"{size(volume.bytes)} in {volume.shards:,} shards of 1 GB, {world.streams:,} streams"),
        ("workers", f"{world.workers:,} x {guess.machine.name}, {run.rate:,.0f} tokens/s each"),
        ("planned", f"{guess.hours:.1f} hours, ${guess.dollars.preemptible:,.0f}; limited by {guess.slowest}"),
        ("simulated", f"{hours:.1f} hours, ${machines:,.0f}"),
        ("lost machines", f"{world.lost:,}, of which {world.suspended} came back later; {world.fenced} commits fenced"),
        ("work done again", f"{world.orphans / commits:.2%} (a simulated commit stands for {scale:,.0f} real ones)"),
        ("requests refused", f"{world.refused:,} of {sum(world.requests.values()):,} simulated"),
        *((name, f"{count:,.0f}, ${cost:,.0f}") for name, (count, cost) in real.items()),
        ("storage", f"${guess.storage_month:,.0f} per month"),
        ("written to the bucket", f"{volume.bytes / hours / 3600 / 1e9:,.0f} GB/s"),
        ("commits of a stream", f"{volume.shards / world.streams:,.0f}, {size(ledger_bytes / commits)} each"),
        ("all ledgers", size(ledger_bytes * scale)),
        ("claims", f"{sum(key.startswith('run/claims/') for key in world.bucket.objects):,} objects"),
        ("index", f"{sum(key.startswith(f'run/{INDEX}') for key in world.bucket.objects)} objects"),
        ("requests per second", _peaks(world, uploads / world.now)),
    ):
        table.add_row(name, text)
    console.print(table)
    console.print(f"each of {volume.samples:,} samples is stored exactly once; simulated in {seconds:.0f} CPU seconds")


def _peaks(world: World, uploads: float) -> str:
    most = {name: max(n for (each, _), n in world.per_second.items() if each == name) for name in ("claims", "stream")}
    mean = sum(world.requests.values()) / world.now
    return (
        f"{uploads:,.0f} for uploads; claims and ledgers {mean:,.0f} on average, at most {most['claims']:,} below "
        f"claims/ and {most['stream']:,} below all streams in one second"
    )


def main(arguments: list[str] | None = None) -> int:
    """Simulate and print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.trillion", description="simulate a very large run")
    parser.add_argument("--tokens", type=float, default=World.tokens)
    parser.add_argument("--workers", type=int, default=World.workers)
    parser.add_argument("--streams", type=int, default=World.streams)
    parser.add_argument("--commits", type=int, default=World.commits, help="simulated commits of each stream")
    parser.add_argument("--lost-per-hour", type=float, default=World.lost_per_hour)
    parser.add_argument("--seed", type=int, default=0)
    run = Run(World(**vars(parser.parse_args(arguments))))
    began = time.process_time()
    run.simulate()
    report(run, Console(width=150), time.process_time() - began)
    return 0


if __name__ == "__main__":
    sys.exit(main())
