"""Compile every program for every generation of TPU with Google's compiler: ``make tpu-check``.

``--quick`` compiles one program per generation; ``--write`` puts the tables into docs/tpu.md. It needs ``libtpu`` and
no TPU. Each generation has a process of its own, because the compiler ends its process at some errors. The exit code
is 1 if a program does not compile, or not with the attention that was chosen for the generation.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from bench.shapes import _COMMON, SHAPES
from spile.compute.generator import GenerationPrograms, SlotPlan
from spile.compute.mesh import MeshPlan, make_mesh
from spile.models.architecture import ModelConfig
from spile.models.families import read_config
from spile.models.params import one_run_per_layer, param_shapes
from spile.planning.machines import GENERATIONS, Machine, known_machines
from spile.planning.tpu_compiler import ENVIRONMENT, Program, make_producer, topology_devices
from spile.spec.run import GenerationSpec
from spile.spec.taps import Tap, select_taps

PAGE = Path(__file__).parent.parent / "docs" / "tpu.md"
_BEGIN, _END = "<!-- made by make tpu-check -->", "<!-- end -->"
_LENGTH = 256
_SELECTED = 16
"""With --positions, this part of the batch leaves the device."""


@dataclass(frozen=True)
class Extraction:
    """A program of extract, stream or tap."""

    dtype: str = "bfloat16"
    store_dtype: str = "bfloat16"
    positions: str = "all"
    kinds: tuple[str, ...] = ("residual",)
    layers: tuple[int, ...] | None = None

    def compile(self, config: ModelConfig, machine: Machine) -> str:
        """Compile for one batch row per device; return the implementation of attention."""
        taps = select_taps(self.kinds, self.layers, config.n_layers)
        program = Program(config, taps, machine.name, _LENGTH, self.dtype, self.store_dtype, positions=self.positions)
        producer = make_producer(program)
        chosen = producer.attention
        producer.compile((1, _LENGTH, _LENGTH // (1 if self.positions == "all" else _SELECTED)))
        if producer.attention != chosen:
            raise RuntimeError(f"the {chosen} kernel does not compile")
        return chosen


@dataclass(frozen=True)
class Generation:
    """A program of infer."""

    part: Literal["reader", "stepper"]

    def compile(self, config: ModelConfig, machine: Machine) -> str:
        """Compile for four answers per device; return the implementation of attention."""
        programs = _generation_programs(config, machine)
        (programs.reader if self.part == "reader" else programs.stepper).result()
        return "xla"


@functools.cache
def _generation_programs(config: ModelConfig, machine: Machine) -> GenerationPrograms:
    devices = topology_devices(machine)
    shape = (len(devices), 1)
    mesh, runs = make_mesh(shape, devices), one_run_per_layer(config.n_layers)
    return GenerationPrograms(
        param_shapes(config, "bfloat16", runs, MeshPlan(config, *shape).place(mesh), head=True),
        config,
        tuple(Tap("residual", layer) for layer in range(config.n_layers)),
        mesh=mesh,
        plan=SlotPlan(slots=4, capacity=_LENGTH, chunk=128, rows=2, stride=4),
        generation=GenerationSpec(max_new_tokens=4),
        seed=0,
        dtype="bfloat16",
        store_dtype="bfloat16",
    )


_Program = Extraction | Generation
PROGRAMS: Mapping[str, _Program] = {
    "extract": Extraction(),
    "extract `--dtype float32`": Extraction("float32", "float32"),
    "extract `--store-dtype int8`": Extraction(store_dtype="int8"),
    "extract `--positions last`": Extraction(positions="last"),
    "stream, one tap": Extraction(layers=(1,)),
    "infer, prompts": Generation("reader"),
    "infer, answers": Generation("stepper"),
}
"""Compiled for every generation."""
_HEADS: Mapping[str, _Program] = {
    "extract `--dtype float32 --taps head_out`": Extraction("float32", "float32", kinds=("head_out",)),
    "extract `--dtype float32 --taps logits,loss`": Extraction("float32", "float32", kinds=("logits", "loss")),
}
_MODEL, _MORE_ON = "Qwen2", "v5e"
_GEMMA = {"head_dim": 256, "num_attention_heads": 4, "query_pre_attn_scalar": 256}
_SHAPES: Mapping[str, Mapping[str, object]] = {
    _MODEL: {**_COMMON, **SHAPES["small"], "hidden_size": 512},
    "Gemma 2": {**SHAPES["small-gemma2"], **_GEMMA},
    "mixture of 16 experts": SHAPES["small-qwen3-moe"],
}
"""Small shapes with the head sizes of real ones: float32 at the width of 0.5B takes seven times as long to compile."""
_Cells = dict[tuple[str, str], str]
"""The attention of each model and program that compiled; empty if it did not."""


def _programs(generation: str, *, quick: bool) -> dict[tuple[str, str], _Program]:
    """Return what is compiled for a generation, by model and name."""
    if quick:
        return {(_MODEL, "extract"): PROGRAMS["extract"]}
    models = _SHAPES if generation == _MORE_ON else (_MODEL,)
    cells = {(model, name): program for model in models for name, program in PROGRAMS.items()}
    return cells | {(_MODEL, name): program for name, program in _HEADS.items() if generation == _MORE_ON}


def _machine(generation: str) -> Machine:
    """Return the smallest slice with several chips: programs of one chip lack what distributes them."""
    return next(machine for machine in known_machines() if machine.generation == generation and machine.chips > 1)


def _compile_here(generation: str, *, quick: bool) -> None:
    """Compile for one generation; print a line of JSON for each program."""
    for (model, name), program in _programs(generation, quick=quick).items():
        config = read_config({**_SHAPES[model], "num_hidden_layers": 2})
        began, attention, error = time.perf_counter(), "", ""
        try:
            attention = program.compile(config, _machine(generation))
        except Exception as failure:  # noqa: BLE001 - every failure is a cell
            error = " ".join(f"{type(failure).__name__}: {failure}".split())[:300]
        print(json.dumps([model, name, attention, error, time.perf_counter() - began]), flush=True)


def _compile_for(generation: str, *, quick: bool) -> _Cells:
    """Compile for one generation in a process of its own, and print each result."""
    words = [sys.executable, "-m", "bench.tpu_matrix", "--only", generation, *(["--quick"] if quick else [])]
    cells = dict.fromkeys(_programs(generation, quick=quick), "")
    environment = {**os.environ, **ENVIRONMENT}
    with subprocess.Popen(
        words, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    ) as process:
        for line in process.stdout or ():
            model, name, attention, error, seconds = json.loads(line)
            cells[model, name] = attention
            print(f"{generation:6} {model:22} {name:45} {seconds:5.0f} s  {attention or error}", flush=True)
    if process.returncode:
        print(f"{generation}: the compiler ended its process with code {process.returncode}")
    return cells


def tables(found: Mapping[str, _Cells]) -> str:
    """Return the results as two tables: all generations, and the other models."""
    names = [generation.name for generation in GENERATIONS]
    rows = [[f"{_MODEL}, two layers", *(f"{name} (`{_machine(name).name}`)" for name in names)]]
    rows += [[program, *(found[name][_MODEL, program] or "**fails**" for name in names)] for program in PROGRAMS]
    more = [[f"{_MORE_ON}, two layers", *_SHAPES]]
    for program in [*PROGRAMS, *_HEADS]:
        cells = [found[_MORE_ON].get((model, program)) for model in _SHAPES]
        more.append([program, *("–" if cell is None else cell or "**fails**" for cell in cells)])
    versions = f"Compiled with jax {version('jax')} and libtpu {version('libtpu')}:"
    return "\n".join([versions, "", *_table(rows), "", *_table(more)])


def _table(rows: list[list[str]]) -> list[str]:
    first, *others = (f"| {' | '.join(row)} |" for row in rows)
    return [first, "|---" * len(rows[0]) + "|", *others]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only:
        _compile_here(args.only, quick=args.quick)
        return
    found = {generation.name: _compile_for(generation.name, quick=args.quick) for generation in GENERATIONS}
    if not args.quick:
        text = tables(found)
        print(text)
        if args.write:
            before, rest = PAGE.read_text().split(_BEGIN, 1)
            PAGE.write_text(f"{before}{_BEGIN}\n\n{text}\n\n{_END}{rest.split(_END, 1)[1]}")
    if failed := sum(not attention for cells in found.values() for attention in cells.values()):
        sys.exit(f"{failed} programs do not compile")


if __name__ == "__main__":
    main()
