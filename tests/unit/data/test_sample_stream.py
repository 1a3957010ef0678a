from __future__ import annotations

import hashlib
import json
import logging
import random
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

import spile.models
from spile.data.arc.encoders import parse_encoder
from spile.data.arc.prompts import revert
from spile.data.manifest import MANIFEST
from spile.data.samples import open_stream
from spile.data.split import make_streams
from spile.data.tokens import Tokenizer, load_tokenizer
from spile.errors import DataError
from spile.spec.ranges import Ranges
from spile.spec.run import DEFAULT_ENCODER, DataSpec, PromptSpec
from spile.spec.sample import Role, Sample, Skip
from tiny_tokenizers import save_tokenizer

Task = Callable[..., dict[str, Any]]
Write = Callable[..., str]
NONE = Ranges()


def shown(item: Sample | Skip) -> tuple[object, ...]:
    if isinstance(item, Skip):
        return (item.index, item.task_id, item.reason)
    return (item.index, item.task_id, item.tokens.tolist(), item.roles.tolist(), str(item.augmentation), item.truncated)


def read(spec: DataSpec, tokenizer: Tokenizer, done: Ranges = NONE) -> list[Sample | Skip]:
    return list(open_stream(spec, tokenizer).read(done))


def samples(spec: DataSpec, tokenizer: Tokenizer) -> list[Sample]:
    found = read(spec, tokenizer)
    assert all(isinstance(item, Sample) for item in found)
    return [item for item in found if isinstance(item, Sample)]


def test_identity_of_a_stream(tasks: str, chatml: Tokenizer) -> None:
    stream = open_stream(DataSpec(dataset=tasks, prompt=PromptSpec(predictions_per_task=3)), chatml)
    assert stream.identity.sha256 == hashlib.sha256(Path(tasks).read_bytes()).hexdigest()
    assert (stream.identity.data, stream.identity.lines, stream.identity.samples) == (tasks, 40, 120)
    assert stream.prompt.kind == "arc"


def test_an_arc_prompt_whole(jsonl: Write, task: Task, chatml: Tokenizer) -> None:
    sample = samples(DataSpec(dataset=jsonl([task("a")])), chatml)[0]
    encoder = parse_encoder(DEFAULT_ENCODER)
    text = chatml.decode(sample.tokens.tolist())
    assert text.startswith("<|im_start|>system\nYou work out")
    assert text.endswith(f"Test\nInput\n{encoder.to_text([[0, 9, 8]])}\nOutput<|im_end|>\n<|im_start|>assistant\n")
    assert encoder.to_text([[2, 1], [4, 3]]) in text
    assert (sample.index, sample.task_id, sample.augmentation, sample.truncated) == (0, "a", None, 0)
    assert sample.preview == text[:96]
    user = chatml.decode(sample.tokens[(sample.roles & Role.USER) > 0].tolist())
    assert user.startswith("Every pair below")
    assert user.endswith("Output")


def test_without_a_template_the_prompt_is_plain_text_with_the_same_parts(
    jsonl: Write, task: Task, with_bos: Tokenizer
) -> None:
    sample = samples(DataSpec(dataset=jsonl([task()])), with_bos)[0]
    assert sample.tokens[0] == with_bos.bos
    assert sample.roles[0] == Role.BOS | Role.SPECIAL | Role.FIRST
    text = with_bos.decode(sample.tokens[1:].tolist())
    assert text.startswith("You work out")
    assert text.endswith("Output\n")
    parts = [(Role.SYSTEM, "You work out the"), (Role.USER, "Every pair")]
    for role, start in parts:
        assert with_bos.decode(sample.tokens[(sample.roles & role) > 0].tolist()).startswith(start)


def test_a_template_without_system_messages_gets_their_words_before_the_users(
    tmp_path: Path, jsonl: Write, task: Task
) -> None:
    source = "{%- for m in messages %}{%- if m['role'] == 'system' %}{{- raise_exception('no') }}{%- endif %}"
    source += "{{- '[' + m['content'] + ']' }}{%- endfor %}"
    tokenizer = load_tokenizer(save_tokenizer(tmp_path / "t", {"chat_template": source}))
    sample = samples(DataSpec(dataset=jsonl([task()])), tokenizer)[0]
    text = tokenizer.decode(sample.tokens.tolist())
    assert text.startswith("[You work out")
    assert "are written.\n\nEvery pair below" in text
    assert ((sample.roles[1:-1] & Role.USER) > 0).all()


