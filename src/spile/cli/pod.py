"""``spile pod check``: a test of a slice, and the flags that make a command a pod's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from spile.cli.shell.flag import flag
from spile.cli.shell.log import log

if TYPE_CHECKING:
    from spile.worker.pod.identity import Identity
    from spile.worker.pod.pod import WorkerGroup

__all__ = ["PodFlags", "check"]

_PODS = Group("Pods (found out by itself where every host runs the same command)", sort_key=5)


@Parameter(name="*")
@dataclass(frozen=True)
class PodFlags:
    """Which process of how many this is."""

    topology: Annotated[str | None, flag(_PODS, "The slice: v5litepod-64, v5e:8x8, v3-8 …; checked.")] = None
    coordinator_address: Annotated[str | None, flag(_PODS, "Worker 0's HOST, or HOST:PORT of the roll call.")] = None
    process_id: Annotated[int | None, flag(_PODS, "This host's number.")] = None
    num_processes: Annotated[int | None, flag(_PODS, "How many hosts there are.")] = None
    barrier_timeout: Annotated[float | None, flag(_PODS, "Seconds that hosts wait for each other.")] = None
    heartbeat_timeout: Annotated[float | None, flag(_PODS, "Seconds after which a silent host counts as dead.")] = None

    def identity(self) -> Identity:
        """Where this process stands."""
        from spile.planning.machines import parse_machine
        from spile.worker.pod.identity import this_process

        return this_process(
            coordinator_address=self.coordinator_address,
            process_id=self.process_id,
            num_processes=self.num_processes,
            hosts=None if self.topology is None else parse_machine(self.topology).hosts,
        )

    @contextlib.contextmanager
    def joined(self, log: Callable[[str], None], identity: Identity | None = None) -> Iterator[WorkerGroup]:
        """Alone, or with the others, for as long as this lasts."""
        from spile.worker.pod.pod import PodTimes, joined_group
        from spile.worker.signals import before_exit, interrupting

        times = PodTimes.of(self.barrier_timeout, self.heartbeat_timeout)
        with (
            interrupting(),
            joined_group(identity or self.identity(), times, log) as hosts,
            before_exit(lambda: hosts.notify_end(KeyboardInterrupt())),
        ):
            yield hosts


def check(*, flags: PodFlags | None = None) -> int:
    """Test a slice in a minute, without a dataset: roll call, barriers, devices, one tiny forward on all of them.

    Run it on every host: gcloud compute tpus tpu-vm ssh $TPU --worker=all --command="spile pod check".
    """
    from spile.worker.pod.check import check_pod

    with (flags or PodFlags()).joined(log) as hosts:
        check_pod(hosts, log)
    return 0
