"""Rows without a model: they are a function of tokens, positions and taps, so a test can compute the expected rows.

``NumpyProducer`` gives them to the real worker's loop; ``produce`` writes them to the store alone, in shards of a
chosen number of samples.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace

import ml_dtypes  # noqa: F401  (registers bfloat16)
import numpy as np

from spile.compute.batches import Batch
from spile.compute.producer import OutOfDeviceMemory, Producer, RowBlock, pack
from spile.objects import Folder
from spile.spec.identity import RunIdentity, StreamIdentity
from spile.spec.ranges import Ranges
from spile.spec.run import PromptSpec
from spile.spec.sample import Role, Sample, Skip
from spile.spec.taps import Tap
from spile.store.run import join_run
from spile.store.shard import ShardBuilder
from spile.store.writer import StreamWriter, join_stream

__all__ = [
    "TAPS",
    "D",
    "NumpyProducer",
    "items",
    "lengths",
    "produce",
    "rows_of",
    "run_identity",
    "sample_of",
    "stream_identity",
    "write_shard",
]

D = 8
TAPS = (Tap("residual", 0), Tap("attn", 1), Tap("residual", 1))


def run_identity(**changes: object) -> RunIdentity:
    base = RunIdentity(
        model="nobody/none",
        revision=None,
        architecture="none",
        d_model=D,
        n_layers=2,
        weights="w" * 8,
        tokenizer="t" * 8,
        prompt=PromptSpec(kind="text"),
        seed=0,
        max_seq_length=64,
        long="truncate",
        dtype="float32",
        store_dtype="bfloat16",
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def stream_identity(samples: int | None, taps: tuple[Tap, ...] = TAPS, sha256: str = "5" * 8) -> StreamIdentity:
    return StreamIdentity(data="data.jsonl", sha256=sha256, lines=samples or 0, samples=samples, taps=taps)


def sample_of(index: int, longest: int = 40, *, length: int | None = None) -> Sample:
    """Return sample ``index`` of a stream, which depends only on its index."""
    source = np.random.default_rng(index)
    drawn = int(source.integers(1, longest))
    length = drawn if length is None else length
    roles = np.full(length, Role.USER, np.uint8)
    roles[0] |= Role.FIRST | Role.BOS
    return Sample(
        index=index,
        task_id=f"task-{index // 2}",
        tokens=source.integers(0, 1000, length).astype(np.int32),
        roles=roles,
        preview=f"sample {index} “…”",
        augmentation={"rotate": index % 4} if index % 2 else None,
        truncated=3 if index % 10 == 0 else 0,
    )


def lengths(count: int, longest: int = 40, seed: int = 0) -> list[int]:
    return [int(n) for n in np.random.default_rng(seed).integers(1, longest + 1, count)]


def rows_of(sample: Sample, tap: int, d: int = D, dtype: str = "bfloat16") -> np.ndarray:
    """Return the rows of tap number ``tap`` for this sample. No two rows are equal."""
    return _values(sample.tokens, np.arange(len(sample)), tap, d).astype(dtype)


def _values(tokens: np.ndarray, positions: np.ndarray, tap: int, d: int = D) -> np.ndarray:
    token, place = tokens.astype(np.uint64)[:, None], positions.astype(np.uint64)[:, None]
    column = np.arange(d, dtype=np.uint64)[None, :]
    mixed = (
        token * np.uint64(2654435761) + place * np.uint64(40503) + column * np.uint64(97) + np.uint64(tap * 7919)
    ) * np.uint64(2246822519)
    return (((mixed >> np.uint64(16)) % np.uint64(4093)).astype(np.float32) - 2046) / 1024


def items(samples: int, done: Ranges = Ranges()) -> Iterator[Sample | Skip]:  # noqa: B008
    """The stream: every 17th sample is skipped."""
    for index in range(samples):
        if index not in done:
            yield Skip(index, f"task-{index // 2}", "too long", {"tokens": 99}) if index % 17 == 5 else sample_of(index)


class NumpyProducer(Producer):
    """A model of a few lines, in float32: groups, packing and poisoned padding as a device would have them."""

    def __init__(self, groups: int = 1, fits: int | None = None, seconds: float = 0.0) -> None:
        self.groups = groups
        self.owned: Sequence[int] = range(groups)
        self.fits = fits
        """The number of tokens per group that fit in memory."""
        self.seconds = seconds
        """The seconds that a batch takes."""
        self.shapes: list[tuple[int, int]] = []

    def describe(self) -> str:
        return "NumPy"

    def start(self, batch: Batch) -> Batch:
        if self.fits is not None and batch.rows * batch.length > self.fits:
            raise OutOfDeviceMemory("the device's memory ran out")
        self.shapes.append((batch.rows, batch.length))
        return batch

    def fetch(self, pending: object) -> Sequence[Sequence[RowBlock]]:
        assert isinstance(pending, Batch)
        time.sleep(self.seconds)
        packed = pack(pending)
        return [[self._block(pending, *packed, tap, group) for group in self.owned] for tap in range(len(TAPS))]

    def _block(self, batch: Batch, packed, places, tap: int, group: int) -> RowBlock:
        rows = packed.reshape(self.groups, batch.rows, 3, batch.length)[group]
        whole = np.concatenate([_values(tokens, positions, tap) for tokens, positions, _ in rows])
        real = batch.stored_rows_of(group)
        rows = whole[places[group]]
        rows[real:] = np.nan
        return RowBlock(group, rows)


def write_shard(builder: ShardBuilder, samples: list[Sample], upto: int | None = None, step: int = 3) -> None:
    """The rows of the first ``upto`` samples, ``step`` samples at a time, tap after tap."""
    upto = len(samples) if upto is None else upto
    for first in range(0, upto, step):
        batch = samples[first : min(first + step, upto)]
        for tap in range(len(TAPS)):
            builder.write(tap, int(builder.offsets[first]), np.concatenate([rows_of(sample, tap) for sample in batch]))


def produce(
    root: Folder,
    samples: int,
    *,
    worker_id: int = 0,
    shard: int = 10,
    step: int = 3,
    attempt: str | None = None,
    cut: int | None = None,
    run: RunIdentity | None = None,
) -> StreamWriter:
    """Run one worker: join, process the rest, finish. ``cut`` ends each shard after this many samples."""
    run = run or run_identity()
    join_run(root, run)
    store = join_stream(root, worker_id, stream_identity(samples), run, attempt)
    waiting: list[Sample] = []
    skipped: list[Skip] = []

    def flush() -> None:
        while waiting:
            planned = waiting[:shard]
            kept = planned[: cut or shard]
            builder = store.begin(planned)
            write_shard(builder, planned, len(kept), step)
            store.commit([builder.finish(len(kept))], skipped)
            del waiting[: len(kept)]
            skipped.clear()
            if cut is None:
                break

    for item in items(samples, store.ledger.done):
        if isinstance(item, Skip):
            skipped.append(item)
        else:
            waiting.append(item)
        if len(waiting) == shard:
            flush()
    while waiting:
        flush()
    if skipped:
        store.commit([], skipped)
    store.finish()
    return store
