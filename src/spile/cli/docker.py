"""``spile docker``: one image, on this machine and on every host of a slice."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from spile.cli.flags import HostFlags, log
from spile.errors import Failure, SpecError, UserError
from spile.hosts.files import copy_to, load
from spile.hosts.hosts import Host
from spile.hosts.run import Job, jobs_for, launch
from spile.launch.docker import (
    Container,
    Device,
    build_words,
    check_hosts,
    host_script,
    image_name,
    run_words,
    stop_script,
)
from spile.spec.options import pairs
from spile.version import __version__
from spile.view.hosts import results_folder, run_on_all

Words = Annotated[str, Parameter(show=False, allow_leading_hyphen=True)]
Print = Annotated[bool, Parameter(name="--print")]
_DEFAULT = ("spile", "extract")


@Parameter(name="*", group=Group("The container", sort_key=1))
@dataclass(frozen=True)
class ContainerFlags:
    """The image, and the parts of the machine that the container gets."""

    target: Device | None = None
    """The kind of image, and the devices that the container gets. [default: tpu on hosts, cpu here]"""
    image: str | None = None
    """The image's name. [default: spile:VERSION, with -TARGET if --target is given]"""
    runtime: str = "docker"
    """docker, podman or nerdctl."""
    name: str = "spile"
    """The container's name."""
    mount: list[str] | None = None
    """A folder to mount in the container, FOLDER:/PATH."""
    env: list[str] | None = None
    """An environment variable for the container, NAME=value."""
    grace: int = 60
    """Seconds that a worker has to commit when it is stopped."""

    def image_name(self) -> str:
        return self.image or image_name(__version__, self.target)

    def device(self, *, here: bool) -> Device:
        """Return the target: as given, or TPUs on hosts and none on this machine."""
        return self.target or ("cpu" if here else "tpu")

    def container(self, words: Sequence[str], *, here: bool) -> Container:
        """Return the container for a command; ``here``: its folders are on this machine."""
        mounts = []
        for text in self.mount or ():
            folder, colon, inside = text.rpartition(":")
            if not colon or not folder:
                raise SpecError("--mount", expected="FOLDER:/PATH", found=repr(text))
            mounts.append((str(Path(folder).expanduser().absolute()) if here else folder, inside))
        return Container(
            image=self.image_name(),
            words=tuple(words) or _DEFAULT,
            device=self.device(here=here),
            name=self.name,
            runtime=self.runtime,
            mounts=tuple(mounts),
            env=pairs("--env", self.env),
            grace=self.grace,
        )

    def found(self) -> None:
        """Raise if the runtime is not installed here."""
        if shutil.which(self.runtime) is None:
            raise UserError(
                f"no {self.runtime} here",
                expected="docker, podman or nerdctl",
                fix="install one, or name it with --runtime",
            )


def build(
    *,
    flags: ContainerFlags = ContainerFlags(),
    where: HostFlags = HostFlags(),
    context: Path = Path(),
    show: Print = False,
) -> int:
    """Build the image from a checkout: on this machine, or with --tpu-prefix or --hosts on every host.

    Args:
        context: A checkout of spile.
        show: Print the command instead of running it.
    """
    words = partial(build_words, flags.runtime, flags.device(here=not where.given), flags.image_name())
    if show:
        print(shlex.join(words(str(context))))
        return 0
    if not (context / "Dockerfile").is_file():
        raise UserError(
            f"no Dockerfile in {context.absolute()}", expected="a checkout of spile", fix="name one with --context"
        )
    if not where.given:
        flags.found()
        return subprocess.run(words(str(context)), check=False).returncode  # noqa: S603
    hosts, target = where.find(), "~/spile-image"
    files = load(context.absolute(), int(1e9))
    copy_to(hosts, files, target, where.access())
    log(f"copied {len(files.names)} files to {target} on {len(hosts)} hosts")
    jobs = jobs_for(hosts, Job(shlex.join(words(".")), target))
    return run_on_all(jobs, where.access(), results_folder(None))


