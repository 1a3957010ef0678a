"""The datasets that the web application shows: opened on request, with their snapshots and fleets."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from spile.errors import SpileError, UserError
from spile.fleet.home import FleetHome
from spile.fleet.logs import read_log
from spile.objects import open_folder
from spile.objects.folder import NotFound
from spile.reading.dataset import Dataset
from spile.reading.dataset import open as open_dataset
from spile.reading.inspection import tap_widths
from spile.store.ledger import parse_time
from spile.store.snapshot import CommitPoint, Snapshot, SnapshotReader, StreamView

if TYPE_CHECKING:
    from spile.data.tokens import Tokenizer

_REOPEN = 20.0  # seconds after which an unfinished dataset is opened again, to see new commits
_PATIENCE = 3.0  # seconds that the first pages wait for the tokenizer
_BINS = 240  # the number of points of the plot of the throughput
_ACTIONS = 500
_LOG_LINES = 400
_COMMITS = 100
COLUMNS = (
    "number", "name", "zone", "state", "phase", "samples", "expected", "rate", "seconds_left", "tokens", "bytes",
    "shards", "committed", "last_commit", "age", "restarts", "retries", "reason",
)  # fmt: skip
"""The columns of the table of streams, in the order of a row's values."""


class Root:
    """One dataset on the command line, and its fleet if it has one."""

    def __init__(
        self,
        url: str,
        home: FleetHome | None = None,
        model: str | None = None,
        *,
        dataset: Dataset | None = None,
    ) -> None:
        self.home, self._model = home, model
        self.url = home.read_fleet().root if home is not None else url
        self.folder = open_folder(self.url)
        self._reader = SnapshotReader(self.folder)
        self._lock, self._snapshot_lock = threading.Lock(), threading.Lock()
        self._dataset = dataset
        self._loading: threading.Thread | None = None
        """Loads the tokenizer: the hub may not answer for minutes, and pages show token ids until then."""
        self._loaded: Tokenizer | UserError = UserError("the tokenizer of the model is not loaded yet")
        self._opened = time.time()
        self._snapshot: Snapshot | None = None

    def dataset(self) -> Dataset:
        """Return the dataset. An unfinished one is opened again after a while, because it may have grown."""
        with self._lock:
            known = self._dataset
            if known is None or (time.time() - self._opened > _REOPEN and not self._is_done()):
                known = open_dataset(self.url, self._model)
                self._opened = time.time()
            self._dataset = known
            if self._loading is None:
                self._loading = threading.Thread(
                    target=self._load_tokenizer, args=(known._find_tokenizer,), daemon=True
                )
                self._loading.start()
                self._deadline = time.monotonic() + _PATIENCE
            known._find_tokenizer = self._find_tokenizer  # type: ignore[method-assign]
            return known

    def _load_tokenizer(self, find: Callable[[], Tokenizer | UserError]) -> None:
        self._loaded = find()

    def _find_tokenizer(self) -> Tokenizer | UserError:
        if self._loading is not None:
            self._loading.join(max(0.0, self._deadline - time.monotonic()))
        return self._loaded

    def open_in_background(self) -> None:
        """Open the dataset in a thread, while the browser loads the page. A request reports an error."""

        def opening() -> None:
            with suppress(SpileError, OSError):
                tap_widths(self.dataset())

        threading.Thread(target=opening, name="opening", daemon=True).start()

    def _is_done(self) -> bool:
        return self._snapshot is not None and self._snapshot.done and self._snapshot.taken < self._opened

    def snapshot(self, max_age: float = 2.0) -> Snapshot:
        """Return the state of all streams, at most this many seconds old."""
        with self._snapshot_lock:
            known = self._snapshot
            if known is None or time.time() - known.taken > max_age:
                known = self._snapshot = self._reader.take()
            return known

    def describe_run(self, max_age: float = 2.0) -> dict[str, Any]:
        """Return the table of streams, the totals, the throughput over time and the state of the fleet."""
        snapshot = self.snapshot(max_age)
        fleet, workers = self._fleet_state()
        rows = [self._row(view, workers.get(view.number)) for view in snapshot.streams]
        return {
            **snapshot.to_json(),
            "streams": len(rows),
            "columns": COLUMNS,
            "rows": rows,
            "states": {view.state.value: snapshot.count(view.state) for view in snapshot.streams},
            "throughput": throughput(self._reader.history, self._starts()),
            "quarantined": snapshot.quarantined,
            "fleet": fleet,
        }

    def _starts(self) -> dict[str, float]:
        """Return when the current attempt of each stream started, by the id of the attempt."""
        found = {}
        for beat in self._reader.beats.values():
            with suppress(ValueError):
                found[beat.attempt] = parse_time(beat.started)
        return found

    def _row(self, view: StreamView, worker: tuple[str, int, str] | None) -> list[Any]:
        commits, beat = self._reader.history.get(view.number, []), self._reader.beats.get(view.number)
        attempts = {each.attempt for each in (*commits, beat) if each is not None}
        zone, restarts, reason = worker or ("", max(0, len(attempts) - 1), "")
        return [
            view.number, view.name, zone, view.state.value, str(view.phase), view.samples, view.expected,
            view.tokens_per_second, view.seconds_left, view.tokens, view.bytes, view.shards, view.committed,
            commits[-1].time if commits else None, view.age, restarts, view.retries, view.last_error or reason,
        ]  # fmt: skip

    def _fleet_state(self) -> tuple[dict[str, Any] | None, dict[int, tuple[str, int, str]]]:
        """Return the state of the fleet, and the zone, the restarts and their reasons of each worker by its stream."""
        if self.home is None:
            return None, {}
        fleet, history, reports = self.home.read_fleet(), self.home.read_history(), self.home.read_reports()
        workers = {}
        for worker in fleet.workers:
            past, report = history.workers.get(worker.id), reports.get(worker.name)
            restarts = [0, report.launches - 1 if report else 0, past.creates - 1 if past else 0]
            reasons = [report.error.strip().splitlines()[-1]] if report and report.error.strip() else []
            if past:
                counts = ((past.preemptions, "preempted"), (past.crashes, "crashed"))
                known = [f"{word} {count}×" for count, word in counts if count]
                reasons = [*known, *filter(None, [past.gave_up or past.lost or past.note]), *reasons]
            workers[worker.id] = (past.zone if past else worker.zone, max(restarts), "; ".join(reasons))
        state = {
            "name": fleet.name,
            "workers": len(fleet.workers),
            "dollars": history.dollars,
            "budget": fleet.policy.budget,
            "stopped": history.stopped,
        }
        return state, workers

    def describe_stream(self, number: int) -> dict[str, Any]:
        """Return one stream: its heartbeat's log lines, its last commits, and the worker's log if there is a fleet."""
        view = next((each for each in self.snapshot(10.0).streams if each.number == number), None)
        if view is None:
            raise UserError(f"no stream {number} in {self.url}")
        points = self._reader.history.get(number, [])[-_COMMITS:]
        return {
            "number": number,
            "name": view.name,
            "host": view.host,
            "status": view.status,
            "last_error": view.last_error,
            "quarantined": view.quarantined,
            "log": self._worker_log(number) or list(view.log_tail),
            "commits": [[point.time, point.attempt, point.samples, point.tokens, point.bytes] for point in points],
        }

    def _worker_log(self, number: int) -> list[str]:
        if self.home is None:
            return []
        workers = {worker.id: worker.name for worker in self.home.read_fleet().workers}
        return list(read_log(self.home.folder, workers[number]))[-_LOG_LINES:] if number in workers else []

    def events(self) -> list[dict[str, Any]]:
        """Return the last actions of the fleet's monitors, the newest first: when, what and why."""
        if self.home is None:
            return []
        folder, found = self.home.folder, []
        for key in sorted((info.key for info in folder.list("actions/")), reverse=True):
            with suppress(NotFound):
                for line in reversed(folder.get(key).decode(errors="replace").splitlines()):
                    with suppress(ValueError, AttributeError):
                        event = json.loads(line)
                        wanted = ("time", "verb", "name", "zone", "reason", "result")
                        found.append({name: str(event.get(name, "")) for name in wanted})
            if len(found) >= _ACTIONS:
                break
        return found[:_ACTIONS]


