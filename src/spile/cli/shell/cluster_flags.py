"""The flags of a run that a cluster schedules itself: the same for Kubernetes and Slurm."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from spile.cli.flags import flag, variables
from spile.errors import SpecError
from spile.objects.opening import is_remote

if TYPE_CHECKING:
    from spile.cli.flags import ExtractFlags
    from spile.launch.engines import ClusterJob

__all__ = ["ClusterFlags"]

_JOB = Group("The job", sort_key=0)


@Parameter(name="*")
@dataclass(frozen=True)
class ClusterFlags:
    """How many, and under which name."""

    name: Annotated[str, flag(_JOB, "The job's name.")] = "spile"
    num_streams: Annotated[int | None, flag(_JOB, "How many streams. [default: as many as --dataset-dir holds]")] = None
    num_workers: Annotated[int | None, flag(_JOB, "Streams worked on at once. [default: all]")] = None
    cpus: Annotated[int | None, flag(_JOB, "Processors of each host.")] = None
    memory_gb: Annotated[int | None, flag(_JOB, "Memory of each host, in GB.")] = None
    env: Annotated[list[str] | None, flag(_JOB, "NAME=value for every worker; never a secret.", negative="")] = None
    grace: Annotated[int, flag(_JOB, "Seconds that a worker has to commit when it must end.")] = 120
    retries: Annotated[int, flag(_JOB, "Attempts more after a worker's own errors; a disruption does not count.")] = 6

    def job(self, flags: ExtractFlags, *, hosts: int, shared: Sequence[str] = ()) -> ClusterJob:
        """The job that these flags ask for. ``shared``: folders that every host sees."""
        from spile.launch.engines import ClusterJob

        if flags.worker_id is not None:
            raise SpecError("--worker-id", expected="none: the cluster numbers the workers", found=str(flags.worker_id))
        if flags.dataset_dir is None:
            raise SpecError("no streams", expected="--dataset-dir gs://…", fix="make them: spile data streams")
        if flags.model is None:
            raise SpecError("no model", expected="--model NAME", found="none", fix="--model embedded for a try-out")
        spec = flags.replaced(worker_id=0).spec()
        for name, place in (("--output", spec.output), ("--dataset-dir", flags.dataset_dir)):
            if not is_remote(place) and not any(PurePosixPath(place).is_relative_to(folder) for folder in shared):
                expected = "a bucket, or a folder that all hosts share"
                raise SpecError(f"{name} {place}", expected=expected, found="a folder of this machine")
        text = json.dumps(spec.to_dict())
        return ClusterJob(
            name=self.name,
            words=("spile", "worker", "--spec", text),
            streams=self._streams(flags.dataset_dir),
            root=spec.output,
            workers=self.num_workers,
            hosts=hosts,
            env=variables(self.env),
            grace=self.grace,
            retries=self.retries,
            cpus=self.cpus,
            memory_gb=self.memory_gb,
        )

    def _streams(self, dataset_dir: str) -> tuple[int, ...]:
        if self.num_streams is not None:
            return tuple(range(self.num_streams))
        from spile.launch.supervisor import stream_tasks

        return tuple(sorted(task.stream for task in stream_tasks(dataset_dir, lambda _: ())))
