"""The shuffled reader: every selected row once an epoch, whoever reads, wherever it stops."""

from __future__ import annotations

import atexit
import json
import subprocess
import sys
import tempfile
from collections import Counter
from functools import cache, partial
from itertools import islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spile.errors import Damaged, UserError
from spile.objects import Folder, open_folder
from spile.reading import shuffle
from spile.reading.dataset import Dataset
from spile.reading.dataset import open as open_dataset
from spile.reading.rows import SampleRef
from spile.reading.shuffle import Position
from spile.spec.sample import Role, Sample
from spile.store.run import join_run
from spile.store.writer import join_stream
from world import TAPS, produce, rows_of, run_identity, sample_of, stream_identity


@cache
def made(samples: int = 40, cut: int | None = None) -> Dataset:
    kept = tempfile.TemporaryDirectory()
    atexit.register(kept.cleanup)
    produce(open_folder(kept.name), samples, cut=cut)
    produce(open_folder(kept.name), 12, worker_id=3)
    return open_dataset(kept.name)


def odd(ref: SampleRef) -> bool:
    return ref.index % 2 == 1


def rows(batches: Any) -> list[bytes]:
    return [row.tobytes() for batch in batches for row in batch]


CHOICES: list[dict[str, Any]] = [
    {},
    {"exclude": Role.FIRST},
    {"include": Role.BOS},
    {"include": Role.ASSISTANT},  # nothing
    {"positions": (2, 7)},
    {"positions": range(3, 5), "samples": odd},
    {"tokens": range(500)},
    {"without_tokens": range(900), "exclude": Role.BOS},
    {"max_norm": 3.0},
    {"min_norm": 3.0, "max_norm": 3.5, "samples": odd},
]


def selected(dataset: Dataset, wanted: dict[str, Any]) -> Counter[bytes]:
    """What a plain loop over all samples finds."""
    found: Counter[bytes] = Counter()
    for ref in dataset.samples:
        sample = dataset.sample(ref.stream, ref.index)
        block = sample.rows("attn.1")
        norms = np.linalg.norm(block.astype(np.float32), axis=1)
        positions = wanted.get("positions", (0, 10**9))
        positions = positions if isinstance(positions, range) else range(*positions)
        for place, row in enumerate(block):
            role, token = int(sample.roles[place]), int(sample.tokens[place])
            found[row.tobytes()] += (
                bool(role & wanted.get("include", 255))
                and not role & wanted.get("exclude", 0)
                and place in positions
                and token in wanted.get("tokens", range(10**9))
                and token not in wanted.get("without_tokens", ())
                and wanted.get("min_norm", 0) <= norms[place] <= wanted.get("max_norm", np.inf)
                and wanted.get("samples", lambda _: True)(ref)
            )
    return +found


@given(
    cut=st.sampled_from([None, 1, 4]),
    batch=st.integers(1, 300),
    memory=st.sampled_from([1, 2000, 9000, 1 << 30]),
    parts=st.integers(1, 5),
    seed=st.integers(0, 3),
    epochs=st.integers(1, 2),
    wanted=st.sampled_from(CHOICES),
    stop=st.integers(0, 40),
    smallest=st.sampled_from([64, 3]),
)
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_every_selected_row_once_an_epoch_stopped_and_resumed_anywhere(
    cut: int | None,
    batch: int,
    memory: int,
    parts: int,
    seed: int,
    epochs: int,
    wanted: dict[str, Any],
    stop: int,
    smallest: int,
) -> None:
    dataset = made(cut=cut)
    found: Counter[bytes] = Counter()
    with patch.object(shuffle, "_MIN_PART_ROWS", smallest):
        for part in range(parts):
            how = {"seed": seed, "memory": memory, "part": (part, parts), "epochs": epochs, **wanted}
            whole = [batch.copy() for batch in dataset.shuffled("attn.1", batch, **how)]
            first = dataset.shuffled("attn.1", batch, **how)
            begun = list(islice(first, stop))
            state = json.loads(json.dumps(first.state()))
            rest = list(dataset.shuffled("attn.1", batch, **how, state=state))
            assert [each.tobytes() for each in begun + rest] == [each.tobytes() for each in whole]
            assert all(0 < len(each) <= batch for each in whole)
            found.update(rows(whole))
    assert found == Counter({row: count * epochs for row, count in selected(dataset, wanted).items()})


