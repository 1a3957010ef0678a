"""Several hosts as one worker on a Ray cluster: a slice, or any nodes, that start together and end together."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spile.runtime.engines.engine import StreamTask, WorkerEnd

__all__ = ["Gang", "find_gangs"]

SLICE_LABEL = "ray.io/tpu-slice-name"
WORKER_LABEL = "ray.io/tpu-worker-id"


@dataclass
class Gang:
    """One stream's hosts."""

    task: StreamTask
    size: int
    nodes: list[str] = field(default_factory=list)
    refs: list[Any] = field(default_factory=list)
    _ends: list[WorkerEnd] = field(default_factory=list)
    _stopped: bool = False

    @property
    def placed(self) -> bool:
        """Whether its hosts were found."""
        return bool(self.nodes)

    def words(self, number: int, coordinator: str) -> list[str]:
        """The command of one of its hosts."""
        place = ["--coordinator-address", coordinator, "--process-id", str(number)]
        return [*self.task.words, *place, "--num-processes", str(self.size)]

    def place(self, nodes: Sequence[str], refs: Sequence[Any]) -> None:
        """They run now."""
        self.nodes, self.refs = list(nodes), list(refs)

    def stop(self) -> list[Any]:
        """Those to ask; a gang that nobody has placed has ended already."""
        self._stopped = True
        return list(self.refs)

    def heard(self, ends: Mapping[Any, WorkerEnd], cancel: Callable[[Any], None]) -> WorkerEnd | None:
        """Hosts that ended. One's failure is the end of all; the gang has ended when all have."""
        self.refs = [ref for ref in self.refs if ref not in ends]
        self._ends += ends.values()
        if any(end.code != 0 for end in ends.values()):
            for ref in self.refs:
                cancel(ref)
        if self.refs or not (self.placed or self._stopped):
            return None
        return min(self._ends, key=_telling, default=WorkerEnd(self.task.stream, 130))


def _telling(end: WorkerEnd) -> int:
    """Whose end says most: a mistake, then a lost node, then a failure; last, those that only followed."""
    return {2: 0, None: 1, 3: 2, 130: 4, 143: 4, 0: 5}.get(end.code, 3)


def find_gangs(
    nodes: Sequence[Mapping[str, Any]], size: int, taken: Collection[str]
) -> Iterator[list[Mapping[str, Any]]]:
    """Whole gangs of free nodes, in the hosts' order: a slice's own hosts together, others as they come."""
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for node in nodes:
        groups.setdefault(node.get("Labels", {}).get(SLICE_LABEL, ""), []).append(node)
    for name, members in sorted(groups.items()):
        free = [node for node in members if node["NodeID"] not in taken]
        if name:
            free.sort(key=lambda node: int(node["Labels"].get(WORKER_LABEL, 0)))
            if len(free) == size == len(members):
                yield free
            continue
        for start in range(0, len(free) - size + 1, size):
            yield free[start : start + size]
