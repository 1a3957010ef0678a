"""The roll call: all processes connect to worker 0, which then tells them where the coordination service is.

The connections stay open until JAX has started on all hosts: until then, only they reveal that a host has died.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from spile.errors import PodError, untrusted
from spile.version import __version__
from spile.worker.pod.identity import Identity

MOST_BYTES = 1 << 16
_MOST_ANSWER = 1 << 24

Line = Callable[[str], None]


@dataclass(frozen=True)
class RollAnswer:
    """What worker 0 sends to every process."""

    service: str
    """The address of the coordination service."""
    names: tuple[str, ...]
    """The host names of all processes, in order."""


def send_all(connections: Iterable[socket.socket], message: dict[str, object]) -> None:
    """Send one line of JSON over each connection."""
    data = json.dumps(message).encode() + b"\n"
    for connection in connections:
        with contextlib.suppress(OSError):  # a process that is gone will be reported as missing
            connection.settimeout(5)
            connection.sendall(data)


def receive(connection: socket.socket, identity: Identity, until: float) -> dict[str, object]:
    """Return the next line of JSON from worker 0; raise :class:`PodError` if it is gone."""
    connection.settimeout(max(until - time.monotonic(), 0.01))
    try:
        with connection.makefile("rb", buffering=0) as lines:  # unbuffered: the next line belongs to the next call
            line = lines.readline(_MOST_ANSWER)
    except OSError:
        line = b""
    if not line.endswith(b"\n"):
        raise PodError(
            f"{identity.host(0)} went away during the roll call",
            found=f"this is worker {identity.process} of {identity.count}",
            fix="see worker 0's log",
        )
    with _reading(identity):
        return dict(json.loads(line))


def _reading(identity: Identity) -> contextlib.AbstractContextManager[None]:
    return untrusted(PodError, f"{identity.host(0)} sent an invalid message", fix="see worker 0's log")


class RollConnections:
    """The connections of the roll call, kept until every process is connected to the coordination service.

    Until then they reveal that a host has died; JAX would wait and then abort all processes without naming it.
    """

    def __init__(self, identity: Identity, answer: RollAnswer, sockets: dict[int, socket.socket]) -> None:
        self.answer = answer
        self._identity = replace(identity, hosts=identity.hosts or answer.names)
        self._sockets = sockets
        self._failed = False

    @contextlib.contextmanager
    def guarded(self, end: Line, timeout: float) -> Iterator[None]:
        """Call ``end`` with a line if another process fails while this one connects inside the context."""
        watch = self._await_all if self._identity.first else self._await_bye
        thread = threading.Thread(target=watch, args=(end, time.monotonic() + timeout), daemon=True)
        thread.start()
        try:
            yield
            if not self._identity.first:
                with contextlib.suppress(OSError):  # worker 0 is gone: the thread notices
                    self._sockets[0].sendall(b"connected\n")
            thread.join()
            if self._identity.first and not self._failed:
                send_all(self._sockets.values(), {"bye": True})
        finally:
            self.close()

    def close(self) -> None:
        for connection in self._sockets.values():
            with contextlib.suppress(OSError):  # the other side may be gone
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()

    def _await_all(self, end: Line, until: float) -> None:
        waiting = dict(self._sockets)
        while waiting:
            for number, gone in self._received(waiting):
                if gone:
                    self._fail(f"{self._identity.host(number)} died between the roll call and JAX's start", end)
                    return
                del waiting[number]
            if waiting and time.monotonic() > until:
                named = ", ".join(self._identity.host(number) for number in waiting)
                self._fail(f"{named} did not connect to the coordination service in time", end)
                return

    @staticmethod
    def _received(waiting: dict[int, socket.socket]) -> list[tuple[int, bool]]:
        """Return the processes that sent something, each with whether it is gone."""
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
        send_all(self._sockets.values(), {"error": line})
        end(line)

    def _await_bye(self, end: Line, until: float) -> None:
        try:
            message = receive(self._sockets[0], self._identity, until)
        except PodError:
            end(f"{self._identity.host(0)} died before JAX had started on all hosts; run the same command again on all")
            return
        if "error" in message:
            end(str(message["error"]))


_RETRY_SECONDS = 0.25
_MINUTE = 60.0


@dataclass
class _Caller:
    connection: socket.socket
    received: bytes = b""
    process: int | None = None
    name: str = ""


@dataclass
class _Roll:
    """The processes that have called."""

    identity: Identity
    present: dict[int, _Caller] = field(default_factory=dict)
    ignored: int = 0
    """Callers that were not spile workers of this pod."""

    def missing(self) -> list[int]:
        return [number for number in range(1, self.identity.count) if number not in self.present]

    def enter(self, caller: _Caller) -> str | None:
        """Check the line of a caller and add it; return what is wrong, if anything."""
        try:
            fields = json.loads(caller.received)
            process, count = int(fields["process"]), int(fields["count"])
            name, version = fields["name"], fields["version"]
            if not isinstance(name, str) or not isinstance(version, str):
                raise TypeError("name and version must be strings")
            if not hmac.compare_digest(str(fields.get("secret", "")).encode(), self.identity.secret.encode()):
                raise ValueError("not of this slice")
        except Exception:  # noqa: BLE001 - a caller may send anything
            self.ignored += 1  # a port scanner must not end a run
            return None
        caller_name = f"worker {process} on {name}"
        if count != self.identity.count:
            return (
                f"the workers do not agree on how many they are: expected {self.identity.count} "
                f"(worker 0 on {self.identity.name}), found {count} ({caller_name})"
            )
        if not 0 < process < count:
            owner = f"worker 0 on {self.identity.name}"
            return f"two workers have one number: {owner} and {caller_name}; each needs its own --process-id"
        if process in self.present:
            other = self.present[process].name
            return (
                f"two workers have one number: worker {process} on {other} and on {name}; "
                "each needs its own --process-id, and an earlier launch must have ended"
            )
        if version != __version__:
            return f"the workers run different versions: worker 0 spile {__version__}, {caller_name} spile {version}"
        caller.process, caller.name = process, str(name)
        self.present[process] = caller
        return None


def hold_roll_call(
    identity: Identity, serve: Callable[[], str], *, timeout: float, ready: Line = lambda _: None
) -> RollConnections:
    """Run the roll call on worker 0: wait for all processes, then start the service and send its address."""
    roll = _Roll(identity)
    service = ""
    with _listen(identity) as listener, selectors.DefaultSelector() as selector:
        ready(f"Barrier server ready on port {listener.getsockname()[1]}")
        selector.register(listener, selectors.EVENT_READ)
        callers: list[_Caller] = []
        try:
            wrong = _collect(roll, listener, selector, callers, time.monotonic() + timeout)
            if wrong is None and roll.missing():
                wrong = _absent(roll, timeout)
            if wrong is not None:
                send_all((caller.connection for caller in callers), {"error": wrong})
                raise PodError(wrong)
            names = (identity.name, *(roll.present[number].name for number in range(1, identity.count)))
            service = serve()
            send_all((caller.connection for caller in callers), {"service": service, "names": names})
            sockets = {number: caller.connection for number, caller in roll.present.items()}
            return RollConnections(identity, RollAnswer(service, names), sockets)
        finally:
            kept = {id(caller) for caller in roll.present.values()} if service else set()
            for caller in callers:
                if id(caller) not in kept:
                    caller.connection.close()


def _listen(identity: Identity) -> socket.socket:
    """Listen on worker 0's address in the slice only, not on every network of the machine."""
    listener: socket.socket | None = None
    try:
        family, kind, protocol, _, place = socket.getaddrinfo(
            identity.coordinator, identity.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(place)
        listener.listen(identity.count)
    except OSError as error:
        if listener is not None:
            listener.close()
        raise _cannot_listen(identity, error) from error
    return listener


def _cannot_listen(identity: Identity, error: OSError) -> PodError:
    where = f"{identity.coordinator}:{identity.port}"
    if error.errno == errno.EADDRINUSE:
        return PodError(
            f"worker 0 cannot hold the roll call on {where}: another process holds it",
            fix="end the earlier launch on this host, or give all workers another port with --coordinator-address",
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return PodError(
            f"this process is worker 0 ({identity.source}), and {identity.coordinator} is not this host's address",
            fix="check --process-id and --coordinator-address, or run the container with --network=host",
        )
    return PodError(f"worker 0 cannot hold the roll call on {where}: {error.strerror or error}")


def _collect(
    roll: _Roll, listener: socket.socket, selector: selectors.BaseSelector, callers: list[_Caller], until: float
) -> str | None:
    """Accept callers until all have called, one is wrong, or time is up."""
    while roll.missing() and (left := until - time.monotonic()) > 0:
        for key, _ in selector.select(min(left, 1.0)):
            if key.fileobj is listener:
                connection, _ = listener.accept()
                connection.setblocking(False)
                callers.append(_Caller(connection))
                selector.register(connection, selectors.EVENT_READ, callers[-1])
                continue
            wrong = _receive(roll, key.data, selector)
            if wrong is not None:
                return wrong
    return None


def _receive(roll: _Roll, caller: _Caller, selector: selectors.BaseSelector) -> str | None:
    try:
        data = caller.connection.recv(MOST_BYTES)
    except OSError:
        data = b""
    if not data:  # gone: it no longer counts as present
        selector.unregister(caller.connection)
        if caller.process is not None:
            roll.present.pop(caller.process, None)
        return None
    if caller.process is not None:
        return None
    caller.received += data
    if not caller.received.endswith(b"\n") and len(caller.received) <= MOST_BYTES:
        return None
    wrong = roll.enter(caller)
    if wrong is None and caller.process is None:
        selector.unregister(caller.connection)
        caller.connection.close()
    return wrong


def _absent(roll: _Roll, timeout: float) -> str:
    missing = roll.missing()
    named = ", ".join(roll.identity.host(number) for number in missing)
    ignored = f" ({roll.ignored} callers were not spile workers)" if roll.ignored else ""
    return (
        f"{len(missing)} of {roll.identity.count} workers did not come to the roll call within {timeout:g} s: "
        f"{named}{ignored}; run the same command on every host (--worker=all), and see those hosts' logs"
    )


def answer_roll_call(identity: Identity, *, timeout: float) -> RollConnections:
    until = time.monotonic() + timeout
    connection = _connect(identity, until, timeout)
    try:
        fields = {
            "process": identity.process,
            "count": identity.count,
            "name": f"{identity.name}, process {os.getpid()}",
            "version": __version__,
            **({"secret": identity.secret} if identity.secret else {}),
        }
        connection.sendall(json.dumps(fields).encode() + b"\n")
        # Worker 0 may have started later; its own clock decides which process is missing.
        message = receive(connection, identity, time.monotonic() + timeout + _MINUTE)
        if "error" in message:
            raise PodError(str(message["error"]))
        with _reading(identity):
            names = tuple(str(name) for name in message["names"])  # type: ignore[attr-defined]
            return RollConnections(identity, RollAnswer(str(message["service"]), names), {0: connection})
    except BaseException:
        connection.close()
        raise


def _connect(identity: Identity, until: float, timeout: float) -> socket.socket:
    last: OSError | None = None
    while (left := until - time.monotonic()) > 0:
        try:
            return socket.create_connection((identity.coordinator, identity.port), timeout=min(left, 5.0))
        except OSError as error:  # also if the name does not resolve yet, as on Kubernetes
            last = error
            time.sleep(min(_RETRY_SECONDS, max(left, 0)))
    why = "no answer" if last is None or isinstance(last, TimeoutError) else (last.strerror or str(last)).lower()
    raise PodError(
        f"worker 0 is unreachable at {identity.coordinator}:{identity.port} for {timeout:g} s ({why})",
        found=f"this is worker {identity.process} of {identity.count} ({identity.source})",
        fix="see worker 0's log, or give another address with --coordinator-address HOST:PORT",
    )
