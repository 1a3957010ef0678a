"""A fleet's news for people who do not watch: a small JSON to a webhook, or a line for Slack's."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Literal
from urllib.parse import urlsplit

from spile.errors import SpecError
from spile.fleet.history import History
from spile.fleet.reconcile import past_of
from spile.fleet.spec import FleetSpec

__all__ = ["Event", "check_url", "events_between", "send"]

Kind = Literal["given up", "budget", "stopped", "finished", "silent"]
Event = tuple[Kind, str]
_SECONDS = 10.0


def check_url(url: str) -> str:
    """A webhook's address."""
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).netloc:
        raise SpecError("--notify", expected="https://…", found=repr(url))
    return url


def events_between(fleet: FleetSpec, before: History, after: History) -> Iterator[Event]:
    """What is new: each thing once, for the next monitor goes on from the stored history."""
    for worker in fleet.workers:
        old, new = past_of(before, worker), past_of(after, worker)
        if new.gave_up and not old.gave_up:
            yield "given up", f"{worker.name} is given up: {new.gave_up}"
        if new.silences > old.silences:
            yield "silent", f"{worker.name} is silent and is replaced: {new.lost}"
    if after.stopped and not before.stopped:
        yield ("stopped" if fleet.policy.stop else "budget"), after.stopped
    if _done(fleet, after) and not _done(fleet, before):
        yield "finished", f"all {len(fleet.workers)} workers are done; ${after.dollars:.2f} spent"


def _done(fleet: FleetSpec, history: History) -> bool:
    return history.deployment == fleet.deployment and all(past_of(history, each).finished for each in fleet.workers)


def send(fleet: FleetSpec, events: Sequence[Event], now: float) -> list[str]:
    """Tell every webhook; what could not be told, a line each: the fleet goes on without it."""
    troubles = []
    for kind, text in events:
        moment = datetime.fromtimestamp(now, UTC).isoformat(timespec="seconds")
        line = f"spile fleet {fleet.name}: {text}"[:2000]
        whole = {"event": kind, "fleet": fleet.name, "text": line, "output": fleet.root, "time": moment}
        for url in fleet.notify:
            slack = urlsplit(url).hostname == "hooks.slack.com"
            body = json.dumps({"text": line} if slack else whole).encode()
            request = urllib.request.Request(url, body, {"Content-Type": "application/json"}, method="POST")  # noqa: S310
            try:
                urllib.request.urlopen(request, timeout=_SECONDS).close()  # noqa: S310  (checked at deploy)
            except (OSError, ValueError) as error:
                troubles.append(f"nobody was told at {urlsplit(url).hostname}: {error}")
    return troubles
