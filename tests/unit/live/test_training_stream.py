"""``spile.stream``: the batches of a stored dataset without storing it, and with it; after a stop it continues."""

from __future__ import annotations

import json
import signal
import threading
from importlib.util import find_spec
from itertools import islice
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spile
from fleet.ssh.loopback import wait_until
from spile.errors import SpecError, UserError
from spile.live import training_rows as streaming
from spile.live.training_rows import ActivationStream, Feed
from spile.reading.shuffle import ShufflePlan
from spile.spec.ranges import Ranges
from spile.spec.sample import Sample
from world import items

TAPS = ["residual.1", "attn.2"]
TEXTS = [{"text": " ".join(f"word {i} {j}" for j in range(2 + i % 13)), "label": i} for i in range(60)]
HOW: dict[str, Any] = {"batch_rows": 100, "buffer_rows": 200, "seed": 3}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    root = str(tmp_path_factory.mktemp("stored") / "root")
    spile.extract("embedded", TEXTS, root, taps=TAPS)
    return root


@pytest.fixture(scope="module")
def stream() -> ActivationStream:
    return spile.stream("embedded", TEXTS, TAPS)


def equal(one: Any, other: Any) -> bool:
    return set(one) == set(other) and all(np.array_equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "how",
    [{}, {"epochs": 2, "exclude": spile.Role.FIRST}, {"context": 2}, {"max_norm": 30.0}],
    ids=str,
)
def test_streamed_and_stored_batches_are_equal(root: str, stream: ActivationStream, how: dict[str, Any]) -> None:
    stored = list(spile.open(root).shuffled(TAPS, order="data", **HOW, **how))
    streamed = list(stream.shuffled(TAPS, **HOW, **how))
    assert len(stored) == len(streamed) > 2
    assert all(equal(one, other) for one, other in zip(stored, streamed, strict=True))


def test_the_context_of_rows_and_the_adapters_are_the_same(root: str, stream: ActivationStream) -> None:
    stored = spile.open(root)
    one, other = (next(each.shuffled(TAPS[0], order="data", context=True, **HOW)) for each in (stored, stream))
    for name in ("tokens", "roles", "streams", "samples", "positions"):
        assert np.array_equal(getattr(one, name), getattr(other, name)), name
    assert np.array_equal(one.kept["label"], other.kept["label"])
    for kind in ("torch", "jax", "grain"):
        if find_spec(kind) is None:
            continue
        made = [iter(getattr(each, kind)(TAPS[0], order="data", **HOW)) for each in (stored, stream)]
        pairs = list(islice(zip(*made, strict=False), 3))
        assert len(pairs) == 3
        assert all(bool((one == other).all()) for one, other in pairs), kind


def same(one: Any, other: Any) -> bool:
    """Samples that are computed in other batches may differ in the last bits of a row."""
    places = np.array_equal(one.samples, other.samples) and np.array_equal(one.positions, other.positions)
    return places and np.allclose(one.rows.astype("f4"), other.rows.astype("f4"), rtol=2**-6, atol=0.02)


def test_parts_are_those_of_a_stored_dataset(root: str, stream: ActivationStream) -> None:
    how = {**HOW, "context": True, "part": (1, 2)}
    stored = list(spile.open(root).shuffled(TAPS[0], order="data", **how))
    streamed = list(stream.shuffled(TAPS[0], **how))
    assert len(stored) > 2
    assert all(same(*pair) for pair in zip(stored, streamed, strict=True))


@pytest.mark.slow
def test_worker_processes_give_the_same_batches_and_their_end_is_an_error(stream: ActivationStream) -> None:
    wanted = list(stream.shuffled(TAPS[0], context=True, **HOW))
    other = spile.stream("embedded", TEXTS, TAPS, workers=2)
    found = list(other.shuffled(TAPS[0], context=True, **HOW))
    assert all(same(*pair) for pair in zip(wanted, found, strict=True))
    reader = other.shuffled(TAPS[0], context=True, epochs=None, **HOW)
    next(reader)
    state = reader.state_dict()
    other._producer._workers[1]._process.kill()  # type: ignore[union-attr]
    with pytest.raises(spile.errors.Failure, match=r"exit code -9.*state_dict"):
        list(islice(reader, 10_000))
    other.close()
    rest = stream.shuffled(TAPS[0], context=True, epochs=None, state=state, **HOW)
    assert same(next(rest), wanted[1])
    with pytest.raises(SpecError, match="workers"):
        list(spile.stream("embedded", TEXTS, TAPS, workers="slurm:2").shuffled(TAPS[0], **HOW))


@pytest.mark.parametrize("when", ["while it loads", "while it computes"])
def test_closing_ends_a_worker_that_does_not_answer(when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "_CLOSE_SECONDS", 0.2)
    stream = spile.stream("embedded", TEXTS, TAPS, workers=1)
    reader = stream.shuffled(TAPS[0], epochs=None, **HOW)
    if when == "while it computes":
        next(reader)

    def take() -> None:
        with pytest.raises(UserError):
            list(reader)

    taken = threading.Thread(target=take, daemon=True)
    taken.start()
    assert wait_until(lambda: stream._producer is not None)
    process = stream._producer._workers[0]._process  # type: ignore[union-attr]
    process.send_signal(signal.SIGSTOP)
    stream.close()
    assert process.returncode == -signal.SIGKILL
    taken.join(30)
    assert not taken.is_alive()


def test_a_silent_worker_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = spile.stream("embedded", TEXTS, TAPS, workers=1)
    reader = stream.shuffled(TAPS[0], epochs=None, **HOW)
    next(reader)
    process = stream._producer._workers[0]._process  # type: ignore[union-attr]
    monkeypatch.setattr(streaming, "hang_limit", lambda _: 0.5)
    process.send_signal(signal.SIGSTOP)
    with pytest.raises(spile.errors.Failure, match=rf"process {process.pid}\) does not answer: .*state_dict"):
        list(islice(reader, 10_000))
    stream.close()