@pytest.mark.parametrize("count", [1, 3])
def test_each_index_stays_the_same_in_all_cases(tasks: str, chatml: Tokenizer, count: int) -> None:
    spec = DataSpec(dataset=tasks, prompt=PromptSpec(predictions_per_task=count), seed=5)
    whole = {item.index: shown(item) for item in read(spec, chatml)}
    assert list(whole) == list(range(40 * count))
    chance = random.Random(0)
    for odds in (0.1, 0.5, 0.9, 1.0):
        done = Ranges.of(n for n in whole if chance.random() < odds)
        rest = read(spec, chatml, done)
        assert [item.index for item in rest] == [n for n in whole if n not in done]
        assert all(shown(item) == whole[item.index] for item in rest)


def test_each_variant_records_how_it_was_made(jsonl: Write, task: Task, chatml: Tokenizer) -> None:
    grid = [[0, 9, 8], [1, 2, 3]]
    spec = DataSpec(
        dataset=jsonl([task("a", test=[{"input": grid}])]), prompt=PromptSpec(predictions_per_task=9), seed=4
    )
    encoder = parse_encoder(DEFAULT_ENCODER)
    for variant, sample in enumerate(samples(spec, chatml)):
        assert (sample.augmentation is None) == (variant == 0)
        text = chatml.decode(sample.tokens.tolist())
        asked = text.split("Test\nInput\n")[1].split("\nOutput")[0]
        assert revert(encoder.to_grid(asked), sample.augmentation) == grid
        json.dumps(sample.augmentation)


def test_prompts_do_not_depend_on_the_split(tasks: str, chatml: Tokenizer, tmp_path: Path) -> None:
    prompt = PromptSpec(predictions_per_task=4)
    whole = {(s.task_id, s.index % 4): shown(s)[2:] for s in samples(DataSpec(dataset=tasks, prompt=prompt), chatml)}
    for count in (1, 3, 7):
        folder = tmp_path / str(count)
        make_streams(tasks, folder, count)
        split = {}
        for worker in range(count):
            spec = DataSpec(dataset_dir=str(folder), worker_id=worker, prompt=prompt)
            split |= {(s.task_id, s.index % 4): shown(s)[2:] for s in samples(spec, chatml)}
        assert split == whole


def test_max_samples_stops_early_and_changes_nothing_else(tasks: str, chatml: Tokenizer) -> None:
    spec = DataSpec(dataset=tasks, prompt=PromptSpec(predictions_per_task=3))
    limited = replace(spec, max_samples=7)
    assert open_stream(limited, chatml).identity.samples == 120
    assert [shown(item) for item in read(limited, chatml)] == [shown(item) for item in read(spec, chatml)][:7]


def test_long_samples_are_cut_or_skipped(tasks: str, chatml: Tokenizer) -> None:
    whole = samples(DataSpec(dataset=tasks), chatml)[0]
    cut = samples(DataSpec(dataset=tasks, max_seq_length=10), chatml)[0]
    assert cut.tokens.tolist() == whole.tokens[:10].tolist()
    assert cut.truncated == len(whole) - 10
    skipped = read(DataSpec(dataset=tasks, max_seq_length=10, long="skip"), chatml)[0]
    assert isinstance(skipped, Skip)
    assert (skipped.reason, skipped.detail) == ("too long", {"tokens": len(whole), "max_seq_length": 10})
    exact = read(DataSpec(dataset=tasks, max_seq_length=len(whole), long="skip"), chatml)[0]
    assert isinstance(exact, Sample)


def test_text_and_empty_text(jsonl: Write, with_bos: Tokenizer) -> None:
    rows = [{"text": "the fox"}, {"text": ""}, {"text": " \n"}, {"text": "dog", "id": 7}]
    found = read(DataSpec(dataset=jsonl(rows)), with_bos)
    assert [type(item) for item in found] == [Sample, Skip, Skip, Sample]
    assert [item.task_id for item in found] == ["line-0", "line-1", "line-2", "7"]
    assert isinstance(found[1], Skip)
    assert found[1].reason == "empty"
    assert isinstance(found[0], Sample)
    assert found[0].tokens.tolist() == with_bos.backend.encode("the fox").ids


def test_chat(jsonl: Write, chatml: Tokenizer) -> None:
    rows = [{"messages": [{"role": "user", "content": "fox?"}, {"role": "assistant", "content": "dog!"}]}]
    sample = samples(DataSpec(dataset=jsonl(rows)), chatml)[0]
    assert chatml.decode(sample.tokens[(sample.roles & Role.ASSISTANT) > 0].tolist()) == "dog!<|im_end|>"
    assert chatml.decode(sample.tokens[(sample.roles & Role.USER) > 0].tolist()) == "fox?"


def test_what_a_kind_does_not_use_is_back_at_its_default(jsonl: Write, task: Task, chatml: Tokenizer) -> None:
    odd = PromptSpec(version="input-from-inputs-v0", encoder=" MinimalGridEncoder( ) ", column="body")
    text = open_stream(DataSpec(dataset=jsonl([{"body": "x"}]), prompt=odd), chatml).prompt
    assert text == PromptSpec(kind="text", column="body")
    arc = open_stream(DataSpec(dataset=jsonl([task()]), prompt=odd), chatml).prompt
    assert arc == PromptSpec(kind="arc", version=odd.version, encoder="MinimalGridEncoder()")


