"""docs/tpu.md says what the compiler said, for the versions that a fleet's machines install."""

from __future__ import annotations

import re

import pytest
from bench.tpu_matrix import PROGRAMS

from docs.pages import ROOT
from spile.planning.machines import GENERATIONS, GIB, Generation, known_machines

PAGE = (ROOT / "docs/tpu.md").read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("| ")]
KERNELS = {"xla": "XLA", "flash": "splash kernel"}


def test_every_program_compiles_for_every_generation() -> None:
    header, *rows = [row for row in ROWS if len(row) == len(GENERATIONS) + 1]
    assert [cell.split()[0] for cell in header[1:]] == [generation.name for generation in GENERATIONS]
    assert [row[0] for row in rows] == list(PROGRAMS)
    assert {cell for row in rows for cell in row[1:]} == set(KERNELS)
    assert "**fails**" not in PAGE


def test_the_compiler_is_the_one_that_machines_install() -> None:
    pinned = (ROOT / "src/spile/fleet/requirements.txt").read_text()
    jax, libtpu = (re.search(rf"^{name}==(\S+)", pinned, re.MULTILINE)[1] for name in ("jax", "libtpu"))  # type: ignore[index]
    assert f"Compiled with jax {jax} and libtpu {libtpu}:" in PAGE, "run make tpu-check"


@pytest.mark.parametrize("generation", GENERATIONS, ids=lambda generation: generation.name)
def test_the_table_of_generations(generation: Generation) -> None:
    machines = [machine for machine in known_machines() if machine.generation == generation.name]
    (row,) = [row for row in ROWS if row[1].startswith(f"`{machines[0].name}` to `{machines[-1].name}`")]
    assert row[2] == f"{machines[0].hbm_per_device // GIB} GiB"
    assert ("Cloud TPU API" in row[3]) == generation.tpu_api
    compiled = dict(
        zip(
            [generation.name for generation in GENERATIONS], next(r for r in ROWS if r[0] == "extract")[1:], strict=True
        )
    )
    assert row[4] == KERNELS[compiled[generation.name]]
