"""The roll call names every host that is missing, doubled or miscounted, over real sockets."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest

from ports import free_port
from spile.errors import PodError
from spile.run.pod.identity import Identity
from spile.run.pod.rollcall import Peer, RollCall, answer_roll_call, hold_roll_call


class Workers:
    """Roll calls in threads, with the result of each."""

    def __init__(self, count: int, timeout: float = 120) -> None:
        self.base = Identity(0, count, "127.0.0.1", free_port(), source="test", name="host-0")
        self.timeout = timeout
        self.results: dict[str, RollCall | Exception] = {}
        self.threads: list[threading.Thread] = []

    def start(self, key: str, call: Callable[[], RollCall]) -> None:
        def run() -> None:
            try:
                roll = call()
                self.results[key] = roll
                roll.close()
            except PodError as error:
                self.results[key] = error

        self.threads.append(threading.Thread(target=run))
        self.threads[-1].start()

    def first(self, serve: Callable[[], str] = lambda: "1.2.3.4:5", ready: threading.Event | None = None) -> None:
        def parts_said(_: str) -> None:
            if ready is not None:
                ready.set()

        self.start("0", lambda: hold_roll_call(self.base, serve, timeout=self.timeout, ready=parts_said))

    def other(self, number: int, key: str | None = None, **changes: object) -> None:
        identity = replace(self.base, process=number, name=f"host-{number}", **changes)  # type: ignore[arg-type]
        self.start(key or str(number), lambda: answer_roll_call(identity, timeout=self.timeout))

    def join(self) -> dict[str, RollCall | Exception]:
        for thread in self.threads:
            thread.join()
        return self.results


def test_all_come_in_any_order() -> None:
    workers = Workers(4)
    workers.other(3)
    workers.other(1)
    workers.first()
    workers.other(2)
    results = workers.join()
    for roll in results.values():
        assert isinstance(roll, RollCall)
        assert roll.service == "1.2.3.4:5"
        assert [name.split(",")[0] for name in roll.identity.hosts] == ["host-0", "host-1", "host-2", "host-3"]


def test_every_missing_host_is_named_to_everyone() -> None:
    workers = Workers(5, timeout=4)
    workers.base = replace(workers.base, hosts=("a", "b", "c", "d", "e"))
    workers.first(serve=lambda: pytest.fail("served"))
    workers.other(1)
    workers.other(3)
    for error in workers.join().values():
        assert isinstance(error, PodError)
        line = "2 of 5 workers did not come to the roll call within 4 s: worker 2 (c), worker 4 (e)"
        assert str(error).startswith(line)


def test_a_wrong_count() -> None:
    workers = Workers(3)
    workers.first()
    workers.other(1, count=8)
    for error in workers.join().values():
        assert "do not agree on how many they are: expected 3 (worker 0 on host-0), found 8 (worker 1 on host-1" in str(
            error
        )


def test_two_with_one_number() -> None:
    workers = Workers(4)
    workers.first()
    workers.other(1)
    workers.other(1, key="again")
    results = workers.join()
    for error in results.values():
        assert "two workers have one number: worker 1 on host-1" in str(error)


def test_a_second_worker_0_on_this_host() -> None:
    workers = Workers(2)
    ready = threading.Event()
    workers.first(ready=ready)
    assert ready.wait(120)
    with pytest.raises(PodError, match=r"another process holds it\. End the earlier launch"):
        hold_roll_call(workers.base, lambda: "", timeout=1)
    workers.other(1)
    workers.join()


def test_worker_0_elsewhere() -> None:
    identity = Identity(0, 2, "192.0.2.1", 5555, source="CLOUD_TPU_TASK_ID", name="h")
    with pytest.raises(
        PodError, match=r"is worker 0 \(CLOUD_TPU_TASK_ID\), and 192\.0\.2\.1 is not this host's address"
    ):
        hold_roll_call(identity, lambda: "", timeout=1)


def test_an_unreachable_worker_0() -> None:
    workers = Workers(2, timeout=0.6)
    workers.other(1)
    (error,) = workers.join().values()
    assert "worker 0 is unreachable at 127.0.0.1:" in str(error)
    assert "connection refused" in str(error)
    assert "this is worker 1 of 2 (test)" in str(error)


def test_a_host_that_left_again_is_missing() -> None:
    workers = Workers(2, timeout=4)
    ready = threading.Event()
    workers.first(ready=ready)
    assert ready.wait(120)
    with socket.create_connection(("127.0.0.1", workers.base.port)):
        pass
    (error,) = workers.join().values()
    assert "1 of 2 workers did not come" in str(error)


def test_an_unknown_client_does_not_end_the_roll_call() -> None:
    workers = Workers(2, timeout=4)
    ready = threading.Event()
    workers.first(ready=ready)
    assert ready.wait(120)
    with socket.create_connection(("127.0.0.1", workers.base.port)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
        assert stranger.recv(1) == b""
    (error,) = workers.join().values()
    assert "1 of 2 workers did not come" in str(error)
    assert "worker 1 (1 callers were not spile workers)" in str(error)


def test_an_unknown_client_among_workers() -> None:
    workers = Workers(2)
    ready = threading.Event()
    workers.first(ready=ready)
    assert ready.wait(120)
    with socket.create_connection(("127.0.0.1", workers.base.port)) as stranger:
        stranger.sendall(b"x" * 200_000)
        workers.other(1)
        assert all(isinstance(answer, RollCall) for answer in workers.join().values())


def test_a_host_that_dies_before_jax_starts_is_named() -> None:
    workers = Workers(3)
    lines: dict[str, list[str]] = {"0": [], "2": []}
    rolls: dict[str, RollCall] = {}

    def keep(key: str, call: Callable[[], RollCall]) -> threading.Thread:
        thread = threading.Thread(target=lambda: rolls.update({key: call()}))
        thread.start()
        return thread

    def other(number: int) -> Callable[[], RollCall]:
        identity = replace(workers.base, process=number, name=f"host-{number}")
        return lambda: answer_roll_call(identity, timeout=120)

    threads = [keep("0", lambda: hold_roll_call(workers.base, lambda: "x:1", timeout=120))]
    threads += [keep(str(number), other(number)) for number in (1, 2)]
    for thread in threads:
        thread.join()
    rolls["1"].close()
    with rolls["2"].guarded(lines["2"].append, 120), rolls["0"].guarded(lines["0"].append, 120):
        pass
    (line,) = lines["0"]
    assert line.startswith("worker 1 (host-1, process")
    assert "died between the roll call and JAX's start" in line
    assert lines["2"] == [line]


def test_all_hosts_continue_when_all_are_connected() -> None:
    workers = Workers(2)
    rolls: dict[str, RollCall] = {}
    first = threading.Thread(
        target=lambda: rolls.update({"0": hold_roll_call(workers.base, lambda: "x:1", timeout=120)})
    )
    first.start()
    rolls["1"] = answer_roll_call(replace(workers.base, process=1, name="host-1"), timeout=120)
    first.join()

    def connect(key: str) -> None:
        with rolls[key].guarded(pytest.fail, 120):
            pass

    both = [threading.Thread(target=connect, args=(key,)) for key in rolls]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()


def test_lines_that_come_together_are_heard_one_by_one() -> None:
    """A slow worker finds the answer and, behind it, that another has died."""
    ours, theirs = socket.socketpair()
    with theirs:
        peer = Peer(ours)
        theirs.sendall(b'{"service": "x:1", "na')
        theirs.sendall(b'mes": []}\n{"error": "worker 2 died"}\n')
        assert peer.receive("no message", 120) == {"service": "x:1", "names": []}
        assert peer.receive("no message", 120) == {"error": "worker 2 died"}
        peer.close()


@pytest.mark.parametrize("parts_said", [{}, {"secret": "guessed"}, {"secret": float("inf")}])
def test_a_caller_without_the_secret_of_the_slice_is_rejected(parts_said: dict[str, object]) -> None:
    """It speaks the protocol, with a wrong count and another version: without the secret it ends nothing."""
    workers, ready = Workers(2), threading.Event()
    workers.base = replace(workers.base, secret="shared")
    workers.first(ready=ready)
    assert ready.wait(120)
    with socket.create_connection(("127.0.0.1", workers.base.port), timeout=120) as stranger:
        line = {"process": 1, "count": 9, "name": "x", "version": "none", **parts_said}
        stranger.sendall(json.dumps(line).encode() + b"\n")
        assert stranger.recv(10) == b"", "hung up on"
    workers.other(1)
    assert all(isinstance(answer, RollCall) for answer in workers.join().values())
