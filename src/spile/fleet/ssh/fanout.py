"""One command on all hosts at once: they start together, and one's end by failure is the end of all."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from spile.errors import Interrupted, SpileError
from spile.fleet.ssh.failures import together
from spile.fleet.ssh.hosts import Access, Host
from spile.fleet.ssh.session import Ended, Job, Session, SessionTimes

__all__ = ["MEGASCALE_PORT", "HostOutcome", "environment_of", "run", "run_everywhere", "worst"]

MEGASCALE_PORT = 8080
INTERRUPTED = 130
PATIENCE = 8.0


@dataclass(frozen=True)
class HostOutcome(Ended):
    """How the command went on one host."""

    host: Host = field(kw_only=True)


def environment_of(host: Host, hosts: Sequence[Host]) -> dict[str, str]:
    """The variables that tell a host its place: its number in the slice, and the slice's among many."""
    slices = len({other.slice for other in hosts})
    variables = {"TPU_WORKER_ID": str(host.worker), "PYTHONUNBUFFERED": "1"}
    if slices > 1:
        first = next(other for other in hosts if other.slice == 0 and other.worker == 0)
        variables |= {
            "MEGASCALE_COORDINATOR_ADDRESS": f"{first.internal or first.address}:{MEGASCALE_PORT}",
            "MEGASCALE_NUM_SLICES": str(slices),
            "MEGASCALE_SLICE_ID": str(host.slice),
        }
    return variables


def worst(outcomes: Sequence[HostOutcome]) -> int:
    """The highest code of those that ended by themselves; 130 if all were stopped by Ctrl+C."""
    own = [outcome.code for outcome in outcomes if not outcome.stopped]
    if any(own) or (own and len(own) == len(outcomes)):
        return max(own)
    return INTERRUPTED


async def run_everywhere(
    hosts: Sequence[Host],
    job: Job,
    *,
    access: Access,
    output: Callable[[Host, bytes], None],
    pace: SessionTimes | None = None,
    variables: Callable[[Host, Sequence[Host]], dict[str, str]] = environment_of,
    interrupt: asyncio.Event | None = None,
) -> list[HostOutcome]:
    """Connect to all, start on all, follow all; what comes goes to ``output``. Setting ``interrupt`` stops all."""
    pace = pace or SessionTimes()
    access.check(hosts)
    interrupt = interrupt or asyncio.Event()
    sessions = [Session(host, access, pace, lambda data, host=host: output(host, data)) for host in hosts]  # type: ignore[misc]
    ends: list[asyncio.Task[Ended]] = []
    try:
        await _connect(sessions, interrupt)
        for session in sessions:
            env = {**variables(session.host, hosts), **job.env}
            session.go(replace(job, env=env))
        ends = [asyncio.create_task(session.ended()) for session in sessions]
        await _until_over(sessions, ends, pace, interrupt)
        return [
            HostOutcome(end.code, end.cause, end.seconds, end.left, host=session.host)
            for session, end in zip(sessions, [task.result() for task in ends], strict=True)
        ]
    finally:
        await asyncio.gather(*(session.close() for session in sessions))
        await asyncio.gather(*ends, return_exceptions=True)


async def _connect(sessions: Sequence[Session], interrupt: asyncio.Event) -> None:
    """All or none: nothing runs anywhere until every guard is there."""
    opening = asyncio.gather(*(session.open() for session in sessions), return_exceptions=True)
    asked = asyncio.create_task(interrupt.wait())
    both: tuple[asyncio.Future[Any], ...] = (opening, asked)
    await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
    asked.cancel()
    if not opening.done():
        for session in sessions:
            session.abandon()
        await opening
        raise Interrupted("interrupted before anything ran")
    errors = [result for result in opening.result() if isinstance(result, BaseException)]
    for error in errors:
        if not isinstance(error, SpileError):
            raise error
    if errors:
        raise together([error for error in errors if isinstance(error, SpileError)], len(sessions))


async def _until_over(
    sessions: Sequence[Session], ends: Sequence[asyncio.Task[Ended]], pace: SessionTimes, interrupt: asyncio.Event
) -> None:
    """Follow all to their ends; at the first failure, or when interrupted, end the others."""
    pending: set[asyncio.Task[Ended]] = set(ends)
    alarms = [asyncio.create_task(event.wait()) for event in (interrupt, *(session.failed for session in sessions))]
    try:
        while pending and not any(alarm.done() for alarm in alarms):
            done, _ = await asyncio.wait({*pending, *alarms}, return_when=asyncio.FIRST_COMPLETED)
            pending -= done
            if any(task.result().code != 0 for task in ends if task.done()):
                break
        for session in sessions:
            session.stop()
        interrupt.clear()
        deadline = asyncio.get_running_loop().time() + pace.grace + PATIENCE
        await _wait_for(pending, sessions, interrupt, deadline)
        for session in sessions:
            session.abandon()  # a link so dead that not even ssh noticed; the guard over there ends the rest
        await asyncio.gather(*pending)
    finally:
        for alarm in alarms:
            alarm.cancel()


async def _wait_for(
    pending: set[asyncio.Task[Ended]], sessions: Sequence[Session], interrupt: asyncio.Event, deadline: float
) -> None:
    """Give the stopped hosts time to end; interrupted once more, kill at once."""
    again = asyncio.create_task(interrupt.wait())
    while pending:
        left = deadline - asyncio.get_running_loop().time()
        waiting = {*pending} if again.done() else {*pending, again}
        done, _ = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            break
        if again in done:
            for session in sessions:
                session.stop(now=True)
        pending -= done
    again.cancel()


def run(
    hosts: Sequence[Host],
    job: Job,
    *,
    access: Access,
    output: Callable[[Host, bytes], None],
    pace: SessionTimes | None = None,
    variables: Callable[[Host, Sequence[Host]], dict[str, str]] = environment_of,
) -> list[HostOutcome]:
    """``run_everywhere`` from plain code: Ctrl+C, SIGTERM and SIGHUP stop all hosts; a second one kills at once."""

    async def main() -> list[HostOutcome]:
        interrupt = asyncio.Event()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, interrupt.set)
        return await run_everywhere(
            hosts, job, access=access, output=output, pace=pace, variables=variables, interrupt=interrupt
        )

    return asyncio.run(main())
