"""The records of a run as a whole: ``run.json`` with its identity, and ``spec.json`` with the last command's spec."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from spile.errors import Damaged, RunMismatch, SpecError, untrusted
from spile.objects import open_folder, split
from spile.objects.folder import Folder, NotFound, get_if_present
from spile.spec.identity import RunIdentity
from spile.spec.positions import ALL
from spile.spec.records import read_record
from spile.spec.run import EMBEDDED, STORED, GenerationSpec, PromptSpec, RunSpec, spec_fields
from spile.spec.taps import Steer
from spile.store.layout import ANSWERS, RUN, SPEC
from spile.store.ledger import FORMAT, iso_time, seal, unseal
from spile.version import __version__

_ABSENT = "nothing"
_SAME_SETTINGS = "give the same settings, or another --output"


def differences(stored: Mapping[str, Any], ours: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return (field, stored, ours) for each field that differs when both are JSON values."""
    theirs, ours = json.loads(json.dumps([dict(stored), dict(ours)]))
    pairs = [(name, theirs.get(name, _ABSENT), ours.get(name, _ABSENT)) for name in sorted({*theirs, *ours})]
    return [(name, stored, ours) for name, stored, ours in pairs if stored != ours]


def mismatch(place: str, differing: list[tuple[str, Any, Any]], fix: str = _SAME_SETTINGS) -> RunMismatch:
    """Return an error that names every differing field."""
    stored = ", ".join(_setting(name, value) for name, value, _ in differing)
    ours = ", ".join(_setting(name, value) for name, _, value in differing)
    return RunMismatch(f"{place} was created with {stored}, but this command asks for {ours}", fix=fix)


def _setting(name: str, value: object) -> str:
    """Return a field of an identity and its value in words."""
    if value in (_ABSENT, [], None):
        value = ALL if name == "positions" else "none"
    if isinstance(value, list):
        value = ", ".join(map(str, value))
    match name:
        case "sha256":
            return f"data of sha256 {str(value)[:12]}…"
        case "lines":
            return f"{value} rows"
        case "samples":
            return f"{value} samples"
    return f"{name} {value}"


def join_run(root: Folder, identity: RunIdentity) -> None:
    """Create ``run.json``, or check that the existing one belongs to this run.

    Raises:
        RunMismatch: If it belongs to another run. The message names every field that differs.

    """
    stored = read_run(root)
    if stored is None and root.create(RUN, _run_bytes(identity)):
        return
    stored = stored or read_run(root)
    if stored is None:
        raise Damaged(f"{root.url}/{RUN} vanished while it was being read")
    if differing := differences(stored.compared(), identity.compared()):
        raise mismatch(root.url, differing)
    if stored.folders != identity.folders:  # Another worker has just created the run.
        raise RunMismatch(
            f"{root.url} was created with folders named {stored.folders}_N",
            found=f"{identity.folders}_N",
            fix="run the same command again",
        )


def _run_bytes(identity: RunIdentity) -> bytes:
    shown = {name: getattr(identity, name) for name in ("adapter", "vocab_size", "steer")}
    record = {
        "format": FORMAT,
        "id": secrets.token_hex(8),
        "fingerprint": identity.fingerprint(),
        "model": identity.model,
        "revision": identity.revision,
        **{name: value for name, value in shown.items() if value},
        "folders": identity.folders,
        "numbers": identity.compared(),
        "created": iso_time(),
        "version": __version__,
    }
    return seal(record, indent=1)


def claim_answers(folder: Folder, root: Folder) -> None:
    """Record in a folder for answers that it belongs to the run at ``root``.

    Raises:
        RunMismatch: If it belongs to another run, whose answers would be overwritten.

    """
    ours = {"run": _run_id(root), "output": root.url}
    if not folder.create(ANSWERS, json.dumps(ours).encode() + b"\n"):
        refuse_other_answers(folder, root)


def _run_id(root: Folder) -> object:
    return (_read_record(root) or {}).get("id")


def refuse_other_answers(folder: Folder, root: Folder) -> None:
    """Raise as :func:`claim_answers` does, and write nothing; the run need not exist yet."""
    content = get_if_present(folder, ANSWERS)
    if content is None:
        return
    where = f"{folder.url}/{ANSWERS}"
    with untrusted(Damaged, f"{where} does not say which run the answers belong to", fix=f"delete {where}"):
        owner = json.loads(content)
        other, output = owner["run"], str(owner["output"])
    if other != _run_id(root):
        raise RunMismatch(
            f"--output-dir {folder.url} holds the answers of another run",
            expected=f"those of {root.url}",
            found=f"those of {output}",
            fix=f"choose another --output-dir, or delete {where} to replace those answers",
        )


def write_spec(root: Folder, spec: RunSpec) -> str:
    """Write ``spec.json`` next to ``run.json``, unless it holds this spec already, and return its location.

    Every worker of the run starts from the same file, in any folder: paths are absolute, and the number of the stream
    is stored only if the data has one.
    """
    content = absolute_paths(spec if spec.one_stream is not None else spec.for_stream(0)).to_json()
    if get_if_present(root, SPEC) != content:
        root.put(SPEC, content)
    return f"{root.url}/{SPEC}"


