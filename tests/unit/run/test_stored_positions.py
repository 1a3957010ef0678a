"""``--positions``: only those tokens' rows are stored, they are the rows of a whole run, and they lead back."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import spile
from spile.cli.main import main
from spile.cli.program import run
from spile.compute.batches import Sizes
from spile.compute.producer import Control
from spile.compute.progress import Progress
from spile.errors import RunMismatch, SpecError
from spile.objects import open_folder
from spile.planning.forecast import plan
from spile.proof.rerun import recomputer
from spile.proof.verification import verify
from spile.run.pipeline import Sink, run_pipeline
from spile.run.worker import run_stream
from spile.spec.positions import choose_positions
from spile.spec.run import DataSpec, GenerationSpec, RunSpec
from spile.spec.sample import Role, Sample
from spile.store.run import join_run
from spile.store.writer import join_stream
from world import TAPS, NumpyProducer, rows_of, run_identity, sample_of, stream_identity


def some_samples(count: int, positions: str) -> list[Sample]:
    found = [sample_of(index) for index in range(count)]
    return [replace(s, positions=choose_positions(positions, 0, s.index, s.roles)) for s in found]


def stored(root: Path, samples: list[Sample], positions: str, **sizes: object) -> None:
    folder, run = open_folder(str(root)), run_identity(store_dtype="float32", positions=positions)
    join_run(folder, run)
    stream = join_stream(folder, 0, stream_identity(len(samples)), run)
    stream.statistics = True
    finished = run_pipeline(
        samples,
        NumpyProducer(groups=2),
        Sink(stream),
        replace(Sizes(batch_tokens=128, batch_size=None, longest=64, shard_bytes=900), **sizes),  # type: ignore[arg-type]
        progress=Progress(),
        control=Control(),
    )
    assert finished


@pytest.mark.parametrize("positions", ["last", "random:3", "answer"])
def test_the_stored_rows_are_those_of_the_positions(tmp_path: Path, positions: str) -> None:
    """``answer`` of samples without one: no rows at all, and still every sample is there."""
    samples = some_samples(30, positions)
    stored(tmp_path, samples, positions)
    dataset = spile.open(str(tmp_path))
    assert sum(len(stream.shards) for stream in dataset.streams) > 1 or positions == "answer"
    for sample in samples:
        found = dataset.sample(0, sample.index)
        assert found.ref.length == sample.rows
        assert np.array_equal(found.context, sample.tokens)
        assert np.array_equal(found.positions, sample.of_rows(np.arange(len(sample))))
        assert np.array_equal(found.tokens, sample.tokens[found.positions])
        for tap in range(len(TAPS)):
            wanted = sample.of_rows(rows_of(sample, tap, dtype="float32"))
            assert np.array_equal(found.rows(str(TAPS[tap])), wanted)
    report = verify(str(tmp_path))
    assert report.ok, report.all_problems


def test_readers_give_each_row_its_position(tmp_path: Path) -> None:
    samples = some_samples(12, "random:3")
    stored(tmp_path, samples, "random:3")
    dataset = spile.open(str(tmp_path))
    (batch,) = dataset.shuffled("attn.1", 10_000, context=True)
    found = {(int(s), int(p)) for s, p in zip(batch.samples, batch.positions, strict=True)}
    assert found == {(s.index, int(p)) for s in samples for p in s.of_rows(np.arange(len(s)))}
    for rows, token, index, position in zip(batch.rows, batch.tokens, batch.samples, batch.positions, strict=True):
        sample = samples[int(index)]
        assert token == sample.tokens[position]
        assert np.array_equal(rows, rows_of(sample, 1, dtype="float32")[position])
    (chosen,) = dataset.shuffled("attn.1", 10_000, context=True, positions=(5, 20))
    assert all(5 <= position < 20 for position in chosen.positions)
    assert all(row.position in samples[row.sample].of_rows(np.arange(64)) for row in dataset.stats("attn.1").top)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"positions": [0, 0, 2]}, "positions do not rise within their samples"),
        ({"positions": [0, 1, 9]}, "positions lie outside their samples"),
        ({"positions": [0, 1, 3]}, "tokens are not those of context at positions"),
    ],
)
def test_rows_that_do_not_lead_back_are_damage(tmp_path: Path, change: dict[str, list[int]], says: str) -> None:
    """Right checksums over a wrong tail: a broken writer's."""
    folder, run = open_folder(str(tmp_path)), run_identity(store_dtype="float32", positions="random:3")
    join_run(folder, run)
    stream = join_stream(folder, 0, stream_identity(1), run)
    sample = Sample(
        0, "t", np.arange(5, dtype=np.int32), np.zeros(5, np.uint8), positions=np.array([0, 1, 2], np.int32)
    )
    builder = stream.begin([sample])
    for tap in range(len(TAPS)):
        builder.write(tap, 0, np.zeros((3, 8), np.float32))
    builder._tail["positions"][:] = change["positions"]
    stream.commit([builder.finish()])
    assert any(says in problem.text for problem in verify(str(tmp_path)).all_problems)


