"""What is built and released: pinned by hash, listed in a bill of materials."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]


def pins(name: str) -> dict[str, str]:
    text = (ROOT / name).read_text(encoding="utf-8")
    return dict(re.findall(r"^([\w.-]+)==([^\s;]+)", text, re.MULTILINE))


def test_images_install_nothing_without_a_hash() -> None:
    """``jax[tpu]`` and ``jax[cuda13]`` were installed by version only, with what they depend on."""
    text = re.sub(r"\\\n", " ", (ROOT / "Dockerfile").read_text(encoding="utf-8"))
    installs = re.findall(r"pip(?: --python \S+)? install ([^&\n]*)", text)
    assert len(installs) == 5
    for words in installs:
        assert "--require-hashes" in words or words.split() == ["--no-deps", "wheels/*.whl"], words


def test_the_accelerators_libraries_belong_to_the_pinned_jax() -> None:
    image, machines, cuda = (
        pins(name)
        for name in ("requirements.txt", "src/spile/fleet/requirements.txt", "src/spile/fleet/requirements-cuda.txt")
    )
    assert machines["libtpu"]
    assert {image["jax"], machines["jax"], cuda["jax-cuda13-plugin"], cuda["jax-cuda13-pjrt"]} == {image["jax"]}
    for name in ("src/spile/fleet/requirements.txt", "src/spile/fleet/requirements-cuda.txt"):
        blocks = re.findall(r"^\S+==.*?(?=^\S|\Z)", (ROOT / name).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
        assert all("--hash=sha256:" in block for block in blocks)


def test_the_pins_satisfy_what_the_project_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    asked = [*project["dependencies"], *(text for name in ("data", "ray", "view", "dev") for text in extras[name])]
    pinned = pins("requirements.txt")
    for requirement in map(Requirement, asked):
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), requirement
    (starlette,) = (each for each in map(Requirement, extras["view"]) if each.name == "starlette")
    assert not starlette.specifier.contains("1.0.0"), "its request.url.path comes from the Host header"


@pytest.mark.parametrize(("said", "code"), [(f"sha256:{'5' * 64}", 0), ("unauthorized", 2)])
def test_the_base_image_is_pinned_to_the_digest_that_its_registry_gives(said: str, code: int, tmp_path: Path) -> None:
    for name in ("Makefile", "Dockerfile"):
        shutil.copy(ROOT / name, tmp_path)
    before = (tmp_path / "Dockerfile").read_text()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "docker").write_text(f'#!/bin/sh\necho "$@" >> asked\necho {said}\n')
    (tmp_path / "bin" / "docker").chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}"}
    for _ in range(2):  # a pinned base is pinned again, to what its tag is now
        ran = subprocess.run(["make", "base-image"], cwd=tmp_path, env=env, capture_output=True, check=False)
        assert ran.returncode == code, ran.stderr
    after = (tmp_path / "Dockerfile").read_text()
    assert "imagetools inspect python:3.12-slim-bookworm --format" in (tmp_path / "asked").read_text()
    pinned = re.sub(r"^ARG BASE=([^@\n]*).*", rf"ARG BASE=\1@{said}", before, count=1, flags=re.MULTILINE)
    assert after == (before if code else pinned)


@pytest.fixture
def sbom() -> Any:
    spec = importlib.util.spec_from_file_location("make_sbom", ROOT / "scripts" / "make_sbom.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_bill_of_materials_has_every_dependency(sbom: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "spile-0-py3-none-any.whl"
    wheel.write_bytes(b"x")
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    bill = sbom.bill([wheel])
    assert (bill["bomFormat"], bill["specVersion"]) == ("CycloneDX", "1.6")
    assert bill == sbom.bill([wheel]), "the same environment gives the same bill"
    parts = {part["name"]: part for part in bill["components"]}
    assert {"jax", "jaxlib", "numpy", "rich", "obstore", "ml-dtypes"} <= set(parts)
    assert not {"pytest", "ruff", "spile"} & set(parts), "neither the developers' tools nor spile itself"
    assert parts["numpy"]["purl"] == f"pkg:pypi/numpy@{parts['numpy']['version']}"
    whole = bill["metadata"]["component"]
    (listed,) = whole["externalReferences"]
    assert listed["hashes"] == [{"alg": "SHA-256", "content": hashlib.sha256(b"x").hexdigest()}]
    known = {part["bom-ref"] for part in (whole, *parts.values())}
    edges = {each["ref"]: each["dependsOn"] for each in bill["dependencies"]}
    assert set(edges) == known
    assert {other for each in edges.values() for other in each} <= known
    assert parts["jaxlib"]["bom-ref"] in edges[parts["jax"]["bom-ref"]]
    for part in parts.values():
        assert part.get("licenses"), part["name"]


def test_there_is_a_policy_that_says_how_to_report() -> None:
    assert "Report a vulnerability" in (ROOT / "SECURITY.md").read_text(encoding="utf-8")