def test_a_task_without_a_name_gets_one_from_its_content(jsonl: Write, task: Task, chatml: Tokenizer) -> None:
    one, two = samples(DataSpec(dataset=jsonl([task(None), task(None, test=[{"input": [[1]]}])])), chatml)
    assert one.task_id.startswith("task-")
    assert one.task_id != two.task_id
    assert samples(DataSpec(dataset=jsonl(["", task(None, test=[{"input": [[1]]}])])), chatml)[0].task_id == two.task_id


def test_blank_lines_a_byte_order_mark_and_no_newline_at_the_end(tmp_path: Path, chatml: Tokenizer) -> None:
    file = tmp_path / "x.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"text": "a"}\r\n\r\n\n{"text": "b"}')
    found = read(DataSpec(dataset=str(file)), chatml)
    assert [(item.index, getattr(item, "preview", "")) for item in found] == [(0, "a"), (1, "b")]


def alive() -> int:
    return sum(thread.name.startswith("spile-ahead") for thread in threading.enumerate())


def test_a_reader_that_stops_early_leaves_no_thread(jsonl: Write, chatml: Tokenizer) -> None:
    place = jsonl([{"text": f"fox {n} " * 900} for n in range(1000)])  # more than is tokenized ahead
    stream = open_stream(DataSpec(dataset=place), chatml)
    reader = stream.read(NONE)
    assert next(reader).index == 0
    assert alive() == 1
    reader.close()
    assert alive() == 0

    def use(item: Sample | Skip) -> None:
        raise KeyError(item.index)

    with pytest.raises(KeyError, match="0"):
        list(map(use, stream.read(NONE)))
    assert alive() == 0
    # And what was left can be read by another.
    assert sum(1 for _ in stream.read(NONE)) == 1000


def test_an_error_while_reading_arrives_in_its_place(tmp_path: Path, jsonl: Write) -> None:
    source = "{%- if messages[0]['role'] != 'user' %}{{- raise_exception('users only') }}{%- endif %}x"
    tokenizer = load_tokenizer(save_tokenizer(tmp_path / "t", {"chat_template": source}))
    place = jsonl([{"messages": [{"role": role, "content": "x"}]} for role in ["user"] * 3 + ["system"]])
    reader = open_stream(DataSpec(dataset=place), tokenizer).read(NONE)
    with pytest.raises(DataError, match=r"line 4: the model's chat template refuses these messages: found users only"):
        list(reader)
    assert alive() == 0


@pytest.mark.parametrize("looked_at", [1, 4, *(pytest.param(number, marks=pytest.mark.slow) for number in (0, 2, 3))])
def test_what_was_looked_at_is_given_all_the_same_and_an_error_too(
    tmp_path: Path, jsonl: Write, looked_at: int
) -> None:
    refusal = "{%- if messages[0]['role'] != 'user' %}{{- raise_exception('users only') }}{%- endif %}"
    source = refusal + "{{- messages[0]['content'] }}"
    tokenizer = load_tokenizer(save_tokenizer(tmp_path / "t", {"chat_template": source}))
    message = {"role": "user", "content": "x " * 200_000}  # each a chunk of its own
    rows = [[message], [message], [message], [{"role": "system", "content": "x"}]]
    stream = open_stream(DataSpec(dataset=jsonl([{"messages": row} for row in rows])), tokenizer)
    reader = stream.read(NONE)
    assert [item.index for item in islice(reader.peek(), looked_at)] == list(range(min(looked_at, 3)))
    assert [next(reader).index for _ in range(3)] == [0, 1, 2]
    with pytest.raises(DataError, match="users only"):
        next(reader)
    assert alive() == 0


def test_a_template_without_parts_is_reported_once(
    tmp_path: Path, jsonl: Write, caplog: pytest.LogCaptureFixture
) -> None:
    source = "{%- for m in messages %}{{- m['content'] | reverse }}{%- endfor %}"
    tokenizer = load_tokenizer(save_tokenizer(tmp_path / "t", {"chat_template": source}))
    place = jsonl([{"messages": [{"role": "user", "content": "abc"}]}] * 3)
    with caplog.at_level(logging.WARNING, "spile.data"):
        found = samples(DataSpec(dataset=place), tokenizer)
    assert [tokenizer.decode(s.tokens.tolist()) for s in found] == ["cba"] * 3
    assert not any((s.roles & (Role.USER | Role.SYSTEM | Role.ASSISTANT)).any() for s in found)
    assert len(caplog.records) == 1


