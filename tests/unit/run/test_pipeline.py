import math
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import spile
from spile.compute.batches import Sizes, batches
from spile.compute.producer import Control, Decision, OutOfDeviceMemory, RowBlock
from spile.compute.progress import Progress
from spile.errors import StoreError
from spile.objects import open_folder
from spile.run.pipeline import Pipeline, Sink, plan_shards, run_pipeline
from spile.spec.sample import Skip
from spile.store.run import join_run
from spile.store.writer import StreamWriter, join_stream
from world import TAPS, NumpyProducer, lengths, rows_of, run_identity, sample_of, stream_identity

SIZES = Sizes(batch_tokens=128, batch_size=None, longest=64, shard_bytes=4000)


def open_stream(root, count) -> StreamWriter:
    folder = open_folder(str(root))
    join_run(folder, run_identity(store_dtype="float32"))
    return join_stream(folder, 0, stream_identity(count), run_identity(store_dtype="float32"))


def visit(root, items, producer=None, *, sizes=SIZES, control=None, progress=None, count=None) -> bool:
    stream = open_stream(root, count if count is not None else len(items))
    left = [item for item in items if item.index not in stream.ledger.done]
    return run_pipeline(
        left,
        producer or NumpyProducer(),
        Sink(stream),
        sizes,
        progress=progress or Progress(),
        control=control or Control(),
    )


def check(root, items) -> None:
    """Every sample is there once, with its own rows at every tap."""
    dataset = spile.open(str(root))
    for item in items:
        if isinstance(item, Skip):
            continue
        stored = dataset.sample(0, item.index)
        assert np.array_equal(stored.tokens, item.tokens)
        for tap in range(len(TAPS)):
            assert np.array_equal(
                np.asarray(stored.rows(str(TAPS[tap])), np.float32), rows_of(item, tap, dtype="float32")
            )


def planned(items, sizes, bytes_per_token=101):
    """The shards of one group that these samples become."""
    return plan_shards(
        items,
        lambda samples: batches(samples, sizes),
        bytes_per_token,
        sizes.shard_bytes,
    )


class Script:
    """A control with given answers, which then continues."""

    def __init__(self, *decisions: Decision) -> None:
        self.decisions = list(decisions)

    def decide(self) -> Decision:
        return self.decisions.pop(0) if self.decisions else "continue"

    def stopping(self) -> bool:
        return False

    def committed(self) -> None:
        pass


@settings(max_examples=12, deadline=None)
@given(
    st.integers(1, 60),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([500, 4000, 10**6]),
    st.sampled_from([1, 2, 4]),
    st.integers(0, 99),
)
def test_every_row_is_where_it_belongs(tmp_path_factory, count, groups, shard_bytes, writers, seed):
    root = tmp_path_factory.mktemp("run")
    items = [sample_of(i, length=n) for i, n in enumerate(lengths(count, seed=seed))]
    progress = Progress()
    sizes = Sizes(128, None, 64, shard_bytes, writers)
    assert visit(root, items, NumpyProducer(groups), sizes=sizes, progress=progress)
    check(root, items)
    assert progress.snapshot().samples == progress.snapshot().samples_committed == count


@pytest.mark.parametrize("writers", [1, 3])
def test_a_stop_commits_what_was_started_and_a_second_visit_does_the_rest(tmp_path, writers):
    items = [sample_of(i, length=n) for i, n in enumerate(lengths(80))]
    assert not visit(
        tmp_path, items, sizes=Sizes(128, None, 64, 4000, writers), control=Script(*["continue"] * 5, "stop")
    )
    done = open_stream(tmp_path, 80).ledger.done
    assert 0 < len(done) < 80
    assert visit(tmp_path, items, NumpyProducer(2), sizes=Sizes(300, 2, 64, 1500))
    check(tmp_path, items)


def test_a_stop_before_the_first_batch_leaves_no_shard(tmp_path):
    assert not visit(tmp_path, [sample_of(0, length=5)], control=Script("stop"))
    assert not list(tmp_path.glob("**/*.safetensors"))
    assert not list(tmp_path.glob("**/.tmp*"))


def test_commit_every_ends_shards_early(tmp_path):
    items = [sample_of(i, length=n) for i, n in enumerate(lengths(40))]
    big = Sizes(128, None, 64, 10**9)
    assert visit(
        tmp_path, items, sizes=big, control=Script("continue", "continue", "commit", "continue", "continue", "commit")
    )
    assert open_stream(tmp_path, 40).ledger.shards == 3
    check(tmp_path, items)


