"""Workers on an existing Ray cluster: one Ray task per stream, or one per host for a worker of several hosts.

The settings of the cluster are not changed. In particular the driver sets no gRPC keepalive: servers with Ray's
defaults answer a shorter one with ``too_many_pings`` and close the connection, which loses every worker after 40 s.
"""

from __future__ import annotations

import os
import platform
import re
import socket
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spile.engines.local import WorkerProcess, thread_limits
from spile.engines.registry import EngineOptions
from spile.engines.supervisor import ClusterCheck, StreamTask, WorkerEnd
from spile.errors import SpecError, UserError
from spile.version import __version__

# -- on a node --------------------------------------------------------------------------------------------------------

_POLL = 0.2
_COMMIT_SECONDS = 100.0


def check_node(output: str, token: str, inputs: Sequence[str]) -> dict[str, Any]:
    """Return the node's versions and why it cannot work, if so.

    The function travels to the node by value, because it must also work if spile is missing there or is another
    version. So it imports spile itself.
    """
    import ray

    found: dict[str, Any] = {"python": platform.python_version(), "ray": ray.__version__, "spile": None, "problem": ""}
    try:
        from spile.errors import SpileError
        from spile.objects import open_folder, split
        from spile.objects.folder import NotFound
        from spile.objects.preflight import preflight
        from spile.version import __version__
    except ImportError as error:
        found["problem"] = f"{type(error).__name__}: {error}"
        return found
    found["spile"] = __version__
    try:
        if output:
            home = open_folder(output)
            try:
                home.info(token)
            except NotFound:
                found["problem"] = f"{output} is another folder there: expected a bucket, or a folder all nodes share"
                return found
            preflight(home)
        for place in inputs:
            folder, name = split(place)
            if not any(True for _ in open_folder(folder).list(name)):
                found["problem"] = f"it does not see {place}"
                return found
    except (SpileError, OSError) as error:
        found["problem"] = str(error)
    return found


def run_stream(words: Sequence[str], env: Mapping[str, str]) -> tuple[int, str, str]:
    """Run one worker to its end; return its exit code, its last lines and the node. If cancelled, it commits first."""
    worker = WorkerProcess(words, env=env, on_line=lambda line: print(line, flush=True))
    code = None
    try:
        while code is None:
            try:
                code = worker.wait(_POLL)
            except KeyboardInterrupt:  # Ray cancels a task with this exception.
                worker.stop()
                deadline = time.monotonic() + _COMMIT_SECONDS
                while code is None and time.monotonic() < deadline:
                    code = worker.wait(_POLL)
                break
    finally:
        worker.kill()
    return 130 if code is None else code, worker.last_lines, socket.gethostname()


# -- several hosts as one worker --------------------------------------------------------------------------------------

SLICE_LABEL = "ray.io/tpu-slice-name"
WORKER_LABEL = "ray.io/tpu-worker-id"


@dataclass
class Gang:
    """The Ray tasks of one worker, one for each host. They start and end together."""

    task: StreamTask
    refs: list[Any] = field(default_factory=list)
    """The tasks that run."""
    nodes: Sequence[str] = ()
    """Its nodes, if there are several hosts. Ray chooses the node of a single host."""
    stopped: bool = False
    _ends: list[WorkerEnd] = field(default_factory=list)

    @property
    def needs_nodes(self) -> bool:
        """Whether it still needs nodes."""
        return not (self.refs or self._ends or self.stopped)

    def record_ends(self, ends: Mapping[Any, WorkerEnd], cancel: Callable[[Any], None]) -> WorkerEnd | None:
        """Record hosts that ended and cancel the others if one failed; return the gang's end after the last one."""
        self.refs = [ref for ref in self.refs if ref not in ends]
        self._ends += ends.values()
        if any(end.code != 0 for end in ends.values()):
            for ref in self.refs:
                cancel(ref)
        if self.refs or self.needs_nodes:
            return None
        return min(self._ends, key=_rank, default=WorkerEnd(self.task.stream, 130))


def _rank(end: WorkerEnd) -> int:
    """Order ends by how well they explain a failure: a mistake, a lost node, an error, then hosts that were stopped."""
    return {2: 0, None: 1, 4: 1, 3: 2, 130: 4, 143: 4, 0: 5}.get(end.code, 3)


