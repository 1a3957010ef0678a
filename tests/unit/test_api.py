"""The functions of ``import spile``: options, errors, Python objects as data, and what they return."""

from __future__ import annotations

import math
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import spile
from spile.api import InferOptions, LoadOptions, RunOptions
from spile.live.tapping import TapOptions
from spile.spec.run import spec_fields

TEXTS = ["The cat sat on the mat", "Dogs bark", "A third and rather longer sentence follows here"]
ROWS = [{"id": f"r{n}", "text": text, "label": n % 2, "score": n / 2} for n, text in enumerate(TEXTS)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Activations of the three rows, which are stored longest first."""
    output = str(tmp_path_factory.mktemp("api") / "activations")
    summary = spile.extract("embedded", ROWS, output, taps=["residual.1", "mlp.0"])
    assert (summary.samples, summary.complete) == (3, True)
    return output


# -- options ----------------------------------------------------------------------------------------------------------

EXPLICIT = {"model", "dataset", "output", "taps"}


def test_the_typed_options_are_the_fields_of_the_run_spec() -> None:
    fields = {each.name: each for each in spec_fields()}
    run = {name for name, each in fields.items() if each.path[0] != "generation"} - EXPLICIT
    generation = {name for name, each in fields.items() if each.path[0] == "generation"}
    assert set(RunOptions.__annotations__) == run
    assert set(typing.get_type_hints(InferOptions)) == run | generation - {"stop"}  # an argument of its own
    assert set(TapOptions.__annotations__) | set(LoadOptions.__annotations__) <= set(fields)
    for options in (InferOptions, TapOptions, LoadOptions):
        for name, hint in typing.get_type_hints(options).items():
            wanted = fields[name].hint
            if fields[name].option.parse is None and name not in ("stop_tokens", "steer"):
                assert hint == wanted, name
            elif hint != wanted:  # also text, as on the command line, or any sequence
                parts = {typing.get_origin(part) or part for part in (hint, *typing.get_args(hint))}
                assert parts & {str, Sequence}, name


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda: spile.extract("embedded", TEXTS, layer=3), "spile.extract() has an unknown field 'layer'"),
        (lambda: spile.extract("embedded", TEXTS, max_samples=0), "spile.extract(): max_samples: expected from 1"),
        (lambda: spile.extract("embedded", TEXTS, max_samples="x"), "spile.extract(): max_samples: expected a whole"),
        (lambda: spile.extract("embedded", TEXTS, taps=["residuals.1"]), "spile.extract(): taps: expected some of"),
        (lambda: spile.extract("embedded", TEXTS, taps=["residual.99"]), "spile.extract(): taps residual.99: expected"),
        (lambda: spile.infer("embedded", TEXTS, max_new_tokens=0), "spile.infer(): max_new_tokens: expected from 1"),
        (lambda: spile.plan("embedded", TEXTS, machine="v99"), "spile.plan(): "),
        (lambda: spile.plan("embedded", TEXTS, count=0), "spile.plan(): count: expected at least 1, found 0"),
        (lambda: spile.tap("embedded", TEXTS, taps="residual.1", positions="some"), "spile.tap(): positions: expected"),
        (lambda: spile.load("embedded").tap(TEXTS, top_k=0), "spile.tap(): top_k: expected from 1"),
        (lambda: spile.tap("embedded", "The cat sat"), "spile.tap(): data: expected a list of texts, or a dataset"),
        (lambda: spile.load("embedded", dtype="float3"), "spile.load(): dtype: expected one of auto, float32"),
        (lambda: spile.verify("nowhere", recompute="4"), "spile.verify(): recompute: expected the number of samples"),
        (lambda: spile.extract("embedded", (text for text in TEXTS)), "spile.extract(): data: expected a name, a list"),
        (lambda: spile.extract(spile.RunSpec(), TEXTS), "spile.extract(): data: expected a run spec and no other"),
        (lambda: spile.tap("embedded", [{"words": "x"}]), "Python list row 0: expected an ARC task"),
        (lambda: spile.tap("embedded", TEXTS, taps=3), "spile.tap(): taps: expected names such as"),
        (lambda: spile.tap("embedded", TEXTS, steer=["residual.1=zero"]), "spile.tap(): steer: expected one of layers"),
        (lambda: spile.tap(spile.load("embedded"), TEXTS, dtype="float32"), "spile.tap(): dtype: expected a model by"),
        (lambda: spile.tap("embedded", None), "spile.tap(): data: expected a name, a list"),
        (lambda: spile.tap("embedded", {"text": TEXTS}), "spile.tap(): data: expected a name, a list"),
        (lambda: spile.tap("embedded", [{"text": math.nan}]), "Python list row 0: expected a text in 'text'"),
        (lambda: spile.extract("embedded", [*ROWS, {"text": None}], "."), "Python list row 3: expected a text in"),
    ],
)  # fmt: skip
def test_an_error_names_the_function_and_the_argument(
    call: Any, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(spile.errors.UserError) as error:
        call()
    assert str(error.value).startswith(line), str(error.value)
    assert "--" not in str(error.value)
    assert not list(tmp_path.iterdir()), "nothing was written"


# -- Python objects as data -------------------------------------------------------------------------------------------


def pandas_frame() -> Any:
    return pytest.importorskip("pandas").DataFrame(ROWS)


def polars_frame() -> Any:
    return pytest.importorskip("polars").DataFrame(ROWS)


def arrow_table() -> Any:
    return pytest.importorskip("pyarrow").Table.from_pylist(ROWS)


def hub_dataset() -> Any:
    return pytest.importorskip("datasets").Dataset.from_list(ROWS)


@pytest.mark.parametrize("make", [lambda: ROWS, pandas_frame, polars_frame, arrow_table, hub_dataset])
def test_tables_are_data_and_their_columns_are_labels(make: Any, tmp_path: Path) -> None:
    data = make()
    spile.extract("embedded", data, tmp_path / "out", layers=1, positions="last")
    dataset = spile.open(tmp_path / "out")
    assert [sample.task_id for sample in dataset] == ["r0", "r1", "r2"]
    assert [sample.text for sample in dataset] == TEXTS
    assert dataset.labels("label").tolist() == [0, 1, 0]
    assert dataset.labels("score").tolist() == [0.0, 0.5, 1.0]
    assert spile.verify(tmp_path / "out").ok
    spile.extract("embedded", data, tmp_path / "out", layers=1, positions="last")  # nothing is left to do
    changed = [*ROWS[:2], {**ROWS[2], "text": "something else"}]
    with pytest.raises(spile.errors.UserError):
        spile.extract("embedded", changed, tmp_path / "out", layers=1, positions="last")


def test_the_options_of_tap_choose_rows(tmp_path: Path) -> None:
    model = spile.load("embedded")
    rows = ["one", {"words": 2}, "three"]
    assert [sample.text for sample in model.tap(TEXTS, max_samples=2)] == TEXTS[:2]
    (skipped,) = model.tap(rows, prompt="text", bad_rows="skip").skipped
    assert (skipped.index, skipped.reason) == (1, "bad row")
    (tmp_path / "rows.csv").write_text("text,label\n" + "".join(f"{text},{n}\n" for n, text in enumerate(TEXTS)))
    found = model.tap(str(tmp_path / "rows.csv"), split="train[1:3]")
    assert [sample.text for sample in found] == TEXTS[1:3]
    assert found.labels("label").tolist() == ["1", "2"]


def test_strings_chats_and_token_ids_are_data() -> None:
    model = spile.load("embedded")
    (text,) = model.tap(["The cat sat"], taps="residual.0")
    (ids,) = model.tap([text.tokens], taps="residual.0")
    (chat,) = model.tap([[{"role": "user", "content": "The cat sat"}]], taps="residual.0")
    assert ids.tokens.tolist() == text.tokens.tolist()
    np.testing.assert_allclose(ids["residual.0"], text["residual.0"], atol=1e-5)
    assert "The cat sat" in chat.text
    assert len(chat) > len(text)


def test_keep_names_the_fields_or_none(tmp_path: Path) -> None:
    spile.extract("embedded", ROWS, tmp_path / "some", layers=1, keep=["label"])
    assert [ref.kept for ref in spile.open(tmp_path / "some").samples] == [{"label": n % 2} for n in range(3)]
    with pytest.raises(spile.errors.UserError, match=r"no field score is stored .* expected one of label"):
        spile.open(tmp_path / "some").labels("score")
    rows = [{"text": "a b", "note": "x" * 300, "tags": ["a"], "n": 1}, {"text": "c d", "extra": None}]
    spile.extract("embedded", rows, tmp_path / "rest", layers=1)
    dataset = spile.open(tmp_path / "rest")
    assert [ref.kept for ref in dataset.samples] == [{"n": 1}, {"extra": None}]
    assert dataset.labels("n").tolist() == [1, None]
    assert [batch.kept["n"].tolist()[0] for batch in dataset.batches("residual.1", 2)] == [1, None]
    assert spile.verify(tmp_path / "rest").ok


# -- in memory --------------------------------------------------------------------------------------------------------


def test_tap_returns_what_extract_stores(root: str) -> None:
    dataset, acts = spile.open(root), spile.tap("embedded", ROWS, taps=["residual.1", "mlp.0"])
    assert acts.taps == ("mlp.0", "residual.1")
    for stored, tapped in zip(dataset, acts, strict=True):
        assert tapped.task_id == stored.task_id
        assert tapped.tokens.tolist() == stored.tokens.tolist()
        assert tapped.token_texts == stored.token_texts
        assert "".join(tapped.token_texts) == tapped.text
        for tap in acts.taps:
            assert tapped[tap].dtype == np.float32
            np.testing.assert_allclose(stored[tap], tapped[tap], rtol=0.01, atol=0.01)  # stored as bfloat16
    assert acts.labels("label").tolist() == [0, 1, 0]
    assert acts["r1"].text == "Dogs bark"
    last = spile.tap("embedded", TEXTS, taps="residual.1", positions="last")
    np.testing.assert_allclose(last.numpy("residual.1"), acts.numpy("residual.1"), atol=1e-5)
    assert [len(sample) for sample in last] == [1, 1, 1]
    assert last[0].token_texts == acts[0].token_texts[-1:]


def test_the_model_stays_loaded_and_other_layers_need_no_new_program(monkeypatch: pytest.MonkeyPatch) -> None:
    from spile.live import tapping

    spile.tap("embedded", TEXTS, taps="residual.1")
    loads: list[object] = []
    compiled: list[object] = []
    monkeypatch.setattr(tapping, "load", loads.append)
    monkeypatch.setattr(tapping.DeviceProducer, "compile", lambda _self, shape: compiled.append(shape))
    spile.tap("embedded", ["other words"], taps="residual.3")
    spile.tap("embedded", ["and still others"], taps=["residual.0", "residual.5"])
    assert (loads, compiled) == ([], [])


def test_tap_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tempfile

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tempfile, "TemporaryFile", None)
    monkeypatch.setattr(tempfile, "mkdtemp", None)
    assert len(spile.tap("embedded", TEXTS, taps="residual.1")) == 3
    assert not list(tmp_path.iterdir())


# -- reading ----------------------------------------------------------------------------------------------------------


def test_samples_are_in_the_order_of_the_data(root: str) -> None:
    dataset = spile.open(root)
    shard = dataset._open_shard(dataset.streams[0], dataset.streams[0].shards[0])
    assert shard.read_tensor("sample_index").tolist() != [0, 1, 2], "stored in another order"
    assert [sample.text for sample in dataset] == TEXTS
    assert [ref.index for ref in dataset.samples] == [0, 1, 2]
    assert (len(dataset), dataset[-1].text, [each.text for each in dataset[:2]]) == (3, TEXTS[2], TEXTS[:2])
    assert dataset["r1"].text == "Dogs bark"
    with pytest.raises(spile.errors.UserError, match=r"no sample 'r7' in "):
        dataset["r7"]
    with pytest.raises(IndexError):
        dataset[3]
    assert dataset.decode(dataset[1].tokens) == "Dogs bark"


@pytest.mark.parametrize("positions", ["last", "first", "mean", 1, -2, "all"])
def test_rows_are_aligned_with_labels(root: str, positions: Any) -> None:
    dataset = spile.open(root)
    one_by_one = [sample["residual.1"] for sample in dataset]
    chosen = {
        "last": lambda rows: rows[-1:], "first": lambda rows: rows[:1], "all": lambda rows: rows,
        "mean": lambda rows: rows.mean(0, keepdims=True),
    }  # fmt: skip
    pick = chosen.get(positions, lambda rows: rows[[positions]])
    rows = dataset.numpy("residual.1", positions=positions)
    np.testing.assert_allclose(rows, np.concatenate([pick(each) for each in one_by_one]), rtol=1e-5, atol=1e-6)
    labels = dataset.labels("label", positions=positions)
    counts = [len(pick(each)) for each in one_by_one]
    assert labels.tolist() == np.repeat([0, 1, 0], counts).tolist()


def test_rows_can_be_chosen_by_role(root: str) -> None:
    dataset = spile.open(root)
    rows = dataset.numpy("residual.1", positions="all", exclude=spile.Role.FIRST)
    assert len(rows) == sum(len(sample) - 1 for sample in dataset)
    with pytest.raises(spile.errors.UserError, match=r"sample r\d has no row for positions='last'"):
        dataset.numpy("residual.1", include=spile.Role.ASSISTANT)
    with pytest.raises(spile.errors.UserError, match="positions: expected last, last-content, first"):
        dataset.numpy("residual.1", positions="middle")


def test_a_reader_continues_from_its_state_dict(root: str) -> None:
    dataset = spile.open(root)
    reader = dataset.shuffled("residual.1", 4, epochs=None, dtype="float32")
    next(reader)
    state = reader.state_dict()
    wanted = [next(reader) for _ in range(3)]
    reader.load_state_dict(state)
    np.testing.assert_array_equal([next(reader) for _ in range(3)], wanted)
    on_device = dataset.jax("residual.1", batch_rows=4, epochs=None, dtype="float32")
    on_device.load_state_dict(state)
    np.testing.assert_array_equal(np.asarray(next(on_device)), wanted[0])
    on_device.close()
    reader.close()


# -- what notebooks show ----------------------------------------------------------------------------------------------


def test_reprs_are_short(root: str) -> None:
    dataset = spile.open(root)
    acts = spile.tap("embedded", TEXTS, taps="residual.1")
    things = (dataset, dataset[0], dataset.samples, acts, acts[0], spile.load("embedded"), acts[0].heat_map())
    run = spile.extract("embedded", ROWS, root, taps=["residual.1", "mlp.0"])
    stream = spile.stream("embedded", TEXTS, ["residual.1"])
    with dataset.shuffled("residual.1", batch_rows=2) as reader:
        next(reader)
        assert repr(reader) == "<shuffled batches of 2 rows, after batch 1 of epoch 0>"
    for thing in (*things, run, spile.verify(root), stream, reader):
        assert repr(thing).startswith("<")
        assert len(repr(thing).replace(root, "root")) < 120
    assert "3 samples of embedded, mlp.0, residual.1" in repr(dataset)


def test_the_heat_map_shows_hostile_text_as_text() -> None:
    hostile = "<script>alert('x')</script> & \"quoted\"\nline"
    (sample,) = spile.tap("embedded", [{"text": hostile, "note": "<b>bold</b>"}], taps="residual.1")
    page = sample._repr_html_()
    assert "<script" not in page
    assert "<b>bold" not in page
    assert page.count("<span") == len(sample)
    values = np.linspace(-1, 1, len(sample))
    assert "rgba(40,100,199" in str(sample.heat_map(values=values))
    with pytest.raises(spile.errors.UserError, match="values: expected"):
        sample.heat_map(values=[1.0])


def test_the_dataset_and_the_inspection_have_html(root: str) -> None:
    assert "3 samples" not in spile.open(root)._repr_html_()
    assert "<table>" in spile.open(root)._repr_html_()
    found = spile.inspect(root)
    assert "residual.1" in repr(found)
    assert "<td>residual.1</td>" in found._repr_html_()


# -- the other functions ----------------------------------------------------------------------------------------------


def test_verify_recomputes(root: str) -> None:
    report = spile.verify(root, recompute=2)
    assert report.ok
    assert report.recomputed is not None
    assert report.recomputed.samples == 2


def test_plan_forecasts_sizes_and_on_a_machine_hours_and_dollars() -> None:
    sizes = spile.plan("embedded", TEXTS, taps=["residual.1"])
    assert (sizes.samples, sizes.hours, sizes.dollars) == (3, None, None)
    assert sizes.bytes > sizes.tokens * 2 * 192
    known = spile.plan("embedded", TEXTS, taps=["residual.1"], machine="v5e-64")
    assert known.hours is not None
    assert known.dollars is not None
    assert known.dollars.on_demand > known.dollars.preemptible > 0
    assert "on v5" in repr(known)


def test_export_writes_npy(root: str, tmp_path: Path) -> None:
    done = spile.export(root, tmp_path / "npy", to="npy", taps=["residual.1"], dtype="float16")
    assert done.rows == sum(len(sample) for sample in spile.open(root))
    with pytest.raises(spile.errors.UserError, match=r"spile.export\(\): to: expected one of"):
        spile.export(root, tmp_path / "other", to="csv")  # type: ignore[arg-type]
    with pytest.raises(spile.errors.UserError, match=r"spile.export\(\): output: expected a path on this machine"):
        spile.export(root, "gs://bucket/npy")


def test_compare_finds_that_datasets_are_equal_or_not(root: str, tmp_path: Path) -> None:
    spile.extract("embedded", ROWS, tmp_path / "int8", taps=["residual.1"], store_dtype="int8")
    same, other = spile.compare(root, root), spile.compare(root, tmp_path / "int8")
    assert same.taps["residual.1"].largest == 0
    assert list(other.taps) == ["residual.1"]
    assert 0 < other.taps["residual.1"].median < 0.05
    assert other.taps["residual.1"].cosine > 0.99
    assert (other.samples, other.different) == (3, ())
    assert "3 samples in both datasets" in repr(other)


def test_infer_answers_strings_and_score_explains_that_they_are_no_tasks(tmp_path: Path) -> None:
    summary = spile.infer("embedded", TEXTS[:1], tmp_path / "out", taps=["residual.1"], max_new_tokens=4)
    assert summary.complete
    sample = spile.open(tmp_path / "out")[0]
    assert sample.text.startswith(TEXTS[0])
    with pytest.raises(spile.errors.UserError, match="expected outputs of ARC tasks"):
        spile.score(tmp_path / "out")


def test_fields_of_files_are_kept_and_an_existing_run_keeps_its_own(tmp_path: Path) -> None:
    (tmp_path / "rows.csv").write_text("review,label\nThe cat sat,good\nDogs bark,bad\n")
    spile.extract("embedded", tmp_path / "rows.csv", tmp_path / "csv", column="review", layers=1)
    assert spile.open(tmp_path / "csv").labels("label").tolist() == ["good", "bad"]
    (tmp_path / "rows.jsonl").write_text('{"text": "The cat sat", "label": 1}\n{"text": "Dogs bark", "label": 0}\n')
    for keep, wanted in (([], [1, 0]), (["label"], [1, 0])):
        output = tmp_path / f"jsonl-{len(keep)}"
        spile.extract("embedded", tmp_path / "rows.jsonl", output, layers=1, max_samples=1, keep=keep)
        spile.extract("embedded", tmp_path / "rows.jsonl", output, layers=1)  # resumes without naming them
        assert spile.open(output).labels("label").tolist() == wanted
        assert spile.verify(output).ok
    spile.extract("embedded", None, tmp_path / "arc", layers=1, max_samples=1, max_seq_length=64)
    assert spile.open(tmp_path / "arc").run.keep == ()


def test_a_text_file_a_limit_in_bytes_and_the_assistants_tokens(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("\n".join(f"Prompt number {n} of many" for n in range(64)))
    how: dict[str, Any] = {"layers": 1, "batch_size": 1, "max_seq_length": 64}
    summary = spile.extract("embedded", tmp_path / "prompts.txt", tmp_path / "limited", max_bytes="20kB", **how)
    assert 0 < summary.samples < 64
    assert spile.open(tmp_path / "limited")[0].text == "Prompt number 0 of many"
    chat = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Good morning"}]
    spile.extract("embedded", [chat], tmp_path / "chat", layers=1, positions="answer")
    (sample,) = spile.open(tmp_path / "chat")
    assert "".join(sample.token_texts).startswith("Good morning")
    assert "Hello" in sample.text
    assert all(sample.roles & spile.Role.ASSISTANT)
