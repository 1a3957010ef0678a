"""One container image, on this machine or on every host of a slice: the commands of docker, podman or nerdctl.

On a host the container's life hangs on a script under the ssh guard: whatever ends the script stops the container,
gives the worker in it time to commit, and removes it.
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

__all__ = [
    "ON_HOSTS",
    "Container",
    "Device",
    "build_words",
    "check_hosts",
    "host_script",
    "image_name",
    "run_words",
    "stop_script",
]

Device = Literal["cpu", "cuda", "tpu"]
LABEL = "spile"
ON_HOSTS = ("TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES", "MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES",
            "MEGASCALE_SLICE_ID")  # fmt: skip
"""Variables that tell a container its place in the slice; each host has its own."""
_PASSED = ("HF_TOKEN", "STORAGE_EMULATOR_HOST", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN",
           "AWS_REGION", "AWS_ENDPOINT_URL", "JAX_PLATFORMS")  # fmt: skip
"""Variables that go from a shell into its container, by name: a secret's value stands on no command line."""
_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{0,62}")


def image_name(version: str, target: Device) -> str:
    """``spile:0.1.0-tpu``."""
    return f"spile:{version.replace('+', '-')}-{target}"


@dataclass(frozen=True)
class Container:
    """What runs in which image, with what of the machine."""

    image: str
    words: tuple[str, ...]
    device: Device = "cpu"
    name: str = "spile"
    runtime: str = "docker"
    mounts: tuple[tuple[str, str], ...] = ()
    """A host's folder and where the container sees it."""
    env: Mapping[str, str] = field(default_factory=dict)
    grace: int = 60
    """Seconds that the worker has to commit when it is stopped."""

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
    """Build the image from a checkout."""
    return [runtime, "build", "--target", target, "--tag", image, context]


def run_words(container: Container, *, user: str | None = None, passed: Sequence[str] = _PASSED) -> list[str]:
    """The command that runs the container in the foreground. ``passed``: variables that are set there."""
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
    if container.device == "tpu":  # the chips' device files are root's, and hosts of a slice talk over the host's ports
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
    """What a host's bash runs: the container, and its end with the script's, however that comes."""
    folders = " ".join(shlex.quote(here) for here, _ in container.mounts if here.startswith("/"))
    make = f"mkdir -p {folders} && " if folders else ""
    # The guard asks every new process of the script to end too: the ones that clean up must not listen.
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


def stop_script(runtime: str, name: str | None, grace: int = 60) -> str:
    """Stop one container, or all of ours; says which. None is no error."""
    words = shlex.quote(runtime)
    which = f"--filter name=^{name}$" if name else f"--filter label={LABEL}=1"
    return (
        f"command -v {words} > /dev/null || {{ echo 'no {runtime} here'; exit 127; }}\n"
        f'for each in $({words} ps --all --format "{{{{.Names}}}}" {which}); do\n'
        f'  {words} stop -t {grace} "$each" > /dev/null; {words} rm -f "$each" > /dev/null 2>&1; echo "stopped $each"\n'
        "done\n"
    )


def check_hosts(hosts: Sequence[Host], runtime: str, image: str, access: Access) -> None:
    """Every host has the runtime, may use it, and has the image or can pull it; told for all, before any starts."""
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
    told = [f"{each.host.label}: {each.output.strip().rpartition(chr(10))[2] or each.error}" for each in failed]
    raise UserError(
        f"{len(failed)} of {len(hosts)} hosts cannot run the container",
        found="; ".join(told[:4]) + (f"; and {len(told) - 4} more" if len(told) > 4 else ""),
        fix="build it there: spile docker build --target … with the same hosts; or install the runtime",
    )
