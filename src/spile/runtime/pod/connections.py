"""The roll call's connections, kept a little longer: until JAX has started everywhere they alone tell of a death."""

from __future__ import annotations

import contextlib
import json
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from spile.errors import PodError, untrusted
from spile.runtime.pod.identity import Identity

__all__ = ["MOST_BYTES", "Line", "RollAnswer", "RollConnections", "listen", "tell"]

MOST_BYTES = 1 << 16

Line = Callable[[str], None]


@dataclass(frozen=True)
class RollAnswer:
    """What everyone hears."""

    service: str
    """The coordination service's address."""
    names: tuple[str, ...]
    """The machines' own names, in order."""


def tell(connections: Iterable[socket.socket], message: dict[str, object]) -> None:
    """One line of JSON to each of them."""
    data = json.dumps(message).encode() + b"\n"
    for connection in connections:
        with contextlib.suppress(OSError):  # one who has gone will be missed later, by name
            connection.settimeout(5)
            connection.sendall(data)


def listen(connection: socket.socket, identity: Identity, until: float) -> dict[str, object]:
    """The next line of JSON from worker 0; :class:`PodError` where it has gone."""
    heard = b""
    while not heard.endswith(b"\n"):
        connection.settimeout(max(until - time.monotonic(), 0.01))
        try:
            # No further than the line's end: the next one, if it is there already, is for whoever listens next.
            seen = connection.recv(MOST_BYTES, socket.MSG_PEEK)
            data = connection.recv(seen.index(b"\n") + 1 if b"\n" in seen else len(seen)) if seen else b""
        except OSError:
            data = b""
        if not data:
            raise PodError(
                f"{identity.host(0)} went away during the roll call",
                found=f"this is worker {identity.process} of {identity.count}",
                fix="see worker 0's log",
            )
        heard += data
    with untrusted(PodError, f"{identity.host(0)} said what no spile worker says", fix="see worker 0's log"):
        return dict(json.loads(heard))


class RollConnections:
    """The roll call's connections, held until everyone is on the coordination service: until then they are what tells
    that a host has died, and JAX, which waits for it, would abort everybody without a name.
    """

    def __init__(self, identity: Identity, answer: RollAnswer, sockets: dict[int, socket.socket]) -> None:
        self.answer = answer
        self._identity = replace(identity, hosts=identity.hosts or answer.names)
        self._sockets = sockets
        self._failed = False

    @contextlib.contextmanager
    def guarded(self, end: Line, timeout: float) -> Iterator[None]:
        """While this process connects: ``end`` is called, with a line, should another not come that far."""
        watch = self._await_all if self._identity.first else self._await_bye
        thread = threading.Thread(target=watch, args=(end, time.monotonic() + timeout), daemon=True)
        thread.start()
        try:
            yield
            if not self._identity.first:
                with contextlib.suppress(OSError):  # worker 0 has gone: the thread knows
                    self._sockets[0].sendall(b"connected\n")
            thread.join()
            if self._identity.first and not self._failed:
                self._tell({"bye": True})
        finally:
            self.close()

    def close(self) -> None:
        """No more to say."""
        for connection in self._sockets.values():
            with contextlib.suppress(OSError):  # the other side may be gone
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _tell(self, message: dict[str, object]) -> None:
        tell(self._sockets.values(), message)

    def _await_all(self, end: Line, until: float) -> None:
        waiting = dict(self._sockets)
        while waiting:
            for number, gone in self._heard(waiting):
                if gone:
                    self._fail(f"{self._identity.host(number)} died between the roll call and JAX's start", end)
                    return
                del waiting[number]
            if waiting and time.monotonic() > until:
                named = ", ".join(self._identity.host(number) for number in waiting)
                self._fail(f"{named} did not connect to the coordination service in time", end)
                return

    @staticmethod
    def _heard(waiting: dict[int, socket.socket]) -> list[tuple[int, bool]]:
        """Those who said that they are connected, and those who are gone."""
        with selectors.DefaultSelector() as selector:
            for number, connection in waiting.items():
                connection.setblocking(False)
                selector.register(connection, selectors.EVENT_READ, number)
            found = []
            for key, _ in selector.select(0.5):
                try:
                    data = waiting[key.data].recv(64)
                except OSError:
                    data = b""
                found.append((key.data, not data))
            return found

    def _fail(self, line: str, end: Line) -> None:
        line = f"{line}; run the same command again on all hosts"
        self._failed = True
        self._tell({"error": line})
        end(line)

    def _await_bye(self, end: Line, until: float) -> None:
        try:
            heard = listen(self._sockets[0], self._identity, until)
        except PodError:
            end(f"{self._identity.host(0)} died before JAX had started on all hosts; run the same command again on all")
            return
        if "error" in heard:
            end(str(heard["error"]))
