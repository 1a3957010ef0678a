"""The lease of a fleet: only one monitor acts at a time.

``lease/000007.json`` belongs to the seventh monitor and is created only if absent. Its owner overwrites it in every
round, and does not act if it could not. A monitor that finds the last lease released, or not renewed for ``ttl``
seconds, creates the next one. The previous owner sees a higher number and only watches from then on.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from spile.errors import Damaged, UserError, untrusted
from spile.fleet.provider import Node
from spile.objects import open_folder
from spile.objects.folder import Folder, NotFound, Removal
from spile.spec.records import typed_fields

_SHAPE = re.compile(r"lease/([0-9]{6}|[1-9][0-9]{6,})\.json")


def this_person() -> str:
    """Return the user and host name, for display."""
    return f"{os.environ.get('USER', 'somebody')}@{socket.gethostname()}"


@dataclass(frozen=True)
class Holder:
    """The owner of the lease."""

    number: int
    owner: str
    """User, host and process; ``who`` in the file."""
    token: str
    renewed: float
    ttl: float
    released: bool = False

    def expired(self, now: float) -> bool:
        """Return whether another monitor may take over."""
        return self.released or now - self.renewed > self.ttl


class Lease:
    """One monitor's lease on a fleet."""

    def __init__(
        self,
        folder: Folder,
        *,
        clock: Callable[[], float],
        ttl: float,
        owner: str | None = None,
        token: str | None = None,
    ) -> None:
        self._folder = folder
        self._clock = clock
        self._ttl = ttl
        self._owner = owner or f"{this_person()}, process {os.getpid()}"
        self._token = token or secrets.token_hex(8)
        self.number = 0
        """The number of the lease that this monitor holds; 0 if it holds none."""
        self._renewed = float("-inf")

    def held(self) -> bool:
        """Return whether this monitor may act now. It is never true once another monitor could have taken over."""
        return self.number > 0 and self._clock() - self._renewed < self._ttl * 0.8

    def take(self) -> Holder | None:
        """Take or renew the lease. Return None if this monitor holds it, else the holder."""
        began = self._clock()
        last = self._last()
        if self.number and (last is None or last.number == self.number):
            if began - self._renewed < self._ttl:
                self._write(self.number, began)
                return None
            self.number = 0
        if last is not None and last.token != self._token and not last.expired(began):
            self.number = 0
            return last
        number = (last.number if last else 0) + 1
        if not self._folder.create(_key(number), self._body(began)):
            winner = self._last()
            # A lost reply looks like a lost race.
            if winner is None or winner.token != self._token or winner.number != number:
                self.number = 0
                return winner
        self.number, self._renewed = number, began
        self._forget(number - 8)
        return None

    def release(self) -> None:
        """Let the next monitor start at once."""
        last = self._last()
        if self.number and last is not None and last.number == self.number:
            self._write(self.number, self._clock(), released=True)
        self.number = 0

    def holder(self) -> Holder | None:
        """Return the current holder, if there is one."""
        last = self._last()
        return None if last is None or last.expired(self._clock()) else last

    def _write(self, number: int, moment: float, *, released: bool = False) -> None:
        self._folder.put(_key(number), self._body(moment, released=released))
        self._renewed = moment

    def _body(self, moment: float, *, released: bool = False) -> bytes:
        fields = {"who": self._owner, "token": self._token, "renewed": moment, "ttl": self._ttl, "released": released}
        return json.dumps(fields).encode()

    def _numbers(self) -> list[int]:
        keys = (info.key for info in self._folder.list("lease/"))
        return sorted(int(key[6:-5]) for key in keys if _is_lease(key))

    def _last(self) -> Holder | None:
        for number in reversed(self._numbers()):
            try:
                data = self._folder.get(_key(number))
            except NotFound:  # Deleted by a later monitor meanwhile.
                continue
            with untrusted(Damaged, f"{self._folder.url}/{_key(number)} is not a lease", fix="remove it"):
                found = json.loads(data)
                return Holder(**typed_fields(Holder, {**found, "owner": found["who"], "number": number}))
        return None

    def _forget(self, below: int) -> None:
        old = [_key(number) for number in self._numbers() if number < below]
        Removal(self._folder.url, ours=_is_lease, remove=self._folder.delete, fence=self.held).in_order(old)


def _is_lease(key: str) -> bool:
    return _SHAPE.fullmatch(key) is not None


def _key(number: int) -> str:
    return f"lease/{number:06d}.json"


def refuse_monitored(nodes: Iterable[Node], fleet: str) -> None:
    """Refuse to delete machines of a fleet that is monitored: the monitor would create them again."""
    homes = sorted({home for node in nodes if (home := node.metadata.get("spile-home"))})
    for home in homes:
        holder = Lease(open_folder(home), clock=time.time, ttl=0.0).holder()
        if holder is not None:
            raise UserError(
                f"{holder.owner} monitors fleet {fleet} and would create them again",
                fix=f"end it for good with: spile fleet stop {home}",
            )
