"""What a spec names: the model, the tokenizer, the data and the dataset's home, found before any weight is read."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeVar

import jax

from spile import weights
from spile.data.stream import SampleStream, open_stream
from spile.data.tokens import Tokenizer, load_tokenizer
from spile.errors import SpecError
from spile.objects import open_folder
from spile.objects.folder import Folder
from spile.objects.mirror import MirrorFolder
from spile.planning.ranges import Ranges
from spile.planning.shards import row_bytes
from spile.runtime.backends import compute_dtype_for, compute_platform, find_model, rows_of
from spile.runtime.positions import refuse_no_answers
from spile.runtime.producer import check_tokens
from spile.runtime.sizing import choose_sizes
from spile.runtime.stopping import with_stops
from spile.runtime.timeline import Timeline
from spile.runtime.worker import Sizes
from spile.spec.identity import RunIdentity, StreamIdentity
from spile.spec.run import ExtractSpec
from spile.spec.sample import Sample
from spile.spec.taps import Tap, TapRows, select_taps
from spile.store.run import join_run, read_run

__all__ = ["Parts", "bytes_per_token", "find", "sizes_for"]

_LOOKED_AT = 256
"""Samples whose tokens are looked at before anything is written, where the tokenizer has more than the model."""


@dataclass(frozen=True)
class Parts:
    """What a spec names, found and checked; nothing was written yet."""

    spec: ExtractSpec
    root: Folder
    files: weights.ModelFiles
    taps: tuple[Tap, ...]
    rows: tuple[TapRows, ...]
    samples: SampleStream
    identity: RunIdentity
    stream_identity: StreamIdentity
    tokenizer: Tokenizer


def find(spec: ExtractSpec, timeline: Timeline | None = None) -> Parts:
    """Everything that a spec names, checked as far as it can be before the weights are loaded.

    The devices are looked for and the weights are summed beside the reading of the tokenizer and the data.
    """
    timeline = timeline or Timeline()
    with timeline.span("model, tokenizer and data"), ThreadPoolExecutor(2, "spile-start") as threads:
        platform = threads.submit(_timed, timeline, "devices", jax.default_backend)
        root = _output(spec)
        known = read_run(root)
        files, backend = find_model(spec, known, root.url)
        spec = replace(spec, backend=backend)
        _refuse_positions(spec, files.config.learned_positions)
        summed = threads.submit(_timed, timeline, "the weights' checksum", files.weights_hash)
        return _found(spec, root, known, files, platform, summed)


T = TypeVar("T")


def _timed(timeline: Timeline, name: str, work: Callable[[], T]) -> T:
    with timeline.span(name):
        return work()


def _found(
    spec: ExtractSpec,
    root: Folder,
    known: RunIdentity | None,
    files: weights.ModelFiles,
    platform: Future[str],
    summed: Future[str],
) -> Parts:
    taps = select_taps(spec.sites, spec.layers, files.config.n_layers, spec.heads, spec.top_k)
    generation = spec.generation
    taps = () if generation is not None and generation.capture == "none" else taps
    rows = rows_of(files, taps, spec.store_dtype, spec.backend)
    tokenizer = load_tokenizer(files.tokenizer_folder, optional=generation is None)
    samples = open_stream(spec.data, tokenizer, files.config.vocab_size)
    refuse_no_answers(spec, samples.prompt.kind)
    dtype = spec.dtype
    if dtype == "auto":
        where = compute_platform(spec.backend, platform.result())
        dtype = known.dtype if known else compute_dtype_for(where)  # type: ignore[assignment]
    identity = RunIdentity(
        model=files.name,
        revision=files.revision,
        architecture=files.config.architecture,
        d_model=files.config.d_model,
        n_layers=files.config.n_layers,
        weights=summed.result(),
        tokenizer=files.tokenizer_hash() if tokenizer.missing is None else "none",
        prompt=samples.prompt,
        seed=spec.data.seed,
        max_seq_length=spec.data.max_seq_length,
        long=spec.data.long,
        dtype=dtype,
        store_dtype=spec.store_dtype,
        backend=known.backend if known is not None and spec.same_numbers else spec.backend,
        adapter=spec.adapter,
        keep=tuple(sorted(spec.data.keep)),
        positions=spec.positions,
        generation=None if generation is None else with_stops(generation, files, tokenizer),
    )
    stream = StreamIdentity(
        samples.location,
        samples.sha256,
        samples.lines,
        samples.samples,
        taps,
        samples.streams,
        samples.split,
        {row.name: row.shape for row in rows if row.shape != (files.config.d_model,)},
    )
    if tokenizer.size > files.config.vocab_size:  # no fault by itself; the producer looks at every batch
        # After the identity: packed documents that end within this look would have a count that others have not.
        first = islice(samples.read(Ranges()), _LOOKED_AT)
        check_tokens((item for item in first if isinstance(item, Sample)), files.config.vocab_size)
    if known is not None:
        join_run(root, identity)  # compares: a run of other numbers is refused before anything is loaded
    return Parts(replace(spec, dtype=dtype), root, files, taps, rows, samples, identity, stream, tokenizer)


def _refuse_positions(spec: ExtractSpec, learned: int | None) -> None:
    """A model with learned positions has none for longer samples, their answers included."""
    answer = 0 if spec.generation is None else spec.generation.max_new_tokens
    if learned is not None and spec.data.max_seq_length + answer > learned:
        raise SpecError(
            "--max-seq-length and --max-new-tokens together" if answer else "--max-seq-length",
            expected=f"at most {learned}, the positions that {spec.model} has learned",
            found=spec.data.max_seq_length + answer,
            fix=f"add --max-seq-length {max(1, learned - answer)}",
        )


def _output(spec: ExtractSpec) -> Folder:
    """The dataset's home, with a copy on this machine where one is asked for."""
    home = open_folder(spec.output)
    return home if spec.local_copy is None else MirrorFolder(home, open_folder(spec.local_copy))


def bytes_per_token(parts: Parts) -> int:
    """What one token takes in a shard."""
    return row_bytes(parts.rows)


def sizes_for(parts: Parts) -> Sizes:
    """How much of it at once."""
    return choose_sizes(parts.spec, bytes_per_token(parts), parts.files.config)