def test_commit_every_ends_the_shards_of_all_lanes(tmp_path):
    items = [sample_of(i, length=n) for i, n in enumerate(lengths(80))]
    sizes = Sizes(128, None, 64, 6000, writers=3)
    assert visit(tmp_path, items, sizes=sizes, control=Script(*["continue"] * 7, "commit", *["continue"] * 4, "commit"))
    check(tmp_path, items)


@pytest.mark.parametrize(("groups", "writers"), [(1, 1), (3, 1), (1, 3)])
def test_a_batch_that_does_not_fit_is_halved_and_logged(tmp_path, groups, writers):
    items = [sample_of(i, length=n) for i, n in enumerate(lengths(50))]
    output: list[str] = []
    producer = NumpyProducer(groups, fits=130)
    sizes = Sizes(512, None, 64, 5000, writers)
    assert visit(tmp_path, items, producer, sizes=sizes, progress=Progress(log=output.append))
    assert max(rows * length for rows, length in producer.shapes) <= 130
    assert output[0].startswith("device memory ran out at 8 × 64 tokens: going on with 4 × 64")
    check(tmp_path, items)


def test_one_sample_that_does_not_fit_is_an_error_that_says_what_to_do(tmp_path):
    with pytest.raises(OutOfDeviceMemory, match=r"one row of 64 tokens does not fit on the device\. Use fewer --taps"):
        visit(tmp_path, [sample_of(0, length=5)], NumpyProducer(fits=10))


def test_skips_are_done_too(tmp_path):
    items = [
        Skip(0, "a", "too long"),
        sample_of(1, length=9),
        Skip(2, "c", "empty"),
        sample_of(3, length=4),
        Skip(4, "e", "too long"),
    ]
    progress = Progress()
    assert visit(tmp_path, items, progress=progress)
    assert list(open_stream(tmp_path, 5).ledger.done) == [0, 1, 2, 3, 4]
    assert progress.snapshot().skipped == {"too long": 2, "empty": 1}


def test_only_skips_make_a_commit_without_a_shard(tmp_path):
    assert visit(tmp_path, [Skip(0, "a", "empty")])
    ledger = open_stream(tmp_path, 1).ledger
    assert (ledger.shards, list(ledger.done)) == (0, [0])


class FailsAt(NumpyProducer):
    def __init__(self, at: int, error: BaseException) -> None:
        super().__init__()
        self.at, self.error = at, error

    def fetch(self, pending):
        self.at -= 1
        if self.at < 0:
            raise self.error
        return super().fetch(pending)


@pytest.mark.parametrize("error", [StoreError("gone"), KeyboardInterrupt(), ValueError("a bug")])
def test_a_failure_in_any_stage_ends_all_and_leaves_nothing_half_written(tmp_path, error):
    items = [sample_of(i, length=n) for i, n in enumerate(lengths(80))]
    with pytest.raises(type(error)):
        visit(tmp_path, items, FailsAt(4, error), sizes=Sizes(128, None, 64, 4000, writers=2))
    assert not list(tmp_path.glob("**/.tmp*"))
    assert not [
        t
        for t in threading.enumerate()
        if t.name.startswith(("spile-plan", "spile-copy", "spile-write", "spile-commit"))
    ]
    assert visit(tmp_path, items)
    check(tmp_path, items)


def test_a_failing_dataset_ends_the_run_with_its_own_error(tmp_path):
    def items():
        yield sample_of(0, length=5)
        raise StoreError("the dataset went away")

    stream = open_stream(tmp_path, 2)
    with pytest.raises(StoreError, match="the dataset went away"):
        run_pipeline(items(), NumpyProducer(), Sink(stream), SIZES, progress=Progress(), control=Script())


class Counting(Progress):
    """Counts the batches that were written."""

    written = 0

    def add(self, **counts: int) -> None:
        self.written += "computed_tokens" in counts
        super().add(**counts)


