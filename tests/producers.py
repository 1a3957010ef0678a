"""A model of a few lines of NumPy: rows that depend on the token, its place and the tap, and on nothing else.

It drives the real worker where a test is about the store, the pipeline or a crash, not about numbers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from spile.planning.batches import Batch
from spile.runtime.producer import OutOfDeviceMemory, RowBlock, pack
from spile.spec.identity import RunIdentity, StreamIdentity
from spile.spec.run import PromptSpec
from spile.spec.sample import Role, Sample
from spile.spec.taps import Tap

D_MODEL = 8
TAPS = (Tap("residual", 0), Tap("mlp", 1), Tap("residual", 1))


def rows_of(tokens: np.ndarray, tap: int, positions: np.ndarray | None = None) -> np.ndarray:
    """What the producer gives for one sample at one tap."""
    place = (np.arange(len(tokens)) if positions is None else positions)[:, None]
    return ((tokens[:, None] * 31 + place * 7 + np.arange(D_MODEL) * 3 + tap * 13) % 101).astype(np.float32)


class NumpyProducer:
    """Groups, packing and poisoned padding as a device would have them."""

    def __init__(self, groups: int = 1, fits: int | None = None, seconds: float = 0.0) -> None:
        self.groups = groups
        self.owned: Sequence[int] = range(groups)
        self.fits = fits
        """Computed tokens per group that there is memory for."""
        self.seconds = seconds
        """How long a batch takes."""
        self.shapes: list[tuple[int, int]] = []

    def describe(self) -> str:
        return "NumPy"

    def prepare(self, shape: tuple[int, int]) -> None:
        pass

    def await_program(self, batch: Batch, given_up: Callable[[], bool]) -> None:
        pass

    def start(self, batch: Batch) -> Batch:
        if self.fits is not None and batch.rows * batch.length > self.fits:
            raise OutOfDeviceMemory("the device's memory ran out")
        self.shapes.append((batch.rows, batch.length))
        return batch

    def fetch(self, pending: object) -> Sequence[Sequence[RowBlock]]:
        assert isinstance(pending, Batch)
        time.sleep(self.seconds)
        packed = pack(pending)
        return [[self._block(pending, packed, tap, group) for group in self.owned] for tap in range(len(TAPS))]

    def _block(self, batch: Batch, packed, tap: int, group: int) -> RowBlock:
        rows = packed.rows.reshape(self.groups, batch.rows, 3, batch.length)[group]
        whole = np.concatenate([rows_of(tokens, tap, positions) for tokens, positions, _ in rows])
        real = sum(map(len, batch.of(group)))
        rows = whole[packed.places[group]]
        rows[real:] = np.nan
        return RowBlock(group, rows)


def sample(index: int, length: int) -> Sample:
    """Sample ``index`` of a stream: its tokens follow from its number."""
    tokens = ((np.arange(length) * 17 + index * 5) % 1000).astype(np.int32)
    roles = np.zeros(length, np.uint8)
    roles[0] = Role.FIRST
    return Sample(index, f"task-{index}", tokens, roles, preview=f"sample {index}")


def lengths(count: int, longest: int = 40, seed: int = 0) -> list[int]:
    return [int(n) for n in np.random.default_rng(seed).integers(1, longest + 1, count)]


def run_identity(**changes: object) -> RunIdentity:
    fields = {
        "model": "numpy", "revision": None, "architecture": "numpy", "d_model": D_MODEL, "n_layers": 2, "weights": "w",
        "tokenizer": "t", "prompt": PromptSpec(kind="text"), "seed": 0, "max_seq_length": 64, "long": "truncate",
        "dtype": "float32", "store_dtype": "float32",
    }  # fmt: skip
    return RunIdentity(**{**fields, **changes})


def stream_identity(count: int | None) -> StreamIdentity:
    return StreamIdentity("memory", "0" * 64, count or 0, count, TAPS)
