"""verify without a model: a forgery whose checksums and ledger are right is found if the dataset contradicts it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spile.errors import Damaged
from spile.objects import Folder, open_folder
from spile.proof.verification import verify
from spile.reading.dataset import open as open_dataset
from spile.spec.identity import RunIdentity
from spile.spec.positions import choose_positions
from spile.spec.run import GenerationSpec
from spile.spec.sample import Prediction, Role, Sample
from spile.store import shard
from spile.store.ledger import ShardRecord
from spile.store.predictions import put_predictions
from spile.store.run import join_run
from spile.store.shard import as_stored, notes_of
from spile.store.statistics import TapAccumulator, TapStatistics
from spile.store.writer import join_stream
from world import TAPS, rows_of, run_identity, sample_of, stream_identity

COUNT = 6
STOP = 2
RUN = run_identity(vocab_size=1000)
INFER = replace(RUN, generation=GenerationSpec(max_new_tokens=5, stop_tokens=(STOP,)))


def store(
    root: Path,
    run: RunIdentity,
    samples: Sequence[Sample],
    answers: Sequence[Prediction] | None = None,
    *,
    statistics: bool = False,
) -> Folder:
    """Store samples as a worker does: every checksum and record is right, whatever the samples contain."""
    folder = open_folder(str(root))
    join_run(folder, run)
    stream = join_stream(folder, 0, stream_identity(len(samples)), run)
    stream.statistics = statistics
    builder = stream.begin(samples)
    for tap in range(len(TAPS)):
        builder.write(tap, 0, np.concatenate([sample.of_rows(rows_of(sample, tap)) for sample in samples]))
    record = builder.finish()
    stream.commit([record if answers is None else put_predictions(stream.folder, record, answers)])
    return folder


def problems(folder: Folder, **options: Any) -> str:
    return "\n".join(problem.text for problem in verify(folder, **options).all_problems)


@pytest.mark.parametrize(
    ("field", "value"), [("index", [0]), ("index", "0"), ("index", True), ("task_id", 7), ("kept", []), ("preview", {})]
)
def test_a_note_with_a_field_of_another_type_is_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, field: str, value: object
) -> None:
    monkeypatch.setattr(shard, "notes_of", lambda samples: [{**note, field: value} for note in notes_of(samples)])
    folder = store(tmp_path, RUN, [sample_of(0), sample_of(1)])
    assert f"records of its samples: found TypeError: {field} is {type(value).__name__}" in problems(folder)
    with pytest.raises(Damaged, match="records of its samples"):
        list(open_dataset(folder))


def decode(tokens: Sequence[int]) -> str:
    return " ".join(f"w{token}" for token in tokens)


def answered(index: int) -> tuple[Sample, Prediction]:
    """A prompt with its answer, which ends with the stop token, and for every third sample at the limit."""
    prompt, draw = sample_of(index), np.random.default_rng(index)
    tokens = [*draw.integers(3, 1000, 5 if index % 3 == 0 else 3).tolist(), *([] if index % 3 == 0 else [STOP])]
    roles = np.full(len(tokens), Role.ANSWER | Role.ASSISTANT, np.uint8)
    sample = replace(
        prompt,
        tokens=np.append(prompt.tokens, tokens).astype(np.int32),
        roles=np.append(prompt.roles, roles),
    )
    reason = "length" if index % 3 == 0 else "stop"
    text = decode(tokens if reason == "length" else tokens[:-1])
    logprobs = tuple(-0.5 * n for n in range(len(tokens)))
    return sample, Prediction(index, prompt.task_id, text, tuple(tokens), logprobs, reason, prompt.augmentation)  # type: ignore[arg-type]


class Forged(TapAccumulator):
    """Statistics that are changed before they are stored, in the shard and in the commit alike."""

    change: Callable[[TapStatistics], TapStatistics]

    def result(self) -> TapStatistics:
        return type(self).change(super().result())


def _moved(found: TapStatistics) -> dict[int, int]:
    low, high = min(found.norms), max(found.norms)
    return {**found.norms, low: found.norms[low] - 1, high: found.norms[high] + 1}


STATISTICS: dict[str, tuple[Callable[[TapStatistics], TapStatistics], str]] = {
    "sums": (lambda s: replace(s, sums=(s.sums[0] * [[1.0001], [1.0]],)), "other sums of columns"),
    "squares": (lambda s: replace(s, sums=(s.sums[0] * [[1.0], [1.0001]],)), "other sums of columns"),
    "norms": (lambda s: replace(s, norms=_moved(s)), "other counts or norms"),
    "the largest norm": (lambda s: replace(s, top=(s.top[0]._replace(norm=99.0), *s.top[1:])), "list other rows"),
    "the largest row": (lambda s: replace(s, top=(s.top[0]._replace(position=0), *s.top[1:])), "list other rows"),
    "its token": (lambda s: replace(s, top=(s.top[0]._replace(token=1), *s.top[1:])), "list other rows"),
    "its sample": (lambda s: replace(s, top=(s.top[0]._replace(sample=77), *s.top[1:])), "list other rows"),
    "smaller rows": (lambda s: replace(s, top=s.top[1:]), "list other rows"),
}


@pytest.mark.parametrize("positions", ["all", "random:4"])
@pytest.mark.parametrize("store_dtype", ["bfloat16", "int8", "float8_e4m3"])
def test_right_statistics_pass(tmp_path: Path, store_dtype: str, positions: str) -> None:
    run = replace(RUN, store_dtype=store_dtype, positions=positions)
    folder = open_folder(str(tmp_path))
    join_run(folder, run)
    stream = join_stream(folder, 0, stream_identity(COUNT), run)
    stream.statistics = True
    samples = [choose(sample_of(index), positions) for index in range(COUNT)]
    builder = stream.begin(samples)
    for tap, kind in enumerate(stream.record.schema(run).rows):
        rows = np.concatenate([sample.of_rows(rows_of(sample, tap, dtype="float32")) for sample in samples])
        for start in range(0, len(rows), 7):  # Sums are added up in another order than verify adds them.
            builder.write(tap, start, as_stored(rows[start : start + 7], kind.dtype))
    stream.commit([builder.finish()])
    assert stream.ledger.shards == 1
    assert problems(folder) == ""


@pytest.mark.parametrize("what", STATISTICS)
def test_forged_statistics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    change, found = STATISTICS[what]
    monkeypatch.setattr(Forged, "change", staticmethod(change), raising=False)
    monkeypatch.setattr("spile.store.shard.TapAccumulator", Forged)
    folder = store(tmp_path, RUN, [sample_of(index) for index in range(COUNT)], statistics=True)
    assert f"the stored statistics of attn.1 {'have ' if 'other' in found[:6] else ''}{found}" in problems(folder)


def test_statistics_without_sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    samples = [sample_of(index) for index in range(COUNT)]
    monkeypatch.setattr("spile.store.ledger.ShardRecord.to_json", _with_statistics)
    assert "statistics of taps whose sums" in problems(store(tmp_path, RUN, samples))


def _with_statistics(record: ShardRecord) -> dict[str, Any]:
    return {**TO_JSON(record), "statistics": {"attn.1": {"count": record.tokens, "norms": {}, "top": []}}}


TO_JSON = ShardRecord.to_json


def choose(sample: Sample, positions: str, change: int = 0) -> Sample:
    chosen = choose_positions(positions, RUN.seed, sample.index + change, sample.roles)
    return replace(sample, positions=chosen)


@pytest.mark.parametrize("positions", ["last", "random:3", "answer"])
def test_forged_positions(tmp_path: Path, positions: str) -> None:
    run = replace(RUN, positions=positions)
    samples = [answered(index)[0] for index in range(COUNT)]
    right = [choose(sample, positions) for sample in samples]
    assert problems(store(tmp_path / "right", run, right)) == ""
    count = right[-1].rows
    wrong = [*right[:-1], replace(right[-1], positions=np.arange(2, 2 + count, dtype=np.int32))]
    assert problems(store(tmp_path / "wrong", run, wrong)) == (
        f"samples 5 have rows at other positions than --positions {positions} selects"
    )


@pytest.mark.parametrize("capture", ["both", "prompt", "answer"])
@pytest.mark.parametrize("positions", ["last", "random:3", "answer"])
def test_forged_positions_beside_answers(tmp_path: Path, positions: str, capture: str) -> None:
    if (positions, capture) == ("answer", "prompt"):
        return
    run = replace(INFER, positions=positions, generation=replace(INFER.generation, capture=capture))  # type: ignore[type-var]
    both = [answered(index) for index in range(COUNT)]
    kept = []
    for sample, answer in both:
        prompt = len(sample) - len(answer.tokens)
        first = prompt if "answer" in (positions, capture) else 0
        stop = prompt if capture == "prompt" else len(sample)
        kept.append(replace(sample, positions=choose_positions(positions, 0, sample.index, sample.roles, first, stop)))
    answers = [answer for _, answer in both]
    assert problems(store(tmp_path / "right", run, kept, answers)) == ""
    moved = kept[1].positions - 1  # type: ignore[operator]
    wrong = [kept[0], replace(kept[1], positions=moved), *kept[2:]]
    assert "samples 1 have rows at other positions" in problems(store(tmp_path / "wrong", run, wrong, answers))


@pytest.mark.parametrize("token", [1000, -1, 1 << 30])
def test_forged_tokens(tmp_path: Path, token: int) -> None:
    samples = [sample_of(index) for index in range(COUNT)]
    samples[3].tokens[-1] = token
    assert problems(store(tmp_path, RUN, samples)) == "tokens has ids outside the vocabulary of 1000"
    some = [choose(sample, "random:1") for sample in samples]
    hidden = problems(store(tmp_path / "some", replace(RUN, positions="random:1"), some))
    assert "context has ids outside the vocabulary of 1000" in hidden


def test_a_run_without_its_vocabulary(tmp_path: Path) -> None:
    samples = [sample_of(index) for index in range(COUNT)]
    samples[3].tokens[-1] = 5000
    assert problems(store(tmp_path, run_identity(), samples)) == ""


ANSWERS: dict[str, tuple[Callable[[Prediction], Prediction], str]] = {
    "text": (lambda a: replace(a, text=a.text + "!"), "has a text that is not that of its tokens"),
    "tokens": (lambda a: replace(a, tokens=(9, *a.tokens[1:]), text=decode((9, *a.tokens[1:-1]))), "not those of its"),
    "fewer tokens": (lambda a: replace(a, tokens=a.tokens[1:], logprobs=a.logprobs[1:]), "are not those of its answer"),
    "a log-probability above 0": (lambda a: replace(a, logprobs=(0.5, *a.logprobs[1:])), "log-probability above 0"),
    "a stop reason": (lambda a: replace(a, stop_reason="length", text=decode(a.tokens)), "ends with length, but has 4"),
    "a task id": (lambda a: replace(a, task_id="task-77"), "has the task id 'task-77'"),
    "an augmentation": (lambda a: replace(a, augmentation={"rotate": 3}), "has the task id"),
    "ids": (lambda a: replace(a, tokens=(1000, *a.tokens[1:])), "has token ids outside the vocabulary"),
}


@pytest.mark.parametrize("what", ANSWERS)
def test_forged_answers(tmp_path: Path, what: str) -> None:
    samples, answers = map(list, zip(*(answered(index) for index in range(COUNT)), strict=True))
    assert problems(store(tmp_path / "right", INFER, samples, answers), decode=decode) == ""
    change, found = ANSWERS[what]
    answers[1] = change(answers[1])
    text = problems(store(tmp_path / "wrong", INFER, samples, answers), decode=decode)
    assert "sample 1 " in text
    assert found in text


@pytest.mark.parametrize("stop", [0, 3])
def test_forged_ends_of_answers(tmp_path: Path, stop: int) -> None:
    """A token after the stop token, or a limit that was not reached: in the rows as well."""
    samples, answers = map(list, zip(*(answered(index) for index in range(COUNT)), strict=True))
    tokens = list(answers[stop].tokens)
    tokens[1] = STOP
    samples[stop].tokens[-len(tokens) :] = tokens
    answers[stop] = replace(answers[stop], tokens=tuple(tokens), text=decode(tokens))
    text = problems(store(tmp_path, INFER, samples, answers), decode=decode)
    assert text.startswith(f"the answer of sample {stop} ends with length, but has 5 tokens of 5, or a stop token")


def test_rows_of_an_answer_that_are_not_marked(tmp_path: Path) -> None:
    samples, answers = map(list, zip(*(answered(index) for index in range(COUNT)), strict=True))
    samples[2].roles[:] = Role.USER
    assert problems(store(tmp_path, INFER, samples, answers)) == "the rows of sample 2 are not those of its answer"