def test_stopped_and_resumed_at_every_step() -> None:
    dataset = made(cut=4)
    how: dict[str, Any] = {"memory": 4000, "epochs": 3, "exclude": Role.FIRST}
    reader = dataset.shuffled("attn.1", 100, **how)
    given, states = [], [reader.state()]
    for batch in reader:
        given.append(batch.tobytes())
        states.append(reader.state())
    for step, state in enumerate(states):
        assert [batch.tobytes() for batch in dataset.shuffled("attn.1", 100, **how, state=state)] == given[step:]


def test_seeds_epochs_and_parts_have_orders_of_their_own() -> None:
    dataset = made(cut=4)
    for memory in (4000, 1 << 30):
        same, again, other = (rows(dataset.shuffled("attn.1", 64, seed=seed, memory=memory)) for seed in (1, 1, 2))
        assert same == again != other
        assert sorted(same) == sorted(other)
        both = rows(dataset.shuffled("attn.1", 64, seed=1, memory=memory, epochs=2))
        assert both[: len(same)] == same != both[len(same) :]
        in_order = rows(dataset.rows("attn.1", 64))
        at = {row: place for place, row in enumerate(in_order)}
        places = np.array([at[row] for row in same])
        assert abs(np.corrcoef(places, np.arange(len(places)))[0, 1]) < 0.1