def find_gangs(
    nodes: Sequence[Mapping[str, Any]], size: int, taken: Collection[str]
) -> Iterator[list[Mapping[str, Any]]]:
    """Yield groups of ``size`` free nodes: all hosts of one TPU slice in their order, or any nodes without a slice."""
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


# -- the engine ------------------------------------------------------------------------------------------------------

_NAMED = {"CPU": "num_cpus", "GPU": "num_gpus"}
_CHECK_SECONDS = 60.0
_PACKAGE = "/runtime_resources/working_dir_files/"
"""Part of the path of every working directory that Ray unpacks."""
_VERSIONS = re.compile(r"Ray: (\S+) Python: (\S+)")


class RayEngine:
    """Runs workers as tasks of a Ray cluster."""

    name = "ray"
    elsewhere = True

    def __init__(self, options: EngineOptions, output: str) -> None:
        if options.log_dir is not None:
            raise SpecError("--log-dir", expected="--engine local", found="--engine ray, which keeps logs itself")
        _refuse_package_folder(output)
        self._ray = _connect(options.ray_address)
        self._needs = options.needs or {"CPU": 1.0}
        self._hosts_per_worker = options.hosts_per_worker
        try:
            room = self._count_workers()
        except UserError:
            self._ray.shutdown()
            raise
        self.workers, self.room = options.num_workers or room, room
        self._threads = self._thread_limits()
        self._gangs: dict[int, Gang] = {}

    # -- before the run -------------------------------------------------------------------------------------------

    def _nodes(self) -> list[dict[str, Any]]:
        return [node for node in self._ray.nodes() if node["Alive"]]

    def _fitting_nodes(self) -> list[dict[str, Any]]:
        return [node for node in self._nodes() if _workers_per_node(node["Resources"], self._needs)]

    def _count_workers(self) -> int:
        """Return how many workers fit now; raise if none does, with the resources of each node."""
        nodes = self._nodes()
        fits = sum(_workers_per_node(node["Resources"], self._needs) for node in nodes) // self._hosts_per_worker
        if fits:
            return fits
        asked = ", ".join(f"{name}={amount:g}" for name, amount in self._needs.items())
        hosts = f" on each of {self._hosts_per_worker} nodes" if self._hosts_per_worker > 1 else ""
        raise SpecError(
            f"--resources {asked}",
            expected=f"a node that has them{hosts}",
            found="; ".join(f"{_name(node)}: {_describe(node['Resources'])}" for node in nodes) or "no node",
        )

    def _thread_limits(self) -> dict[str, str]:
        """Limit CPU workers to the threads asked for, or to an even share of the cluster if that is more."""
        if "CPU" not in self._needs:
            return {}
        cores = sum(node["Resources"]["CPU"] for node in self._fitting_nodes())
        share = cores / (self.workers * self._hosts_per_worker)
        return thread_limits(max(1, int(max(share, self._needs["CPU"]))))

    def check(self, asked: ClusterCheck) -> None:
        """Check the versions of every node, and whether it can use the output and the data."""
        ray = self._ray
        here = sys.modules[__name__]
        ray.cloudpickle.register_pickle_by_value(here)
        try:
            check = ray.remote(num_cpus=0, max_retries=0)(check_node)
            from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

            waiting = {
                check.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(
                    asked.output, asked.token, list(asked.inputs)
                ): node
                for node in self._fitting_nodes()
            }
        finally:
            ray.cloudpickle.unregister_pickle_by_value(here)
        ready, late = ray.wait(list(waiting), num_returns=len(waiting), timeout=_CHECK_SECONDS)
        problems = [f"{_name(waiting[ref])}: no answer in {_CHECK_SECONDS:.0f} s" for ref in late]
        for ref in ready:
            problem = self._problem(ref)
            problems += [f"{_name(waiting[ref])}: {problem}"] if problem else []
        if problems:
            more = f"; and {len(problems) - 4} more" if len(problems) > 4 else ""
            raise UserError(
                f"{len(problems)} of {len(waiting)} nodes cannot work", found="; ".join(problems[:4]) + more
            )

    def _problem(self, ref: Any) -> str:
        try:
            found: dict[str, Any] = self._ray.get(ref)
        except self._ray.exceptions.RayError as error:
            return " ".join(str(error).split())[-300:]
        if found["spile"] is None:
            return f"no spile there ({found['problem']}); install it: spile install --hosts …"
        here = {"python": platform.python_version(), "ray": self._ray.__version__, "spile": __version__}
        for name, version in here.items():
            node_version = str(found[name])
            same = _minor(node_version) == _minor(version) if name == "python" else node_version == version
            if not same:
                return f"expected {name} {version}, found {node_version}"
        return str(found["problem"])

    # -- the run --------------------------------------------------------------------------------------------------

    def start(self, task: StreamTask, avoid: Collection[str] = ()) -> None:
        """Submit the task of a single host; for several hosts, remember the gang until nodes are free."""
        gang = self._gangs[task.stream] = Gang(task)
        if self._hosts_per_worker == 1:
            gang.refs = [self._submit(task.single_process_words, task, self._options(task.label, avoid))]

    def _options(self, name: str, avoid: Collection[str] = ()) -> dict[str, Any]:
        options: dict[str, Any] = {"num_cpus": 0, "max_retries": 0, "name": name, "resources": {}}
        for kind, amount in self._needs.items():
            if kind in _NAMED:
                options[_NAMED[kind]] = amount
            else:
                options["resources"][kind] = amount
        fitting = self._fitting_nodes() if avoid else []
        bad = [node["NodeID"] for node in fitting if node["NodeManagerHostname"] in avoid]
        if 0 < len(bad) < len(fitting):
            options["label_selector"] = {"ray.io/node-id": f"!in({','.join(bad)})"}
        return options

    def _submit(self, words: Sequence[str], task: StreamTask, options: Mapping[str, Any]) -> Any:
        run = self._ray.remote(**options)(run_stream)
        return run.remote(list(words), {**self._threads, **task.env})

    def wait(self, seconds: float) -> Sequence[WorkerEnd]:
        self._place_gangs()
        refs = self._refs()
        ready: list[Any] = []
        if refs:
            self._ray.wait(refs, num_returns=1, timeout=seconds)
            ready, _ = self._ray.wait(refs, num_returns=len(refs), timeout=0)
        else:
            time.sleep(seconds)
        ends = []
        for stream, gang in list(self._gangs.items()):
            end = gang.record_ends({ref: self._end(ref, stream) for ref in ready if ref in gang.refs}, self._cancel)
            if end is not None:
                del self._gangs[stream]
                ends.append(end)
        return ends

    def _refs(self) -> list[Any]:
        return [ref for gang in self._gangs.values() for ref in gang.refs]

    def _place_gangs(self) -> None:
        """Start gangs that wait, on a whole slice or on as many nodes as they need, if those are free."""
        waiting = [gang for gang in self._gangs.values() if gang.needs_nodes]
        if not waiting:
            return
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        size = self._hosts_per_worker
        taken = {node for gang in self._gangs.values() for node in gang.nodes}
        for gang, nodes in zip(waiting, find_gangs(self._fitting_nodes(), size, taken), strict=False):
            gang.nodes = [node["NodeID"] for node in nodes]
            coordinator = str(nodes[0]["NodeManagerAddress"])
            for number, node in enumerate(nodes):
                strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                options = {**self._options(f"{gang.task.label} host {number}"), "scheduling_strategy": strategy}
                place = ["--coordinator-address", coordinator, "--process-id", str(number)]
                words = [*gang.task.words, *place, "--num-processes", str(size)]
                gang.refs.append(self._submit(words, gang.task, options))

    def _end(self, ref: Any, stream: int) -> WorkerEnd:
        errors = self._ray.exceptions
        try:
            code, last_lines, where = self._ray.get(ref)
            return WorkerEnd(stream, code, where, last_lines)
        except errors.TaskCancelledError:
            return WorkerEnd(stream, 130)
        except errors.OutOfMemoryError as error:
            return WorkerEnd(stream, 137, last_lines=" ".join(str(error).split())[:400])
        except errors.RayTaskError as error:
            return WorkerEnd(stream, 1, last_lines=" ".join(str(error).split())[-400:])
        except errors.RayError as error:  # The node, or the worker's parent process on it, is gone.
            return WorkerEnd(stream, None, cause=_first_sentence(error))

    def _cancel(self, ref: Any) -> None:
        self._ray.cancel(ref, force=False)

    def stop(self, stream: int) -> None:
        """Cancel the tasks, which :func:`run_stream` takes as a request to commit."""
        if stream in self._gangs:
            self._gangs[stream].stopped = True
            for ref in self._gangs[stream].refs:
                self._cancel(ref)

    def abandon(self, stream: int) -> None:
        """Cancel the tasks, which may be out of reach, and forget them."""
        self.stop(stream)
        self._gangs.pop(stream, None)

    def kill(self) -> None:
        for ref in self._refs():
            self._ray.cancel(ref, force=True)

    def close(self) -> None:
        self.kill()
        self._ray.shutdown()