def run(*words: Words, flags: ContainerFlags = ContainerFlags(), show: Print = False) -> int:
    """Run a command in a container on this machine: spile docker run --mount ./data:/data -- spile extract …

    Files that it writes to mounted folders belong to you. Ctrl+C stops the container after the worker has committed.

    Args:
        show: Print the command instead of running it.
    """
    _refuse_runtime_flags(words)
    user = f"{os.getuid()}:{os.getgid()}"
    command = run_words(flags.container(words, here=True), user=user)
    if show:
        print(shlex.join(command))
        return 0
    flags.found()
    return subprocess.run(command, check=False).returncode  # noqa: S603


def pod(
    *words: Words,
    flags: ContainerFlags = ContainerFlags(),
    where: HostFlags = HostFlags(),
    logs: Path | None = None,
    collect: str | None = None,
    show: Print = False,
) -> int:
    """Run a command in one container on every host of a slice: spile docker pod --tpu-prefix my-tpu -- spile extract …

    All containers start together. If one fails, or after Ctrl+C, all of them commit and stop.

    Args:
        logs: The folder for the logs. [default: spile-run-TIME]
        collect: Afterwards fetch this folder from every host, as spile collect does.
        show: Print the command instead of running it.
    """
    _refuse_runtime_flags(words)
    container = flags.container(words, here=False)
    script = host_script(container)
    if show:
        print(script)
        return 0
    hosts, access = where.find(), where.access()
    check_hosts(hosts, flags.runtime, container.image, access)
    code = 1
    try:
        code = run_on_all(_pod_jobs(hosts, Job(script, grace=flags.grace + 10.0)), access, results_folder(logs))
    finally:
        if code != 0:
            _run_stop_script(hosts, stop_script(flags.runtime, flags.name, flags.grace, none_is_error=False), where)
    if code == 0 and collect is not None:
        from spile.cli.hosts import collect as collect_from_hosts  # Here, because chains of imports are kept short.

        collect_from_hosts(collect, where=where)
    return code


def stop(
    *words: Words,
    flags: ContainerFlags = ContainerFlags(),
    where: HostFlags = HostFlags(),
    everything: Annotated[bool, Parameter(name="--all")] = False,
    show: Print = False,
) -> int:
    """Stop a container here, or with --tpu-prefix or --hosts on every host; the worker in it commits first.

    Args:
        everything: Stop all containers of spile.
        show: Print the command instead of running it.
    """
    if words:
        raise SpecError(
            "docker stop", expected="--name NAME, or --all", found=" ".join(words), fix="use: spile docker stop --all"
        )
    name = None if everything else flags.name
    script = stop_script(flags.runtime, name, flags.grace, none_is_error=not where.given)
    if show:
        print(script, end="")
        return 0
    if where.given:
        return _run_stop_script(where.find(), script, where)
    flags.found()
    return int(subprocess.run(["/bin/bash", "-c", script], check=False).returncode != 0)  # noqa: S603


def _refuse_runtime_flags(words: Sequence[str]) -> None:
    """Refuse flags of docker itself, which the guides put before the image name."""
    if words and words[0].startswith("-"):
        flag = words[0].partition("=")[0]
        fix = "use --mount instead of -v and --env instead of -e; on every host, run: spile docker pod … -- COMMAND"
        raise SpecError(f"no flag {flag}", expected="the command after --", fix=fix)


def _pod_jobs(hosts: Sequence[Host], job: Job) -> dict[Host, Job]:
    """Return the job of each host. Without a cloud, the variables also name the addresses of all hosts of its slice."""
    jobs = jobs_for(hosts, job)
    for host in hosts:
        mine = [other.internal or other.address for other in hosts if other.slice == host.slice]
        if not host.node_id and len(mine) > 1:
            jobs[host] = replace(jobs[host], env={**jobs[host].env, "TPU_WORKER_HOSTNAMES": ",".join(mine)})
    return jobs


def _run_stop_script(hosts: Sequence[Host], script: str, where: HostFlags) -> int:
    """Run a stop script on each host and print what it says; return the exit code: 0 if one stopped and none failed."""
    stopped = failed = 0
    for each in launch(hosts, lambda _: script, access=where.access()):
        for line in each.output.splitlines():
            log(f"{each.host.label}: {line}")
            stopped += line.startswith("stopped ")
        if each.error is not None:
            failed += 1
            log(f"{each.host.label}: {Failure('could not stop its containers', found=str(each.error))}")
    return int(failed > 0 or stopped == 0)
