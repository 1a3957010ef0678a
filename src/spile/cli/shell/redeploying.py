"""A second deployment of a fleet, ``spile deploy --skip-dataset``: what it takes of the first, and on whose word."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING, Any

from spile.cli.flags import confirm
from spile.cli.shell.remembering import as_before, as_words, given

if TYPE_CHECKING:
    from rich.console import Console

    from spile.cli.deploy import DeployFlags
    from spile.cli.flags import PlaceFlags
    from spile.fleet.home import FleetHome
    from spile.fleet.provider import Provider
    from spile.fleet.spec import FleetSpec

__all__ = ["known_fleet", "place_as_before", "prepared", "steps_as_before", "told_of_steps"]


def known_fleet(provider: Provider, home: FleetHome, console: Console, *, yes: bool) -> FleetSpec:
    """What the bucket says was deployed. What nobody outside of it knows is asked about: it becomes the user's word."""
    from spile.fleet.pins import check_pinned

    fleet, pin = home.read_pinned()
    doubt = check_pinned(provider, home.folder.url, fleet, pin)
    if doubt is not None:
        confirm(f"{doubt.problem}. Take its flags and machines as yours all the same?", yes=yes, console=console)
    return fleet


def place_as_before(place: PlaceFlags, before: FleetSpec) -> tuple[PlaceFlags, list[str]]:
    """Zones and names."""
    return as_before(place, {"zones": ",".join(before.zones), **before.flags.get("place", {})}, {"fleet", "project"})


def steps_as_before(steps: DeployFlags, before: FleetSpec) -> tuple[DeployFlags, list[str]]:
    """What every worker and every monitor is told. Values of variables and addresses of webhooks are not shown."""
    environment = [f"{name}={value}" for name, value in before.environment.items()]
    told = {"env": environment, "notify": list(before.notify), **before.flags.get("steps", {})}
    taken, _ = as_before(steps, {name: value for name, value in told.items() if value})
    new = given(taken).keys() - given(steps).keys()
    shown = [f"--env {name}=…" for name in before.environment] if "env" in new else []
    shown += ["--notify …"] if "notify" in new else []
    return taken, [*shown, *(["--keep-finished"] if "keep_finished" in new else [])]


def told_of_steps(steps: DeployFlags) -> dict[str, Any]:
    """What ``fleet.json`` keeps of them beside the variables and the webhooks."""
    return {"keep_finished": True} if steps.keep_finished else {}


def prepared(place: PlaceFlags, steps: DeployFlags, bucket: str, *, again: bool) -> str:
    """What is true after ``--skip-launch``, and the command that launches. ``again``: machines were told of it."""
    said = {**_only(place, "fleet", "project"), **_only(steps, "adopt", "launch", "user", "ssh_key", "internal_ip")}
    words = ["--gcs-bucket", bucket, *as_words(said), "--skip-dataset", *([] if steps.adopt else ["--create-tpus"])]
    taken = "the fleet's machines that are there take it now; " if again else ""
    return f"prepared; {taken}launch with: spile deploy {shlex.join(words)}"


def _only(flags: PlaceFlags | DeployFlags, *names: str) -> dict[str, Any]:
    return {name: value for name, value in given(flags).items() if name in names}