@pytest.mark.parametrize(("writers", "in_flight"), [(1, 2), (1, 5), (3, 2), (3, 9)])
def test_the_number_of_batches_in_flight_is_limited(tmp_path, writers, in_flight):
    progress, full = Counting(), threading.Event()
    seen = []

    class Watched(NumpyProducer):
        def start(self, batch):
            seen.append(1 + len(seen) - progress.written)
            if seen[-1] >= in_flight:
                full.set()
            return super().start(batch)

        def fetch(self, pending):
            assert full.wait(120), "too few batches were started ahead"
            return super().fetch(pending)

    items = [sample_of(i, length=40) for i in range(60)]
    sizes = Sizes(128, None, 64, 4000, writers, in_flight=in_flight)
    assert visit(tmp_path, items, Watched(), sizes=sizes, progress=progress)
    assert max(seen) == in_flight
    check(tmp_path, items)


def test_a_lane_that_is_held_up_holds_up_no_other(tmp_path):
    """Nearly all batches are written while the first one's file hangs: later ones do not queue behind it."""
    many, progress = threading.Event(), Counting()

    class Hanging(np.ndarray):
        def __getitem__(self, key):
            assert many.wait(120), f"{progress.written} batches were written"
            return np.asarray(self)[key]

    class FirstHangs(NumpyProducer):
        def fetch(self, pending):
            blocks = super().fetch(pending)
            if pending.samples[0].index:
                return blocks
            return [[RowBlock(group, rows.view(Hanging)) for group, rows in tap] for tap in blocks]

    class Watched(Counting):
        def add(self, **counts: int) -> None:
            super().add(**counts)
            progress.written = self.written
            if self.written >= 36:
                many.set()

    items = [sample_of(i, length=40) for i in range(40)]
    one_batch = Sizes(64, 1, 64, 100, writers=2)
    assert visit(tmp_path, items, FirstHangs(), sizes=one_batch, progress=Watched())
    check(tmp_path, items)


def test_a_device_that_computes_while_a_batch_is_started_is_what_limits(tmp_path):
    """As a CPU does."""

    class ComputesAtOnce(NumpyProducer):
        def start(self, batch):
            ticks.advance(5.0)
            return super().start(batch)

    class Ticks:
        now = 0.0

        def __call__(self):
            return self.now

        def advance(self, seconds):
            self.now += seconds

    ticks = Ticks()
    progress = Progress(clock=ticks)
    items = [sample_of(i, length=40) for i in range(6)]
    stream = open_stream(tmp_path, 6)
    sink, control = Sink(stream), Control()
    sizes = Sizes(64, 1, 64, 100, in_flight=1)
    pipeline = Pipeline(ComputesAtOnce(), sink, control, progress, sizes)
    assert pipeline.run(planned(items, sizes))
    assert progress.snapshot().busy["model"] == 6 * 5.0


def test_no_program_is_waited_for_that_the_device_has_no_room_for(tmp_path):
    """Shards of other writers were planned before memory ran out, and are halved without a look at their old shapes."""
    awaited, refused = [], []

    class Watched(NumpyProducer):
        def await_program(self, batch, cancelled):
            awaited.append((batch.rows * batch.length, min(refused, default=math.inf)))

        def start(self, batch):
            if len(self.shapes) == 4:  # Another process uses the rest of the memory.
                self.fits = 200
            try:
                return super().start(batch)
            except OutOfDeviceMemory:
                refused.append(batch.rows * batch.length)
                raise

    items = [sample_of(i, length=n) for i, n in enumerate(lengths(400, 60))]
    sizes = Sizes(512, None, 64, 200_000, writers=3)
    assert visit(tmp_path, items, Watched(), sizes=sizes)
    assert refused
    assert [(tokens, room) for tokens, room in awaited if tokens >= room] == []
    check(tmp_path, items)


@pytest.mark.parametrize("decisions", [(), ("continue", "continue", "stop")])
def test_bytes_grow_with_each_batch_and_end_as_the_ledger_has_them(tmp_path, decisions) -> None:
    """A shard of 1 GB took minutes during which the display said 0 bytes."""
    seen = []

    class Counting(Progress):
        def add(self, **counts: int) -> None:
            super().add(**counts)
            now = self.snapshot()
            seen.append((now.shards_written, now.bytes))

    items = [sample_of(index, length=n) for index, n in enumerate(lengths(40))]
    progress = Counting()
    visit(tmp_path, items, sizes=Sizes(128, None, 64, 1e6), control=Script(*decisions), progress=progress)
    growing = [count for shards, count in seen if shards == 0]
    assert growing == sorted(set(growing))
    assert growing[0] > 0
    assert progress.snapshot().bytes == open_stream(tmp_path, 40).ledger.bytes
