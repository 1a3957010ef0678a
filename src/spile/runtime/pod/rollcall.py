"""The roll call: before JAX is touched, every worker says its name to worker 0 and hears who else is there.

JAX's own ``initialize`` aborts every process when one never connects, and names nobody. This is one line of JSON each
way over TCP, to the slice's own address of worker 0, and it names everyone who is missing, doubled or miscounted.
"""

from __future__ import annotations

import errno
import hmac
import json
import os
import selectors
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from spile.errors import PodError
from spile.runtime.pod.connections import MOST_BYTES, Line, RollAnswer, RollConnections, listen, tell
from spile.runtime.pod.identity import Identity
from spile.version import __version__

__all__ = ["answer_roll_call", "hold_roll_call"]

_RETRY_SECONDS = 0.25
_MINUTE = 60.0


@dataclass
class _Caller:
    connection: socket.socket
    heard: bytes = b""
    process: int | None = None
    name: str = ""


@dataclass
class _Roll:
    """Who has come."""

    identity: Identity
    present: dict[int, _Caller] = field(default_factory=dict)
    strangers: int = 0
    """Callers that were no spile workers."""

    def missing(self) -> list[int]:
        return [number for number in range(1, self.identity.count) if number not in self.present]

    def enter(self, caller: _Caller) -> str | None:
        """Take a caller's line; what is wrong with it, if anything."""
        try:
            said = json.loads(caller.heard)
            process, count, name, version = int(said["process"]), int(said["count"]), said["name"], said["version"]
            if not isinstance(name, str) or not isinstance(version, str):
                raise TypeError("a name and a version are texts")
            if not hmac.compare_digest(str(said.get("secret", "")).encode(), self.identity.secret.encode()):
                raise ValueError("not of this slice")
        except Exception:  # noqa: BLE001 - Infinity, a thousand brackets: whatever a stranger says
            self.strangers += 1  # a scanner of ports must not end a run
            return None
        who = f"worker {process} on {name}"
        if count != self.identity.count:
            return (
                f"the workers do not agree on how many they are: expected {self.identity.count} "
                f"(worker 0 on {self.identity.name}), found {count} ({who})"
            )
        if not 0 < process < count:
            owner = f"worker 0 on {self.identity.name}"
            return f"two workers have one number: {owner} and {who}; each needs its own --process-id"
        if process in self.present:
            other = self.present[process].name
            return (
                f"two workers have one number: worker {process} on {other} and on {name}; "
                "each needs its own --process-id, and an earlier launch must have ended"
            )
        if version != __version__:
            return f"the workers run different versions: worker 0 spile {__version__}, {who} spile {version}"
        caller.process, caller.name = process, str(name)
        self.present[process] = caller
        return None


def hold_roll_call(
    identity: Identity, serve: Callable[[], str], *, timeout: float, ready: Line = lambda _: None
) -> RollConnections:
    """Worker 0: wait for all the others, then start the service and tell them where it is."""
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
                tell((caller.connection for caller in callers), {"error": wrong})
                raise PodError(wrong)
            names = (identity.name, *(roll.present[number].name for number in range(1, identity.count)))
            service = serve()
            tell((caller.connection for caller in callers), {"service": service, "names": names})
            sockets = {number: caller.connection for number, caller in roll.present.items()}
            return RollConnections(identity, RollAnswer(service, names), sockets)
        finally:
            kept = {id(caller) for caller in roll.present.values()} if service else set()
            for caller in callers:
                if id(caller) not in kept:
                    caller.connection.close()


def _listen(identity: Identity) -> socket.socket:
    """Bound to the slice's own address of worker 0, not to every network of the machine."""
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
    """Take callers until all are there, one is wrong, or time is up."""
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
    if not data:  # gone: it does not count as present any more
        selector.unregister(caller.connection)
        if caller.process is not None:
            roll.present.pop(caller.process, None)
        return None
    if caller.process is not None:
        return None
    caller.heard += data
    if not caller.heard.endswith(b"\n") and len(caller.heard) <= MOST_BYTES:
        return None
    wrong = roll.enter(caller)
    if wrong is None and caller.process is None:
        selector.unregister(caller.connection)
        caller.connection.close()
    return wrong


def _absent(roll: _Roll, timeout: float) -> str:
    missing = roll.missing()
    named = ", ".join(roll.identity.host(number) for number in missing)
    strangers = f" ({roll.strangers} that are no spile workers called)" if roll.strangers else ""
    return (
        f"{len(missing)} of {roll.identity.count} workers did not come to the roll call within {timeout:g} s: "
        f"{named}{strangers}; run the same command on every host (--worker=all), and see those hosts' logs"
    )


def answer_roll_call(identity: Identity, *, timeout: float) -> RollConnections:
    """Any other worker: call worker 0 until it answers."""
    until = time.monotonic() + timeout
    connection = _connect(identity, until, timeout)
    try:
        said = {
            "process": identity.process,
            "count": identity.count,
            "name": f"{identity.name}, process {os.getpid()}",
            "version": __version__,
            **({"secret": identity.secret} if identity.secret else {}),
        }
        connection.sendall(json.dumps(said).encode() + b"\n")
        # Worker 0 may have come later than we: its own clock decides who is missing, and tells.
        heard = listen(connection, identity, time.monotonic() + timeout + _MINUTE)
        if "error" in heard:
            raise PodError(str(heard["error"]))
        names = tuple(str(name) for name in heard["names"])  # type: ignore[attr-defined]
        return RollConnections(identity, RollAnswer(str(heard["service"]), names), {0: connection})
    except BaseException:
        connection.close()
        raise


def _connect(identity: Identity, until: float, timeout: float) -> socket.socket:
    last: OSError | None = None
    while (left := until - time.monotonic()) > 0:
        try:
            return socket.create_connection((identity.coordinator, identity.port), timeout=min(left, 5.0))
        except OSError as error:  # a name that does not resolve yet, too: on Kubernetes it may take a while
            last = error
            time.sleep(min(_RETRY_SECONDS, max(left, 0)))
    why = "no answer" if last is None or isinstance(last, TimeoutError) else (last.strerror or str(last)).lower()
    raise PodError(
        f"worker 0 is unreachable at {identity.coordinator}:{identity.port} for {timeout:g} s ({why})",
        found=f"this is worker {identity.process} of {identity.count} ({identity.source})",
        fix="see worker 0's log; --coordinator-address HOST:PORT names another place",
    )
