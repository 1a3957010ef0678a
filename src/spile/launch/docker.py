"""One container image, on this machine or on every host of a slice: the commands of docker, podman or nerdctl.

On a host, a script under the ssh guard owns the container: when the script ends for any reason, it stops the container,
which gives the worker time to commit, and removes it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

from spile.errors import SpecError, UserError
from spile.hosts.hosts import Access, Host
from spile.hosts.run import launch

Device = Literal["cpu", "cuda", "tpu"]
LABEL = "spile"
ON_HOSTS = ("TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES", "MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES",
            "MEGASCALE_SLICE_ID")  # fmt: skip
"""Variables that tell a container its place in the slice; they differ between hosts."""
_PASSED = ("HF_TOKEN", "STORAGE_EMULATOR_HOST", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN",
           "AWS_REGION", "AWS_ENDPOINT_URL", "JAX_PLATFORMS")  # fmt: skip
"""Variables that are passed into the container by name, so that no secret is on a command line."""
_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{0,62}")


def image_name(version: str, target: Device | None = None) -> str:
    """Return the default image name: ``spile:0.1.0``, or ``spile:0.1.0-tpu`` if a target is named.

    ``build``, ``run`` and ``pod`` share it, so that each finds what another has built.
    """
    tag = version.replace("+", "-")
    return f"spile:{tag}" if target is None else f"spile:{tag}-{target}"


@dataclass(frozen=True)
class Container:
    """A command, its image, and the folders, variables and devices of the machine that it gets."""

    image: str
    words: tuple[str, ...]
    device: Device = "cpu"
    name: str = "spile"
    runtime: str = "docker"
    mounts: tuple[tuple[str, str], ...] = ()
    """Folders of the host, each with its path in the container."""
    env: Mapping[str, str] = field(default_factory=dict)
    grace: int = 60
    """Seconds for the worker to commit when it is stopped."""

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise SpecError("--name", expected="letters, digits, dots and dashes", found=repr(self.name))
        if self.device not in get_args(Device):
            raise SpecError("--target", expected="cpu, cuda or tpu", found=repr(self.device))
        if not 0 <= self.grace <= 3600:
            raise SpecError("--grace", expected="from 0 to 3,600 seconds", found=str(self.grace))
        for _, inside in self.mounts:
            if not inside.startswith("/"):
                raise SpecError("--mount", expected="FOLDER:/PATH", found=inside)


def build_words(runtime: str, target: Device, image: str, context: str) -> list[str]:
    return [runtime, "build", "--target", target, "--tag", image, context]


def run_words(container: Container, *, user: str | None = None, passed: Sequence[str] = _PASSED) -> list[str]:
    """Return the command that runs the container in the foreground; ``passed`` names variables to pass on."""
    words = [container.runtime, "run", "--rm", "--init", "--name", container.name, "--label", f"{LABEL}=1"]
    words += _device(container)
    if user is not None and container.device != "tpu":
        words += ["--user", user]
    for here, inside in container.mounts:
        words += ["--volume", f"{here}:{inside}"]
    for name in passed:
        words += ["--env", name]
    for name, value in container.env.items():
        words += ["--env", f"{name}={value}"]
    return [*words, container.image, *container.words]


def _device(container: Container) -> list[str]:
    # Root owns the chips' device files, and the hosts of a slice communicate over the host's ports.
    if container.device == "tpu":
        return ["--privileged", "--network=host", "--user", "0:0"]
    if container.device == "cuda":
        everything = "nvidia.com/gpu=all"
        return ["--device", everything] if container.runtime.endswith("podman") else ["--gpus", "all"]
    return []


def _cleanup(container: Container) -> str:
    runtime, name = shlex.quote(container.runtime), shlex.quote(container.name)
    quiet = "> /dev/null 2>&1"
    return f"{runtime} stop -t {container.grace} {name} {quiet}; {runtime} rm -f {name} {quiet}"


def host_script(container: Container) -> str:
    """Return the script for a host: it runs the container and ends it when the script ends for any reason."""
    folders = " ".join(shlex.quote(here) for here, _ in container.mounts if here.startswith("/"))
    make = f"mkdir -p {folders} && " if folders else ""
    # The guard signals every process of the script; those that clean up must ignore it.
    return "\n".join(
        [
            "clean() { trap '' TERM INT HUP EXIT; " + _cleanup(container) + "; }",
            "trap 'clean; exit 143' TERM INT HUP",
            f"{make}{shlex.join(run_words(container, passed=(*ON_HOSTS, *_PASSED)))} &",
            "wait $!",
            "code=$?",
            "clean",
            "exit $code",
        ]
    )


def stop_script(runtime: str, name: str | None, grace: int = 60, *, none_is_error: bool = True) -> str:
    """Return a script that stops one container, or all of spile's, and prints ``stopped NAME`` for each.

    It exits with 1 if one does not stop or, with ``none_is_error``, if there is none; with 127 or 126 without a runtime
    or its daemon.
    """
    words = shlex.quote(runtime)
    which = f"--filter name=^{name}$" if name else f"--filter label={LABEL}=1"
    what = f"no container {name}" if name else "no container of spile"
    return (
        f"command -v {words} > /dev/null || {{ echo 'no {runtime} here' >&2; exit 127; }}\n"
        f'names=$({words} ps --all --format "{{{{.Names}}}}" {which}) || '
        f"{{ echo '{runtime} does not answer: is its daemon running?' >&2; exit 126; }}\n"
        f"[ -n \"$names\" ] || {{ echo '{what} here' >&2; exit {int(none_is_error)}; }}\n"
        "code=0\n"
        "for each in $names; do\n"
        f'  if {words} stop -t {grace} "$each" > /dev/null; then echo "stopped $each"; else code=1; fi\n'
        f'  {words} rm -f "$each" > /dev/null 2>&1\n'
        "done\n"
        "exit $code\n"
    )


def check_hosts(hosts: Sequence[Host], runtime: str, image: str, access: Access) -> None:
    """Raise if any host lacks the runtime, may not use it, or neither has the image nor can pull it."""
    words, quoted = shlex.quote(runtime), shlex.quote(image)
    script = (
        f"command -v {words} > /dev/null || {{ echo 'no {runtime}'; exit 127; }}\n"
        f"{words} version > /dev/null 2>&1 || {{ echo '{runtime} cannot be used by '$(id -un); exit 126; }}\n"
        f"{words} image inspect {quoted} > /dev/null 2>&1 || {words} pull --quiet {quoted} > /dev/null 2>&1 || "
        f"{{ echo no image {quoted}; exit 125; }}\n"
    )
    failed = [each for each in launch(hosts, lambda _: script, access=access) if each.error is not None]
    if not failed:
        return
    problems = [f"{each.host.label}: {each.output.strip().rpartition(chr(10))[2] or each.error}" for each in failed]
    raise UserError(
        f"{len(failed)} of {len(hosts)} hosts cannot run the container",
        found="; ".join(problems[:4]) + (f"; and {len(problems) - 4} more" if len(problems) > 4 else ""),
        fix="build it there with spile docker build and the same hosts, or install the runtime",
    )
