"""The roll call: all processes connect to worker 0, which sends them the address of the coordination service.

Messages are lines of JSON. The connections stay open until every process is connected to the service: until then, only
they reveal that a host has died. JAX would wait for that host and then abort all processes without naming it.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from spile.errors import PodError, untrusted
from spile.run.pod.identity import Identity
from spile.version import __version__

_MOST_MESSAGE_BYTES = 1 << 20
_ACCEPT_SECONDS = 0.05
_RETRY_SECONDS = 0.25
_CALL_SECONDS = 60.0
"""The time of a caller for its first message. The others also wait this much longer than worker 0, whose own clock
decides which process is missing."""

Log = Callable[[str], None]


class Peer:
    """The connection to another process."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection, self._lines = connection, connection.makefile("rb")
        self.name = ""

    def send(self, message: Mapping[str, object]) -> None:
        with contextlib.suppress(OSError):  # a process that is gone will be reported as missing
            self._connection.settimeout(5)
            self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self, problem: str, timeout: float) -> dict[str, Any]:
        """Return the next message; raise :class:`PodError` if there is none or an invalid one."""
        with untrusted(PodError, problem, fix="see that host's log, then run the same command again on all hosts"):
            self._connection.settimeout(timeout)
            line = self._lines.readline(_MOST_MESSAGE_BYTES)
            if not line:
                raise EOFError("connection closed")
            return dict(json.loads(line))

    def is_gone(self) -> bool:
        """Return whether a process that waits for an answer, and therefore sends nothing, is gone."""
        try:
            self._connection.settimeout(0)
            return not self._connection.recv(1, socket.MSG_PEEK)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def close(self) -> None:
        with contextlib.suppress(OSError):  # it may be gone; a thread that reads wakes up
            self._connection.shutdown(socket.SHUT_RDWR)
        self._lines.close()
        self._connection.close()


class RollCall:
    """A complete roll call, whose connections reveal if a host dies before JAX has started on all hosts."""

    def __init__(self, identity: Identity, peers: Mapping[int, Peer], service: str, names: tuple[str, ...]) -> None:
        self.service = service
        """The address of the coordination service."""
        self.identity = replace(identity, hosts=identity.hosts or names)
        """The identity of this process, with the names of all hosts."""
        self._peers = peers
        self._closed = threading.Event()

    @contextlib.contextmanager
    def guarded(self, end: Log, timeout: float) -> Iterator[None]:
        """Call ``end`` with a line if another process fails while this one connects inside the context."""
        threads = [
            threading.Thread(target=self._watch, args=(number, peer, end, timeout), daemon=True)
            for number, peer in self._peers.items()
        ]
        for thread in threads:
            thread.start()
        try:
            yield
            if not self.identity.first:
                self._send({"connected": True})
            for thread in threads:
                thread.join()
            if self.identity.first:  # all are connected
                self._send({"connected": True})
        finally:
            self.close()

    def _watch(self, number: int, peer: Peer, end: Log, timeout: float) -> None:
        """Wait until a process reports that it is connected, or worker 0 that all are."""
        problem = f"{self.identity.host(number)} died between the roll call and JAX's start"
        try:
            message = peer.receive(problem, timeout if self.identity.first else timeout + _CALL_SECONDS)
        except PodError as error:
            message = {"error": str(error)}
        if "error" in message and not self._closed.is_set():
            self._closed.set()  # the others close their connections when they get the message
            self._send(message)
            self.close()
            end(str(message["error"]))

    def _send(self, message: Mapping[str, object]) -> None:
        for peer in self._peers.values():
            peer.send(message)

    def close(self) -> None:
        self._closed.set()  # the threads must not report the connections that are closed here
        for peer in self._peers.values():
            peer.close()


# -- worker 0 ---------------------------------------------------------------------------------------------------------


class Callers:
    """The processes that have called worker 0."""

    def __init__(self, identity: Identity) -> None:
        self.identity = identity
        self.present: dict[int, Peer] = {}
        self.problem = ""
        """What is wrong with one of the callers."""
        self._ignored = 0
        self._lock = threading.Lock()

    def receive(self, peer: Peer) -> None:
        """Read and check the first message of a caller, in a thread of its own."""
        try:
            call = peer.receive("invalid call", _CALL_SECONDS)
            with self._lock:
                self.problem = self.problem or self._check(call, peer)
        except Exception:  # noqa: BLE001 - a caller may send anything: a port scanner must not end a run
            self._ignored += 1
            peer.close()

    def _check(self, call: Mapping[str, Any], peer: Peer) -> str:
        """Check a call and add the process; return what is wrong with it. An exception means that it is no worker."""
        process, count, name, version = int(call["process"]), int(call["count"]), call["name"], call["version"]
        if not isinstance(name, str) or not isinstance(version, str):
            raise TypeError("name and version must be strings")
        if not hmac.compare_digest(str(call.get("secret", "")).encode(), self.identity.secret.encode()):
            raise ValueError("not of this slice")
        own, caller = f"worker 0 on {self.identity.name}", f"worker {process} on {name}"
        if count != self.identity.count:
            return (
                f"the workers do not agree on how many they are: expected {self.identity.count} ({own}), "
                f"found {count} ({caller})"
            )
        if not 0 < process < count:
            return f"two workers have one number: {own} and {caller}; each needs its own --process-id"
        if process in self.present and not self.present[process].is_gone():
            return (
                f"two workers have one number: worker {process} on {self.present[process].name} and on {name}; "
                "each needs its own --process-id, and an earlier launch must have ended"
            )
        if version != __version__:
            return f"the workers run different versions: worker 0 spile {__version__}, {caller} spile {version}"
        peer.name = name
        self.present[process] = peer
        return ""

    def missing(self) -> list[int]:
        with self._lock:
            return [
                number
                for number in range(1, self.identity.count)
                if number not in self.present or self.present[number].is_gone()
            ]

    def error(self, timeout: float) -> str:
        """Return what is wrong with a caller, or which processes are missing; an empty text if all is well."""
        missing = self.missing()
        if self.problem or not missing:
            return self.problem
        named = ", ".join(self.identity.host(number) for number in missing)
        ignored = f" ({self._ignored} callers were not spile workers)" if self._ignored else ""
        return (
            f"{len(missing)} of {self.identity.count} workers did not come to the roll call within {timeout:g} s: "
            f"{named}{ignored}; run the same command on every host (--worker=all), and see those hosts' logs"
        )


