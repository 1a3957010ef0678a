"""The flags that send a run's streams to many workers: on this machine, or on a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Group, Parameter

from spile.cli.shell.flag import flag
from spile.errors import SpecError

if TYPE_CHECKING:
    from spile.launch.engines import EngineRequest

__all__ = ["EngineFlags"]

_ENGINE = Group("Many workers at once", sort_key=6)


@Parameter(name="*")
@dataclass(frozen=True)
class EngineFlags:
    """Which engine, how many workers, and what each of them needs."""

    engine: Annotated[
        str | None,
        flag(
            _ENGINE,
            "Run all streams: local, with N processes on this machine, or ray, on a cluster. [default: one stream]",
        ),
    ] = None
    num_workers: Annotated[int | None, flag(_ENGINE, "Streams worked on at once. Alone it means --engine local.")] = (
        None
    )
    num_streams: Annotated[
        int | None, flag(_ENGINE, "Into how many streams --dataset is split. [default: 4 for each worker]")
    ] = None
    resources: Annotated[
        list[str] | None,
        flag(_ENGINE, "What each worker needs: GPU=1, TPU=4, CPU=8, or a resource of the cluster.", negative=""),
    ] = None
    ray_address: Annotated[
        str | None,
        flag(_ENGINE, "The cluster: HOST:6379, or ray://HOST:10001. [default: RAY_ADDRESS, else this machine's]"),
    ] = None
    hosts_per_worker: Annotated[
        int, flag(_ENGINE, "With ray: hosts that act as one worker, a slice's; 1 unless a model needs more.")
    ] = 1
    log_dir: Annotated[Path | None, flag(_ENGINE, "With local: a folder that gets each stream's output.")] = None

    @property
    def asked(self) -> bool:
        """Whether this is a run of many workers."""
        return self.engine is not None or self.num_workers is not None

    @property
    def name(self) -> str:
        """The engine's."""
        return self.engine or "local"

    def needs(self) -> dict[str, float]:
        """``--resources`` as numbers by name."""
        found: dict[str, float] = {}
        for word in " ".join(self.resources or ()).replace(",", " ").split():
            name, equals, text = word.partition("=")
            try:
                amount = float(text)
            except ValueError:
                amount = 0.0
            if not name or not equals or amount <= 0:
                raise SpecError("--resources", expected="NAME=number such as GPU=1", found=repr(word))
            found[name] = amount
        return found

    def check(self) -> None:
        """What cannot be, before anything is looked at."""
        for name, value in (
            ("--num-workers", self.num_workers),
            ("--num-streams", self.num_streams),
            ("--hosts-per-worker", self.hosts_per_worker),
        ):
            if value is not None and not 1 <= value <= 10_000:
                raise SpecError(name, expected="1 to 10,000", found=f"{value:,}")
        self.needs()

    def request(self, output: str) -> EngineRequest:
        """Return what the engine is asked for."""
        from spile.launch.engines import EngineRequest

        return EngineRequest(
            self.num_workers, self.needs(), self.ray_address, self.hosts_per_worker, self.log_dir, output
        )
