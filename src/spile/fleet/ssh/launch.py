"""Start something that stays, on many hosts: each by itself, so that one bad host holds up no other."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from spile.errors import Failure, SpileError
from spile.fleet.ssh.fanout import environment_of, run_everywhere
from spile.fleet.ssh.hosts import Access, Host
from spile.fleet.ssh.session import Job, SessionTimes

__all__ = ["Launched", "launch"]

AT_ONCE = 32
KEPT = 8192


@dataclass(frozen=True)
class Launched:
    """How it went on one host."""

    host: Host
    error: SpileError | None
    output: str
    """The end of what the script said."""


def launch(
    hosts: Sequence[Host],
    script: Callable[[Host], str],
    *,
    access: Access,
    env: Mapping[str, str] | None = None,
    pace: SessionTimes | None = None,
) -> list[Launched]:
    """Run each host's script in its bash; what a successful one leaves running goes on. Never raises for a host."""

    async def main() -> list[Launched]:
        room = asyncio.Semaphore(AT_ONCE)

        async def one(host: Host) -> Launched:
            async with room:
                return await _launch_one(host, hosts, Job(script(host), "~", dict(env or {}), keep=True), access, pace)

        return list(await asyncio.gather(*(one(host) for host in hosts)))

    return asyncio.run(main())


async def _launch_one(
    host: Host, hosts: Sequence[Host], job: Job, access: Access, pace: SessionTimes | None
) -> Launched:
    said = bytearray()

    def keep(_: Host, data: bytes) -> None:
        said.extend(data)
        del said[:-KEPT]

    error: SpileError | None = None
    try:
        (outcome,) = await run_everywhere(
            [host], job, access=access, output=keep, pace=pace, variables=lambda one, _: environment_of(one, hosts)
        )
        if outcome.code != 0:
            last = said.decode("utf-8", "replace").strip().rpartition("\n")[2]
            how = f"exit code {outcome.code}" if outcome.cause == "ended" else outcome.cause
            error = Failure(f"{host.label}: the launch failed", found=f"{how}, after: {last}" if last else how)
    except SpileError as caught:
        error = caught
    return Launched(host, error, said.decode("utf-8", "replace"))
