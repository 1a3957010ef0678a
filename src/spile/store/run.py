"""``run.json``: created by whoever comes first, compared by everybody else, never changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any

from spile.errors import Damaged, RunMismatch, untrusted
from spile.objects.folder import Folder, NotFound
from spile.spec.identity import RunIdentity
from spile.spec.run import GenerationSpec, PromptSpec
from spile.store.layout import RUN
from spile.store.sealed import RUN_FORMATS, seal, unseal
from spile.version import __version__

__all__ = ["differences", "join_run", "now_iso", "parse_iso", "read_run"]

_ABSENT = "nothing"


def now_iso() -> str:
    """The time, in UTC, as every record writes it."""
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def parse_iso(text: str) -> float:
    """Seconds since the epoch of a time as :func:`now_iso` writes it; ValueError for anything else."""
    return datetime.fromisoformat(text).timestamp()


def differences(stored: Mapping[str, Any], ours: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """(field, stored, ours) of each field that differs, after a turn through JSON."""
    plain = json.loads(json.dumps(ours))
    names = sorted({*stored, *plain})
    return [
        (name, stored.get(name, _ABSENT), plain.get(name, _ABSENT))
        for name in names
        if stored.get(name, _ABSENT) != plain.get(name, _ABSENT)
    ]


def mismatch(what: str, differing: list[tuple[str, Any, Any]], fix: str) -> RunMismatch:
    """The error that names every field."""
    return RunMismatch(
        what,
        expected=", ".join(f"{name} = {stored}" for name, stored, _ in differing),
        found=", ".join(f"{name} = {ours}" for name, _, ours in differing),
        fix=fix,
    )


def join_run(root: Folder, identity: RunIdentity) -> None:
    """Create ``run.json``, or check that it is this run's; :class:`RunMismatch` names every field that differs."""
    record = {
        "format": identity.format,
        "fingerprint": identity.fingerprint(),
        "model": identity.model,
        "revision": identity.revision,
        **({} if identity.adapter is None else {"adapter": identity.adapter}),
        "numbers": identity.compared(),
        "created": now_iso(),
        "version": __version__,
    }
    stored = _read(root)
    if stored is None:
        if root.create(RUN, seal(record, indent=1)):
            return
        stored = _read(root)
    if stored is None:
        raise Damaged(f"{root.url}/{RUN} vanished while it was being read")
    differing = differences(stored["numbers"], identity.compared())
    if differing:
        raise mismatch(
            f"{root.url} holds another run",
            differing,
            "give the same settings, or another --output",
        )


def read_run(root: Folder) -> RunIdentity | None:
    """The run at this root, or None where there is none."""
    record = _read(root)
    if record is None:
        return None
    with untrusted(Damaged, f"{root.url}/{RUN} is no run's record"):
        compared = dict(record["numbers"])
        prompt = {each.name: compared.pop(f"prompt.{each.name}") for each in fields(PromptSpec)}
        own = {each.name: compared.pop(each.name) for each in fields(RunIdentity) if each.name in compared}
        own["keep"] = tuple(own.get("keep", ()))
        generation = _generation(compared)
        identity = RunIdentity(
            **own,
            model=record["model"],
            revision=record["revision"],
            adapter=record.get("adapter"),
            prompt=PromptSpec(**prompt),
            generation=generation,
            unknown=compared,
        )
    if identity.fingerprint() != record.get("fingerprint"):
        raise Damaged(
            f"{root.url}/{RUN} does not match its fingerprint",
            expected=record.get("fingerprint"),
            found=identity.fingerprint(),
        )
    return identity


def _generation(compared: dict[str, Any]) -> GenerationSpec | None:
    """Taken out of what is compared; absent where no answers are generated."""
    names = [each.name for each in fields(GenerationSpec)]
    found = {name: compared.pop(f"generation.{name}") for name in names if f"generation.{name}" in compared}
    lists = {name: tuple(value) for name, value in found.items() if isinstance(value, list)}
    return GenerationSpec(**{**found, **lists}) if found else None


def _read(root: Folder) -> dict[str, Any] | None:
    try:
        record = unseal(root.get(RUN), f"{root.url}/{RUN}", RUN_FORMATS)
    except NotFound:
        return None
    if not isinstance(record.get("numbers"), dict):
        raise Damaged(f"{root.url}/{RUN} is no run's record", expected="an object named numbers")
    return record