def hold_roll_call(
    identity: Identity, serve: Callable[[], str], *, timeout: float, ready: Log = lambda _: None
) -> RollCall:
    """Run the roll call on worker 0: wait for all processes, then start the service and send its address."""
    callers, until, peers = Callers(identity), time.monotonic() + timeout, list[Peer]()
    with _listen(identity) as listener:
        ready(f"Barrier server ready on port {listener.getsockname()[1]}")
        listener.settimeout(_ACCEPT_SECONDS)
        while callers.missing() and not callers.problem and time.monotonic() < until:
            with contextlib.suppress(TimeoutError):
                peers.append(Peer(listener.accept()[0]))
                threading.Thread(target=callers.receive, args=(peers[-1],), daemon=True).start()
    try:
        if problem := callers.error(timeout):
            raise PodError(problem)
        names = (identity.name, *(callers.present[number].name for number in range(1, identity.count)))
        answer: dict[str, Any] = {"service": serve(), "names": names}
    except PodError as error:
        for peer in peers:
            peer.send({"error": str(error)})
            peer.close()
        raise
    for peer in peers:
        if peer in callers.present.values():
            peer.send(answer)
        else:
            peer.close()
    return RollCall(identity, callers.present, answer["service"], names)


def _listen(identity: Identity) -> socket.socket:
    """Listen on worker 0's address in the slice only, not on every network of the machine."""
    where = f"{identity.coordinator}:{identity.port}"
    try:
        family, _, _, _, place = socket.getaddrinfo(
            identity.coordinator, identity.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        return socket.create_server(place[:2], family=family, backlog=identity.count)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise PodError(
                f"worker 0 cannot hold the roll call on {where}: another process holds it",
                fix="end the earlier launch on this host, or give all workers another port with --coordinator-address",
            ) from error
        if error.errno == errno.EADDRNOTAVAIL:
            raise PodError(
                f"this process is worker 0 ({identity.source}), and {identity.coordinator} is not this host's address",
                fix="check --process-id and --coordinator-address, or run the container with --network=host",
            ) from error
        raise PodError(f"worker 0 cannot hold the roll call on {where}: {error.strerror or error}") from error


# -- the other workers ------------------------------------------------------------------------------------------------


def answer_roll_call(identity: Identity, *, timeout: float) -> RollCall:
    peer = Peer(_connect(identity, timeout))
    call = {"process": identity.process, "count": identity.count, "version": __version__}
    peer.send({**call, "name": f"{identity.name}, process {os.getpid()}", "secret": identity.secret})
    problem = f"{identity.host(0)} did not answer worker {identity.process} of {identity.count} in the roll call"
    try:
        answer = peer.receive(problem, timeout + _CALL_SECONDS)
        if "error" in answer:
            raise PodError(str(answer["error"]))
        with untrusted(PodError, problem):
            names = tuple(str(name) for name in answer["names"])
            return RollCall(identity, {0: peer}, str(answer["service"]), names)
    except BaseException:
        peer.close()
        raise


def _connect(identity: Identity, timeout: float) -> socket.socket:
    until, last = time.monotonic() + timeout, OSError("no answer")
    while (left := until - time.monotonic()) > 0:
        try:
            return socket.create_connection((identity.coordinator, identity.port), timeout=min(left, 5.0))
        except OSError as error:  # also if the name does not resolve yet, as on Kubernetes
            last = error
            time.sleep(min(_RETRY_SECONDS, left))
    why = "no answer" if isinstance(last, TimeoutError) else (last.strerror or str(last)).lower()
    raise PodError(
        f"worker 0 is unreachable at {identity.coordinator}:{identity.port} for {timeout:g} s ({why})",
        found=f"this is worker {identity.process} of {identity.count} ({identity.source})",
        fix="see worker 0's log, or give another address with --coordinator-address HOST:PORT",
    )
