"""The run spec as a file: it is read back as it was written, and refuses what it does not know."""

from __future__ import annotations

import json
import math
from typing import Any, Literal, get_args, get_origin

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spile.errors import SpecError
from spile.spec.run import RunSpec, SpecField, make_spec, spec_fields

TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12)
NUMBERS = st.sets(st.integers(0, 60), min_size=1, max_size=5).map(lambda found: tuple(sorted(found)))
OWN: dict[str, st.SearchStrategy[Any]] = {
    "positions": st.sampled_from(["all", "last", "answer", "random:32"]),
    "taps": st.lists(st.sampled_from(["residual", "mlp.3-5,9", "z.12.0-3", "embed", "logits.top5", "module:a.b"])).map(
        lambda found: found or ["attn"]
    ),
    "steer": st.lists(st.sampled_from(["residual.1=zero", "z.2.0-3=a b.safetensors#v:2.0"])).map(tuple),
    "layers": st.none() | NUMBERS,
    "heads": st.none() | NUMBERS,
    "mesh_shape": st.none() | st.tuples(st.integers(1, 64), st.integers(1, 64)),
    "keep": st.lists(st.sampled_from(["label", "source", "id"]), unique=True).map(tuple),
    "stop": st.lists(TEXT).map(tuple),
    "max_seq_length": st.just("auto") | st.integers(1, 1 << 16),
    "stop_tokens": st.lists(st.integers(0, 9)).map(tuple),
    "predictions_per_task": st.integers(1, 4096),
    "shard_size_gb": st.floats(1e-6, 64),
    "commit_every": st.none() | st.floats(0.01, 1e9),
    "temperature": st.floats(0, 100),
    "top_p": st.floats(1e-6, 1),
    "worker_id": st.integers(0, 99_999),
    "max_new_tokens": st.integers(1, 1 << 17),
    "top_k": st.integers(1, 1 << 16),
}
PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    str: TEXT,
    str | None: st.none() | TEXT,
    int: st.integers(1, 1 << 16),
    int | None: st.none() | st.integers(1, 1 << 16),
    bool: st.booleans(),
    bool | None: st.none() | st.booleans(),
}


def values(each: SpecField) -> st.SearchStrategy[Any]:
    if get_origin(each.hint) is Literal:
        return st.sampled_from(get_args(each.hint))
    return OWN[each.name] if each.name in OWN else PLAIN[each.hint]


@st.composite
def specs(draw: st.DrawFn) -> RunSpec:
    infer = draw(st.booleans())
    known = [each for each in spec_fields() if infer or each.path[0] != "generation"]
    chosen = draw(st.lists(st.sampled_from(known), unique_by=lambda each: each.name))
    try:
        return make_spec({each.name: draw(values(each)) for each in chosen}, infer=infer)
    except SpecError:  # Two fields exclude each other.
        return make_spec({}, infer=infer)


@given(specs())
def test_a_spec_is_read_back_as_it_was_written(spec: RunSpec) -> None:
    assert RunSpec.from_json(spec.to_json()) == spec
    assert RunSpec.from_json(spec.to_toml()) == spec


@pytest.mark.parametrize("each", spec_fields(), ids=lambda each: each.name)
def test_every_field_changes_the_file(each: SpecField) -> None:
    """A field that is not written would be lost between the launcher and its workers."""
    assert each.name in make_spec({}, infer=True).to_dict()
    assert each.option.help.endswith(".") or each.option.help.endswith("…")


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"modle": "x"}, "spec.json has an unknown field 'modle'. Did you mean model?"),
        ({"hf_token": "x"}, "spec.json has an unknown field 'hf_token'. Remove it"),
        ({"temperature": 1.0}, "spec.json: temperature is a field of infer. Remove it"),
        ({"batch_size": "8"}, "spec.json: batch_size: expected a whole number, found '8'"),
        ({"pack": 1}, "spec.json: pack: expected true or false, found 1"),
        ({"dtype": "int4"}, "spec.json: dtype: expected one of auto, float32, bfloat16, found 'int4'"),
        ({"stop": "x", "command": "infer"}, "spec.json: stop: expected a list, found 'x'"),
        ({"version": 2}, "spec.json has version 2: expected at most 1"),
        ({"command": "rm"}, "spec.json: command: expected extract or infer, found 'rm'"),
    ],
    ids=str,
)
def test_a_mistake_in_a_file_is_named(changed: dict[str, Any], line: str) -> None:
    content = json.dumps({**RunSpec().to_dict(), **changed})
    with pytest.raises(SpecError) as caught:
        RunSpec.from_json(content, "spec.json")
    assert str(caught.value).startswith(line)


@pytest.mark.parametrize("content", ["", "{", "[1]", "\xff"])
def test_what_is_no_spec_is_refused(content: str) -> None:
    if content:
        with pytest.raises(SpecError):
            RunSpec.from_json(content, "spec.json")
    else:
        assert RunSpec.from_json(content) == RunSpec()  # An empty TOML file.


def test_no_field_can_hold_a_secret() -> None:
    names = [each.name for each in spec_fields()]
    assert not [name for name in names if any(word in name for word in ("token_", "secret", "password", "api_key"))]


def test_defaults_that_depend_on_the_command() -> None:
    extract, infer = make_spec({}), make_spec({}, infer=True)
    assert (extract.output, extract.data.long) == ("./activations", "auto")
    assert (infer.output, infer.data.long) == ("./inference", "skip")
    assert math.isclose(infer.generation.temperature if infer.generation else 1.0, 0.0)


def test_the_number_of_a_stream_comes_from_its_file() -> None:
    assert make_spec({"dataset": "data/stream_005.jsonl"}).data.worker_id == 5
    assert make_spec({"dataset": "data/stream_005.jsonl", "worker_id": 2}).data.worker_id == 2
    assert make_spec({"dataset": "data/other.jsonl"}).data.worker_id == 0
