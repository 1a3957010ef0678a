"""Several datasets as one: rows of the same token side by side; and rows with their predecessors."""

from __future__ import annotations

import pickle
import tempfile
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import spile
from spile.errors import UserError
from spile.objects import open_folder
from spile.reading.dataset import Dataset
from spile.spec.sample import Role, Sample
from spile.store.run import join_run
from spile.store.writer import join_stream
from world import TAPS, items, rows_of, run_identity, sample_of, stream_identity

COUNT = 60
_kept: list[Any] = []


def store(root: str, samples: list[Sample], d: int, dtype: str, shard: int, positions: str = "all") -> str:
    run = run_identity(d_model=d, store_dtype=dtype, weights=f"{d} {dtype}", positions=positions)
    join_run(open_folder(root), run)
    stream = join_stream(open_folder(root), 0, stream_identity(None), run)
    for first in range(0, len(samples), shard):
        some = samples[first : first + shard]
        some = [*some[1::2], *some[::2]]  # a shard is not in the order of the data
        builder = stream.begin(some)
        for tap in range(len(TAPS)):
            rows = [sample.of_rows(rows_of(sample, tap, d, dtype)) for sample in some]
            builder.write(tap, 0, np.concatenate(rows))
        stream.commit([builder.finish()], [])
    return root


@cache
def made(d: int, dtype: str, shard: int) -> str:
    folder = tempfile.TemporaryDirectory()
    _kept.append(folder)
    return store(folder.name, [each for each in items(COUNT) if isinstance(each, Sample)], d, dtype, shard)


def expected(batch: Any, d: int, dtype: str, tap: int) -> np.ndarray:
    rows = [
        rows_of(sample_of(sample), tap, d, dtype)[position]
        for sample, position in zip(batch.samples.tolist(), batch.positions.tolist(), strict=True)
    ]
    return np.stack(rows)


KINDS = st.tuples(st.sampled_from([3, 8, 32]), st.sampled_from(["bfloat16", "float32"]), st.sampled_from([4, 7, 60]))


@given(
    kinds=st.lists(KINDS, min_size=1, max_size=3),
    memory=st.integers(200, 40_000),
    batch_rows=st.integers(1, 200),
    epochs=st.integers(1, 2),
    part=st.sampled_from([(0, 1), (0, 2), (2, 3)]),
    seed=st.integers(0, 9),
    wanted=st.sampled_from([{}, {"exclude": Role.FIRST}, {"max_norm": 3.0}, {"positions": (2, 9)}]),
)
def test_rows_of_all_datasets_belong_to_the_same_token(
    kinds: list[tuple[int, str, int]], memory: int, batch_rows: int, part: tuple[int, int], **how: Any
) -> None:
    joint = spile.open([made(*kind) for kind in kinds])
    how |= how.pop("wanted")
    reader = joint.shuffled("residual.1", batch_rows, memory=memory, part=part, context=True, **how)
    with reader:
        for batch in reader:
            for place, (d, dtype, _) in enumerate(kinds):
                assert np.array_equal(batch.rows[f"{place}/residual.1"], expected(batch, d, dtype, 2)), place


def test_each_epoch_gives_every_row_once_and_parts_share_them() -> None:
    joint = spile.open({"wide": made(32, "float32", 7), "narrow": made(3, "bfloat16", 60)})
    total = sum(len(sample) for sample in items(COUNT) if isinstance(sample, Sample))
    found: list[tuple[int, int]] = []
    for part in range(2):
        for batch in joint.shuffled("residual.0", 64, memory=4000, part=(part, 2), context=True):
            assert [*batch.rows] == ["wide/residual.0", "narrow/residual.0"]
            found += zip(batch.samples.tolist(), batch.positions.tolist(), strict=True)
    assert len(set(found)) == len(found) == total == sum(sample.length for sample in joint.datasets["wide"].samples)


def test_taps_of_single_datasets_can_be_named_and_a_state_continues() -> None:
    joint = spile.open([made(8, "float32", 4), made(3, "bfloat16", 7)])
    taps = ["0/residual.0", "1/attn.1"]
    assert {*taps} < {*joint.taps}
    one = [batch["1/attn.1"].tobytes() for batch in joint.shuffled(taps, 50, memory=3000)]
    reader = joint.shuffled(taps, 50, memory=3000)
    assert [next(reader)["1/attn.1"].tobytes() for _ in range(3)] == one[:3]
    state = reader.state_dict()
    rest = pickle.loads(pickle.dumps(joint)).shuffled(taps, 50, memory=3000, state=state)
    assert [batch["1/attn.1"].tobytes() for batch in rest] == one[3:]
    with pytest.raises(UserError, match=r"no tap 2/attn\.1"):
        joint.shuffled("2/attn.1")
    assert joint.stats("1/attn.1").count == sum(sample.length for sample in joint.datasets["1"].samples)


