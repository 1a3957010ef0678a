"""``spile.extract``: a spec in, a set of activations out. Finds the parts, puts them together, runs the worker."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, replace

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spile import weights
from spile.data.stream import SampleStream, open_stream
from spile.data.tokens import load_tokenizer
from spile.errors import SpecError
from spile.model.attention import choose
from spile.model.decoder import layers_needed
from spile.objects import open_folder
from spile.objects.folder import Folder
from spile.plan.ranges import Ranges
from spile.runtime.device import DeviceProducer, compute_dtype_for, enable_compilation_cache, local_mesh
from spile.runtime.producer import Producer
from spile.runtime.progress import Progress
from spile.runtime.summary import Summary, peak_memory
from spile.runtime.worker import LocalControl, Sizes, work
from spile.spec.identity import RunIdentity, StreamIdentity
from spile.spec.run import ExtractSpec
from spile.spec.taps import Tap, select_taps
from spile.store.layout import stream_folder
from spile.store.run import join_run, read_run
from spile.store.stream import StreamStore, clear_stream, join_stream, read_stream, stream_has_commits
from spile.weights.load import Place, load

__all__ = ["extract"]

_BATCH_TOKENS = {"cpu": 4096, "gpu": 32768, "tpu": 16384}
"""Tokens a device and step: enough to keep it busy, little enough that a batch's rows are a fraction of a shard."""


@dataclass(frozen=True)
class _Parts:
    """What a spec names, found and checked; nothing was written yet."""

    spec: ExtractSpec
    root: Folder
    files: weights.ModelFiles
    taps: tuple[Tap, ...]
    samples: SampleStream
    identity: RunIdentity
    stream_identity: StreamIdentity


def extract(spec: ExtractSpec, *, progress: Progress | None = None, stop: threading.Event | None = None) -> Summary:
    """Run a model over a stream and store its activations; what an earlier visit committed is not done again."""
    progress = progress or Progress()
    enable_compilation_cache()
    progress.phase("looking at the model and the data")
    parts = _find(spec)
    _start_over(parts)
    stream = _known_stream(parts)
    if stream is not None and not _left(parts, stream):
        stream.finish()
        return _summary(parts, stream, progress, interrupted=False, device="none: nothing was left to do")
    progress.phase("loading the model")
    producer = _producer(parts, progress)
    join_run(parts.root, parts.identity)
    stream = stream or join_stream(parts.root, spec.data.worker_id, parts.stream_identity, parts.identity)
    finished = _work(parts, stream, producer, progress, stop or threading.Event())
    return _summary(parts, stream, progress, interrupted=not finished, device=producer.describe())


def _find(spec: ExtractSpec) -> _Parts:
    files = weights.find(spec.model, spec.revision)
    taps = select_taps(spec.sites, spec.layers, files.config.n_layers)
    root = open_folder(spec.output)
    samples = open_stream(spec.data, load_tokenizer(files.tokenizer_folder))
    known = read_run(root)
    dtype = spec.dtype
    if dtype == "auto":
        dtype = known.dtype if known else compute_dtype_for(jax.default_backend())  # type: ignore[assignment]
    identity = RunIdentity(
        model=files.name,
        revision=files.revision,
        architecture=files.config.architecture,
        d_model=files.config.d_model,
        n_layers=files.config.n_layers,
        weights=files.weights_hash(),
        tokenizer=files.tokenizer_hash(),
        prompt=samples.prompt,
        seed=spec.data.seed,
        max_seq_length=spec.data.max_seq_length,
        long=spec.data.long,
        dtype=dtype,
        store_dtype=spec.store_dtype,
    )
    stream = StreamIdentity(samples.location, samples.sha256, samples.lines, samples.samples, taps)
    if known is not None:
        join_run(root, identity)  # compares: a run of other numbers is refused before anything is loaded
    return _Parts(replace(spec, dtype=dtype), root, files, taps, samples, identity, stream)


def _start_over(parts: _Parts) -> None:
    """``--no-checkpointing``: as if nothing were there, but never over somebody's work unasked."""
    worker_id = parts.spec.data.worker_id
    if parts.spec.checkpointing or not stream_has_commits(parts.root, worker_id):
        return
    if not parts.spec.overwrite:
        raise SpecError(
            "--no-checkpointing",
            expected="a stream without commits",
            found=f"commits in {parts.root.url}/{stream_folder(worker_id)}",
            fix="add --overwrite to remove them, or leave --no-checkpointing out to resume",
        )
    clear_stream(parts.root, worker_id)