def throughput(history: dict[int, list[CommitPoint]], starts: dict[str, float]) -> dict[str, list[float]]:
    """Return the tokens per second of all streams over time, from the times of their commits.

    The tokens of a commit are spread evenly over the time since the previous commit of the same attempt, or since the
    start of the attempt if that is known, but at least over one interval of the plot.
    """
    spans = []
    for points in history.values():
        for before, point in zip([None, *points], points, strict=False):
            same = before is not None and before.attempt == point.attempt
            begin = before.time if same and before else starts.get(point.attempt, point.time)
            spans.append((min(begin, point.time), point.time, point.tokens))
    if not spans:
        return {"times": [], "rates": []}
    begins, ends, tokens = np.array(spans, np.float64).T
    first, last = begins.min(), ends.max()
    count = max(1, min(_BINS, math.ceil(last - first)))
    edges = np.linspace(first, max(last, first + 1.0), count + 1)
    width = edges[1] - edges[0]
    begins = np.maximum(np.minimum(begins, ends - width), first)
    done = np.zeros(count + 1)
    for begin, end, amount in zip(begins, ends, tokens, strict=True):
        done += amount * np.clip((edges - begin) / max(end - begin, 1e-9), 0.0, 1.0)
    return {"times": (edges[:-1] + width / 2).tolist(), "rates": (np.diff(done) / width).tolist()}