def absolute_paths(spec: RunSpec) -> RunSpec:
    """Return the spec with absolute paths. Names on the hub and URLs stay."""
    steers = map(Steer.parse, spec.steer)
    paths: dict[str, Any] = {
        name: absolute_path(value)
        for name in ("output", "local_copy", "checkpoint_dir", "answers_dir")
        if (value := getattr(spec, name)) is not None
    }
    folder = spec.data.dataset_dir
    return replace(
        spec,
        model=absolute_name(spec.model),
        adapter=spec.adapter and absolute_name(spec.adapter),
        data=replace(
            spec.data,
            dataset=absolute_name(spec.data.dataset),
            dataset_dir=folder and absolute_path(folder),
        ),
        steer=tuple(str(replace(each, source=each.source and absolute_path(each.source))) for each in steers),
        **paths,
    )


def absolute_path(place: str) -> str:
    """Return a path as an absolute path; a URL stays."""
    return place if "://" in place else str(Path(place).expanduser().absolute())


def absolute_name(name: str) -> str:
    """Return a path as an absolute path; a name on the hub or a URL stays."""
    if name.startswith(STORED):
        return STORED + absolute_path(name.removeprefix(STORED))
    return absolute_path(name) if is_location(name) else name


def is_location(name: str) -> bool:
    """Return whether the name is a path or a URL and not a name on the hub."""
    return "://" in name or name.startswith((".", "/", "~")) or (name != EMBEDDED and Path(name).exists())


def refuse_other_spec(root: Folder, spec: RunSpec) -> None:
    """Refuse a spec that the workers of an existing run would refuse, as far as the spec alone shows it.

    A launcher calls it before it writes the spec. The fields are compared with ``run.json``, and the taps with the
    stored ``spec.json``. The value ``auto`` agrees with any other, and so does ``keep`` without names.

    Raises:
        RunMismatch: If a field differs. The message names each one.

    """
    run = read_run(root)
    if run is None:
        return
    differing = spec_differences(run, spec)
    if other := stored_spec(root):
        stored, ours = ([str(tap) for tap in each.selected_taps(run.n_layers)] for each in (other, spec))
        differing += differences({"taps": stored}, {"taps": ours})
    if differing:
        raise mismatch(root.url, differing)


def spec_differences(run: RunIdentity, spec: RunSpec) -> list[tuple[str, Any, Any]]:
    """Return (field, stored, ours) for each field in which a spec differs from ``run.json``, as far as it shows it."""
    known, ours = run.compared(), _identity_fields(spec)
    left_out = {"backend": "jax", "prompt.template_from": None}  # run.json does not state these defaults
    theirs: dict[str, Any] = {name: known.get(name, left_out.get(name, _ABSENT)) for name in ours}
    theirs["positions"], theirs["keep"] = run.positions, list(run.keep) if spec.data.keep else ours["keep"]
    return differences(theirs, ours)


def _identity_fields(spec: RunSpec) -> dict[str, Any]:
    """Return the identity of the run as far as the spec alone states it, by the names of ``run.json``."""
    found: dict[str, Any] = {"generation.capture": _ABSENT if spec.generation is None else spec.generation.capture}
    for each in spec_fields():
        part, name = each.path[:-1], each.path[-1]
        if not each.option.identity or (part == ("generation",) and spec.generation is None):
            continue
        value = each.get(spec)
        if name in ("model", "adapter", "steer") or value == "auto" or (name == "backend" and spec.same_numbers):
            continue  # The run has the hash of the weights and vectors, which only a worker can compare.
        prefix = f"{part[-1]}." if part and part[-1] in ("prompt", "generation") else ""
        found[prefix + name] = sorted(value) if name == "keep" else value
    return found


def stored_spec(root: Folder) -> RunSpec | None:
    """Return the spec of the last command of a run; None if there is none or it is damaged, and will be replaced."""
    with suppress(NotFound, SpecError):
        return RunSpec.from_json(root.get(SPEC), f"{root.url}/{SPEC}")
    return None


def read_spec(location: str) -> RunSpec:
    """Read a run spec from a file or an object of a bucket.

    Raises:
        SpecError: If there is no such file, or if it is not a run spec.

    """
    folder, key = split(location)
    try:
        content = open_folder(folder).get(key)
    except NotFound as error:
        raise SpecError(f"--spec {location}", expected="a run spec", found="no such file") from error
    return RunSpec.from_json(content, location)


def read_run(root: Folder) -> RunIdentity | None:
    """Read the ``run.json`` of a dataset; return None if there is none.

    Raises:
        Damaged: If it is malformed, or if its content does not match its fingerprint.

    """
    record = _read_record(root)
    if record is None:
        return None
    with untrusted(Damaged, f"{root.url}/{RUN} is not the record of a run"):
        compared = dict(record["numbers"])
        prompt = _pop_fields(PromptSpec, "prompt.", compared)
        generation = _pop_fields(GenerationSpec, "generation.", compared)
        own = _pop_fields(RunIdentity, "", compared)
        parts = {"prompt": prompt, "generation": generation or None, "unknown": compared}
        identity = read_record(RunIdentity, {**record, **own, **parts})
    if identity.fingerprint() != record.get("fingerprint"):
        raise Damaged(
            f"{root.url}/{RUN} does not match its fingerprint",
            expected=record.get("fingerprint"),
            found=identity.fingerprint(),
        )
    return identity


def _pop_fields(cls: type, prefix: str, compared: dict[str, Any]) -> dict[str, Any]:
    """Remove the fields of a dataclass, whose names have the prefix, from ``compared`` and return them."""
    names = [each.name for each in fields(cls)]
    return {name: compared.pop(prefix + name) for name in names if prefix + name in compared}


def _read_record(root: Folder) -> dict[str, Any] | None:
    data = get_if_present(root, RUN)
    return None if data is None else unseal(data, f"{root.url}/{RUN}")
