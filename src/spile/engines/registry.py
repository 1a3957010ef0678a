"""The registry of engines, and the job description that engines with their own scheduler share.

``SUPERVISED`` lists the engines that :class:`spile.engines.supervisor.Supervisor` schedules (``spile extract --engine
NAME``). Kubernetes and Slurm schedule by themselves: they get a :class:`ClusterJob` and print it in their own format.
docs/guides/add-an-engine.md describes how to add one of either kind.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from spile.errors import SpecError, printable
from spile.spec.options import check_number, parse_pairs

if TYPE_CHECKING:
    from spile.engines.supervisor import Engine

SUPERVISED: dict[str, str] = {
    "local": "spile.engines.local:LocalEngine",
    "ray": "spile.engines.ray:RayEngine",
}
"""Engine classes by name, as import paths, so that only the chosen engine is imported."""


@dataclass(frozen=True)
class WorkerOptions:
    """The engine, the number of workers and the resources of each. They are flags of ``spile verify``."""

    engine: str | None = None
    """Where workers run: local, as processes of this machine, or ray, on a cluster. [default: none]"""
    num_workers: int | None = None
    """The number of workers at once. Without --engine it implies --engine local."""
    resources: list[str] | None = None
    """What each worker needs: GPU=1, TPU=4, CPU=8, or a resource of the cluster."""
    ray_address: str | None = None
    """The cluster: HOST:6379, or ray://HOST:10001. [default: RAY_ADDRESS, else this machine's]"""

    def __post_init__(self) -> None:
        check_number("--num-workers", self.num_workers, 1, 10_000)

    @property
    def requested(self) -> bool:
        """Whether the flags ask for several workers."""
        return self.engine is not None or self.num_workers is not None

    @property
    def needs(self) -> dict[str, float]:
        """The resources of each worker, by name: CPU, GPU, TPU or a resource of the cluster."""
        found: dict[str, float] = {}
        for word in " ".join(self.resources or ()).replace(",", " ").split():
            name, _, text = word.partition("=")
            try:
                found[name] = float(text)
            except ValueError:
                found[name] = 0.0
            if not name or found[name] <= 0:
                raise SpecError("--resources", expected="NAME=number such as GPU=1", found=repr(word))
        return found


@dataclass(frozen=True)
class EngineOptions(WorkerOptions):
    """The engine of a run, and how its data is split into streams. They are flags of ``spile extract``."""

    num_streams: int | None = None
    """The number of streams that --dataset is split into. [default: up to 4 for each worker; 1 of large data]"""
    hosts_per_worker: int = 1
    """With ray: the number of hosts that act as one worker, such as the hosts of a slice."""
    log_dir: Path | None = None
    """With local: a folder for the log of each stream."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("--num-streams", self.num_streams, 1, 10_000)
        check_number("--hosts-per-worker", self.hosts_per_worker, 1, 10_000)


def make_engine(options: WorkerOptions, output: str) -> Engine:
    """Create the engine that ``SUPERVISED`` has under this name; it raises SpecError for what it cannot do.

    Args:
        options: The user's requirements.
        output: The output folder or bucket, as the user named it.
    """
    name = options.engine or "local"
    if name not in SUPERVISED:
        raise SpecError("--engine", expected=" or ".join(SUPERVISED), found=name, fix="see spile extract --help")
    module, _, attribute = SUPERVISED[name].partition(":")
    engine: Engine = getattr(import_module(module), attribute)(EngineOptions(**vars(options)), output)
    return engine


_JOB_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,46}[a-z0-9])?")
"""At most 48 characters: a label has at most 63, and a pod's name adds the numbers of the stream and the host."""


def check_texts(flag: str, pattern: str | re.Pattern[str], expected: str, *texts: str | None) -> None:
    """Raise an error unless each text is None or matches the whole pattern."""
    for text in texts:
        if text is not None and not re.fullmatch(pattern, text):
            raise SpecError(flag, expected=expected, found=repr(text))


def refuse_control_characters(flag: str, text: str) -> None:
    """Raise if text that goes into a generated script or manifest contains a line break or a control character.

    Characters that change the direction of text are refused too: they would show another command than runs.
    """
    for character in text:
        if character in "\t\n" or printable(character) != character:
            problem = f"{flag} contains the control character U+{ord(character):04X}"
            raise SpecError(problem, fix="remove it and run the command again")


@dataclass(frozen=True, kw_only=True)
class ClusterOptions:
    """The options that all clusters share. They are flags of ``spile k8s job`` and ``spile slurm job``."""

    name: str = "spile"
    """The job's name."""
    num_workers: int | None = None
    """The number of workers, which claim one stream after another. [default: one for each stream]"""
    hosts_per_worker: int = 1
    """Hosts that act as one worker."""
    gpus: int = 0
    """GPUs of each host."""
    cpus: int | None = None
    """Processors of each host."""
    memory_gb: int | None = None
    """Memory of each host, in GB."""
    env: list[str] | None = None
    """NAME=value for every worker. Do not use it for secrets."""
    grace: int = 120
    """Seconds that a worker has to commit before it is killed."""
    retries: int = 6
    """Retries after errors of a worker. Disruptions do not count."""

    @property
    def variables(self) -> dict[str, str]:
        return parse_pairs("--env", self.env)

    def __post_init__(self) -> None:
        check_texts("--name", _JOB_NAME, "small letters, digits and dashes, 48 at most", self.name)
        check_number("--num-workers", self.num_workers, 1)
        check_number("--hosts-per-worker", self.hosts_per_worker, 1)
        check_number("--gpus", self.gpus, 0)
        check_number("--cpus", self.cpus, 1)
        check_number("--memory-gb", self.memory_gb, 1)
        check_number("--retries", self.retries, 0)
        check_number("--grace", self.grace, 10, 3600)
        for name, text in self.variables.items():
            refuse_control_characters(f"--env {name}", text)


@dataclass(frozen=True)
class ClusterJob:
    """A run for a cluster that schedules by itself: workers that claim streams."""

    words: tuple[str, ...]
    """The worker's command, without the flags that name the worker and its host."""
    workers: int
    """The number of workers at once."""
    root: str
    """The output folder or bucket."""

    def __post_init__(self) -> None:
        flag = "the command"
        for word in self.words:
            refuse_control_characters(flag, word)
            flag = word if word.startswith("--") else flag
        refuse_control_characters("--output", self.root)