@pytest.mark.slow
def test_a_state_continues_in_another_process_of_the_same_run(stream: ActivationStream) -> None:
    whole = list(stream.shuffled(TAPS[0], context=True, epochs=2, **HOW))
    reader = stream.shuffled(TAPS[0], context=True, epochs=2, **HOW)
    taken = len(list(islice(reader, len(whole) // 2 + 2)))
    state = json.loads(json.dumps(reader.state_dict()))
    reader.close()
    rest = list(spile.stream("embedded", TEXTS, TAPS).shuffled(TAPS[0], context=True, epochs=2, state=state, **HOW))
    assert len(rest) == len(whole) - taken
    assert all(same(*pair) for pair in zip(whole[taken:], rest, strict=True))
    with pytest.raises(UserError, match="a different reader"):
        spile.stream("embedded", TEXTS[:-1], TAPS).shuffled(TAPS[0], state=state, context=True, **HOW)


def test_what_is_stored_on_the_way_is_the_dataset_of_extract(root: str, tmp_path: Path) -> None:
    own = str(tmp_path / "own")
    stream = spile.stream("embedded", TEXTS, TAPS, store=own, shard_size_gb=1e-5)
    reader = stream.shuffled(TAPS, **HOW)
    given = list(islice(reader, 3))
    state = reader.state()
    reader.close()
    # Another process finds a part of the samples in the store; it reads them and computes the others.
    rest = spile.stream("embedded", TEXTS, TAPS, store=own).shuffled(TAPS, state=state, **HOW)
    given += list(rest)
    assert spile.verify(own).ok
    stored = spile.open(own)
    assert len(stored) == len(TEXTS)
    assert all(
        equal(*pair) for pair in zip(given[3:], list(stored.shuffled(TAPS, order="data", **HOW))[3:], strict=True)
    )
    assert len(spile.open([root, own])) == len(TEXTS)
    complete = spile.extract("embedded", TEXTS, own, taps=TAPS)
    assert complete.complete
    again = list(spile.stream("embedded", TEXTS, TAPS, store=own).shuffled(TAPS, **HOW))  # nothing is computed
    assert all(equal(*pair) for pair in zip(again, stored.shuffled(TAPS, order="data", **HOW), strict=True))


def test_errors_of_the_data_and_of_the_arguments_reach_the_caller(stream: ActivationStream, tmp_path: Path) -> None:
    file = tmp_path / "texts.jsonl"
    file.write_text("".join(json.dumps({"text": f"one {number}"}) + "\n" for number in range(50)))
    broken = spile.stream("embedded", str(file), TAPS[0])
    file.write_text(file.read_text().replace("one 3", "two 3"))
    with pytest.raises(spile.errors.SpileError, match="changed"):
        list(broken.shuffled(TAPS[0], **HOW))
    with pytest.raises(UserError, match=r"no tap mlp\.1"):
        stream.shuffled("mlp.1")
    with pytest.raises(UserError, match="order"):
        stream.shuffled(TAPS[0], order="random")
    with pytest.raises(SpecError, match="max_samples"):
        spile.stream("embedded", TEXTS, TAPS, max_tokens=10)
    assert not list(tmp_path.glob("activations"))


def test_the_model_waits_for_a_slow_reader_and_never_for_a_starving_one() -> None:
    plan = ShufflePlan(buffer_rows=300, order="data")
    feed = Feed(plan, ())
    samples = [each for each in feed.select(items(60), 0, Ranges()) if isinstance(each, Sample)]
    total, most = sum(sample.rows for sample in samples), 0

    def produce() -> None:
        for sample in reversed(samples):  # the order in which no group is complete before the last sample
            feed.put([sample], {"tap": np.full((sample.rows, 2), sample.index)})

    thread = threading.Thread(target=produce)
    thread.start()
    groups = feed.groups(["tap"])
    found = []
    for members, last, rows in groups:
        found += [sample.index for sample in members]
        most = max(most, len(rows["tap"]))
        assert rows["tap"][:, 0].tolist() == [sample.index for sample in members for _ in range(sample.rows)]
        assert last == (len(found) == len(samples))
    thread.join()
    assert found == [sample.index for sample in samples]
    assert most < total / 5

    feed = Feed(plan, ())
    samples = [each for each in feed.select(items(60), 0, Ranges()) if isinstance(each, Sample)]
    given: list[int] = []

    def forward() -> None:
        for sample in samples:
            feed.put([sample], {"tap": np.zeros((sample.rows, 2))})
            given.append(sample.rows)

    thread = threading.Thread(target=forward, daemon=True)
    thread.start()
    thread.join(0.3)
    assert sum(given) < total  # nobody reads
    feed.fail(RuntimeError("closed"))
    thread.join(10)
    assert not thread.is_alive()


def test_an_error_of_a_worker_reaches_the_caller_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    class Failing:
        def __init__(self, *_job: object) -> None:
            pass

        def groups(self) -> int:
            return 1

        def compute(self, _batch: object) -> None:
            raise spile.errors.Failure("NaN at residual.1")

    monkeypatch.setattr(streaming, "BatchComputer", Failing)
    ours, theirs = Pipe()
    thread = threading.Thread(target=streaming.serve, args=(theirs,), daemon=True)
    thread.start()
    with ours:
        ours.send(())
        assert ours.recv() == 1
        ours.send("a batch, after which none follows")
        assert ours.poll(60), "the worker waits for another batch"
        assert str(ours.recv()) == "NaN at residual.1"
    thread.join(60)
    assert not thread.is_alive()
