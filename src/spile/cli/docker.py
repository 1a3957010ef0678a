"""``spile docker``: one image, on this machine and on every host of a slice."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from cyclopts import Group, Parameter

from spile.cli.flags import HostFlags, log
from spile.engines.docker import ContainerOptions, build_command, check_hosts, host_script, run_command, stop_script
from spile.errors import Failure, SpecError, UserError
from spile.hosts.files import copy_to, files_to_copy
from spile.hosts.hosts import Host
from spile.hosts.run import Job, jobs_for, launch
from spile.view.hosts import results_folder, run_on_all

Words = Annotated[str, Parameter(show=False, allow_leading_hyphen=True)]
Print = Annotated[bool, Parameter(name="--print")]
Flags = Annotated[ContainerOptions, Parameter(name="*", group=Group("The container", sort_key=1))]


def build(
    *,
    flags: Flags = ContainerOptions(),
    where: HostFlags = HostFlags(),
    context: Path = Path(),
    show: Print = False,
) -> int:
    """Build the image from a checkout: on this machine, or with --tpu-prefix or --hosts on every host.

    Args:
        context: A checkout of spile.
        show: Print the command instead of running it.
    """
    words = build_command(flags, str(context), here=not where.given)
    if show:
        print(shlex.join(words))
        return 0
    if not (context / "Dockerfile").is_file():
        raise UserError(
            f"no Dockerfile in {context.absolute()}", expected="a checkout of spile", fix="name one with --context"
        )
    if not where.given:
        return _run_here(flags, words)
    hosts, target = where.find(), "~/spile-image"
    files = files_to_copy(context.absolute(), int(1e9))
    copy_to(hosts, files, target, where.access())
    log(f"copied {len(files.names)} files to {target} on {len(hosts)} hosts")
    job = Job(shlex.join(build_command(flags, ".", here=False)), target)
    return run_on_all(jobs_for(hosts, job), where.access(), results_folder(None))


def run(*words: Words, flags: Flags = ContainerOptions(), show: Print = False) -> int:
    """Run a command in a container on this machine: spile docker run --mount ./data:/data -- spile extract …

    Files that it writes to mounted folders belong to you. Ctrl+C stops the container after the worker has committed.

    Args:
        show: Print the command instead of running it.
    """
    _refuse_runtime_flags(words)
    user = f"{os.getuid()}:{os.getgid()}"
    command = run_command(flags, words, here=True, user=user)
    if show:
        _refuse_overwrite(words)
        print(shlex.join(command))
        return 0
    return _run_here(flags, command)


def pod(
    *words: Words,
    flags: Flags = ContainerOptions(),
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
    script = host_script(flags, words)
    if show:
        _refuse_overwrite(words)
        print(script)
        return 0
    hosts, access = where.find(), where.access()
    check_hosts(hosts, flags.runtime, flags.image_name, access)
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
    flags: Flags = ContainerOptions(),
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
    return int(_run_here(flags, ["/bin/bash", "-c", script]) != 0)


def _run_here(flags: ContainerOptions, words: Sequence[str]) -> int:
    if shutil.which(flags.runtime) is None:
        fix = "install one, or name it with --runtime"
        raise UserError(f"no {flags.runtime} here", expected="docker, podman or nerdctl", fix=fix)
    return subprocess.run(words, check=False).returncode  # noqa: S603


def _refuse_runtime_flags(words: Sequence[str]) -> None:
    """Refuse flags of docker itself, which the guides put before the image name."""
    if words and words[0].startswith("-"):
        flag = words[0].partition("=")[0]
        fix = "use --mount instead of -v and --env instead of -e; on every host, run: spile docker pod … -- COMMAND"
        raise SpecError(f"no flag {flag}", expected="the command after --", fix=fix)


def _refuse_overwrite(words: Sequence[str]) -> None:
    """Refuse to print a command that would remove data each time it is run."""
    if any(word.partition("=")[0] == "--overwrite" for word in words):
        fix = "leave out --print, or --overwrite"
        raise SpecError("--overwrite", expected="a command that runs now, once", found="--print", fix=fix)


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