def test_an_endless_reader_gives_full_batches_over_the_borders_of_epochs() -> None:
    dataset = made()
    total = sum(stream.tokens for stream in dataset.streams)
    for parts in (1, 2):
        found: Counter[bytes] = Counter()
        readers = [dataset.shuffled("attn.1", 64, epochs=None, part=(part, parts)) for part in range(parts)]
        for reader in readers:
            given = [next(reader) for _ in range(3 * total // parts // 64)]
            assert {len(batch) for batch in given} == {64}
            found.update(rows(given))
        assert max(found.values()) <= 4 * max(Counter(rows(dataset.rows("attn.1"))).values())
    assert not list(dataset.shuffled("attn.1", 64, epochs=None, include=Role.ASSISTANT))


@pytest.mark.parametrize("wanted", [{}, {"exclude": Role.FIRST}, {"samples": odd}])
def test_with_drop_last_every_reader_has_as_many_full_batches(wanted: dict[str, Any]) -> None:
    dataset = made(cut=1)
    for parts in (1, 2, 5):
        counts = [
            [len(batch) for batch in dataset.shuffled("attn.1", 32, drop_last=True, part=(part, parts), **wanted)]
            for part in range(parts)
        ]
        assert {size for each in counts for size in each} == {32}
        assert len({len(each) for each in counts}) == 1
    with pytest.raises(UserError, match="drop_last with a bound on norms: expected one reader"):
        dataset.shuffled("attn.1", 32, drop_last=True, part=(0, 2), max_norm=3)


def test_several_taps_stay_row_aligned_and_rows_lead_back() -> None:
    dataset = made(cut=4)
    given = 0
    for batch in dataset.shuffled(["residual.1", "attn.1"], 50, memory=9000, context=True, dtype="float32"):
        assert list(batch.rows) == ["residual.1", "attn.1"]
        given += len(batch.tokens)
        for row in range(0, len(batch.tokens), 7):
            sample, place = sample_of(int(batch.samples[row])), int(batch.positions[row])
            assert batch.tokens[row] == sample.tokens[place]
            assert batch.roles[row] == sample.roles[place]
            for tap, number in (("residual.1", 2), ("attn.1", 1)):
                assert batch.rows[tap].dtype == np.float32
                assert np.array_equal(batch.rows[tap][row], rows_of(sample, number)[place].astype(np.float32))
            assert dataset.sample(int(batch.streams[row]), int(batch.samples[row])).ref.task_id == sample.task_id
    assert given == sum(stream.tokens for stream in dataset.streams)


def test_it_reads_from_disks_and_buckets_alike(folder: Folder) -> None:
    produce(folder, 45, cut=4)
    dataset = open_dataset(folder)
    found = rows(dataset.shuffled("residual.0", 100, memory=4000, seed=5))
    assert sorted(found) == sorted(rows(dataset.rows("residual.0")))
    local = made(45, cut=4)
    assert found == rows(local.shuffled("residual.0", 100, memory=4000, seed=5, streams=[0]))


@pytest.mark.parametrize(("d", "memory"), [(64, 4 << 20), (48, 4 << 20), (48, 1 << 19)])
def test_blocks_of_large_shards(tmp_path: Path, d: int, memory: int) -> None:
    """Blocks that end with chunks, blocks that do not, and small ones; all are checked."""
    root, run = open_folder(str(tmp_path)), run_identity(d_model=d)
    join_run(root, run)
    store = join_stream(root, 0, stream_identity(9), run)
    samples = [Sample(n, "t", np.arange(20_001, dtype=np.int32) + n, np.zeros(20_001, np.uint8)) for n in range(2)]
    builder = store.begin(samples)
    for tap in range(len(TAPS)):
        builder.write(tap, 0, np.concatenate([rows_of(sample, tap, d=d) for sample in samples]))
    store.commit([builder.finish()], [])
    dataset = open_dataset(root)
    how: dict[str, Any] = {"memory": memory}
    found = rows(dataset.shuffled("residual.1", 3000, part=(0, 2), **how))
    found += rows(dataset.shuffled("residual.1", 3000, part=(1, 2), **how))
    assert sorted(found) == sorted(rows(dataset.rows("residual.1")))
    shard = tmp_path / "tpu_0" / dataset.streams[0].shards[0].name
    with shard.open("r+b") as file:
        file.seek(shard.stat().st_size // 2)
        file.write(b"\x5a\xa5")
    with pytest.raises(Damaged, match=r"attn\.1, chunk"):
        list(open_dataset(root).shuffled("attn.1", 3000, **how))


def test_what_a_caller_gets_wrong() -> None:
    dataset = made()
    for wrong, text in (
        ({"batch_rows": 0}, "batch_rows: expected at least 1, found 0"),
        ({"part": (2, 2)}, r"part: expected \(k, n\) with k from 0 to n - 1"),
        ({"positions": range(0, 9, 2)}, "positions: expected a range without a step"),
        ({"state": {"epoch": 0}}, r"state: expected what state\(\) returned"),
    ):
        with pytest.raises(UserError, match=text):
            dataset.shuffled("attn.1", **wrong)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"no tap mlp\.9 in this dataset: expected one of residual\.0"):
        dataset.shuffled(["attn.1", "mlp.9"])
    state = dataset.shuffled("attn.1", 64).state()
    with pytest.raises(UserError, match="the state of a different reader: expected seed = 0, found seed = 7"):
        dataset.shuffled("attn.1", 64, seed=7, state=state)


@pytest.mark.parametrize("reader", ["shuffled", "torch", "jax", "grain"])
def test_an_unknown_argument_is_named_with_the_nearest_known_one(reader: str) -> None:
    if reader != "shuffled":
        pytest.importorskip(reader)
    with pytest.raises(TypeError, match=r"shuffled\(\) got .* 'batch_size'\. Did you mean 'batch_rows'\?"):
        getattr(made(), reader)("attn.1", batch_size=4)


def test_its_quality_is_reported() -> None:
    dataset = made(cut=4)
    assert dataset.shuffled("attn.1").quality == "a full permutation"
    assert "one of 3" in dataset.shuffled("attn.1", part=(0, 3)).quality
    samples = len(dataset.samples)
    assert f"two levels: {samples} blocks of one sample" in dataset.shuffled("attn.1", memory=4000).quality


def test_small_parts_take_documents_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """With whole samples an epoch's first half has some of the samples; with small parts it has nearly all."""
    dataset = made(400)
    total = sum(stream.tokens for stream in dataset.streams)
    for smallest, least, most in ((64, 0.4, 0.8), (4, 0.9, 1.0)):
        monkeypatch.setattr(shuffle, "_MIN_PART_ROWS", smallest)
        reader = dataset.shuffled("attn.1", total // 2, memory=8000, context=True)
        assert ("of a sample" in reader.quality) == (smallest == 4)
        first = next(reader)
        seen = len(set(zip(first.streams.tolist(), first.samples.tolist(), strict=True))) / len(dataset.samples)
        assert least < seen <= most, (smallest, seen)


def test_the_order_does_not_depend_on_width_dtype_or_shards(tmp_path: Path) -> None:
    """Two datasets of the same samples, as two models would make them, stay aligned in every batch."""
    samples = [sample_of(index) for index in range(60)]
    for name, d, dtype, per in (("one", 8, "bfloat16", 7), ("two", 24, "float32", 60)):
        run = run_identity(d_model=d, store_dtype=dtype)
        root = open_folder(str(tmp_path / name))
        join_run(root, run)
        store = join_stream(root, 0, stream_identity(60), run)
        # The samples of a shard are stored in different orders, too.
        order = samples if name == "one" else sorted(samples, key=lambda sample: (-len(sample), sample.index))
        for first in range(0, 60, per):
            mine = order[first : first + per]
            builder = store.begin(mine)
            for tap in range(len(TAPS)):
                builder.write(tap, 0, np.concatenate([rows_of(sample, tap, d=d, dtype=dtype) for sample in mine]))
            store.commit([builder.finish()], [])
    one, two = (open_dataset(str(tmp_path / name)) for name in ("one", "two"))
    hows: list[dict[str, Any]] = [{}, {"buffer_rows": 200}, {"buffer_rows": 500, "part": (1, 3)}]
    hows += [{"buffer_rows": 300, "epochs": 3, "exclude": Role.FIRST}, {"buffer_rows": 100, "seed": 5}]
    for how in hows:
        pairs = zip(
            one.shuffled("attn.1", 50, context=True, **how),
            two.shuffled(["residual.0", "attn.1"], 50, context=True, **how),
            strict=True,
        )
        for left, right in pairs:
            assert left.samples.tolist() == right.samples.tolist()
            assert left.positions.tolist() == right.positions.tolist()
            assert left.tokens.tolist() == right.tokens.tolist()
    assert one.shuffled("attn.1").state()["dataset"] != two.shuffled("attn.1").state()["dataset"]


EDITS: list[tuple[str, Any]] = [
    ("window", 10**6),
    ("window", 1),
    ("window", -1),
    ("window", 2**80),
    ("taken", 10**9),
    ("taken", 7),
    ("epoch", 1),
    ("epoch", 10**30),
    ("epoch", "0"),
    ("epoch", None),
    ("batches", 2.5),
    ("batches", True),
    ("check", "00000000"),
    ("check", None),
    ("seed", [0]),
    ("dataset", "0" * 16),
    ("block", [1, 2]),
    ("part", [1, 2]),
]


@pytest.mark.parametrize(("field", "value"), EDITS)
def test_an_edited_state_ends_in_one_line(field: str, value: Any) -> None:
    dataset = made(cut=4)
    how: dict[str, Any] = {"memory": 4000, "epochs": 3}
    reader = dataset.shuffled("attn.1", 64, **how)
    next(reader), next(reader)
    state = reader.state()
    reader.close()
    assert state[field] != value
    with pytest.raises(UserError, match="state"):
        dataset.shuffled("attn.1", 64, **how, state={**state, field: value})
    with pytest.raises(UserError, match="state"):
        dataset.shuffled("attn.1", 64, **how, state={name: each for name, each in state.items() if name != field})


@pytest.mark.parametrize("state", [{}, [], "state", 7, {"epoch": float("nan")}, {"check": {}}])
def test_what_is_no_state_ends_in_one_line(state: Any) -> None:
    with pytest.raises(UserError, match=r"state: expected what state\(\) returned"):
        made().shuffled("attn.1", 64, state=state)


def test_a_state_with_a_correct_checksum_is_still_bounded() -> None:
    dataset = made(cut=4)
    reader = dataset.shuffled("attn.1", 64, memory=4000)
    for position, text in (
        (Position(0, 1, 10**6, 0), "expected a window below"),
        (Position(2, 0, 0, 0), "expected at most 1 epochs, found 2 complete ones"),
        (Position(0, 1, 1, 10**6), "rows of its window"),
    ):
        reader._position = position
        with pytest.raises(UserError, match=text):
            list(dataset.shuffled("attn.1", 64, memory=4000, state=reader.state()))


def test_a_state_of_another_dataset_is_refused() -> None:
    state = made(45, cut=4).shuffled("attn.1", 64).state()
    with pytest.raises(UserError, match="the state of a different reader: expected dataset = "):
        made(40, cut=4).shuffled("attn.1", 64, state=state)


def test_predicates_with_one_name_are_not_equal() -> None:
    dataset = made(cut=4)

    def later(than: int) -> Any:
        return lambda ref: ref.index > than

    def one_of(*chosen: int) -> Any:
        return partial(lambda allowed, ref: ref.index in allowed, set(chosen))

    for first, same, other in (
        (lambda ref: ref.index > 3, lambda ref: ref.index > 3, lambda ref: ref.index > 4),
        (lambda ref: ref.index > 3, lambda ref: ref.index > 3, lambda ref: ref.index < 3),
        (later(3), later(3), later(4)),
        (one_of(1, 2), one_of(2, 1), one_of(1, 3)),
    ):
        state = dataset.shuffled("attn.1", 64, samples=first).state()
        dataset.shuffled("attn.1", 64, samples=same, state=state).close()
        with pytest.raises(UserError, match="the state of a different reader: expected selection"):
            dataset.shuffled("attn.1", 64, samples=other, state=state)


def test_two_levels_are_as_random_as_a_permutation_within_the_buffer() -> None:
    """Each batch has rows of many samples, and the place of a row in the epoch hardly depends on its neighbour's."""
    dataset = made(400)
    total = sum(stream.tokens for stream in dataset.streams)
    places: list[dict[tuple[int, int, int], int]] = []
    for how in ({"buffer_rows": total // 4}, {}):
        found: dict[tuple[int, int, int], int] = {}
        different = []
        for batch in dataset.shuffled("attn.1", 64, context=True, **how):
            different.append(len(set(zip(batch.streams.tolist(), batch.samples.tolist(), strict=True))) / len(batch))
            for key in zip(batch.streams.tolist(), batch.samples.tolist(), batch.positions.tolist(), strict=True):
                found[key] = len(found)
        assert len(found) == total
        assert np.median(different) > 0.7  # the first windows have rows of few groups
        places.append(found)
    windowed, permuted = places
    for found, most in ((permuted, 0.05), (windowed, 0.9)):
        pairs = [(at, found[s, n, p + 1]) for (s, n, p), at in found.items() if (s, n, p + 1) in found]
        assert abs(np.corrcoef(np.array(pairs).T)[0, 1]) < most
    # Neighbours of one sample come apart by a large part of the epoch, as far as the buffer allows.
    apart = [abs(at - windowed[s, n, p + 1]) for (s, n, p), at in windowed.items() if (s, n, p + 1) in windowed]
    assert np.median(apart) > total / 20


@pytest.mark.parametrize("how", ["shuffled('attn.1', 16, epochs=None)", "rows('attn.1', 16)"])
@pytest.mark.parametrize("torch", [False, pytest.param(True, marks=pytest.mark.torch)])
def test_an_early_end_leaves_no_traceback(tmp_path: Path, how: str, torch: bool) -> None:
    if torch:
        pytest.importorskip("torch")
    produce(open_folder(str(tmp_path)), 45, cut=1)
    code = f"""
{"import torch" if torch else ""}
import spile
batches = iter(spile.open({str(tmp_path)!r}).{how})
next(batches)
kept = [batches]
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