CHATS = [
    [("user", "Name a colour."), ("assistant", "Blue is one."), ("user", "Another?"), ("assistant", "Red.")],
    [("user", "Say nothing.")],
]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same texts, every row of them."""
    folder = tmp_path_factory.mktemp("positions")
    (folder / "texts.jsonl").write_text(
        "".join(json.dumps({"text": f"{n} a b c d {n} e f g {'h ' * n}"}) + "\n" for n in range(6))
    )
    chats = [{"messages": [{"role": role, "content": text} for role, text in chat]} for chat in CHATS]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    run_stream(spec(folder, "all", "all"))
    return folder


def spec(folder: Path, output: str, positions: str, data: str = "texts", **more: object) -> RunSpec:
    where = DataSpec(dataset=str(folder / f"{data}.jsonl"), max_seq_length=64)
    out = str(folder / output)
    return RunSpec(data=where, output=out, layers=(0, 2), store_dtype="float32", positions=positions, **more)  # type: ignore[arg-type]


def check_means(whole: str, root: str) -> None:
    everything, means = spile.open(whole), spile.open(root)
    for index in range(6):
        ours, theirs = means.sample(0, index), everything.sample(0, index)
        assert ours.positions.tolist() == [len(theirs) - 1]
        assert np.array_equal(ours.context, theirs.tokens)
        for tap in ("residual.0", "residual.2"):
            expected = theirs.rows(tap).mean(axis=0, keepdims=True)
            np.testing.assert_allclose(ours.rows(tap), expected, rtol=1e-4, atol=1e-5)


def test_a_mean_is_that_of_a_whole_run(made: Path) -> None:
    run_stream(spec(made, "mean", "mean"))
    out = str(made / "mean")
    check_means(str(made / "all"), out)
    assert run(["extract", "--add-taps", "mlp.1", "--to", out]) == 0
    report = verify(out, recompute=recomputer(out), k=6)
    assert report.ok, report.all_problems
    assert report.recomputed is not None
    assert set(report.recomputed.taps) == {"residual.0", "residual.2", "mlp.1"}


@pytest.mark.torch
def test_a_mean_is_that_of_transformers(made: Path) -> None:
    torch = pytest.importorskip("torch")
    from transformers import AutoModel

    run_stream(spec(made, "torch-mean", "mean", backend="torch"))
    out = str(made / "torch-mean")
    check_means(str(made / "all"), out)
    assert verify(out, recompute=recomputer(out), k=3).ok
    folder = Path(spile.__file__).parent / "models" / "embedded"
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        for sample in spile.open(out):
            hidden = model(torch.from_numpy(sample.context).long()[None], output_hidden_states=True).hidden_states
            expected = hidden[3].mean(dim=1).numpy()
            np.testing.assert_allclose(sample.rows("residual.2"), expected, rtol=1e-4, atol=1e-4)


def test_a_mean_is_refused_where_it_makes_no_sense(made: Path) -> None:
    with pytest.raises(SpecError, match=r"--positions mean: expected taps of numbers, found pattern_ids\.0"):
        spec(made, "ids", "mean", taps=("pattern",)).selected_taps(4)
    with pytest.raises(SpecError, match="expected spile extract, found spile infer"):
        spec(made, "answers", "mean", generation=GenerationSpec(max_new_tokens=3))
    with pytest.raises(SpecError, match=r'acts\.numpy\(tap, positions="mean"\)'):
        spile.tap("embedded", ["a b"], taps=["residual.0"], positions="mean")


@pytest.mark.parametrize("positions", [pytest.param("last", marks=pytest.mark.slow), "random:4"])
def test_a_model_s_rows_are_those_of_a_whole_run(made: Path, positions: str) -> None:
    name = positions.replace(":", "-")
    run_stream(spec(made, name, positions))
    whole, some = spile.open(str(made / "all")), spile.open(str(made / name))
    for index in range(6):
        ours, theirs = some.sample(0, index), whole.sample(0, index)
        assert len(ours.positions) == (1 if positions == "last" else 4)
        assert np.array_equal(ours.context, theirs.tokens)
        np.testing.assert_allclose(
            ours.rows("residual.2"), theirs.rows("residual.2")[ours.positions], rtol=1e-4, atol=1e-4
        )
    out = str(made / name)
    report = verify(out, recompute=recomputer(out), k=6)
    assert report.ok, report.all_problems
    assert spile.open(out).run.positions == positions


def test_a_run_keeps_its_positions(made: Path) -> None:
    with pytest.raises(RunMismatch, match="created with positions all, but this command asks for positions last"):
        run_stream(spec(made, "all", "last"))


def test_answers_of_chats_are_the_assistant_s_words(made: Path) -> None:
    run_stream(spec(made, "chats", "answer", data="chats"))
    dataset = spile.open(str(made / "chats"))
    first, second = dataset.sample(0, 0), dataset.sample(0, 1)
    assert (first.roles & Role.ASSISTANT).all()
    assert 0 < len(first.tokens) < len(first.context)
    assert len(second.tokens) == 0
    assert verify(str(made / "chats"), recompute=recomputer(str(made / "chats")), k=2).ok


def test_prompts_have_no_answers(made: Path) -> None:
    wanted = "expected chats, which contain answers of an assistant, found --prompt text. Use spile infer"
    with pytest.raises(SpecError, match=wanted):
        run_stream(spec(made, "none", "answer"))
    with pytest.raises(SpecError, match=wanted):
        plan(spec(made, "none", "answer"))
    assert not (made / "none").exists()


@pytest.mark.parametrize(
    "positions", ["answer", *(pytest.param(each, marks=pytest.mark.slow) for each in ("last", "random:5"))]
)
def test_infer_stores_positions_too(made: Path, positions: str) -> None:
    name = "infer-" + positions.replace(":", "-")
    run_stream(spec(made, name, positions, generation=GenerationSpec(max_new_tokens=5)))
    dataset = spile.open(str(made / name))
    for ref in dataset.samples:
        sample = dataset.sample(0, ref.index)
        prompt = spile.open(str(made / "all")).sample(0, ref.index).tokens
        answer = range(len(prompt), len(sample.context))
        assert np.array_equal(sample.context[: len(prompt)], prompt)
        assert len(answer) > 0
        wanted = {"answer": list(answer), "last": [answer[-1]]}.get(positions, sample.positions.tolist())
        assert sample.positions.tolist() == wanted
        assert len(wanted) == {"last": 1, "random:5": 5}.get(positions, len(answer))
    out = str(made / name)
    report = verify(out, recompute=recomputer(out), k=6)
    assert report.ok, report.all_problems


def test_plan_counts_the_rows_that_will_be_stored(made: Path) -> None:
    every, last = plan(spec(made, "x", "all")), plan(spec(made, "x", "last"))
    assert every.volume.rows is None
    assert last.volume.rows == 6
    assert last.volume.tokens == every.volume.tokens
    assert last.volume.bytes < every.volume.bytes / 4
    assert last.record()["rows"] == 6
    assert every.record()["rows"] == every.volume.tokens


def code(words: list[str]) -> int:
    with pytest.raises(SystemExit) as ended:
        main(words)
    return int(ended.value.code or 0)


def test_the_command(made: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--dataset", str(made / "texts.jsonl"), "--model", "embedded", "--positions", "last", "--layers", "0"]
    assert code(["plan", *words, "--topology", "v5litepod-8", "--no-compile"]) == 0
    assert "rows of 6 tokens (--positions last)" in " ".join(capsys.readouterr().out.split())
    assert code(["extract", *words[:-4], "--positions", "first", "--output", str(made / "bad")]) == 2
    assert "--positions: expected all, last, last-content, mean, answer, first:N or random:N" in capsys.readouterr().err
