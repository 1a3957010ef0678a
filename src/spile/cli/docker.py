"""``spile docker``: one image, on this machine and on every host of a slice."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Group, Parameter

from spile.cli.flags import HostFlags, flag, log, variables
from spile.errors import Failure, SpecError, UserError
from spile.hosts import run as fanout
from spile.hosts.files import copy_to, load
from spile.hosts.hosts import Host
from spile.hosts.run import Job, SessionTimes, environment_of, launch
from spile.launch.docker import Container, build_words, check_hosts, host_script, image_name, run_words, stop_script
from spile.version import __version__
from spile.view.hosts import Logs, Output, print_outcomes, results_folder

_WHAT = Group("The container", sort_key=1)
_WORDS = Annotated[str, Parameter(show=False, allow_leading_hyphen=True)]
_PRINT = Annotated[bool, Parameter(name="--print", negative="", help="Print the command instead of running it.")]
_DEFAULT = ("spile", "extract")


@Parameter(name="*")
@dataclass(frozen=True)
class ContainerFlags:
    """The image, and the parts of the machine that the container gets."""

    target: Annotated[
        Literal["cpu", "cuda", "tpu"] | None,
        flag(_WHAT, "The kind of image, and the devices that the container gets. [default: tpu on hosts, cpu here]"),
    ] = None
    image: Annotated[
        str | None, flag(_WHAT, "The image's name. [default: spile:VERSION, with -TARGET if --target is given]")
    ] = None
    runtime: Annotated[str, flag(_WHAT, "docker, podman or nerdctl.")] = "docker"
    name: Annotated[str, flag(_WHAT, "The container's name.")] = "spile"
    mount: Annotated[
        list[str] | None, flag(_WHAT, "A folder to mount in the container, FOLDER:/PATH.", negative="")
    ] = None
    env: Annotated[
        list[str] | None, flag(_WHAT, "An environment variable for the container, NAME=value.", negative="")
    ] = None
    grace: Annotated[int, flag(_WHAT, "Seconds that a worker has to commit when it is stopped.")] = 60

    def image_name(self) -> str:
        """Return the name of the image."""
        return self.image or image_name(__version__, self.target)

    def device(self, *, here: bool) -> Literal["cpu", "cuda", "tpu"]:
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
            env=variables(self.env),
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
    flags: ContainerFlags = ContainerFlags(),  # noqa: B008  (frozen)
    where: HostFlags = HostFlags(),  # noqa: B008
    context: Annotated[Path, Parameter(help="A checkout of spile.")] = Path(),
    show: _PRINT = False,
) -> int:
    """Build the image from a checkout: on this machine, or with --tpu-prefix or --hosts on every host."""
    here = not (where.hosts or where.tpu_prefix)
    words = build_words(flags.runtime, flags.device(here=here), flags.image_name(), str(context))
    if show:
        print(shlex.join(words))
        return 0
    if not (context / "Dockerfile").is_file():
        raise UserError(
            f"no Dockerfile in {context.absolute()}", expected="a checkout of spile", fix="name one with --context"
        )
    if here:
        flags.found()
        return subprocess.run(words, check=False).returncode  # noqa: S603

    hosts, target = where.find(), "~/spile-image"
    files = load(context.absolute(), int(1e9))
    copy_to(hosts, files, target, where.access())
    log(f"copied {len(files.names)} files to {target} on {len(hosts)} hosts")
    line = shlex.join(build_words(flags.runtime, flags.device(here=here), flags.image_name(), "."))
    return _run_on_all(hosts, line, where, folder=target)


def run(
    *words: _WORDS,
    flags: ContainerFlags = ContainerFlags(),  # noqa: B008
    show: _PRINT = False,
) -> int:
    """Run a command in a container on this machine: spile docker run --mount ./data:/data -- spile extract …

    Files that it writes to mounted folders belong to you. Ctrl+C stops the container after the worker has committed.
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
    *words: _WORDS,
    flags: ContainerFlags = ContainerFlags(),  # noqa: B008
    where: HostFlags = HostFlags(),  # noqa: B008
    logs: Annotated[Path | None, Parameter(help="The folder for the logs. [default: spile-run-TIME]")] = None,
    collect: Annotated[
        str | None, Parameter(help="Afterwards fetch this folder from every host, as spile collect does.")
    ] = None,
    show: _PRINT = False,
) -> int:
    """Run a command in one container on every host of a slice: spile docker pod --tpu-prefix my-tpu -- spile extract …

    All containers start together. If one fails, or after Ctrl+C, all of them commit and stop.
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
        code = _run_on_all(hosts, script, where, logs=logs, grace=flags.grace)
    finally:
        if code != 0:
            _run_stop_script(hosts, stop_script(flags.runtime, flags.name, flags.grace, none_is_error=False), where)
    if code == 0 and collect is not None:
        from spile.cli.hosts import collect as bring_back

        bring_back(collect, where=where)
    return code


def stop(
    *words: _WORDS,
    flags: ContainerFlags = ContainerFlags(),  # noqa: B008
    where: HostFlags = HostFlags(),  # noqa: B008
    everything: Annotated[bool, Parameter(name="--all", negative="", help="Stop all containers of spile.")] = False,
    show: _PRINT = False,
) -> int:
    """Stop a container here, or with --tpu-prefix or --hosts on every host; the worker in it commits first."""
    if words:
        raise SpecError(
            "docker stop", expected="--name NAME, or --all", found=" ".join(words), fix="use: spile docker stop --all"
        )
    here = not (where.hosts or where.tpu_prefix)
    script = stop_script(flags.runtime, None if everything else flags.name, flags.grace, none_is_error=here)
    if show:
        print(script, end="")
        return 0
    if not here:
        return _run_stop_script(where.find(), script, where)
    flags.found()
    return int(subprocess.run(["/bin/bash", "-c", script], check=False).returncode != 0)  # noqa: S603


def _refuse_runtime_flags(words: Sequence[str]) -> None:
    """Refuse flags of docker itself, which the guides put before the image name."""
    if words and words[0].startswith("-"):
        flag = words[0].partition("=")[0]
        fix = "use --mount instead of -v and --env instead of -e; on every host, run: spile docker pod … -- COMMAND"
        raise SpecError(f"no flag {flag}", expected="the command after --", fix=fix)


def _run_on_all(
    hosts: Sequence[Host],
    line: str,
    where: HostFlags,
    *,
    logs: Path | None = None,
    folder: str = "~",
    grace: int = 3,
) -> int:
    """Run a command line on all hosts, with logs and exit codes as in ``spile run``."""
    console = Output(highlight=False)
    pace = SessionTimes(grace=grace + 10.0)
    with Logs(hosts, results_folder(logs), console) as written:
        outcomes = fanout.run(
            hosts, Job(line, folder), access=where.access(), output=written.write, pace=pace, variables=_variables
        )
        written.open()
    print_outcomes(outcomes, written, console)
    return fanout.worst(outcomes)


def _variables(host: Host, hosts: Sequence[Host]) -> dict[str, str]:
    """Return the variables that describe the slice to a container; without a cloud, also the addresses of all hosts."""
    found = environment_of(host, hosts)
    mine = [other.internal or other.address for other in hosts if other.slice == host.slice]
    if not host.node_id and len(mine) > 1:
        found["TPU_WORKER_HOSTNAMES"] = ",".join(mine)
    return found


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
