import dataclasses

import pytest

from spile.errors import SpecError, SpileError
from spile.spec.identity import RunIdentity, StreamIdentity
from spile.spec.run import DataSpec, GenerationSpec, PromptSpec, RunSpec
from spile.spec.taps import Tap


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: RunSpec(batch_size=-4), "--batch-size: expected from 1 to 1,048,576, found -4"),
        (lambda: RunSpec(shard_size_gb=float("nan")), "--shard-size-gb: expected from 1e-06 to 64, found nan"),
        (lambda: RunSpec(dtype="int4"), "--dtype: expected one of auto, float32, bfloat16, found 'int4'"),
        (lambda: RunSpec(model=""), "--model: expected a name or a path, found an empty text"),
        (lambda: RunSpec(layers=(-1,)), "--layers: expected layers from 0 up, found [-1]"),
        (lambda: DataSpec(max_seq_length=0), "--max-seq-length: expected from 1 to 1,048,576, found 0"),
        (lambda: DataSpec(worker_id=-1), "--worker-id: expected from 0 to 99,999, found -1"),
        (lambda: PromptSpec(kind="poem"), "--prompt: expected one of auto, arc, chat, text, tokens, found 'poem'"),
        (lambda: PromptSpec(predictions_per_task=0), "--predictions-per-task: expected from 1 to 4,096, found 0"),
    ],
)
def test_a_spec_refuses_what_makes_no_sense(make, line):
    with pytest.raises(SpecError) as caught:
        make()
    assert str(caught.value).startswith(line)


def test_worker_five_reads_stream_five():
    assert DataSpec(dataset_dir="data/streams/", worker_id=5).location == "data/streams/stream_005.jsonl"


IDENTITY = RunIdentity(
    model="m",
    revision=None,
    architecture="qwen2",
    d_model=8,
    n_layers=2,
    weights="w",
    tokenizer="t",
    prompt=PromptSpec(kind="arc"),
    seed=0,
    max_seq_length=64,
    long="truncate",
    dtype="float32",
    store_dtype="bfloat16",
)


NAMES = ("model", "revision", "adapter", "vocab_size", "steer", "folders")
"""The fields that name something but do not change the numbers. The hashes of the weights, including those of an
adapter, and of the steering vectors are compared instead; the names of the streams' folders change no number."""


def test_names_are_not_part_of_the_fingerprint():
    other = dataclasses.replace(IDENTITY, model="./copy", revision="main", adapter="./tuned", folders="stream")
    assert other.fingerprint() == IDENTITY.fingerprint()


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(RunIdentity) if f.name not in NAMES])
def test_every_other_field_is(field):
    others = {"prompt": PromptSpec(kind="text"), "generation": GenerationSpec(), "unknown": {"warp": 1}}
    changed = others.get(field, "other")
    assert dataclasses.replace(IDENTITY, **{field: changed}).fingerprint() != IDENTITY.fingerprint()


def test_a_stream_is_its_content_and_its_taps():
    stream = StreamIdentity("a.jsonl", "hash", 3, 3, (Tap("residual", 1),))
    assert stream.compared() == {"sha256": "hash", "lines": 3, "samples": 3, "taps": ["residual.1"]}


def test_an_error_is_one_line_with_its_four_parts():
    error = SpileError("it\nbroke", expected=1, found="two\n  lines", fix="mend it")
    assert str(error) == "it broke: expected 1, found two lines. Mend it."
    assert str(SpileError("it broke")) == "it broke"
