"""Flags, Python arguments, files and variables have one definition: the same names, and the same defaults."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from spile.cli.flags import ExtractFlags, InferFlags
from spile.cli.program import build_app
from spile.spec.run import GenerationSpec, RunSpec, SpecField, make_spec, spec_fields

each_flag = pytest.mark.parametrize("each", [one for one in spec_fields() if one.option.flag], ids=lambda one: one.name)


APP = build_app()


def parsed(*words: str) -> RunSpec:
    _, bound, _ = APP.parse_args(list(words), exit_on_error=False, print_error=False)
    flags = bound.arguments.get("flags") or (ExtractFlags() if words[0] == "extract" else InferFlags())
    spec: RunSpec = flags.spec()
    return spec


@each_flag
def test_flags_and_python_have_the_same_defaults(each: SpecField) -> None:
    assert each.get(parsed("infer")) == each.get(RunSpec(generation=GenerationSpec()))
    if each.path[0] != "generation":
        assert each.get(parsed("extract")) == each.get(RunSpec())


EXAMPLES: dict[str, tuple[str, Any]] = {
    "backend": ("torch", "torch"),
    "prompt": ("text", "text"),
    "prompt_version": ("output-from-examples-v0", "output-from-examples-v0"),
    "long": ("skip", "skip"),
    "capture": ("prompt", "prompt"),
    "dtype": ("float32", "float32"),
    "store_dtype": ("float16", "float16"),
    "positions": ("last", "last"),
    "mesh_shape": ("2,4", (2, 4)),
    "layers": ("0-2,5", (0, 1, 2, 5)),
    "heads": ("0-2,5", (0, 1, 2, 5)),
    "taps": ("mlp.3-5", ("mlp.3-5",)),
    "keep": ("label", ("label",)),
    "stop": ("x", ("x",)),
    "steer": ("residual.1=zero", ("residual.1=zero",)),
    "statistics": ("", True),
    "top_p": ("0.5", 0.5),
    "output": ("elsewhere", "elsewhere"),
}
KINDS: dict[type, tuple[str, Any]] = {str: ("x", "x"), int: ("7", 7), float: ("7", 7.0), bool: ("", True)}


@each_flag
def test_every_field_has_a_flag_of_its_name(each: SpecField) -> None:
    flag = f"--{each.name.replace('_', '-')}"
    kind = next((kind for kind in KINDS if kind.__name__ in str(each.hint)), str)
    choice = get_args(each.hint)[-1] if get_origin(each.hint) is Literal else None
    text, expected = EXAMPLES.get(each.name, (choice, choice) if choice else KINDS[kind])
    more = {"max_seq_length": 64} if each.name == "pack" else {}
    spec = parsed("infer", *([f"{flag}={text}"] if text else [flag]), *(["--max-seq-length=64"] if more else []))
    assert each.get(spec) == expected
    assert each.get(make_spec({each.name: expected, **more}, infer=True)) == expected


def test_only_the_guides_and_acts_of_a_command_have_flags_of_their_own() -> None:
    known = {each.name for each in spec_fields()}
    acts = {"checkpointing", "overwrite", "delete_local_after_upload"}
    assert {each.name for each in fields(ExtractFlags)} - known - acts == {
        "output_dir", "gcs_bucket", "gcs_prefix", "upload_to_gcs", "guide_script",
    }  # fmt: skip
    assert {each.name for each in fields(InferFlags)} - known - acts == {
        "output_dir", "activations_dir", "n_tasks", "gcs_bucket", "gcs_prefix", "upload_to_gcs", "guide_script",
    }  # fmt: skip
    assert not acts & known, "a stored spec describes; it never commands"


def test_a_spec_is_a_config_file(tmp_path: Path) -> None:
    spec = make_spec(
        {
            "model": "m",
            "taps": ["mlp.1-2", "z.0.3"],
            "layers": "1",
            "mesh_shape": (2, 1),
            "pack": True,
            "max_seq_length": 64,
        }
    )
    (tmp_path / "run.toml").write_text(spec.to_toml())
    _, bound, _ = build_app(str(tmp_path / "run.toml")).parse_args(["extract"], exit_on_error=False, print_error=False)
    assert bound.arguments["flags"].spec() == spec