def test_streams_in_a_bucket_are_read_through_objects(
    tasks: str, chatml: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bucket's place is taken by a local folder: the calls are the same."""
    from spile import objects

    local = objects.open_folder(str(Path(tasks).parent))
    monkeypatch.setattr("spile.data.lines.open_folder", lambda url: local)
    spec = DataSpec(dataset="gs://bucket/rows.jsonl")
    assert [shown(s) for s in read(spec, chatml)] == [shown(s) for s in read(DataSpec(dataset=tasks), chatml)]
    with pytest.raises(DataError, match=r"no such dataset: gs://bucket/none.jsonl"):
        open_stream(DataSpec(dataset="gs://bucket/none.jsonl"), chatml)


def test_the_embedded_tasks_and_tokenizer() -> None:
    tokenizer = load_tokenizer(Path(spile.models.__file__).parent / "embedded")
    found = samples(DataSpec(max_seq_length=1 << 16), tokenizer)
    lengths = sorted(map(len, found))
    assert len(found) == 48
    assert sum(200 <= length <= 2000 for length in lengths) > 40
    assert len({s.task_id for s in found}) == 48


def test_the_embedded_tasks_are_what_their_script_makes(tmp_path: Path) -> None:
    import runpy

    script = Path(__file__).parents[3] / "scripts" / "make_embedded_tasks.py"
    runpy.run_path(str(script))["main"](tmp_path / "tasks.jsonl")
    from spile.data.lines import embedded_tasks

    assert (tmp_path / "tasks.jsonl").read_bytes() == embedded_tasks().read_bytes()
    assert all(json.loads(line)["train"] for line in embedded_tasks().read_text().splitlines())


def test_a_stream_left_from_another_split_is_refused(tmp_path: Path, tasks: str, chatml: Tokenizer) -> None:
    """Four streams, then two in the same folder: the last two of the four are not of the split any more."""
    four, two = tmp_path / "four", tmp_path / "two"
    make_streams(tasks, four, 4)
    manifest = make_streams(tasks, two, 2).manifest
    for name in ("stream_000.jsonl", "stream_001.jsonl", MANIFEST):
        (four / name).write_bytes((two / name).read_bytes())
    assert open_stream(DataSpec(dataset_dir=str(four), worker_id=1), chatml).identity.streams == 2
    for number in (2, 3):
        with pytest.raises(
            DataError, match=rf"stream_00{number}.jsonl does not belong to the split that streams.json describes"
        ):
            open_stream(DataSpec(dataset_dir=str(four), worker_id=number), chatml)
    given = DataSpec(dataset_dir=str(four), worker_id=1, expect_split=manifest.digest())
    assert open_stream(given, chatml).identity.split == manifest.digest()
    (tmp_path / "four" / "own.jsonl").write_bytes(Path(tasks).read_bytes())
    assert open_stream(DataSpec(dataset=str(four / "own.jsonl")), chatml).identity.streams is None, (
        "no stream by its name"
    )


def test_another_split_than_the_one_given_out_is_refused(tmp_path: Path, tasks: str, chatml: Tokenizer) -> None:
    make_streams(tasks, tmp_path / "s", 2)
    for where in (DataSpec(dataset_dir=str(tmp_path / "s"), worker_id=0), DataSpec(dataset=tasks)):
        with pytest.raises(DataError, match=r"is not the stream that was assigned: expected split 5555"):
            open_stream(replace(where, expect_split="5" * 32), chatml)


@pytest.mark.parametrize("shape", ["by id", "pretty"])
def test_tasks_by_id_in_one_json_file_are_read(tmp_path: Path, tasks: str, chatml: Tokenizer, shape: str) -> None:
    """As ``data convert --output-dir`` and ARC's own files have them: ``arc_format_train.json``."""
    rows = [json.loads(line) for line in Path(tasks).read_text().splitlines()]
    by_id = {row["task_id"]: {name: row[name] for name in ("train", "test")} for row in rows}
    file = tmp_path / "arc_format_train.json"
    file.write_text(json.dumps(by_id, indent=2 if shape == "pretty" else None))
    found = samples(DataSpec(dataset=str(file)), chatml)
    same = samples(DataSpec(dataset=tasks), chatml)[: len(rows)]
    assert [item.task_id for item in found] == [item.task_id for item in same]
    assert [item.tokens.tolist() for item in found] == [item.tokens.tolist() for item in same]
    other = tmp_path / "other.json"
    other.write_text(json.dumps(by_id, indent=7))
    one, two = (open_stream(DataSpec(dataset=str(each)), chatml).identity.sha256 for each in (file, other))
    assert one == two, "the layout of the JSON is not part of the data"


def test_lines_in_a_file_named_json_stay_lines(tmp_path: Path, tasks: str, chatml: Tokenizer) -> None:
    file = tmp_path / "tasks.json"
    file.write_bytes(Path(tasks).read_bytes())
    assert len(samples(DataSpec(dataset=str(file)), chatml)) == 40
