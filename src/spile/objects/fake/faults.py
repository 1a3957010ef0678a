"""Faults on demand, for the servers that tests talk to: which request goes wrong, how, and how often.

status          answered with ``status`` and never carried out (429, 500, 503, 403, …)
status_after    carried out, then answered with ``status``
reset           the connection is cut before the request is carried out
reset_after     carried out, then the connection is cut: the reply is lost
truncate        the reply's body stops half way
corrupt         one byte of the reply's body is flipped, or, where it has none, of the checksum it reports
slow            answered after ``seconds``
hang            no answer for ``seconds``, then the connection is cut
"""

from __future__ import annotations

import random
import threading
import time
from dataclasses import asdict, dataclass, field
from typing import Literal, get_args

__all__ = ["Fault", "FaultKind", "Faults", "Throttle", "random_faults"]

FaultKind = Literal["status", "status_after", "reset", "reset_after", "truncate", "corrupt", "slow", "hang"]


@dataclass
class Fault:
    """One rule. It matches requests by method and by a part of their target, and wears out after ``count``."""

    kind: FaultKind
    status: int = 503
    method: str | None = None
    target: str = ""
    """Found anywhere in the path and query."""
    skip: int = 0
    """Matching requests to let through first."""
    count: int = 1
    """Matching requests to spoil; -1: all of them."""
    seconds: float = 1.0

    def __post_init__(self) -> None:
        if self.kind not in get_args(FaultKind):
            raise ValueError(f"unknown fault {self.kind}, expected one of {', '.join(get_args(FaultKind))}")

    def matches(self, method: str, target: str) -> bool:
        """Whether this request is one of its kind."""
        return self.count != 0 and self.method in (None, method) and self.target in target


@dataclass
class Faults:
    """The rules in force, and what they did."""

    rules: list[Fault] = field(default_factory=list)
    spoiled: dict[str, int] = field(default_factory=dict)
    requests: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, kind: FaultKind, **options: object) -> None:
        """Put a rule in force."""
        self.extend([Fault(kind, **options)])  # type: ignore[arg-type]

    def extend(self, rules: list[Fault]) -> None:
        """Put rules in force, after those that are."""
        with self._lock:
            self.rules.extend(rules)

    def clear(self) -> None:
        """Every request succeeds again."""
        with self._lock:
            self.rules.clear()

    def strike(self, method: str, target: str) -> Fault | None:
        """What goes wrong with this request, if anything; counts it."""
        with self._lock:
            self.requests += 1
            for rule in self.rules:
                if rule.matches(method, target):
                    if rule.skip > 0:
                        rule.skip -= 1
                        continue
                    rule.count -= rule.count > 0
                    self.spoiled[rule.kind] = self.spoiled.get(rule.kind, 0) + 1
                    return rule
        return None

    def report(self) -> dict[str, object]:
        """For the admin endpoint."""
        with self._lock:
            rules = [asdict(rule) for rule in self.rules]
            return {"requests": self.requests, "spoiled": dict(self.spoiled), "rules": rules}


def random_faults(seed: int, count: int, requests: int = 40) -> list[Fault]:
    """A schedule of faults that pass, spread over about so many requests; the same for the same seed."""
    dice = random.Random(seed)
    kinds: list[FaultKind] = ["status", "status_after", "reset", "reset_after", "truncate", "corrupt", "slow"]
    rules = []
    for _ in range(count):
        kind = dice.choice(kinds)
        status = dice.choice([408, 429, 500, 502, 503, 504])
        method = dice.choice([None, None, "PUT", "POST", "GET"])
        rules.append(
            Fault(kind, status, method, skip=dice.randrange(requests), count=dice.choice([1, 1, 2]), seconds=0.02)
        )
    return rules


class Throttle:
    """A cap on the bytes per second that all connections share. Unlimited until it is set."""

    def __init__(self) -> None:
        self.rate: float | None = None
        self._free = 0.0
        self._lock = threading.Lock()

    def take(self, count: int, since: float | None = None) -> float:
        """Wait until so many bytes may pass; when that was.

        ``since``: when the bytes before these, of the same body, passed. These were waiting behind them, so that a
        thread that wakes up late on a busy machine does not count as a line that was idle.
        """
        now = time.monotonic()
        rate = self.rate
        if not rate:
            return now
        with self._lock:
            self._free = end = max(self._free, now if since is None else since) + count / rate
        if end > now:
            time.sleep(end - now)
        return end