def test_torch_gives_the_same_rows(tmp_path: Any) -> None:
    torch = pytest.importorskip("torch")
    joint = spile.open([made(8, "float32", 4), made(3, "bfloat16", 7)])
    loader = torch.utils.data.DataLoader(joint.torch("residual.0", batch_rows=64), batch_size=None)
    for given_, batch in zip(loader, joint.shuffled("residual.0", 64), strict=True):
        assert np.array_equal(given_["0/residual.0"].numpy(), batch["0/residual.0"])
        assert given_["1/residual.0"].dtype == torch.bfloat16


def test_datasets_with_different_tokens_are_refused_with_the_first_difference(tmp_path: Any) -> None:
    samples = [each for each in items(COUNT) if isinstance(each, Sample)]
    tokens = samples[7].tokens.copy()
    tokens[-2] += 1
    place = len(tokens) - 2
    changed = sample_of(samples[7].index)
    object.__setattr__(changed, "tokens", tokens)
    other = store(str(tmp_path / "b"), [*samples[:7], changed, *samples[8:]], 3, "float32", 9)
    wanted = f"position {place} of sample 7 .{changed.task_id}.*token {tokens[-2] - 1}.*token {tokens[-2]}"
    with pytest.raises(UserError, match=wanted):
        spile.open([made(8, "float32", 4), other])
    fewer = store(str(tmp_path / "c"), samples[:-2], 3, "float32", 9)
    with pytest.raises(UserError, match=rf"{len(samples)} samples.*{len(samples) - 2} samples"):
        spile.open([made(8, "float32", 4), fewer])


# -- predecessors -----------------------------------------------------------------------------------------------------


@given(
    window=st.integers(2, 4),
    memory=st.integers(300, 20_000),
    wanted=st.sampled_from([{}, {"exclude": Role.FIRST}, {"tokens": range(700)}, {"max_norm": 3.2}]),
)
def test_each_row_comes_after_its_predecessors(window: int, memory: int, wanted: Any) -> None:
    dataset = spile.open(made(8, "float32", 7))
    found = [
        row.tobytes()
        for batch in dataset.shuffled("residual.0", 64, context=window, memory=memory, **wanted)
        for row in batch
    ]
    reference = []
    for sample in (each for each in items(COUNT) if isinstance(each, Sample)):
        rows = rows_of(sample, 0, 8, "float32")
        fits = np.ones(len(rows), bool)
        if "exclude" in wanted:
            fits &= (sample.roles & wanted["exclude"]) == 0
        if "tokens" in wanted:
            fits &= np.isin(sample.tokens, list(wanted["tokens"]))
        if "max_norm" in wanted:
            fits &= np.linalg.norm(rows, axis=1) <= wanted["max_norm"]
        places = [slice(last - window, last) for last in range(window, len(rows) + 1)]
        reference += [rows[place].tobytes() for place in places if fits[place].all()]
    assert sorted(found) == sorted(reference)


def test_pairs_have_a_shape_a_count_and_a_state() -> None:
    dataset = spile.open(made(8, "float32", 7))
    reader = dataset.shuffled(["residual.0", "attn.1"], 32, context=2, memory=6000)
    first = next(reader)
    assert first["residual.0"].shape == first["attn.1"].shape == (32, 2, 8)
    rest = [batch["attn.1"].tobytes() for batch in reader]
    after = dataset.shuffled(["residual.0", "attn.1"], 32, context=2, memory=6000, after=1)
    assert [batch["attn.1"].tobytes() for batch in after] == rest
    with pytest.raises(UserError, match="a different reader"):
        dataset.shuffled(["residual.0", "attn.1"], 32, memory=6000, state=reader.state())
    with pytest.raises(UserError, match="context"):
        dataset.shuffled("residual.0", context=-1)


def test_only_neighbouring_tokens_are_a_pair_if_some_tokens_are_stored(tmp_path: Any) -> None:
    samples = []
    for place, positions in enumerate([[0, 1, 4], [2], [3, 5, 6, 7]]):
        sample = sample_of(place, length=9)
        object.__setattr__(sample, "positions", np.array(positions, np.int32))
        samples.append(sample)
    dataset: Dataset = spile.open(store(str(tmp_path), samples, 8, "float32", 3, positions="random:4"))
    found = [pair.tobytes() for batch in dataset.shuffled("residual.0", context=2) for pair in batch]
    pairs = [(0, 0), (2, 5), (2, 6)]
    wanted = [rows_of(samples[sample], 0, 8, "float32")[first : first + 2].tobytes() for sample, first in pairs]
    assert sorted(found) == sorted(wanted)