def _known_stream(parts: _Parts) -> StreamStore | None:
    """The stream, if an earlier visit began it."""
    worker_id = parts.spec.data.worker_id
    if read_stream(parts.root.child(stream_folder(worker_id))) is None:
        return None
    return join_stream(parts.root, worker_id, parts.stream_identity, parts.identity)


def _expected(parts: _Parts, stream: StreamStore) -> int | None:
    """How many samples there are to do, where that is known before all was read."""
    total = parts.samples.samples if parts.samples.samples is not None else stream.ledger.end
    limits = [count for count in (total, parts.spec.data.max_samples) if count is not None]
    return min(limits) if limits else None


def _left(parts: _Parts, stream: StreamStore) -> bool:
    expected = _expected(parts, stream)
    return expected is None or bool(len(Ranges([(0, expected)]) - stream.ledger.done))


def _producer(parts: _Parts, progress: Progress) -> Producer:
    config, dtype = parts.files.config, parts.spec.dtype
    mesh = local_mesh()
    params = load(parts.files, dtype, layers_needed(parts.taps), _replicated(mesh))
    return DeviceProducer(
        params,
        config,
        parts.taps,
        store_dtype=parts.spec.store_dtype,
        mesh=mesh,
        attention=choose(config, mesh.devices.flat[0].platform, dtype),
        dtype=dtype,
        progress=progress,
    )


def _replicated(mesh: Mesh) -> Place:
    """Every device has all of the weights."""
    whole = NamedSharding(mesh, PartitionSpec())
    return lambda _axes, _shape: whole


def _work(parts: _Parts, stream: StreamStore, producer: Producer, progress: Progress, stop: threading.Event) -> bool:
    spec = parts.spec
    expected = _expected(parts, stream)
    if expected is not None:
        progress.total_samples = len(Ranges([(0, expected)]) - stream.ledger.done)
    sizes = Sizes(
        batch_tokens=spec.batch_tokens or _batch_tokens(spec),
        batch_size=spec.batch_size,
        longest=spec.data.max_seq_length,
        shard_bytes=spec.shard_size_gb * 1e9,
        commit_every=spec.commit_every,
    )
    finished = work(
        parts.samples.read(stream.ledger.done),
        producer,
        stream,
        sizes,
        progress=progress,
        control=LocalControl(stop, spec.commit_every),
        after_commit=lambda: _note_checkpoint(parts, stream, "in_progress"),
    )
    if finished:
        stream.finish()
        _note_checkpoint(parts, stream, "completed")
    return finished


def _note_checkpoint(parts: _Parts, stream: StreamStore, status: str) -> None:
    """``--checkpoint-dir``: the guides' file, for people. The ledger alone is read."""
    spec, ledger = parts.spec, stream.ledger
    if spec.checkpoint_dir is None:
        return
    record = {
        "worker_id": spec.data.worker_id,
        "last_processed_sample_idx": max((stop for _, stop in ledger.done.pairs()), default=0) - 1,
        "total_samples_processed": ledger.samples,
        "total_shards": ledger.shards,
        "dataset_path": parts.samples.location,
        "model_path": spec.model,
        "status": status,
    }
    folder = open_folder(spec.checkpoint_dir)
    folder.put(f"checkpoint_worker_{spec.data.worker_id}.json", json.dumps(record, indent=2).encode() + b"\n")


def _batch_tokens(spec: ExtractSpec) -> int:
    """The device's own budget; with ``--batch-size`` alone, room for that many of the longest samples."""
    if spec.batch_size is not None:
        return spec.batch_size * spec.data.max_seq_length
    return _BATCH_TOKENS.get(jax.default_backend(), 4096)


def _summary(parts: _Parts, stream: StreamStore, progress: Progress, *, interrupted: bool, device: str) -> Summary:
    progress.phase("done")
    ledger = stream.ledger
    return Summary(
        root=parts.root.url,
        stream=stream.folder.url,
        complete=not _left(parts, stream),
        interrupted=interrupted,
        visit=progress.snapshot(),
        samples=ledger.samples,
        tokens=ledger.tokens,
        bytes=ledger.bytes,
        shards=ledger.shards,
        skipped=ledger.skipped,
        device=device,
        sink="bucket" if "://" in parts.root.url else "disk",
        peak_memory=peak_memory(),
    )
