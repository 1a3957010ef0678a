"""One container image, on this machine or on every host of a slice: the commands of docker, podman or nerdctl.

On a host, a script under the ssh guard owns the container: when the script ends for any reason, it stops the container,
which gives the worker time to commit, and removes it.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from spile.engines.registry import check_texts
from spile.errors import UserError
from spile.hosts.hosts import Access, Host
from spile.hosts.run import launch
from spile.spec.options import check_number, parse_pairs
from spile.version import __version__

Device = Literal["cpu", "cuda", "tpu"]
LABEL = "spile"
ON_HOSTS = ("TPU_WORKER_ID", "TPU_WORKER_HOSTNAMES", "MEGASCALE_COORDINATOR_ADDRESS", "MEGASCALE_NUM_SLICES",
            "MEGASCALE_SLICE_ID")  # fmt: skip
"""Variables that tell a container its place in the slice; they differ between hosts."""
_PASSED = ("HF_TOKEN", "STORAGE_EMULATOR_HOST", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN",
           "AWS_REGION", "AWS_ENDPOINT_URL", "JAX_PLATFORMS")  # fmt: skip
"""Variables that are passed into the container by name, so that no secret is on a command line."""
_DEFAULT = ("spile", "extract")
_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9_.-]{0,62}")
_MOUNT = re.compile(r".+:/[^:]*", re.DOTALL)


@dataclass(frozen=True)
class ContainerOptions:
    """The image, and the parts of the machine that the container gets. They are the flags of ``spile docker``."""

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

    def __post_init__(self) -> None:
        check_texts("--name", _NAME, "letters, digits, dots and dashes", self.name)
        check_number("--grace", self.grace, 0, 3600)
        check_texts("--mount", _MOUNT, "FOLDER:/PATH", *(self.mount or ()))

    @property
    def image_name(self) -> str:
        """The name of the image. ``build``, ``run`` and ``pod`` share it, so that each finds what another has built."""
        tag = __version__.replace("+", "-")
        return self.image or (f"spile:{tag}" if self.target is None else f"spile:{tag}-{self.target}")

    def device(self, *, here: bool) -> Device:
        """Return the target: as given, or TPUs on hosts and none on this machine."""
        return self.target or ("cpu" if here else "tpu")

    def mounts(self, *, here: bool) -> list[tuple[str, str]]:
        """Return folders, each with its path in the container; ``here``: the folders are on this machine."""
        parts = [text.rpartition(":") for text in self.mount or ()]
        return [(str(Path(folder).expanduser().absolute()) if here else folder, inside) for folder, _, inside in parts]


def build_command(options: ContainerOptions, context: str, *, here: bool) -> list[str]:
    return [options.runtime, "build", "--target", options.device(here=here), "--tag", options.image_name, context]


def run_command(options: ContainerOptions, command: Sequence[str], *, here: bool, user: str | None = None) -> list[str]:
    """Return the command that runs a container in the foreground, on this machine (``here``) or on a host."""
    device = options.device(here=here)
    words = [options.runtime, "run", "--rm", "--init", "--name", options.name, "--label", f"{LABEL}=1"]
    if device == "tpu":
        # Root owns the chips' device files, and the hosts of a slice communicate over the host's ports.
        words += ["--privileged", "--network=host", "--user", "0:0"]
    elif device == "cuda":
        podman = options.runtime.endswith("podman")
        words += ["--device", "nvidia.com/gpu=all"] if podman else ["--gpus", "all"]
    if user is not None and device != "tpu":
        words += ["--user", user]
    for folder, inside in options.mounts(here=here):
        words += ["--volume", f"{folder}:{inside}"]
    for name in _PASSED if here else (*ON_HOSTS, *_PASSED):
        words += ["--env", name]
    for name, value in parse_pairs("--env", options.env).items():
        words += ["--env", f"{name}={value}"]
    return [*words, options.image_name, *(command or _DEFAULT)]


def host_script(options: ContainerOptions, command: Sequence[str]) -> str:
    """Return the script for a host: it runs the container and ends it when the script ends for any reason."""
    folders = " ".join(shlex.quote(folder) for folder, _ in options.mounts(here=False) if folder.startswith("/"))
    make = f"mkdir -p {folders} && " if folders else ""
    runtime, name, quiet = shlex.quote(options.runtime), shlex.quote(options.name), "> /dev/null 2>&1"
    cleanup = f"{runtime} stop -t {options.grace} {name} {quiet}; {runtime} rm -f {name} {quiet}"
    # The guard signals every process of the script; those that clean up must ignore it.
    return "\n".join(
        [
            "clean() { trap '' TERM INT HUP EXIT; " + cleanup + "; }",
            "trap 'clean; exit 143' TERM INT HUP",
            f"{make}{shlex.join(run_command(options, command, here=False))} &",
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