def _refuse_package_folder(output: str) -> None:
    """Refuse an output in the folder into which ``ray job submit --working-dir`` unpacks: Ray deletes it later."""
    if "://" not in output and _PACKAGE in f"{Path(output).expanduser().absolute()}/":
        raise SpecError(
            f"--output {output} is inside the working directory that Ray unpacked for this job and deletes after it",
            fix="name a bucket, or the absolute path of a folder that all nodes share",
        )


def _first_sentence(error: Exception) -> str:
    """Return Ray's reason without its advice, at most 200 characters."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text.partition('. ')[0][:200]}"


def _connect(address: str | None) -> Any:
    """Connect to the cluster and return the module ``ray``; raise with one line if that fails."""
    try:
        import ray
        import ray.exceptions
    except ImportError as error:
        raise UserError("no Ray here", expected="the extra spile[ray]", fix="run: pip install 'spile[ray]'") from error
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    where = "on this machine" if address == "auto" else f"at {address}"
    _check_listening(address)
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR", configure_logging=False)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        message = " ".join(str(error).split())
        if "ersion" in message and "mismatch" in message:
            cluster = _VERSIONS.search(message)  # The cluster's versions come before ours.
            raise UserError(
                f"the Ray cluster {where} has a different version",
                expected=f"Ray {ray.__version__} and Python {platform.python_version()}, as here",
                found=message[-200:] if cluster is None else f"Ray {cluster[1]} and Python {cluster[2]}",
                fix="install the cluster's versions here, or start the command on one of its nodes",
            ) from error
        raise UserError(
            f"no Ray cluster {where}",
            found=None if "any running Ray instance" in message else message[:200],  # This message adds nothing.
            fix="name one with --ray-address HOST:6379, or start one: ray start --head",
        ) from error
    return ray


def _check_listening(address: str) -> None:
    """Raise if nothing listens at the address. Ray itself would try for a minute."""
    host, colon, port = address.rpartition("://")[2].rpartition(":")
    if not colon or not port.isdecimal():
        if address != "auto":
            raise SpecError("--ray-address", expected="HOST:6379 or ray://HOST:10001", found=repr(address))
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=5.0).close()
    except OSError as error:
        raise UserError(
            f"no Ray cluster at {address}",
            found=str(error),
            fix="name the head's address with --ray-address HOST:6379, or start one: ray start --head",
        ) from error


def _workers_per_node(there: Mapping[str, float], needs: Mapping[str, float]) -> int:
    """Return how many workers fit on an empty node."""
    return min(int(there.get(name, 0.0) / amount) for name, amount in needs.items())


def _describe(resources: Mapping[str, float]) -> str:
    """Describe resources for an error message, without memory and addresses."""
    hidden = ("memory", "object_store_memory")
    shown = {name: n for name, n in sorted(resources.items()) if name not in hidden and not name.startswith("node:")}
    return ", ".join(f"{name}={amount:g}" for name, amount in shown.items()) or "nothing"


def _name(node: Mapping[str, Any]) -> str:
    return str(node.get("NodeName") or node["NodeManagerAddress"])


def _minor(version: str) -> str:
    return version.rpartition(".")[0]
